"""Says where each update takes the logprobs of the old policy from, and computes them if it must.

The old policy is the role's own at the start of the step. A loss reads it where its anchor is
`old`, and where it weighs or rejects tokens by old / behaviour.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, count

from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.signatures import LOGPROBS, RESPONSE_MASK, TOKENS
from flowrl.ids import NodeId
from flowrl.passes.context import Context
from flowrl.passes.decision import Decision
from flowrl.passes.rollouts import changed_options, drawn_by, is_of_sampler
from flowrl.specs import LossSpec
from flowrl.wording import counted

__all__ = ["decisions_on_old_logprobs", "insert_old_logprobs"]

FORWARD, OWN, ROLLOUT = "forward", "own", "rollout_logprobs"


def insert_old_logprobs(graph: Graph, context: Context) -> Graph:
    """Sets the attribute `old_logprobs` of every update whose loss reads them.

    - `forward`: logprobs of the role on the same samples, taken before its first update; those of
      the program, or a node that is inserted.
    - `own`: the update's own forward pass is by the old policy, so no other is made. Exactly so
      where it is the role's first update of the step and makes one optimizer update: all of its
      gradient is taken at the weights that the step began with.
    - `rollout_logprobs`: those of the engine stand for them, where the user said so, the engine
      reads the trainer's parameters in place, no sample is stale, and tokens were drawn from the
      very distribution that the logprobs are of.
    """
    for node in graph.of_op(Op.UPDATE):
        if not _reads_old(node):
            continue
        choice = _choice(graph, node, context)
        graph = graph.replacing(node.with_attrs(old_logprobs=choice))
        if choice == FORWARD and "old" not in node.inputs:
            graph = _feed(graph, graph.node(node.id))
    return graph


def decisions_on_old_logprobs(graph: Graph, context: Context) -> tuple[Decision, ...]:
    """Of a graph that the pass has seen: what it chose for each update, and why."""
    found = []
    for node in graph.of_op(Op.UPDATE):
        choice, edge = node.attr("old_logprobs"), graph.feeding(node.id, "old")
        if choice is None:
            continue
        against_own = _against_own(graph, node, context)
        against_rollout = _against_rollout(graph, node, context)
        rejected: tuple[tuple[str, str], ...] = ()
        if choice == OWN:
            why = "it is the first and only update of the step: its forward pass is by that policy"
        elif choice == ROLLOUT:
            why = "algorithm.trust_rollout_logprobs is set, and engine and trainer share weights"
            rejected = ((OWN, str(against_own)),)
        else:
            assert edge is not None
            choice = f"of {edge.src}"
            others = ((OWN, against_own), (ROLLOUT, against_rollout))
            rejected = tuple((name, reason) for name, reason in others if reason is not None)
            why = "a forward pass at the weights that the step begins with"
            if against_own is None:
                why += ", as the program says"
        found.append(
            Decision(
                subject=f"{node.id}.old_logprobs", choice=str(choice), why=why, rejected=rejected
            )
        )
    return tuple(found)


def _reads_old(update: Node) -> bool:
    loss = update.attr("loss")
    return isinstance(loss, LossSpec) and "old_logprobs" in loss.needs


def _choice(graph: Graph, update: Node, context: Context) -> str:
    if "old" in update.inputs:
        return FORWARD
    if _against_own(graph, update, context) is None:
        return OWN
    return ROLLOUT if _against_rollout(graph, update, context) is None else FORWARD


def _against_own(graph: Graph, update: Node, context: Context) -> str | None:
    """What keeps the update's own forward pass from being by the old policy."""
    first = next(node for node in graph.of_op(Op.UPDATE) if node.role == update.role)
    if first.id != update.id:
        where = f" ({first.source})" if first.source is not None else ""
        return f"{first.id}{where} changes the weights before"
    if context.mini_batches > 1:
        return (
            f"{context.mini_batches} optimizer updates a step: from the second on, the weights are "
            "no longer those of its start"
        )
    return None


def _against_rollout(graph: Graph, update: Node, context: Context) -> str | None:
    """What keeps the engine's logprobs from standing for the old policy's."""
    generate = drawn_by(graph, update)
    if generate is None or generate.role != update.role:
        return f"the samples are not drawn by {update.role}"
    if not context.trust_rollout_logprobs:
        return "algorithm.trust_rollout_logprobs is not set"
    if not context.shares_weights.get(str(update.role), False):
        return "its engine has weights of its own"
    if context.max_staleness > 0:
        return f"samples may be {counted(context.max_staleness, 'publication')} old"
    changed = changed_options(generate)
    repeats = context.truncated == "repeat" or is_of_sampler(generate)
    if changed and not repeats:
        options = ", ".join(f"{name}={value}" for name, value in changed.items())
        return f"{generate.id} draws with {options}"
    return None


def _feed(graph: Graph, update: Node) -> Graph:
    """The argument `old` of an update, from a node that is there or a new one."""
    rollout = graph.feeding(update.id, "rollout")
    assert rollout is not None  # every update has one
    before = _passes_before_updates(graph, update)
    source = next((n for n in before if _samples(graph, n) == rollout.src), None)
    if source is None:
        graph, source = _insert(graph, update, rollout.src)
    fed = replace(update, inputs=(*update.inputs, "old"))
    old = Edge(src=source.id, dst=update.id, argument="old", fields=(LOGPROBS.name,))
    return replace(graph.replacing(fed), edges=(*graph.edges, old))


def _passes_before_updates(graph: Graph, update: Node) -> list[Node]:
    """The logprobs of the role that the weights at the start of the step give."""
    found = []
    for node in graph.nodes:
        if node.op is Op.UPDATE and node.role == update.role:
            break
        if node.op is Op.LOGPROBS and node.role == update.role:
            found.append(node)
    return found


def _samples(graph: Graph, node: Node) -> NodeId | None:
    edge = graph.feeding(node.id, "rollout")
    return None if edge is None else edge.src


def _insert(graph: Graph, update: Node, samples: NodeId) -> tuple[Graph, Node]:
    """A forward pass of the role before its first update of the step."""
    taken = {node.id for node in graph.nodes}
    more = (f"{update.role}.logprobs.{number}" for number in count(2))
    names = chain([f"{update.role}.logprobs"], more)
    made = Node(
        id=NodeId(next(name for name in names if name not in taken)),
        op=Op.LOGPROBS,
        role=update.role,
        inputs=("rollout",),
        outputs=(LOGPROBS,),
        source=update.source,
    )
    first = next(i for i, n in enumerate(graph.nodes) if n.op is Op.UPDATE and n.role == made.role)
    needed = _ancestors(graph, samples)
    before, after = graph.nodes[:first], graph.nodes[first:]
    # What makes the samples may stand behind the first update, which it does not read.
    moved = tuple(node for node in after if node.id in needed)
    rest = tuple(node for node in after if node.id not in needed)
    edge = Edge(
        src=samples,
        dst=made.id,
        argument="rollout",
        fields=(TOKENS.name, RESPONSE_MASK.name),
    )
    nodes = (*before, *moved, made, *rest)
    return replace(graph, nodes=nodes, edges=(*graph.edges, edge)), made


def _ancestors(graph: Graph, node_id: NodeId) -> set[NodeId]:
    """A node and all that it reads within the step, directly or not."""
    found, waiting = {node_id}, [node_id]
    while waiting:
        for edge in graph.in_edges(waiting.pop()):
            if not edge.carried and edge.src not in found:
                found.add(edge.src)
                waiting.append(edge.src)
    return found
