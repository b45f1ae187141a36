"""`AnalyticCost`: every time from the sizes of a model and the figures of a device.

    >>> from flowrl.cluster.hardware import Machine, device_spec
    >>> from flowrl.cost.analytic import AnalyticCost
    >>> h100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
    >>> cost = AnalyticCost()                   # cost.decode_step(shape, layout, h100, ...)

The formulas stand where they are computed: kernels (`flowrl.cost.kernels`), a pass through a model
(`forward_pass`), collectives (`collectives`), an engine's steps (`engine_steps`) and its rollout
(`occupancy`, `replicas`, `prompts`, `rollout_time`), a trainer (`trainer_time`), moves and weight
sync (`switching`); all constants in `efficiency`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from flowrl.cluster.hardware import Machine
from flowrl.cost import efficiency
from flowrl.cost.activations import Recompute
from flowrl.cost.engine_steps import decode_parts, prefill_parts
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard
from flowrl.cost.rollout_time import DecodeStep, rollout_estimate
from flowrl.cost.source import Estimate
from flowrl.cost.switching import move_s, weight_sync_parts
from flowrl.cost.trainer_time import batch_of, forward_batch_parts, least_passes_s, update_parts

MICRO_TOKENS = 16384
"""Tokens of a micro-batch where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticCost:
    """See the module, and `flowrl.cost.source.Cost` for what the methods take.

    Attributes:
        host_s: Of an engine's host, in every decode step and every pass in which prompts enter;
            0 for kernels alone, as published figures have them.
        chunk_tokens: Of a pass in which prompts enter; None for one pass.
    """

    host_s: float = efficiency.ENGINE_HOST_S
    chunk_tokens: int | None = efficiency.PREFILL_CHUNK_TOKENS

    def decode_step(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, batch: int, context: float
    ) -> Estimate:
        """See `Cost`."""
        return self._decoder(shape, layout, machine)(batch, context)

    def _decoder(self, shape: ModelShape, layout: Layout, machine: Machine) -> DecodeStep:
        # Without expert groups a step is a replica's own matter, however many there are.
        replica = layout if layout.ep > 1 else _alone(layout)
        return _decoder(shape, replica, machine, self.host_s)

    def prefill(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, rows: int, tokens: int
    ) -> Estimate:
        """See `Cost`."""
        parts = prefill_parts(
            shape, layout, machine, rows=rows, tokens=tokens, chunk_tokens=self.chunk_tokens
        )
        return Estimate.of_parts({**parts, "host": self.host_s})

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
        """See `Cost`."""
        return rollout_estimate(
            self._decoder(shape, layout, machine),
            lambda rows, tokens: self.prefill(shape, layout, machine, rows=rows, tokens=tokens),
            replicas=layout.dp,
            samples=samples,
            group_size=group_size,
            prompt_tokens=prompt_tokens,
            lengths=lengths,
            slots=slots,
            kv_tokens=kv_tokens,
        )

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
        batch = batch_of(samples, prompt_tokens, lengths, micro_tokens)
        return Estimate.of_parts(forward_batch_parts(shape, layout, machine, batch, shard))

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
        batch = batch_of(samples, prompt_tokens, lengths, micro_tokens)
        return Estimate.of_parts(
            update_parts(
                shape,
                layout,
                machine,
                batch,
                mini_batches=mini_batches,
                recompute=recompute,
                shard=shard,
                offload_optimizer=offload_optimizer,
            )
        )

    def least_passes_s(
        self, shape: ModelShape, machine: Machine, *, devices: int, tokens: float, training: bool
    ) -> float:
        """See `flowrl.cost.source.LeastPasses`."""
        return least_passes_s(shape, machine, devices=devices, tokens=tokens, training=training)

    def weight_sync(
        self,
        shape: ModelShape,
        source: Layout,
        destination: Layout,
        machine: Machine,
        *,
        apart: bool,
        dtype_bytes: int = 2,
        shard: Shard = "optimizer",
    ) -> Estimate:
        """See `Cost`."""
        return Estimate.of_parts(
            weight_sync_parts(
                shape,
                source,
                destination,
                machine,
                apart=apart,
                dtype_bytes=dtype_bytes,
                shard=shard,
            )
        )

    def move(self, nbytes: int, machine: Machine) -> Estimate:
        """See `Cost`."""
        return Estimate.of_parts({"host link": move_s(nbytes, machine)})


@lru_cache(maxsize=1024)
def _alone(layout: Layout) -> Layout:
    """One replica of it."""
    return replace(layout, dp=1)


@lru_cache(maxsize=512)
def _decoder(shape: ModelShape, layout: Layout, machine: Machine, host_s: float) -> DecodeStep:
    """Steps of one replica, each computed once: rollouts differ in their number and their cache.

    What is the same for all of them is looked up once a rollout, for its hash takes longer than
    that of a batch and a context.
    """

    @lru_cache(maxsize=256)
    def step(batch: int, context: float) -> Estimate:
        parts = decode_parts(shape, layout, machine, batch=batch, context=context)
        return Estimate.of_parts({**parts, "host": host_s})

    return step
