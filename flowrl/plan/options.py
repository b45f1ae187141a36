"""What a plan over many devices is asked for besides roles and sizes. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from flowrl.cluster.pool import MEMORY_SHARE
from flowrl.cost.episodes import CallSeconds
from flowrl.cost.lengths import ConstantLengths, Lengths
from flowrl.cost.role_memory import Shard
from flowrl.plan.ways.layouts import ENGINE_KINDS, FSDP_KINDS, MEGATRON_KINDS

ObjectiveName: TypeAlias = Literal["step_time", "device_time"]
KindName: TypeAlias = Literal["auto", "temporal", "spatial", "asynchronous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How a library divides a model.

    Attributes:
        name: As the plan names it.
        kinds: Dimensions that it has, of `tp pp dp cp ep fsdp`.
        shard: What replicas of a trainer divide among them.
        kv_copies: Key heads may be copied to several tensor ranks.
        vocabulary_step: See `LayoutRules`.
        cp_splits_heads: See `LayoutRules`.
        sleeps: An engine gives its memory back while others work.
        in_place: An engine reads the parameters of the trainer on its device.
        cuts_experts: See `LayoutRules`.
    """

    name: str
    kinds: frozenset[str]
    shard: Shard = "optimizer"
    kv_copies: bool = True
    vocabulary_step: int = 64
    cp_splits_heads: bool = False
    sleeps: bool = True
    in_place: bool = False
    cuts_experts: bool = True


TRAINERS = {
    # Megatron-LM pads the vocabulary to what tp needs, and wants key heads in every rank.
    "megatron": Library(name="megatron", kinds=MEGATRON_KINDS, kv_copies=False, vocabulary_step=0),
    "fsdp": Library(name="fsdp", kinds=FSDP_KINDS, shard="full", cp_splits_heads=True),
}
"""What a trainer is assumed to be where no backend here declares layouts."""

ENGINES = {
    "sglang": Library(name="sglang", kinds=ENGINE_KINDS, shard="none"),
    # With `--enable-expert-parallel` it divides experts over all devices of a stage, none twice.
    "vllm": Library(name="vllm", kinds=ENGINE_KINDS, shard="none", cuts_experts=False),
}
"""Likewise an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A decision that the planner keeps.

    Attributes:
        subject: A node, an operation (`generate`), `rollout`, or a role.
        field: `devices`, a dimension of the layout, `recompute`, `offload` or `micro_tokens`.
        where: Where somebody asked for it.
        setting: The key that says it in another form: `roles.actor.num_engines`.
    """

    subject: str
    field: str
    value: str
    where: str
    setting: str = ""

    def __str__(self) -> str:
        """As it was written."""
        return f"{self.setting or f'{self.subject}.{self.field}'}={self.value}"


def pins_text(pins: Iterable[Pin]) -> str:
    """Pins in a message; three and more of one subject name it once.

    >>> some = [Pin(subject="rollout", field=f, value="2", where="") for f in ("tp", "pp", "dp")]
    >>> pins_text(some[:2]), pins_text(some)
    ('rollout.tp=2 and rollout.pp=2', 'rollout (tp=2, pp=2, dp=2)')
    """
    told: dict[str, list[Pin]] = {}
    for pin in dict.fromkeys(pins):
        told.setdefault(pin.setting or pin.subject, []).append(pin)
    parts: list[str] = []
    for subject, some in told.items():
        if len(some) < 3 or any(pin.setting for pin in some):
            parts += [str(pin) for pin in some]
        else:
            parts.append(f"{subject} ({', '.join(f'{pin.field}={pin.value}' for pin in some)})")
    return " and ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRequest:
    """What is known of an environment.

    Attributes:
        calls: What they take; None where nobody said.
        accelerated: It computes on accelerators, else on the cores of hosts.
        kind: Name of the accelerators that it takes; None takes those of its policy.
        concurrency: Calls at once, on each accelerator or each node; None takes 1 on an
            accelerator, and one for each core of a node.
        nbytes: Of each accelerator that it is on, or of each node's host.
    """

    calls: CallSeconds | None = None
    accelerated: bool = False
    kind: str | None = None
    concurrency: int | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """See the module.

    Attributes:
        lengths: Of responses.
        prompt_tokens: Mean of prompts.
        trainer: Of `TRAINERS`, for backends that declare no layouts.
        engine: Of `ENGINES`, likewise.
        kind: Of schedule; `auto` takes the best of all.
        kind_where: Who asked for it.
        alternatives: Next best plans that are told.
        try_batches: Plans with other batches, where this one leaves devices idle.
        pins: Decisions that somebody asked the planner to keep.
        settings: What roles' own settings decide of a plan over many devices, in the same form.
        assumptions: What nobody said and the plan takes for granted, one sentence each.
        engine_times: `analytic` or `aiconfigurator`.
        memory_share: Of an accelerator's memory, what a plan may fill.
        single_device: Only what runs in this very process is planned: one device.
        turns: Of an episode on average; None takes half of the most.
        said: Tokens that an environment says before each turn; likewise.
        environments: What is known of them, by role.
    """

    lengths: Lengths = field(default_factory=lambda: ConstantLengths(tokens=256))
    prompt_tokens: float = 256.0
    trainer: str = "megatron"
    engine: str = "sglang"
    objective: ObjectiveName = "step_time"
    kind: KindName = "auto"
    kind_where: str = "plan.kind"
    alternatives: int = 0
    try_batches: bool = False
    pins: tuple[Pin, ...] = ()
    settings: tuple[Pin, ...] = ()
    assumptions: tuple[str, ...] = ()
    engine_times: str = "analytic"
    memory_share: float = MEMORY_SHARE
    single_device: bool = False
    turns: float | None = None
    said: float | None = None
    environments: Mapping[str, EnvironmentRequest] = field(default_factory=dict)


def with_pin(options: PlanOptions, pin: Pin, value: str) -> PlanOptions:
    """The options with another value of one pin, or setting."""
    other = replace(pin, value=value)
    return replace(
        options,
        pins=tuple(other if one == pin else one for one in options.pins),
        settings=tuple(other if one == pin else one for one in options.settings),
    )
