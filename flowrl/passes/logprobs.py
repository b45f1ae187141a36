"""Decides where updates take old and behaviour logprobs from; inserts the forward passes.

The old policy is the role's own at the start of the step. A loss reads it where its anchor is
`old`, and where it weighs or rejects tokens by old / behaviour.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import takewhile

from flowrl.errors import GraphError
from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.ir import called
from flowrl.graph.sample_sets import replay_before, sampling_node, sampling_nodes
from flowrl.graph.signatures import (
    LOGPROBS,
    PART,
    PREFERRED,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
)
from flowrl.ids import NodeId
from flowrl.passes.context import Context, Decision
from flowrl.passes.settle_truncation import changed_options, includes_truncation
from flowrl.passes.simplify import ancestors, unused_id
from flowrl.specs import LossSpec, OwnLoss, Replay
from flowrl.specs import loss as losses
from flowrl.specs.loss import PolicyLoss
from flowrl.wording import counted

FORWARD, OWN, ROLLOUT = "forward", "own", "rollout_logprobs"


def insert_old_logprobs(graph: Graph, context: Context) -> Graph:
    """Sets the attribute `old_logprobs` of every update whose loss reads them.

    - `forward`: logprobs of the role on the same samples, taken before its first update; those of
      the program, or a node that is inserted.
    - `own`: the update's own forward pass is by the old policy, so no other is made. Exactly so
      where it is the role's first update of the step and makes one optimizer update: all of its
      gradient is taken at the weights that the step began with.
    - `rollout_logprobs`: those of the engine replace them, where the user said so, the engine
      reads the trainer's parameters in place, no sample is stale, and tokens were sampled from
      the very distribution that the logprobs are of.
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
    """Returns what the pass chose for each update of a graph that it has seen, and why."""
    decisions = []
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
            against = ((OWN, against_own), (ROLLOUT, against_rollout))
            rejected = tuple((name, reason) for name, reason in against if reason is not None)
            after = graph.feeding(edge.src, "weights")
            begins = "that the step begins with" if after is None else f"after {after.src}"
            forward = graph.node(edge.src).op is Op.LOGPROBS
            why = f"a forward pass at the weights {begins}" if forward else "the program passes it"
            if against_own is None and forward:
                why += ", as the program says"
        decisions.append(
            Decision(
                subject=f"{node.id}.old_logprobs", choice=str(choice), why=why, rejected=rejected
            )
        )
    return tuple(decisions)


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
    """Returns why the update's own forward pass is not by the old policy; None if it is."""
    first = next(node for node in graph.of_op(Op.UPDATE) if node.role == update.role)
    summed = update.attr("sum") is not None and first.attr("sum") == update.attr("sum")
    if first.id != update.id and not summed:
        where = f" ({first.source})" if first.source is not None else ""
        return f"{first.id}{where} changes the weights before"
    if context.mini_batches > 1:
        return (
            f"{context.mini_batches} optimizer updates a step: from the second on, the weights are "
            "no longer those of its start"
        )
    return None


def _against_rollout(graph: Graph, update: Node, context: Context) -> str | None:
    """Returns why the engine's logprobs cannot replace the old policy's; None if they can."""
    generate = sampling_node(graph, update)
    if generate is None or generate.role != update.role:
        return f"the samples are not generated by {update.role}"
    if not context.trust_rollout_logprobs:
        return "algorithm.trust_rollout_logprobs is not set"
    if not context.shares_weights.get(str(update.role), False):
        return "its engine has weights of its own"
    replay = replay_before(graph, update)
    age = context.max_staleness if replay is None else _max_age(replay)
    if age > 0:
        return f"samples may be {counted(age, 'publication')} old"
    changed = changed_options(generate)
    repeats = context.truncated == "repeat" or includes_truncation(generate)
    if changed and not repeats:
        options = ", ".join(f"{name}={value}" for name, value in changed.items())
        return f"{generate.id} samples with {options}"
    return None


def _feed(graph: Graph, update: Node) -> Graph:
    """Feeds the argument `old` of an update, from an existing node or a new one."""
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
    """Returns the logprobs nodes of the role that run with the weights of the step's start."""
    before = takewhile(
        lambda node: not (node.op is Op.UPDATE and node.role == update.role), graph.nodes
    )
    return [node for node in before if node.op is Op.LOGPROBS and node.role == update.role]


def _samples(graph: Graph, node: Node) -> NodeId | None:
    edge = graph.feeding(node.id, "rollout")
    return None if edge is None else edge.src


def _insert(graph: Graph, update: Node, samples: NodeId) -> tuple[Graph, Node]:
    """Inserts a forward pass of the role before its first update of the step."""
    made = Node(
        id=unused_id(graph, f"{update.role}.logprobs"),
        op=Op.LOGPROBS,
        role=update.role,
        inputs=("rollout",),
        outputs=(LOGPROBS,),
        source=update.source,
    )
    first = next(i for i, n in enumerate(graph.nodes) if n.op is Op.UPDATE and n.role == made.role)
    needed = ancestors(graph, [samples], within_step=True)
    before, after = graph.nodes[:first], graph.nodes[first:]
    # The nodes that make the samples may come after the first update, which it does not read.
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


# Behaviour logprobs: those of the policy that produced an update's samples.


