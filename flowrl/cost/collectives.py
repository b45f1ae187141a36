"""What it takes to exchange data between devices: latency and bandwidth, inside nodes and across.

With n ranks, S bytes and b bytes a second from a device to the others (Thakur, Rabenseifner and
Gropp 2005, "Optimization of Collective Communication Operations in MPICH", sections 4.1 to 4.5;
the bandwidth terms are those of a ring):

    all-reduce       2 (n - 1) / n S / b       S: bytes of the vector on each rank
    all-gather         (n - 1) / n S / b       S: bytes of the whole on each rank afterwards
    reduce-scatter     (n - 1) / n S / b       S: bytes of the whole on each rank before
    all-to-all         (n - 1) / n S / b       S: bytes that a rank sends, itself included
    send                           S / b

plus a start that grows with n: inside a node `ALL_REDUCE_BASE_S + n ALL_REDUCE_RANK_S`, across
nodes a network latency for each doubling of nodes.

Ranks that fill more than one node: the part inside nodes and the part across follow each other.
Inside, each of the l ranks of a node exchanges its whole share; across, each handles `S / l`, with
`m = n / l` nodes (hierarchical collectives, as NCCL's trees and rings over rails). An all-to-all
has no such reduction: `(n - l) / n` of its bytes leave the node.

A group is `size` ranks that lie `stride` devices apart: tensor ranks are neighbours (stride 1),
data ranks lie a whole replica apart, so a node holds `node_size / stride` of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowrl.cluster.hardware import Machine
from flowrl.cost import efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Those that exchange: `size` devices, `stride` apart.

    >>> from flowrl.cluster.hardware import device_spec
    >>> machine = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
    >>> Ranks(size=4, stride=4).inside(machine)
    2
    """

    size: int
    stride: int = 1

    def inside(self, machine: Machine) -> int:
        """How many of them share a node."""
        return max(1, min(self.size, machine.node_size // self.stride))


def all_reduce_s(nbytes: float, ranks: Ranks, machine: Machine) -> float:
    """Every rank has a vector of `nbytes` and gets the sum."""
    return _ring_s(nbytes, ranks, machine, passes=2)


def all_gather_s(nbytes: float, ranks: Ranks, machine: Machine) -> float:
    """Every rank has a part of `nbytes` and gets the whole."""
    return _ring_s(nbytes, ranks, machine, passes=1)


def reduce_scatter_s(nbytes: float, ranks: Ranks, machine: Machine) -> float:
    """Every rank has a vector of `nbytes` and gets its part of the sum."""
    return _ring_s(nbytes, ranks, machine, passes=1)


def all_to_all_s(nbytes: float, ranks: Ranks, machine: Machine) -> float:
    """Every rank has `nbytes`, an equal part for each rank."""
    size, inside = ranks.size, ranks.inside(machine)
    if size <= 1 or nbytes <= 0:
        return 0.0
    near = nbytes * (inside - 1) / size / _intra(machine)
    far = nbytes * (size - inside) / size / _inter(machine)
    return _start_s(size, inside, machine) + near + far


def send_s(nbytes: float, machine: Machine, *, across: bool) -> float:
    """One rank sends `nbytes` to another."""
    if nbytes <= 0:
        return 0.0
    if across:
        return efficiency.NETWORK_LATENCY_S + nbytes / _inter(machine)
    return efficiency.ALL_REDUCE_BASE_S + nbytes / _intra(machine)


def _ring_s(nbytes: float, ranks: Ranks, machine: Machine, *, passes: int) -> float:
    size, inside = ranks.size, ranks.inside(machine)
    if size <= 1 or nbytes <= 0:
        return 0.0
    nodes = math.ceil(size / inside)
    near = passes * (inside - 1) / inside * nbytes / _intra(machine)
    far = passes * (nodes - 1) / nodes * nbytes / inside / _inter(machine)
    return _start_s(size, inside, machine) + near + far


def _start_s(size: int, inside: int, machine: Machine) -> float:
    start = 0.0
    if inside > 1:
        scale = efficiency.generation(machine.spec).start_scale
        start += scale * (efficiency.ALL_REDUCE_BASE_S + efficiency.ALL_REDUCE_RANK_S * inside)
    if size > inside:
        start += efficiency.NETWORK_LATENCY_S * math.log2(2 * math.ceil(size / inside))
    return start


def _intra(machine: Machine) -> float:
    return machine.spec.intra_bytes_per_s * efficiency.LINK_SHARE


def _inter(machine: Machine) -> float:
    return machine.spec.inter_bytes_per_s * efficiency.NETWORK_SHARE
