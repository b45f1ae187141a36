"""`MeasuredCost`: what was measured, point by point, and another cost for the rest.

A `MeasuredModel` holds the times of one model on one kind of device with one replica's layout; the
number of replicas is free, because they work side by side. Engines give decode steps and a prefill
line, trainers a line for forward passes and one for updates; each may be absent.

Between measured decode steps times are linear (`DecodeTable`). Beyond the largest batch or context
the other cost is asked, and its answer is scaled by measured over asked at the nearest measured
point: the shape of the one, the level of the other. A note says so.

Lines were measured on one replica: with d replicas each has `samples / d`, and what data ranks
exchange is added from the other cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.cluster.hardware import Machine
from flowrl.cost.activations import Recompute
from flowrl.cost.analytic import MICRO_TOKENS
from flowrl.cost.decode_table import DecodeTable, LinearPrefill
from flowrl.cost.episodes import CallSeconds
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths
from flowrl.cost.models import ModelShape
from flowrl.cost.partial import PartialCost
from flowrl.cost.role_memory import Shard
from flowrl.cost.source import Cost, Estimate
from flowrl.errors import ConfigError

DecodeRow = tuple[int, float, float]
"""Batch, context, seconds."""

_EXCHANGES = ("gradients", "sharded parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """Seconds for each call, micro-batch, row, token, and token that no other row shares."""

    call_s: float = 0.0
    pass_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    distinct_s: float = 0.0

    def __call__(
        self, *, calls: float, passes: float, rows: float, tokens: float, distinct: float
    ) -> float:
        return (
            self.call_s * calls
            + self.pass_s * passes
            + self.row_s * rows
            + self.token_s * tokens
            + self.distinct_s * distinct
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Measured times of one model on one kind of device.

    Attributes:
        device: Its name in the catalogue.
        layout: Of the replica that was measured; its `dp` does not count.
        decode: `(batch, context, seconds)`; empty without.
        recompute: Of the updates that were measured.
    """

    shape: ModelShape
    device: str
    layout: Layout
    decode: tuple[DecodeRow, ...] = ()
    prefill: LinearPrefill | None = None
    forward: BatchLine | None = None
    train: BatchLine | None = None
    recompute: Recompute = "none"


@dataclass(frozen=True, slots=True)
class _Known:
    """A model's times, with its table."""

    times: MeasuredModel
    table: DecodeTable | None
    most_rows: int
    longest: float


