"""Moving what is held: to host memory and back, and weights from a trainer to an engine.

Sync, with W bytes of all parameters, of which a device of the engine holds `D = W / (tp pp)`:

- together (engine and trainer on the same devices): a device lacks what of D its trainer's part
  does not cover. Parts that divide one another cover `min(D, held)`, others the product of their
  shares of W. What it lacks comes over the links of the trainer's replica, or, with parameters
  divided among data ranks, of all of these; then everything is copied once inside the device.
- apart: each device receives D while the devices of one replica of the trainer send W together;
  engines pass on what they receive (a pipelined broadcast), so more of them take no longer. The
  slower of the two, over the network unless all share a node.

Both with `efficiency.SYNC_BUCKET_S` for each bucket, and `SYNC_TENSOR_S` or `SYNC_TENSOR_APART_S`
for each tensor of the model: those are gathered and loaded one after the other, whichever devices
get them.
"""

from __future__ import annotations

import math

from flowrl.cluster.hardware import Machine
from flowrl.cost import efficiency
from flowrl.cost.forward_pass import PassParts
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.models.counts import count_tensors
from flowrl.cost.role_memory import Shard


def move_s(nbytes: float, machine: Machine) -> float:
    """Bytes of one device to its host or back; every device has a link of its own."""
    return nbytes / (machine.spec.host_bytes_per_s * efficiency.HOST_LINK_SHARE)


def saved_s(nbytes: float) -> float:
    """Bytes of one device to its host and back, as frameworks of others copy them on shared
    devices: tensor by tensor or page by page, and not at the rate of the link."""
    return away_s(nbytes) + nbytes / efficiency.RESTORE_BYTES_PER_S


def away_s(nbytes: float) -> float:
    """To the host alone; see `saved_s`."""
    return nbytes / efficiency.SAVE_BYTES_PER_S


def weight_sync_parts(
    shape: ModelShape,
    source: Layout,
    destination: Layout,
    machine: Machine,
    *,
    apart: bool,
    dtype_bytes: int,
    shard: Shard,
) -> PassParts:
    """Seconds by part; see the module."""
    whole = float(shape.parameters.total * dtype_bytes)
    wanted = whole / (destination.tp * destination.pp)
    buckets = math.ceil(wanted / efficiency.SYNC_BUCKET_BYTES) * efficiency.SYNC_BUCKET_S
    each = efficiency.SYNC_TENSOR_APART_S if apart else efficiency.SYNC_TENSOR_S
    tensors = count_tensors(shape) * each
    holders = source.num_devices if shard == "full" else source.model_devices
    if apart:
        near = source.num_devices + destination.num_devices <= machine.node_size
        sent = whole / holders
        return {
            "weights": max(wanted, sent) / _link(machine, near=near),
            "buckets": buckets,
            "tensors": tensors,
        }
    lacking = wanted - _covered(source, destination, shard, whole)
    copied = 2 * wanted / efficiency.rates(machine.spec).nbytes
    near = holders <= machine.node_size
    return {
        "weights": lacking / _link(machine, near=near),
        "copy": copied,
        "buckets": buckets,
        "tensors": tensors,
    }


def _covered(source: Layout, destination: Layout, shard: Shard, whole: float) -> float:
    """Bytes that a device of the engine finds in its trainer's part."""
    parts = source.tp * source.pp * (source.shards if shard == "full" else 1)
    wanted = destination.tp * destination.pp
    if parts % wanted == 0 or wanted % parts == 0:
        return whole / max(parts, wanted)
    return whole / parts / wanted


def _link(machine: Machine, *, near: bool) -> float:
    if near:
        return machine.spec.intra_bytes_per_s * efficiency.LINK_SHARE
    return machine.spec.inter_bytes_per_s * efficiency.NETWORK_SHARE
