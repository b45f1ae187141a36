"""What became of the operations of a program on the way to its lowered graph.

A program that runs line by line calls all of its operations; the lowered graph lacks those that a
pass merged into another or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.compiler import CompiledStage
from flowrl.graph import Graph
from flowrl.ids import NodeId
from flowrl.passes import PassRecord, run_passes

__all__ = ["Fates", "fates_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """Traced nodes that the lowered graph lacks.

    Attributes:
        merged: The node that stands for each of those that give the same as it.
        dropped: The pass that left each of the others out.
    """

    merged: Mapping[NodeId, NodeId]
    dropped: Mapping[NodeId, str]

    def standing_for(self, node: NodeId) -> NodeId:
        """The node whose values are those of `node`: itself, or the one it was merged into."""
        return self.merged.get(node, node)


def fates_of(stage: CompiledStage) -> Fates:
    """Runs the passes once more, and looks where each node goes."""
    merged: dict[NodeId, NodeId] = {}
    dropped: dict[NodeId, str] = {}

    def note(record: PassRecord) -> None:
        left = {node.id for node in record.after.nodes}
        for node in record.before.nodes:
            if node.id not in left:
                other = _reader_now_reads(record.before, record.after, node.id)
                if other is None:
                    dropped[node.id] = record.name
                else:
                    merged[node.id] = other

    run_passes(stage.traced, stage.context, observer=note)
    # What stands for a node may be dropped later, with all that read it.
    for node, other in list(merged.items()):
        if other in dropped:
            del merged[node]
            dropped[node] = dropped[other]
    return Fates(merged=merged, dropped=dropped)


def _reader_now_reads(before: Graph, after: Graph, node: NodeId) -> NodeId | None:
    """What a reader of a node that is gone reads in its place."""
    for edge in before.edges:
        if edge.src == node:
            now = after.feeding(edge.dst, edge.argument)
            if now is not None:
                return now.src
    return None
