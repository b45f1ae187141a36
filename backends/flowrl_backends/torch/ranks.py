"""One of several data-parallel ranks of a trainer, through torch's own FSDP2.

Every rank has the whole batch and computes its own rows of each mini-batch. Weights of samples, and
with them all denominators, are those of the whole mini-batch, so the ranks' gradients are summed
and never averaged. Collectives of FSDP are in the passes of the model, so every rank makes as many
passes as the one with the most: a rank that has fewer makes empty ones.

What is divided over the ranks, in the words of plans:

- `optimizer` (ZeRO-1): the optimizer's state; gradients are reduced after the last micro-batch.
- `gradients` (ZeRO-2): the gradients too, which are reduced after each micro-batch.
- `full` (ZeRO-3): the parameters too, of which each layer's are gathered for its passes.

Between updates parameters are always divided; what differs is when they are gathered. Whole copies
in every rank, as DDP has, compute the same as `optimizer` and take more memory, so there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowrl.backend.balance import rows_of_ranks
from flowrl.backend.batch import Floats, Ints, SequenceBatch
from flowrl.backend.protocols import Head, Rank
from flowrl_backends.torch.metrics import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shard: TypeAlias = Literal["optimizer", "gradients", "full"]


class Ranks:
    """This process's place among the ranks; of a single one, nothing is divided or sent.

    Lifecycle: `divide` once, before the optimizer is made; `close` at the end, in all ranks.

    Args:
        rank: Where this process is; None where it is the only one.
        device: The device of the model.
    """

    def __init__(self, rank: Rank | None, device: torch.device) -> None:
        self.size = 1 if rank is None else rank.size
        self.number = 0 if rank is None else rank.number
        self._device = device
        self._divided: list[FSDPModule] = []
        self._syncs_once = False
        if rank is not None:
            dist.init_process_group(
                "gloo" if device.type == "cpu" else None,
                init_method=f"file://{rank.rendezvous}",
                rank=rank.number,
                world_size=rank.size,
                timeout=timedelta(seconds=rank.timeout_s),
            )

    @property
    def is_first(self) -> bool:
        """True of the rank that writes files."""
        return self.number == 0

    def divide(self, model: PreTrainedModel, head: Head, shard: Shard) -> None:
        """Divides a model's parameters, which are equal in all ranks, in place."""
        if self.size == 1:
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        from flowrl_backends.torch.packed_forward import value_head

        options: dict[str, Any] = {
            "mesh": init_device_mesh(self._device.type, (self.size,)),
            "reshard_after_forward": shard == "full",
        }
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                fully_shard(layer, mp_policy=_REDUCED, **options)
        if head == "lm":
            fully_shard(model, mp_policy=_REDUCED, **options)
        else:  # body and head are called by themselves, the head in float32
            fully_shard(model.base_model, mp_policy=_REDUCED, **options)
            policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            fully_shard(value_head(model), mp_policy=policy, **options)
        self._syncs_once = shard == "optimizer"
        self._divided = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in self._divided:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def part(self, batch: SequenceBatch, rows: Ints, *, whole_groups: bool = False) -> Ints:
        """Returns this rank's rows of some rows of a batch; see `rows_of_ranks`."""
        if self.size == 1:
            return rows
        return rows_of_ranks(batch, rows, self.size, whole_groups=whole_groups)[self.number]

    def passes(self, parts: Sequence[Ints], rows: Ints) -> Iterator[tuple[Ints, bool]]:
        """Yields as many passes in every rank, in training and without gradient.

        Args:
            parts: The micro-batches of this rank.
            rows: Rows of all ranks, of which empty passes take one.

        Yields:
            The rows of a pass, and False if it is an empty one, whose results do not count.
        """
        most = torch.tensor(len(parts), device=self._device)
        if self.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        for number in range(int(most)):
            if self._syncs_once:
                is_last = number == int(most) - 1
                for part in self._divided:
                    part.set_requires_gradient_sync(is_last)
                    part.set_reshard_after_backward(is_last)
            yield (parts[number], True) if number < len(parts) else (rows[:1], False)

    def summed(self, values: Floats) -> Floats:
        """Returns the sum of all ranks' arrays, of which each number is set in one rank."""
        self.gather_anew()
        if self.size == 1:
            return values
        total = torch.from_numpy(values).to(self._device)
        dist.all_reduce(total)
        summed: Floats = total.cpu().numpy()
        return summed

    def joined(self, metrics: Metrics) -> Metrics:
        """Returns the metrics of all ranks."""
        if self.size == 1:
            return metrics
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, metrics.state())
        return Metrics.joined(parts, self._device)

    def gather_anew(self) -> None:
        """Drops gathered parameters, which would not see a change of the divided ones."""
        for part in self._divided:
            part.reshard()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors in one piece, on the host of the first rank; nothing in the others.

        One tensor of several names is one again.
        """
        if self.size == 1:
            return dict(tensors)
        found: dict[int, torch.Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in found:
                full = tensor.detach()
                full = full.full_tensor() if isinstance(full, DTensor) else full
                found[id(tensor)] = full.cpu() if self.is_first else torch.empty(0)
        return {n: found[id(t)] for n, t in tensors.items()} if self.is_first else {}

    def close(self) -> None:
        """Leaves the others, when they leave too."""
        if self.size > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


_REDUCED = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor divided as another one is; every rank has the whole tensor."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
