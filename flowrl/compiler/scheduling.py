"""The rules of a stage's rollout scheduler, from its configuration.

`train.policies` names a policy for each rule, by its kind or with its options:

    train:
      policies:
        publication: abort
        order: {kind: longest_first, window: 512}
        over_sampling: {members: 2}

Admission follows from `max_staleness`: a synchronous stage admits what it is offered, another one
what its age budget allows; `admission` then has the options `slack` and `queue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from flowrl.config.schema import TrainConfig
from flowrl.errors import ConfigError, SchedulerError
from flowrl.rollout.policies import engines, limits, prompts
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs.base import Scalar, Spec
from flowrl.wording import listing, one_of_them

POLICY_KINDS: Mapping[str, tuple[type[Spec], ...]] = {
    "admission": (prompts.AgeBudget,),
    "fairness": (prompts.FirstCome, prompts.WeightedShares),
    "order": (engines.FirstOffered, engines.LongestFirst),
    "over_sampling": (prompts.OverSampling,),
    "patience": (limits.Patience,),
    "publication": (engines.KeepRunning, engines.AbortRunning, engines.FinishRunning),
    "quarantine": (engines.NoQuarantine, engines.Quarantine),
    "refill": (prompts.AskMissing, prompts.AskByKeepRate),
    "repack": (engines.NoRepack, engines.RepackTail),
    "routing": (engines.PromptAffinity, engines.LeastLoaded),
    "retries": (limits.Retries,),
    "stragglers": (limits.WaitForStragglers, limits.DropStragglers),
}
"""What `train.policies` may hold: for each rule its kinds, the first one being the default."""


def scheduler_settings(
    train: TrainConfig,
    *,
    group_size: int,
    max_staleness: int,
    judges_groups: bool,
    num_engines: int = 1,
    key: str = "train",
) -> SchedulerSettings:
    """Returns the settings of a rollout's scheduler.

    Args:
        group_size: Samples for each prompt.
        max_staleness: Publications that a sample may be behind.
        judges_groups: True if filters judge its groups as soon as they are scored.
        num_engines: Engines that generate for it. One of several that fails again and again is
            quarantined, unless the policies say otherwise.
        key: The key of `train` in the config.

    Raises:
        ConfigError: an unknown rule, kind or option, or options that exclude each other.
    """
    key = f"{key}.policies"
    chosen: dict[str, Any] = {}
    options: Mapping[str, Scalar] = {}
    for name, value in train.policies.items():
        if name not in POLICY_KINDS:
            raise _unknown(name, POLICY_KINDS, key, "rule of the scheduler")
        if name == "admission":
            options = _admission_options(value, f"{key}.admission")
        else:
            policy = _policy(name, value, f"{key}.{name}")
            chosen["refill_by" if name == "refill" else name] = policy
    if num_engines > 1:
        chosen.setdefault("quarantine", engines.Quarantine())
    spare = chosen.get("over_sampling", prompts.OverSampling()).prompts
    if max_staleness or spare:
        sizes = {"groups": train.prompts_per_step, **options}
        chosen["admission"] = _made(prompts.AgeBudget, sizes, f"{key}.admission")
    elif options:
        raise ConfigError(
            "a synchronous stage admits all that it is offered",
            where=f"{key}.admission",
            found=", ".join(options),
            hint=f"set {key.removesuffix('.policies')}.max_staleness, or leave the options out",
        )
    try:
        return SchedulerSettings(
            group_size=group_size,
            max_staleness=max_staleness,
            judges_groups=judges_groups,
            refill=train.refill,
            **chosen,
        )
    except SchedulerError as error:
        raise _at_key(error, key) from error


def with_given_groups(settings: SchedulerSettings) -> SchedulerSettings:
    """Returns the rules of a rollout that takes no further prompts, whatever it loses.

    A parent has its children once, and a step its rows. Where others are generated ahead, a batch
    names its groups: its own rows, or the children of its parents.
    """
    return replace(
        settings,
        refill=False,
        refill_by=prompts.AskMissing(),
        admission=prompts.AdmitAll(),
        over_sampling=replace(settings.over_sampling, prompts=0),
        named=settings.budget is not None,
    )


def _at_key(error: SchedulerError, key: str) -> ConfigError:
    return ConfigError(
        error.what, where=key, found=error.found, expected=error.expected, hint=error.hint
    )


def _policy(name: str, value: str | Mapping[str, Scalar], where: str) -> Spec:
    kinds = {str(kind.kind): kind for kind in POLICY_KINDS[name]}
    given = {"kind": value} if isinstance(value, str) else dict(value)
    # A rule with one kind has options only.
    kind = str(given.pop("kind", next(iter(kinds)) if len(kinds) == 1 else ""))
    if kind not in kinds:
        raise _unknown(kind, kinds, where, f"kind of {name}")
    return _made(kinds[kind], given, where)


def _admission_options(value: str | Mapping[str, Scalar], where: str) -> Mapping[str, Scalar]:
    if isinstance(value, str) or not value.keys() <= {"slack", "queue"}:
        raise ConfigError(
            "the age budget follows from the sizes of the stage",
            where=where,
            found=value if isinstance(value, str) else ", ".join(value),
            expected="slack, queue",
            hint="write {slack: N} or {queue: N}, or leave it out",
        )
    return value


_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


def _made(kind: type[Spec], options: Mapping[str, Scalar], where: str) -> Spec:
    declared = fields(kind)  # type: ignore[arg-type]
    types = {field.name: str(field.type) for field in declared if "user" not in field.metadata}
    if len(types) < len(declared):  # further options are weights of sources, by their names
        types = dict.fromkeys(options, "float") | types
    for name, value in options.items():
        if name not in types:
            raise _unknown(name, types, where, f"option of {kind.kind}")
        wanted = types[name]
        allowed = _TYPES.get(wanted, ())
        if not isinstance(value, allowed) or isinstance(value, bool) != (bool in allowed):
            raise ConfigError(
                f"{name} of {kind.kind} must be of another type",
                where=where,
                found=repr(value),
                expected=wanted,
                hint=f"write {wanted} for {name}, or leave it out",
            )
    try:
        return kind.from_json(options)
    except SchedulerError as error:
        raise _at_key(error, where) from error


def _unknown(name: str, choices: Mapping[str, object], where: str, what: str) -> ConfigError:
    return ConfigError(
        f"there is no {what} {name!r}" if name else f"no {what} is named",
        where=where,
        expected=f"one of {listing(choices)}",
        hint=one_of_them(name, choices),
    )
