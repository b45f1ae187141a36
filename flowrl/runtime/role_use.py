"""What the roles of a run do over all its stages, as the graphs say it.

A worker is opened once for everything that its role does, so this looks at every stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.backend.capabilities import Head
from flowrl.config.schema import RunConfig
from flowrl.graph import Graph, Node, Op
from flowrl.ids import RoleName
from flowrl.runtime.rollout_parts import is_rule_score, role_of
from flowrl.specs import LossSpec

__all__ = ["RoleUse", "refreshed_roles"]

_WITH_MODEL = (Op.GENERATE, Op.LOGPROBS, Op.VALUES, Op.SCORE, Op.UPDATE, Op.SYNC)


class RoleUse:
    """The roles of a run.

    Attributes:
        models: Roles with a model, in order of first use; what a copy copies comes with it.
        policy: The role that is evaluated and exported as the run's model: of the roles that give
            logprobs, the last one updated. None where a run trains no such role.
        trained: The last role updated.
    """

    def __init__(self, config: RunConfig, graphs: Sequence[Graph]) -> None:
        self._config = config
        nodes = [node for graph in graphs for node in graph.nodes if node.role is not None]
        self._nodes: dict[RoleName, list[Node]] = {}
        for node in nodes:
            self._nodes.setdefault(role_of(node), []).append(node)
        used = [role for role, does in self._nodes.items() if any(map(_has_model, does))]
        copied = [RoleName(c) for role in used if (c := self.source_of(role)) is not None]
        self.models = tuple(dict.fromkeys((*used, *copied)))
        updated = [role_of(node) for node in nodes if node.op is Op.UPDATE]
        self.trained = updated[-1]  # the verifier of graphs proves that there is one
        self.policy = next((r for r in reversed(updated) if self.head(r) == "lm"), None)

    def source_of(self, role: RoleName) -> RoleName | None:
        """The role that this one begins as a copy of; None where it has a model of its own."""
        if role not in self._config.roles:
            return None
        source = self._config.roles[role].copy_of
        return None if source is None else RoleName(source)

    def owner(self, role: RoleName) -> RoleName:
        """The role whose model folder and tokenizer this one has: its own, or what it copies."""
        source = self.source_of(role)
        return role if source is None else source

    def does(self, role: RoleName, *ops: Op) -> list[Node]:
        """The nodes of a role with these operations, over all stages."""
        return [node for node in self._nodes.get(role, ()) if node.op in ops]

    def is_trained(self, role: RoleName) -> bool:
        """Whether any stage updates it."""
        return bool(self.does(role, Op.UPDATE))

    def generates(self, role: RoleName) -> bool:
        """Whether it needs an engine."""
        return role == self.policy or bool(self.does(role, Op.GENERATE))

    def is_kept(self, role: RoleName) -> bool:
        """Whether it is a copy that no stage trains: made anew at the beginning of each stage."""
        return self.source_of(role) is not None and not self.is_trained(role)

    def head(self, role: RoleName) -> Head:
        """What its model must end in: a critic and a reward model give numbers."""
        if self.does(role, Op.VALUES, Op.SCORE):
            return "value"
        losses = [node.attr("loss") for node in self.does(role, Op.UPDATE)]
        reads = {loss.predicts for loss in losses if isinstance(loss, LossSpec)}
        return "lm" if reads <= {"logprobs"} else "value"


def _has_model(node: Node) -> bool:
    return node.op in _WITH_MODEL and not is_rule_score(node)


def refreshed_roles(graph: Graph) -> set[RoleName]:
    """Roles that take another role's weights from time to time."""
    found = set()
    for node in graph.of_op(Op.SYNC):
        edge = graph.feeding(node.id, "weights")
        if edge is not None and graph.node(edge.src).role != node.role:
            found.add(role_of(node))
    return found
