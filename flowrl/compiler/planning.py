"""What the `plan` section of a configuration asks of the planner, with what it leaves open.

Lengths decide most of a step's time and no configuration has to name them: what is assumed is told
in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flowrl.cluster.hardware import abbreviated, find_spec
from flowrl.config.load import LoadedConfig
from flowrl.config.schema import PlanConfig
from flowrl.cost.episodes import CallSeconds
from flowrl.cost.lengths import (
    ConstantLengths,
    EmpiricalLengths,
    Lengths,
    LognormalLengths,
    mean_by_share_cut,
)
from flowrl.errors import ConfigError, DataError, combine
from flowrl.observe.rows import lengths_in
from flowrl.plan.options import EnvironmentRequest, Pin, PlanOptions
from flowrl.plan.pins import FIELDS, values_of
from flowrl.wording import counted, listing, percent, suggestion

__all__ = ["assumed_lengths", "lengths_of", "mean_prompt", "plan_options"]

ASSUMED_SHARE = 0.5
"""Of the longest, where nobody says how long prompts or responses are on average."""

ASSUMED_SIGMA = 0.7
"""Of the logarithm of response lengths: the longest of a thousand is then some seven times the
mean, before it is cut."""

_MANY_CUT = 0.3
"""Of responses that reach the longest: so many are told."""

_FEW_CUT = 0.2
"""Of responses that reach the longest at a mean that is proposed."""


def plan_options(
    loaded: LoadedConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    draws: Mapping[str, Sequence[str]],
    here: bool,
    environments: Sequence[str] = (),
) -> PlanOptions:
    """The planner's options.

    Args:
        draws: The nodes in which each role generates.
        max_response_tokens: Of the longest response, of an episode with what is said in it.
        here: The plan is for this very machine, whose one process has one device.
        environments: Roles of the stage that policies exchange turns with.

    Raises:
        ConfigError, DataError: lengths that cannot be, or that cannot be read.
    """
    plan = loaded.config.plan
    assumptions: list[str] = []
    lengths = _lengths(loaded, max_response_tokens, assumptions)
    prompt = mean_prompt(plan, max_prompt_tokens)
    if plan.mean_prompt_tokens is None:
        assumptions.append(
            f"prompts of {counted(prompt, 'token')} on average, half of the longest; "
            "plan.mean_prompt_tokens says better"
        )
    elif prompt > max_prompt_tokens:
        raise _above(loaded, "plan.mean_prompt_tokens", prompt, max_prompt_tokens)
    if environments:
        assumptions += _of_episodes(plan)
    return PlanOptions(
        lengths=lengths,
        prompt_tokens=prompt,
        trainer=plan.trainer,
        engine=plan.engine,
        objective=plan.objective,
        kind=plan.kind,
        kind_where=loaded.where("plan.kind"),
        alternatives=plan.alternatives,
        try_batches=plan.try_batches,
        pins=_pins(loaded, plan),
        settings=tuple(_settings(loaded, draws)),
        assumptions=tuple(assumptions),
        engine_times=plan.engine_times,
        memory_share=plan.memory_share,
        single_device=here,
        turns=plan.mean_turns,
        said=plan.mean_observation_tokens,
        environments=_environments(loaded, environments),
    )


def mean_prompt(plan: PlanConfig, longest: int) -> float:
    """Tokens of a prompt on average: what the configuration says, or half of the longest."""
    return plan.mean_prompt_tokens or max(1.0, ASSUMED_SHARE * longest)


def lengths_of(plan: PlanConfig, longest: int, *, where: str = "plan.lengths") -> Lengths:
    """The lengths of responses that a plan is made for.

    Args:
        longest: Tokens that a response has at most.
        where: Names the file of lengths in messages.

    Raises:
        ConfigError, DataError: lengths that cannot be, or that cannot be read.
    """
    if plan.lengths is not None:
        return _read_lengths(plan.lengths, longest, where)
    mean = plan.mean_response_tokens or max(1.0, ASSUMED_SHARE * longest)
    mean = min(mean, float(longest))  # a node may draw shorter ones than the longest of a run
    sigma = ASSUMED_SIGMA if plan.sigma is None else plan.sigma
    if not sigma or mean == longest:
        return ConstantLengths(tokens=mean)
    return LognormalLengths(mean=mean, sigma=sigma, maximum=float(longest))


def _of_episodes(plan: PlanConfig) -> Iterator[str]:
    if plan.mean_turns is None:
        yield "episodes of half of their turns on average; plan.mean_turns says better"
    if plan.mean_observation_tokens is None:
        yield (
            "environments say half of what they may before each turn; "
            "plan.mean_observation_tokens says better"
        )


def _environments(
    loaded: LoadedConfig, environments: Sequence[str]
) -> dict[str, EnvironmentRequest]:
    """What the section says of environments.

    Args:
        environments: Roles of the stage that are some.

    Raises:
        ConfigError: of a role that there is not.
    """
    found = {}
    for role, given in loaded.config.plan.environments.items():
        if role not in loaded.config.roles:
            raise ConfigError(
                f"there is no role {role!r}",
                where=loaded.where_within(f"plan.environments.{role}"),
                expected=f"one of {listing(environments)}"
                if environments
                else f"none, for no workflow of this run has an environment "
                f"(roles {listing(loaded.config.roles)})",
                hint=suggestion(role, environments)
                or f"leave the keys of plan.environments.{role} out",
            )
        if role not in environments and loaded.config.roles[role].environment is None:
            raise ConfigError(
                f"role {role!r} is no environment",
                where=loaded.where_within(f"plan.environments.{role}"),
                expected=f"one of {listing(environments)}" if environments else None,
                hint=f"leave the keys of plan.environments.{role} out",
            )
        known = ("cpu", "accelerator")
        near = suggestion(given.device, known)
        spec = find_spec(given.device)
        if spec is None and len(meant := abbreviated(given.device)) == 1:
            (spec,) = meant
        if given.device not in known and near is not None and spec is None:
            raise ConfigError(
                "no such device of an environment",
                where=loaded.where(f"plan.environments.{role}.device"),
                found=repr(given.device),
                expected="cpu, accelerator, or the name of a device of the cluster",
                hint=near,
            )
        found[role] = EnvironmentRequest(
            calls=CallSeconds(
                reset_s=given.step_s if given.reset_s is None else given.reset_s,
                step_s=given.step_s,
                wait_s=given.wait_s,
            ),
            accelerated=given.device != "cpu",
            kind=None if given.device in known else spec.name if spec else given.device,
            concurrency=given.concurrency,
            nbytes=int(given.memory_gib * (1 << 30)),
        )
    return found


def assumed_lengths(plan: PlanConfig, longest: int) -> list[str]:
    """What plans take of responses because nobody said it, a sentence each."""
    if plan.lengths is not None:
        return []
    found = []
    mean = plan.mean_response_tokens
    if mean is None:
        mean = max(1.0, ASSUMED_SHARE * longest)
        found.append(
            f"responses of {counted(mean, 'token')} on average, half of the longest; "
            "plan.mean_response_tokens says better, or plan.lengths=RUN/samples.jsonl"
        )
    if plan.sigma is None and mean < longest:
        found.append(
            f"response lengths spread lognormally with sigma {ASSUMED_SIGMA:g}; "
            "plan.sigma says better"
        )
    found += _cut(plan, mean, longest)
    return found


def _cut(plan: PlanConfig, mean: float, longest: int) -> Iterator[str]:
    """Of lengths that nearly all are cut at the longest, so that their spread is lost."""
    sigma = ASSUMED_SIGMA if plan.sigma is None else plan.sigma
    lengths = lengths_of(plan, longest)
    said = plan.mean_response_tokens is not None
    key = f"plan.mean_response_tokens={mean:g}" if said else f"a mean of {mean:g}"
    if not sigma:
        return
    if not isinstance(lengths, LognormalLengths):
        if plan.sigma is not None and longest > 1:
            yield (
                f"every response has the {longest:,} tokens of the longest, as {key} says, so "
                f"plan.sigma={sigma:g} says nothing; {_sensible(sigma, longest)}"
            )
    elif lengths.share_cut >= _MANY_CUT:
        yield (
            f"{percent(lengths.share_cut)} of responses are cut at the longest, {longest:,} "
            f"tokens, for {key} with sigma {sigma:g} is a mean of {lengths.before_cut:,.0f} before "
            f"the cut; {_sensible(sigma, longest)}"
        )


def _sensible(sigma: float, longest: int) -> str:
    return f"a mean of {_proposed(sigma, longest):,} would cut {percent(_FEW_CUT)}"


def _proposed(sigma: float, longest: int) -> int:
    """A mean of which few responses are cut, in two digits."""
    mean = mean_by_share_cut(_FEW_CUT, sigma=sigma, maximum=float(longest))
    return max(1, int(float(f"{mean:.1e}")))


def _lengths(loaded: LoadedConfig, longest: int, assumptions: list[str]) -> Lengths:
    """The same, with what nobody said."""
    plan = loaded.config.plan
    if plan.lengths is not None:
        return lengths_of(plan, longest, where=loaded.where("plan.lengths"))
    mean = plan.mean_response_tokens
    if mean is not None and mean > longest:
        raise _above(loaded, "plan.mean_response_tokens", mean, longest)
    assumptions += assumed_lengths(plan, longest)
    return lengths_of(plan, longest)


def _above(loaded: LoadedConfig, key: str, mean: float, longest: int) -> ConfigError:
    of = "data.max_prompt_tokens" if "prompt" in key else "train.sampling.max_tokens"
    whole = "prompt" in key or longest == loaded.config.train.sampling.max_tokens
    sigma = ASSUMED_SIGMA if loaded.config.plan.sigma is None else loaded.config.plan.sigma
    way_out = f"set {key} to at most {longest}"
    if "prompt" not in key and sigma:
        few = percent(_FEW_CUT)
        way_out = f"set {key}={_proposed(sigma, longest)}, which cuts {few} of responses"
    return ConfigError(
        f"a mean of {counted(mean, 'token')} is longer than the longest",
        where=loaded.where(key),
        found=f"{mean:g}",
        expected=f"at most {longest} ({of}{'' if whole else ' of every turn, and what is said'})",
        hint=f"{way_out}, or raise {of}",
    )


def _read_lengths(path: Path, longest: int, where: str) -> Lengths:
    """Lengths of a file or of a run's folder, cut at the longest that this configuration allows."""
    if path.is_dir():
        path /= "samples.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"lengths cannot be read: {reason}",
            where=where,
            found=str(path),
            expected="the folder of a run, or a file of JSON lines such as its samples.jsonl",
            hint="name one of them, or set plan.mean_response_tokens in its place",
        ) from error
    values = lengths_in(path, text)
    if not any(values):
        raise DataError(
            "there are no lengths",
            where=str(path),
            found="no line with a length above 0",
            expected="one JSON value a line: a number, or an object with num_tokens",
            hint="name samples.jsonl of a run, or set plan.mean_response_tokens in its place",
        )
    return EmpiricalLengths(values=tuple(float(min(max(1, v), longest)) for v in values))


