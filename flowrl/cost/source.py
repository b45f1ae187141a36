"""What work takes: the `Cost` protocol, and an estimate that says where it comes from.

Three sources speak it. `flowrl.cost.analytic` computes every time from the sizes of the model, the
figures of the device and a few calibrated efficiencies. `flowrl.cost.measured` and
`flowrl.cost.aiconfigurator` replace it point by point, and leave to another cost what they do not
know; `Estimate.source` tells which one answered.

Conventions:
- `decode_step` and `prefill` are all that an engine takes for them, its host's time included.
- `layout` is the role's whole layout. A replica is `layout.model_devices` devices; `decode_step`
  and `prefill` are of one replica, everything else is of a batch that all replicas share.
- times are of one step's work, with no other work on the same devices.
- `samples` counts rows, prompts times group size; `prompt_tokens` is a mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from flowrl.cluster.hardware import Machine
from flowrl.cost.activations import Recompute
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard

__all__ = [
    "Cost",
    "Estimate",
    "LeastPasses",
    "Recompute",
    "Shard",
    "Source",
    "one_after_the_other",
    "without",
]

Source: TypeAlias = Literal["analytic", "measured", "aiconfigurator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds, and how they came about.

    Attributes:
        source: Who says so. Where parts come from several sources, `measured` and `aiconfigurator`
            are named when most of the seconds are theirs.
        parts: `(name, seconds)`, for people; parts that overlap may add up to more.
        notes: What the estimate had to do without, one sentence each.
        clock: Of a rollout, the share of its seconds that has passed after each of equal parts of
            its decode steps, from 0 to 1 (`flowrl.cost.arrivals`).
        steady_s: Of a rollout, what a batch takes where batches follow each other without a gap, at
            most `seconds`; None: as long as one alone.
        dense_s: The part of `steady_s` that is the batch's own however many are under way at once;
            in the rest all of them progress together (`flowrl.cost.steady`).
    """

    seconds: float
    source: Source = "analytic"
    parts: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    clock: tuple[float, ...] = ()
    steady_s: float | None = None
    dense_s: float = 0.0

    @classmethod
    def of_parts(cls, parts: Mapping[str, float], *, source: Source = "analytic") -> Estimate:
        """The sum of parts that follow one another; those of no time are left out."""
        return cls(
            seconds=sum(parts.values()),
            source=source,
            parts=tuple([part for part in parts.items() if part[1]]),
        )


def without(estimate: Estimate, *names: str) -> Estimate:
    """An update without some of its parts, such as the optimizer's."""
    left_out = sum(seconds for name, seconds in estimate.parts if name in names)
    parts = tuple(part for part in estimate.parts if part[0] not in names)
    return replace(estimate, seconds=max(0.0, estimate.seconds - left_out), parts=parts)


def one_after_the_other(estimates: Sequence[Estimate]) -> Estimate:
    """Work that follows other work on the same devices; its source is that of most seconds."""
    if len(estimates) == 1:
        return estimates[0]
    parts: dict[str, float] = {}
    by_source: dict[Source, float] = {}
    for one in estimates:
        by_source[one.source] = by_source.get(one.source, 0.0) + one.seconds
        for name, seconds in one.parts:
            parts[name] = parts.get(name, 0.0) + seconds
    return Estimate(
        seconds=sum(one.seconds for one in estimates),
        source=max(by_source, key=lambda source: by_source[source]),
        parts=tuple(parts.items()),
        notes=tuple(dict.fromkeys(note for one in estimates for note in one.notes)),
    )


@runtime_checkable
class LeastPasses(Protocol):
    """A cost that knows below what no layout gets a trainer's passes."""

    def least_passes_s(
        self, shape: ModelShape, machine: Machine, *, devices: int, tokens: float, training: bool
    ) -> float:
        """Seconds of passes over so many tokens on so many devices, however they are divided.

        Args:
            training: Forward and backward; else forward alone.
        """
        ...


class Cost(Protocol):
    """What work takes on a machine. All methods are pure: equal questions have equal answers."""

    def decode_step(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, batch: int, context: float
    ) -> Estimate:
        """One more token for each row of one replica's batch.

        Args:
            batch: Rows of the replica.
            context: Mean tokens of a row so far, prompt included.
        """
        ...

    def prefill(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, rows: int, tokens: int
    ) -> Estimate:
        """Rows enter one replica, with their first tokens drawn.

        Args:
            tokens: Of each row.
        """
        ...

    def rollout(
        self,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        *,
        samples: int,
        group_size: int,
        prompt_tokens: float,
        lengths: Lengths,
        slots: int,
        kv_tokens: int,
    ) -> Estimate:
        """A batch generated by all replicas, until its last sample ends.

        Args:
            slots: Rows that one replica decodes at once, at most.
            kv_tokens: Tokens whose keys and values one replica holds.
        """
        ...

    def forward(
        self,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        *,
        samples: int,
        prompt_tokens: float,
        lengths: Lengths,
        micro_tokens: int = ...,
        shard: Shard = ...,
    ) -> Estimate:
        """Logprobs, values or scores of a batch: a forward pass over whole samples.

        Args:
            micro_tokens: Tokens that one replica packs into a pass, at most; a longer sample is a
                pass of its own.
        """
        ...

    def train(
        self,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        *,
        samples: int,
        prompt_tokens: float,
        lengths: Lengths,
        mini_batches: int = ...,
        micro_tokens: int = ...,
        recompute: Recompute = ...,
        shard: Shard = ...,
        offload_optimizer: bool = ...,
    ) -> Estimate:
        """A batch learned from, in `mini_batches` optimizer steps."""
        ...

    def weight_sync(
        self,
        shape: ModelShape,
        source: Layout,
        destination: Layout,
        machine: Machine,
        *,
        apart: bool,
        dtype_bytes: int = ...,
        shard: Shard = ...,
    ) -> Estimate:
        """An engine takes over a trainer's parameters.

        Args:
            shard: What the trainer's data ranks divide.
            apart: The two live on other devices; else on the same ones.
        """
        ...

    def move(self, nbytes: int, machine: Machine) -> Estimate:
        """So many bytes of one device to its host's memory or back, all devices at once."""
        ...
