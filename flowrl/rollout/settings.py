"""The settings of a scheduler: sizes, limits, and a policy for each rule that can be chosen.

The defaults are a synchronous run that waits for what it began. `to_json` holds every option, so a
written scheduler keeps its rules when a default changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.engines import (
    FirstOffered,
    KeepRunning,
    NoQuarantine,
    NoRepack,
    OrderPolicy,
    PromptAffinity,
    PublicationPolicy,
    QuarantinePolicy,
    RepackPolicy,
    RoutingPolicy,
)
from flowrl.rollout.policies.limits import (
    DropStragglers,
    Patience,
    Retries,
    StragglerPolicy,
    WaitForStragglers,
)
from flowrl.rollout.policies.prompts import (
    AdmissionPolicy,
    AdmitAll,
    AgeBudget,
    AskByKeepRate,
    AskMissing,
    FairnessPolicy,
    FirstCome,
    OverSampling,
    RefillPolicy,
)
from flowrl.specs.base import Spec, spec_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The rules of one stage.

    Attributes:
        group_size: Samples a group; a delivered group has exactly so many.
        max_staleness: Publications that a sample may be behind when it is consumed. 0 is
            synchronous: batches are then filled strictly in the order of admission.
        judges_groups: Fully scored groups are judged (filtered or kept) before delivery.
        refill: A batch has exactly the asked number of kept groups. Otherwise filtered and
            dropped groups count towards it, and every offered group is answered in one batch.
        admission: Which groups may start.
        over_sampling: Redundant members and prompts.
        refill_by: How many prompts to ask for when a batch lacks some; with `refill`.
        order: In which order queued samples start.
        routing: On which engine.
        publication: What becomes of running samples when weights are published.
        retries: How often attempts and rewards of a sample may fail.
        repack: Whether the tail of a step moves onto fewer engines.
        quarantine: What becomes of engines that fail again and again.
        patience: How long silence is borne.
        fairness: How sources of prompts share the engines.
        stragglers: Whether a batch waits for what the next one could not take any more.
        named: Batches name their groups, as those of samples' children do, and of rollouts that
            share the rows of a step. Otherwise the scheduler chooses them.
    """

    group_size: int
    max_staleness: int = 0
    judges_groups: bool = False
    refill: bool = False
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    over_sampling: OverSampling = field(default_factory=OverSampling)
    refill_by: RefillPolicy = field(default_factory=AskMissing)
    order: OrderPolicy = field(default_factory=FirstOffered)
    routing: RoutingPolicy = field(default_factory=PromptAffinity)
    publication: PublicationPolicy = field(default_factory=KeepRunning)
    retries: Retries = field(default_factory=Retries)
    repack: RepackPolicy = field(default_factory=NoRepack)
    quarantine: QuarantinePolicy = field(default_factory=NoQuarantine)
    patience: Patience = field(default_factory=Patience)
    fairness: FairnessPolicy = field(default_factory=FirstCome)
    stragglers: StragglerPolicy = field(default_factory=WaitForStragglers)
    named: bool = False

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("max_staleness", 0)):
            value = getattr(self, name)
            if value < least:
                raise SchedulerError(
                    f"{name} is too small", found=str(value), expected=f"at least {least}"
                )
        budget = self.budget
        if self.over_sampling.prompts and (budget is None or not self.refill):
            raise SchedulerError(
                "redundant prompts need to know what a batch takes",
                found=f"over_sampling={self.over_sampling}, admission={self.admission}, "
                f"refill={self.refill}",
                expected="admission=AgeBudget(groups=...) and refill=True",
            )
        if isinstance(self.refill_by, AskByKeepRate) and (budget or not self.refill):
            raise SchedulerError(
                "asking by the share that is kept needs refill, and prompts that are admitted "
                "as they are offered",
                found=f"admission={self.admission}, refill={self.refill}",
                expected="admission=AdmitAll() and refill=True",
                hint="with an age budget, over_sampling=OverSampling(prompts=...) has spare groups",
            )
        if self.named and (budget or self.refill):
            raise SchedulerError(
                "batches that name their groups take no others",
                found=f"admission={self.admission}, refill={self.refill}",
                expected="admission=AdmitAll() and refill=False",
            )
        if isinstance(self.stragglers, DropStragglers) and self.max_staleness == 0:
            raise SchedulerError(
                "a synchronous batch waits for every one of its groups",
                found=f"stragglers={self.stragglers}, max_staleness=0",
                expected="max_staleness of at least 1",
                hint="over_sampling=OverSampling(prompts=...) drops the last groups of a step",
            )
        most = self.max_staleness * budget.batches_per_version * budget.groups if budget else 0
        if budget and budget.slack > most:
            raise SchedulerError(
                "the slack of the age budget leaves no room for a batch",
                found=f"slack={budget.slack}",
                expected=f"at most max_staleness * batches_per_version * groups = {most}",
            )

    @property
    def num_members(self) -> int:
        """Members that a group begins with."""
        return self.group_size + self.over_sampling.members

    @property
    def budget(self) -> AgeBudget | None:
        """The age budget, where there is one."""
        return self.admission if isinstance(self.admission, AgeBudget) else None

    @property
    def runs_ahead(self) -> bool:
        """True if samples are generated for later batches than the next one."""
        return self.named or self.budget is not None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a policy as `{"kind": ..., option: value}`."""
        values = ((of.name, getattr(self, of.name)) for of in fields(self))
        return {name: v.to_json() if isinstance(v, Spec) else v for name, v in values}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> SchedulerSettings:
        """The settings that `to_json` wrote.

        Raises:
            KeyError, TypeError: an unknown policy, or an unknown option of one.
        """
        values: dict[str, Any] = {
            name: spec_from_json("refill" if name == "refill_by" else name, value)
            if isinstance(value, dict)
            else value
            for name, value in obj.items()
        }
        return cls(**values)