def bind_behaviour_logprobs(graph: Graph, context: Context) -> Graph:
    """Binds behaviour logprobs to those that the engine reported with each token.

    The engine's are exactly the behaviour policy's, so no forward pass of that policy is made; the
    attribute `behaviour_logprobs` says so in the graph and the plan. An update on its own role's
    rollout has them whatever its loss reads: the mismatch of engine and trainer is measured with
    them. The edge from the rollout then carries what the update reads, and nothing else.

    Raises:
        GraphError: samples may be stale, and the loss does not correct for the policy that
            produced them.
    """
    carried: dict[str, tuple[str, ...]] = {}
    for node in graph.of_op(Op.UPDATE):
        loss = node.attr("loss")
        if not isinstance(loss, LossSpec):
            continue
        generate = sampling_node(graph, node)
        for sampler in sampling_nodes(graph, node):
            if sampler is not None:
                _check_staleness(graph, node, loss, sampler, context)
        reads = "behaviour_logprobs" in loss.needs
        measures = (
            generate is not None and generate.role == node.role and loss.predicts == "logprobs"
        )
        if (reads or measures) and not loss.pairs:
            graph = graph.replacing(node.with_attrs(behaviour_logprobs=ROLLOUT_LOGPROBS.name))
        carried[node.id] = _read_fields(graph.node(node.id), loss)
    return replace(graph, edges=tuple(_trimmed(edge, carried) for edge in graph.edges))


def _read_fields(update: Node, loss: LossSpec) -> tuple[str, ...]:
    fields = [TOKENS.name, RESPONSE_MASK.name]
    if update.attr("behaviour_logprobs") is not None:
        fields.append(ROLLOUT_LOGPROBS.name)
    if "preferred" in loss.needs:
        fields.append(PREFERRED.name)
    if PART.name in loss.needs:
        fields.append(PART.name)
    return tuple(fields)


def _trimmed(edge: Edge, carried: dict[str, tuple[str, ...]]) -> Edge:
    if edge.argument != "rollout" or edge.dst not in carried:
        return edge
    return replace(edge, fields=tuple(f for f in edge.fields if f in carried[edge.dst]))


def _check_staleness(
    graph: Graph, node: Node, loss: LossSpec, generate: Node, context: Context
) -> None:
    """Raises an error for stale samples of a policy whose loss does not correct for them."""
    # A critic learns returns and a reward model preferences: neither is a policy of its samples.
    if loss.corrects_behaviour or loss.predicts != "logprobs":
        return
    sync, replay = _refresh(graph, node, generate), replay_before(graph, node)
    every, decay = (None if sync is None else sync.attr(name) for name in ("every", "decay"))
    late = every - 1 if isinstance(every, int) else 0
    age = max(context.max_staleness, 0 if replay is None else _max_age(replay)) + late
    gets = f"samples of policies up to {counted(age, 'publication')} old"
    if sync is not None and decay is not None:
        gets = f"samples of {generate.role}, an average of earlier weights of {node.role}"
        raise _uncorrected(node, loss, gets, f"write {sync.role}.sync without decay", sync)
    if replay is not None:
        raise _uncorrected(node, loss, gets, "update on fresh samples", replay)
    if sync is not None and late:
        raise _uncorrected(node, loss, gets, f"write {sync.role}.sync without every", sync)
    if age:
        raise _uncorrected(node, loss, gets, "set max_staleness to 0", None)


def _max_age(replay: Node) -> int:
    spec = replay.attr("spec")
    assert isinstance(spec, Replay)
    return spec.max_age


def _refresh(graph: Graph, update: Node, generate: Node) -> Node | None:
    """Returns the sync by which the generating role follows the updated one from time to time."""
    for sync in graph.of_op(Op.SYNC):
        edge = graph.feeding(sync.id, "weights")
        if sync.role == generate.role != update.role and edge is not None:
            return sync if graph.node(edge.src).role == update.role else None
    return None


def _uncorrected(
    node: Node, loss: LossSpec, gets: str, fresh: str, cause: Node | None
) -> GraphError:
    """Returns the error of a loss that does not correct for the policy that sampled.

    Args:
        gets: The samples of the update.
        fresh: How to get samples of the newest policy.
        cause: The replay or the sync that makes them old; None where the config does.
    """
    found = None
    if cause is not None:
        attrs = [(n, cause.attr(n)) for n in ("every", "decay", "spec")]
        said = [str(v) if n == "spec" else f"{n}={v}" for n, v in attrs if v is not None]
        found = ", ".join([cause.id, *said]) + (f" ({cause.source})" if cause.source else "")
    hint = f"use one of these, or {fresh}"
    if isinstance(loss, PolicyLoss):
        hint = (
            f"let this one correct: loss=fl.loss.{loss.kind}(correction=fl.loss.truncate(2.0), "
            f"...); or {hint}"
        )
    elif isinstance(loss, OwnLoss):
        hint = (
            f"where yours does, declare it: @fl.loss.own(corrects_behaviour=True, ...); or {hint}"
        )
    names = correcting_losses(pairs=loss.pairs)
    return node.error(
        f"update(loss={called(loss)}) gets {gets}, but does not correct for the policy that "
        "produced them",
        found=found,
        expected="a loss that does: " + ", ".join(f"fl.loss.{name}()" for name in names),
        hint=hint,
    )


def correcting_losses(*, pairs: bool = False) -> tuple[str, ...]:
    """Returns the names of the losses that correct for older policies with their defaults.

    Args:
        pairs: True for losses on pairs of samples, False for policy losses.
    """
    names = []
    for name in losses.__all__:
        make = getattr(losses, name)
        if not inspect.isfunction(make) or not _needs_nothing(make):
            continue
        loss = make()
        policy = isinstance(loss, LossSpec) and loss.predicts == "logprobs"
        policy = policy and (pairs or "advantages" in loss.needs)  # not a reward that is learnt
        if policy and loss.corrects_behaviour and loss.pairs == pairs:
            names.append(name)
    return tuple(names)


def _needs_nothing(make: object) -> bool:
    parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)
