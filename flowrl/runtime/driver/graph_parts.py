"""Divides a graph into the part that streams sample by sample and the part that runs on batches.

The streaming part of a rollout is what its driver does while others of its samples still run:
generate, score by rule, judge groups by filters that read such scores. Everything else works on
sets of samples, node by node (`flowrl.runtime.driver.batch_program`).

Which samples a rollout hands over follows from what the batch part reads:

- one set, the rollout's own or that of a filter: the samples of this set alone;
- several, as where a program logs the scores before a filter: all samples (`whole`), and the
  filters run once more, on the batch, to make their sets of it.

`RoleUse` lists what each role does over all stages of a run: a worker is opened once for everything
that its role does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.backend.plugin import Head
from flowrl.config.schema import RunConfig
from flowrl.graph import Graph, Node, Op, results, sample_sets
from flowrl.graph.ir import sums_of
from flowrl.graph.sample_sets import JOINS, SUBSETS, parents_of, sample_edges
from flowrl.graph.sample_trees import data_prompts, evaluated_role
from flowrl.graph.streaming import is_rule_score, streaming_nodes
from flowrl.ids import NodeId, RoleName
from flowrl.specs import LossSpec

_ROLLOUTS = (Op.GENERATE, Op.INTERACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPart:
    """The streaming part of one rollout.

    Attributes:
        node: The `generate` or `interact` whose samples they are.
        turn_nodes: The `generate` nodes that sample tokens: `node`, or those of its region in order
            of their turns.
        source: The data whose prompts are answered, by its parents or theirs where it answers
            prompts that are made of samples.
        by_rows: True if each step has the rows that were taken for it, also ahead of the trainer:
            it answers prompts of the data, and so do other rollouts, or it answers some of them.
        prompts: The node that makes prompts of samples for it; None where it answers the data's.
        parent: The rollout whose samples these are.
        parents: The set of these samples: the rollout's own, or that of a filter.
        completes: True if its parents need its samples, of which a mean is taken for them.
        scorers: Rule scores of its samples, in order.
        filters: Filters that judge its groups, in order.
        ends: The filters whose sets are read; a group that none of them keeps is filtered.
        maps: Maps that `filters` read, in order.
        kept: The set that is handed over.
        whole: True if filtered samples are delivered too.
    """

    node: Node
    turn_nodes: tuple[Node, ...]
    source: NodeId
    by_rows: bool
    prompts: Node | None
    parent: NodeId | None
    parents: NodeId | None
    completes: bool
    scorers: tuple[Node, ...]
    filters: tuple[Node, ...]
    ends: tuple[Node, ...]
    maps: tuple[Node, ...]
    kept: NodeId
    whole: bool

    @property
    def generate_node(self) -> Node:
        """The `generate` whose engine has the samples: that of the first turn."""
        return self.turn_nodes[0]


class GraphParts:
    """A lowered graph, divided into its streaming and its batch part.

    Attributes:
        graph: The graph.
        made: The node that made the set of samples on which a node works, by node.
        rollouts: The rollouts, in the graph's order.
        sources: Nodes of data whose samples are learned from as they are.
        batch: Nodes that run on whole sets, in order.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: Mapping[NodeId, NodeId] = {
            NodeId(node): NodeId(maker) for node, maker in sample_sets(graph).items()
        }
        self._by_id = {node.id: node for node in graph.nodes}
        self._streaming = streaming_nodes(graph)
        self._origins: dict[NodeId, NodeId] = {}
        self._roots: dict[NodeId, frozenset[NodeId]] = {}
        for node in graph.nodes:
            self._origins[node.id] = self._origin_of(node)
            self._roots[node.id] = self._roots_of(node)
        filters = [n for n in graph.of_op(Op.FILTER) if n.id in self._streaming]
        judged = self._maps_before(filters)
        read = self._sets_read(filters, judged)
        self.rollouts = tuple(
            self._part(node, filters, judged, read)
            for node in graph.of_op(*_ROLLOUTS)
            if self._is_rollout(node)
        )
        self.sources = tuple(
            node for node in graph.of_op(Op.SOURCE) if node.attr("data") != "prompts"
        )
        self.batch = self._batch_nodes(filters)

    def root(self, part: RolloutPart) -> RolloutPart:
        """Returns the rollout that answers the data's prompts: a rollout, its parent, or theirs."""
        while part.parent is not None:
            part = next(other for other in self.rollouts if other.node.id == part.parent)
        return part

    def streams(self, node: NodeId) -> bool:
        """True if a node's result for a group follows from the group alone, once it is scored."""
        return node in self._streaming

    def origin(self, node: NodeId) -> NodeId:
        """Returns the rollout, the source, the replay or the join of which a node's samples are."""
        return self._origins[node]

    def roots(self, node: NodeId) -> frozenset[NodeId]:
        """Returns the rollouts and sources of a node's samples: several where sets were joined.

        Those of replayed samples are of earlier steps.
        """
        return self._roots[node]

    def data_of(self, prompts: NodeId) -> NodeId:
        """Returns the source of prompts, of which a node gives all or, as `where` does, some."""
        edge = self.graph.feeding(prompts, "prompts")
        return prompts if edge is None else self.data_of(edge.src)

    def _origin_of(self, node: Node) -> NodeId:
        maker = self._by_id[self.made[node.id]]
        edge = self.graph.feeding(maker.id, "rollout")
        return self._origins[edge.src] if maker.op in SUBSETS and edge is not None else maker.id

    def _roots_of(self, node: Node) -> frozenset[NodeId]:
        origin = self._by_id[self._origins[node.id]]
        if origin.op not in (*JOINS, Op.REPLAY):
            return frozenset({origin.id})
        return frozenset().union(*(self._roots[e.src] for e in sample_edges(self.graph, origin)))

    # What streams

    def _maps_before(self, filters: list[Node]) -> set[NodeId]:
        """Returns the maps that streaming filters read, directly or through other maps."""
        found: set[NodeId] = set()
        waiting = [node.id for node in filters]
        while waiting:
            for edge in self.graph.in_edges(waiting.pop()):
                if self._by_id[edge.src].op is Op.MAP and edge.src not in found:
                    found.add(edge.src)
                    waiting.append(edge.src)
        return found

    def _sets_read(self, filters: list[Node], judged: set[NodeId]) -> set[NodeId]:
        """Sets that something other than the judging of groups reads."""
        judging = {node.id for node in filters} | judged
        return {node.id for node in results(self.graph) if node.op is Op.FILTER} | {
            self.made[edge.src]
            for edge in self.graph.edges
            if not edge.carried
            and edge.dst not in judging
            and not (is_rule_score(self._by_id[edge.dst]) and self.streams(edge.dst))
            and self._by_id[edge.dst].region is None
        }

    def _part(
        self, node: Node, filters: list[Node], judged: set[NodeId], read: set[NodeId]
    ) -> RolloutPart:
        source, parents = data_prompts(self.graph, node), parents_of(self.graph, node)
        prompts = self.graph.feeding(node.id, "prompts")
        assert source is not None  # the verifier of graphs proves it
        assert prompts is not None
        own_filters = [f for f in filters if self._origins[f.id] == node.id]
        ends = tuple(f for f in own_filters if f.id in read)
        sets = [set_ for set_ in (node.id, *(f.id for f in own_filters)) if set_ in read]
        kept = sets[0] if len(sets) == 1 else node.id
        on_way = {f for end in ends for f in self.chain(end)}
        maps = {m for f in on_way for m in self._maps_before([self._by_id[f]])}
        return RolloutPart(
            node=node,
            turn_nodes=self.graph.generators_of(node),
            source=source.id,
            by_rows=parents is None and (source.op is Op.WHERE or self._num_roots() > 1),
            prompts=None if parents is None else self._by_id[prompts.src],
            parent=None if parents is None else self._origins[parents.id],
            parents=None if parents is None else parents.id,
            completes=any(
                self._origins[edge.src] == node.id
                for edge in self.graph.edges
                if edge.argument == "input" and self._by_id[edge.dst].op is Op.MEAN_OF_CHILDREN
            ),
            scorers=tuple(
                score
                for score in self.graph.of_op(Op.SCORE)
                if self.streams(score.id) and self._origins[score.id] == node.id
            ),
            filters=tuple(f for f in own_filters if f.id in on_way),
            ends=ends,
            maps=tuple(m for m in self.graph.of_op(Op.MAP) if m.id in maps & judged),
            kept=kept,
            whole=len(sets) > 1,
        )

    def _num_roots(self) -> int:
        """Returns the number of rollouts that answer prompts of the data."""
        rollouts = (node for node in self.graph.of_op(*_ROLLOUTS) if self._is_rollout(node))
        return sum(parents_of(self.graph, node) is None for node in rollouts)

    @staticmethod
    def _is_rollout(node: Node) -> bool:
        """True for what has samples: of an episode the `interact`, not the turns."""
        return node.op is Op.INTERACT or node.region is None

    def chain(self, node: Node) -> tuple[NodeId, ...]:
        """Returns a filter and those before it whose set it reads, last first."""
        chain = [node.id]
        while True:
            edge = self.graph.feeding(chain[-1], "rollout")
            assert edge is not None  # the verifier of graphs proves it
            if self._by_id[edge.src].op is not Op.FILTER:
                return tuple(chain)
            chain.append(edge.src)

    # What is left for whole batches

    def _batch_nodes(self, filters: list[Node]) -> tuple[Node, ...]:
        """Nodes whose set is handed over, or made of such a set, in order."""
        there = {part.kept for part in self.rollouts} | {node.id for node in self.sources}
        whole = {part.node.id for part in self.rollouts if part.whole}
        judging = {node.id for node in filters if self._origins[node.id] not in whole}
        nodes = []
        for node in self.graph.nodes:
            if node.op in (Op.SOURCE, Op.PROMPTS_OF, *_ROLLOUTS) or node.id in judging:
                continue
            reads = [e.src for e in self.graph.in_edges(node.id) if not e.carried]
            if all(self.made[source] in there for source in reads):
                nodes.append(node)
                there.add(self.made[node.id])
        return tuple(nodes)


