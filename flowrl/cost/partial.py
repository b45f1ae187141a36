"""A cost that knows some things, and asks another one for the rest.

`PartialCost` answers nothing itself; a subclass overrides what it knows. Rollouts are put together
here from `decode_step` and `prefill`, so a rollout is as good as these are.
"""

from __future__ import annotations

from flowrl.cluster.hardware import Machine
from flowrl.cost.activations import Recompute
from flowrl.cost.analytic import MICRO_TOKENS
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard
from flowrl.cost.rollout_time import rollout_estimate
from flowrl.cost.source import Cost, Estimate

CONTEXTS = 5
"""At which a step is asked for in a rollout: measured steps need not be linear in the context."""


class PartialCost:
    """See the module, and `flowrl.cost.source.Cost` for what the methods take.

    Args:
        fallback: Answers what this one does not know.
    """

    def __init__(self, fallback: Cost) -> None:
        self._fallback = fallback

    def decode_step(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, batch: int, context: float
    ) -> Estimate:
        """See `Cost`."""
        return self._fallback.decode_step(shape, layout, machine, batch=batch, context=context)

    def prefill(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, rows: int, tokens: int
    ) -> Estimate:
        """See `Cost`."""
        return self._fallback.prefill(shape, layout, machine, rows=rows, tokens=tokens)

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
            lambda batch, context: self.decode_step(
                shape, layout, machine, batch=batch, context=context
            ),
            lambda rows, tokens: self.prefill(shape, layout, machine, rows=rows, tokens=tokens),
            replicas=layout.dp,
            samples=samples,
            group_size=group_size,
            prompt_tokens=prompt_tokens,
            lengths=lengths,
            slots=slots,
            kv_tokens=kv_tokens,
            contexts=CONTEXTS,
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
        return self._fallback.forward(
            shape,
            layout,
            machine,
            samples=samples,
            prompt_tokens=prompt_tokens,
            lengths=lengths,
            micro_tokens=micro_tokens,
            shard=shard,
        )

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
        return self._fallback.train(
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
        return self._fallback.weight_sync(
            shape,
            source,
            destination,
            machine,
            apart=apart,
            dtype_bytes=dtype_bytes,
            shard=shard,
        )

    def move(self, nbytes: int, machine: Machine) -> Estimate:
        """See `Cost`."""
        return self._fallback.move(nbytes, machine)