class MeasuredCost(PartialCost):
    """See the module.

    Args:
        models: At most one for each shape, device and replica layout.
        group_size: Samples of a prompt, for lines in which they share its tokens.
        environments: What was measured of environments, by role.

    Raises:
        ConfigError: two models for one place, or times that cannot be used.
    """

    def __init__(
        self,
        models: Sequence[MeasuredModel],
        fallback: Cost,
        *,
        group_size: int = 1,
        environments: Mapping[str, CallSeconds] | None = None,
    ) -> None:
        super().__init__(fallback)
        self._environments = dict(environments or {})
        self._group_size = group_size
        self._known: dict[tuple[ModelShape, str, Layout], _Known] = {}
        for model in models:
            key = (model.shape, model.device, _replica(model.layout))
            if key in self._known:
                raise ConfigError(
                    "two measurements of one model on one device and layout",
                    where="profile",
                    found=f"{model.device}, {_replica(model.layout).describe()}",
                    hint="take one of them out of the profile",
                )
            self._known[key] = _Known(
                model,
                DecodeTable(model.decode) if model.decode else None,
                max((batch for batch, _, _ in model.decode), default=0),
                max((context for _, context, _ in model.decode), default=0.0),
            )

    def environment(self, role: str) -> CallSeconds | None:
        """See `flowrl.cost.episodes.EnvironmentCost`."""
        return self._environments.get(role)

    def decode_step(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, batch: int, context: float
    ) -> Estimate:
        """See `Cost`."""
        known = self._find(shape, layout, machine)
        if known is None or known.table is None:
            return super().decode_step(shape, layout, machine, batch=batch, context=context)
        rows, tokens = min(batch, known.most_rows), min(context, known.longest)
        seconds = known.table.at(rows, tokens)
        if (rows, tokens) == (batch, context):
            return Estimate(seconds=seconds, source="measured", parts=(("decode", seconds),))
        asked = super().decode_step(shape, layout, machine, batch=batch, context=context)
        there = super().decode_step(shape, layout, machine, batch=rows, context=tokens)
        seconds *= asked.seconds / there.seconds
        return Estimate(
            seconds=seconds,
            source="measured",
            parts=(("decode", seconds),),
            notes=(
                f"measured up to {known.most_rows} rows and {known.longest:g} tokens; beyond, it "
                f"grows as the {asked.source} estimate does",
            ),
        )

    def prefill(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, rows: int, tokens: int
    ) -> Estimate:
        """See `Cost`."""
        known = self._find(shape, layout, machine)
        if known is None or known.times.prefill is None:
            return super().prefill(shape, layout, machine, rows=rows, tokens=tokens)
        seconds = known.times.prefill(rows, rows * tokens)
        return Estimate(seconds=seconds, source="measured", parts=(("prefill", seconds),))

    def forward(
        self,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        *,
        samples: int,
        prompt_tokens: float,
        lengths: Lengths,
        micro_tokens: int = MICRO_TOKENS,
        shard: Shard = "none",
    ) -> Estimate:
        """See `Cost`."""
        known = self._find(shape, layout, machine)
        asked = super().forward(
            shape,
            layout,
            machine,
            samples=samples,
            prompt_tokens=prompt_tokens,
            lengths=lengths,
            micro_tokens=micro_tokens,
            shard=shard,
        )
        if known is None or known.times.forward is None:
            return asked
        seconds = self._line_s(
            known.times.forward, layout, samples, prompt_tokens, lengths, 1, micro_tokens
        )
        return _with_exchange({"forward": seconds}, asked)

    def train(
        self,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        *,
        samples: int,
        prompt_tokens: float,
        lengths: Lengths,
        mini_batches: int = 1,
        micro_tokens: int = MICRO_TOKENS,
        recompute: Recompute = "none",
        shard: Shard = "optimizer",
        offload_optimizer: bool = False,
    ) -> Estimate:
        """See `Cost`."""
        known = self._find(shape, layout, machine)
        asked = super().train(
            shape,
            layout,
            machine,
            samples=samples,
            prompt_tokens=prompt_tokens,
            lengths=lengths,
            mini_batches=mini_batches,
            micro_tokens=micro_tokens,
            recompute=recompute,
            shard=shard,
            offload_optimizer=offload_optimizer,
        )
        if known is None or known.times.train is None:
            return asked
        if recompute != known.times.recompute or offload_optimizer:
            note = f"updates were measured with recompute {known.times.recompute} on the device"
            return Estimate(
                seconds=asked.seconds,
                source=asked.source,
                parts=asked.parts,
                notes=(*asked.notes, note),
            )
        seconds = self._line_s(
            known.times.train, layout, samples, prompt_tokens, lengths, mini_batches, micro_tokens
        )
        return _with_exchange({"update": seconds}, asked)

    def _find(self, shape: ModelShape, layout: Layout, machine: Machine) -> _Known | None:
        return self._known.get((shape, machine.spec.name, _replica(layout)))

    def _line_s(
        self,
        line: BatchLine,
        layout: Layout,
        samples: int,
        prompt_tokens: float,
        lengths: Lengths,
        calls: int,
        micro_tokens: int,
    ) -> float:
        """Seconds of the replica with most samples."""
        rows = math.ceil(samples / layout.dp)
        tokens = rows * (prompt_tokens + lengths.mean)
        passes = calls * max(1, math.ceil(tokens / calls / micro_tokens))
        distinct = rows / self._group_size * prompt_tokens + rows * max(0.0, lengths.mean - 1)
        return line(calls=calls, passes=passes, rows=rows, tokens=tokens, distinct=distinct)


def _replica(layout: Layout) -> Layout:
    """The layout of one replica; experts that lie over several keep their `dp`."""
    dp = layout.dp if layout.ep > layout.tp else 1
    return Layout(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, dp=dp)


def _with_exchange(measured: dict[str, float], asked: Estimate) -> Estimate:
    """Measured seconds, and what the other cost says that data ranks exchange."""
    exchanged = {name: seconds for name, seconds in asked.parts if name in _EXCHANGES}
    return Estimate.of_parts({**measured, **exchanged}, source="measured")