def is_due(node: Node, number: int) -> bool:
    """True if an update or a refresh is made in a step: in steps `every`, `2 * every`, ..."""
    every = node.attr("every")
    return number % (every if isinstance(every, int) else 1) == 0


def optimizer_updates(graph: Graph) -> list[Node]:
    """Returns the updates that step the optimizer: of the terms of a sum the last alone."""
    held = {node.id for terms in sums_of(graph).values() for node in terms[:-1]}
    return [node for node in graph.of_op(Op.UPDATE) if node.id not in held]


def role_of(node: Node) -> RoleName:
    """Returns the role of a node that has one."""
    assert node.role is not None  # the verifier of graphs proves it
    return node.role


_WITH_MODEL = (Op.GENERATE, Op.LOGPROBS, Op.VALUES, Op.SCORE, Op.UPDATE, Op.SYNC)


class RoleUse:
    """The roles of a run.

    Attributes:
        models: Roles with a model, in order of first use; what a copy copies comes with it.
        policy: The role that is evaluated and exported as the run's model; None where a run
            trains none (`flowrl.graph.sample_trees.evaluated_role`).
        trained: The role whose weights are the run's result: `policy`, or else the last one
            updated. None where a run trains nothing.
        reader: The role whose tokenizer prompts are measured with: `trained`, or else the first
            one that generates, or has a model.
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
        self.policy = evaluated_role(graphs)
        self.trained = self.policy or (updated[-1] if updated else None)
        generating = (role for role in self.models if self.does(role, Op.GENERATE))
        self.reader = self.trained or next(generating, self.models[0])

    def source_of(self, role: RoleName) -> RoleName | None:
        """Returns the role of which this one is a copy; None if it has a model of its own."""
        if role not in self._config.roles:
            return None
        source = self._config.roles[role].copy_of
        return None if source is None else RoleName(source)

    def owner(self, role: RoleName) -> RoleName:
        """Returns the role whose model folder and tokenizer this one has: itself or its source."""
        source = self.source_of(role)
        return role if source is None else source

    def does(self, role: RoleName, *ops: Op) -> list[Node]:
        """Returns the nodes of a role with these operations, over all stages."""
        return [node for node in self._nodes.get(role, ()) if node.op in ops]

    def is_trained(self, role: RoleName) -> bool:
        """True if any stage updates the role."""
        return bool(self.does(role, Op.UPDATE))

    def generates(self, role: RoleName) -> bool:
        """True if the role needs an engine."""
        return role == self.policy or bool(self.does(role, Op.GENERATE))

    def is_frozen_copy(self, role: RoleName) -> bool:
        """True for a copy that no stage trains: it is made again at the start of each stage."""
        return self.source_of(role) is not None and not self.is_trained(role)

    def head(self, role: RoleName) -> Head:
        """Returns the head of the role's model: critics and reward models end in one number."""
        if self.does(role, Op.VALUES, Op.SCORE):
            return "value"
        losses = [node.attr("loss") for node in self.does(role, Op.UPDATE)]
        reads = {loss.predicts for loss in losses if isinstance(loss, LossSpec)}
        return "lm" if reads <= {"logprobs"} else "value"


def _has_model(node: Node) -> bool:
    return node.op in _WITH_MODEL and not is_rule_score(node)