def _pins(loaded: LoadedConfig, plan: PlanConfig) -> tuple[Pin, ...]:
    """Pins as they are written: `{rollout: {tp: 2}}`, or `rollout.tp=2` on the command line.

    Raises:
        ConfigError: some are none; one error for all of them.
    """
    found, problems = list[Pin](), list[ConfigError]()
    waiting: list[tuple[str, object]] = [(str(k), v) for k, v in reversed(plan.pins.items())]
    while waiting:
        name, value = waiting.pop()
        where = loaded.where(f"plan.pins.{name}")
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", inner) for key, inner in reversed(value.items())]
            continue
        subject, dot, of = name.rpartition(".")
        if not dot or not isinstance(value, str | int) or isinstance(value, bool):
            problems.append(_no_pin(name, value, where))
        else:
            found.append(Pin(subject=subject, field=of, value=str(value), where=where))
    if problems:
        raise combine(problems)
    return tuple(found)


def _no_pin(name: str, value: object, where: str) -> ConfigError:
    """Of a pin without a field, or with a value that no field has."""
    subject, _, field = name.rpartition(".")
    takes = values_of(field) if subject else None
    if takes is None:
        return ConfigError(
            "a pin says a number or devices of a part of the plan",
            where=where,
            found=f"{name}={_written(value)}",
            expected="WHAT.FIELD=VALUE, for example rollout.tp=2 or actor.devices=0-31",
            hint=f"pin one of {listing(FIELDS)}",
        )
    example = _EXAMPLES.get(field, "2")
    return ConfigError(
        f"{field} of {subject} cannot be {_written(value)}",
        where=where,
        found=f"{name}={_written(value)}",
        expected=takes,
        hint=f"write {name}={example}, or leave the pin out",
    )


_EXAMPLES = {"devices": "0-31", "environment": "apart", "recompute": "full", "offload": "all"}
"""A value of each field of pins that is no number."""


def _written(value: object) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settings(loaded: LoadedConfig, draws: Mapping[str, Sequence[str]]) -> Iterator[Pin]:
    """What roles say of their own: recomputation, and an engine for each replica of a rollout."""
    for name, role in loaded.config.roles.items():
        if role.recompute != "auto":
            key = f"roles.{name}.recompute"
            kind, where = role.recompute, loaded.where(key)
            yield Pin(subject=name, field="recompute", value=kind, where=where, setting=key)
        if role.num_engines is not None:
            key = f"roles.{name}.num_engines"
            number, where = str(role.num_engines), loaded.where(key)
            for node in draws.get(name, ()):
                yield Pin(subject=node, field="dp", value=number, where=where, setting=key)
