"""The rules of a stage's rollout scheduler, as its configuration says them.

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
from dataclasses import fields
from typing import Any

from flowrl.config.schema import TrainConfig
from flowrl.errors import ConfigError, SchedulerError
from flowrl.rollout import SchedulerSettings, policies
from flowrl.specs.base import Scalar, Spec
from flowrl.wording import listing, one_of_them

__all__ = ["POLICY_KINDS", "scheduler_settings"]

POLICY_KINDS: Mapping[str, tuple[type[Spec], ...]] = {
    "admission": (policies.AgeBudget,),
    "fairness": (policies.FirstCome, policies.WeightedShares),
    "order": (policies.FirstOffered, policies.LongestFirst),
    "over_sampling": (policies.OverSampling,),
    "patience": (policies.Patience,),
    "publication": (policies.KeepRunning, policies.AbortRunning, policies.FinishRunning),
    "quarantine": (policies.NoQuarantine, policies.Quarantine),
    "refill": (policies.AskMissing, policies.AskByKeepRate),
    "repack": (policies.NoRepack, policies.RepackTail),
    "routing": (policies.PromptAffinity, policies.LeastLoaded),
    "retries": (policies.Retries,),
    "stragglers": (policies.WaitForStragglers, policies.DropStragglers),
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
    """The settings of a rollout's scheduler.

    Args:
        group_size: Samples for each prompt.
        max_staleness: Publications that a sample may be behind.
        judges_groups: Filters judge its groups as soon as they are scored.
        num_engines: Engines that draw for it. Of several, one that fails again and again is closed
            for a while, unless the policies say otherwise.
        key: Of `train` in the config.

    Raises:
        ConfigError: a rule, a kind or an option that there is not, or that does not go with others.
    """
    chosen: dict[str, Any] = {}
    options: Mapping[str, Scalar] = {}
    for name, value in train.policies.items():
        where = f"{key}.policies.{name}"
        if name not in POLICY_KINDS:
            raise _unknown(name, POLICY_KINDS, f"{key}.policies", "rule of the scheduler")
        if name == "admission":
            options = _options(value, where)
        else:
            chosen["refill_by" if name == "refill" else name] = _policy(name, value, where)
    if num_engines > 1:
        chosen.setdefault("quarantine", policies.Quarantine())
    spare = chosen.get("over_sampling", policies.OverSampling()).prompts
    try:
        if max_staleness or spare:
            chosen["admission"] = _made(
                policies.AgeBudget,
                {"groups": train.prompts_per_step, **options},
                f"{key}.policies.admission",
            )
        elif options:
            raise ConfigError(
                "a synchronous stage admits all that it is offered",
                where=f"{key}.policies.admission",
                found=", ".join(options),
                hint=f"set {key}.max_staleness, or leave the options out",
            )
        return SchedulerSettings(
            group_size=group_size,
            max_staleness=max_staleness,
            judges_groups=judges_groups,
            refill=train.refill,
            **chosen,
        )
    except SchedulerError as error:
        raise ConfigError(
            error.what,
            where=f"{key}.policies",
            found=error.found,
            expected=error.expected,
            hint=error.hint,
        ) from error


def _policy(name: str, value: str | Mapping[str, Scalar], where: str) -> Spec:
    kinds = {str(kind.kind): kind for kind in POLICY_KINDS[name]}
    given = {"kind": value} if isinstance(value, str) else dict(value)
    # A rule with one kind has options only.
    kind = str(given.pop("kind", next(iter(kinds)) if len(kinds) == 1 else ""))
    if kind not in kinds:
        raise _unknown(kind, kinds, where, f"kind of {name}")
    return _made(kinds[kind], given, where)


def _options(value: str | Mapping[str, Scalar], where: str) -> Mapping[str, Scalar]:
    if isinstance(value, str) or not value.keys() <= {"slack", "queue"}:
        found = value if isinstance(value, str) else ", ".join(value)
        raise ConfigError(
            "the age budget follows from the sizes of the stage",
            where=where,
            found=found,
            expected="slack, queue",
            hint="write {slack: N} or {queue: N}, or leave it out",
        )
    return value


def _made(kind: type[Spec], options: Mapping[str, Scalar], where: str) -> Spec:
    every = fields(kind)  # type: ignore[arg-type]
    types = {of.name: of.type for of in every if "user" not in of.metadata}
    names_sources = len(types) < len(every)
    for name, value in options.items():
        if name not in types and names_sources:
            types[name] = "float"  # a source, by its name
        if name not in types:
            raise _unknown(name, types, where, f"option of {kind.kind}")
        wanted = str(types[name])
        fits = {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, int | float) and not isinstance(value, bool),
            "bool": isinstance(value, bool),
        }.get(wanted, False)
        if not fits:
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
        raise ConfigError(
            error.what, where=where, found=error.found, expected=error.expected, hint=error.hint
        ) from error


def _unknown(name: str, choices: Mapping[str, object], where: str, what: str) -> ConfigError:
    return ConfigError(
        f"there is no {what} {name!r}" if name else f"no {what} is named",
        where=where,
        expected=f"one of {listing(choices)}",
        hint=one_of_them(name, choices),
    )
