"""What is legal, and yet seldom meant: said aloud when a run is compiled."""

from __future__ import annotations

import logging

from flowrl.compiler.sizes import compares_a_group, generates_before
from flowrl.graph import Graph, Op
from flowrl.graph.ir import called
from flowrl.passes import Context
from flowrl.passes.context import (
    changed_options,
    includes_truncation,
    neutral_options,
    sampling_node,
)
from flowrl.passes.settle_truncation import treats_as_untruncated
from flowrl.specs import AdvantageSpec, CrossEntropy, LossSpec, Sampling

__all__ = ["warn_of"]

_log = logging.getLogger(__name__)


def warn_of(graph: Graph, context: Context) -> None:
    """Logs a warning for each thing in a lowered graph that is seldom meant."""
    if context.truncated == "ignore":
        _warn_of_truncation(graph, context)
    _warn_of_equal_scores(graph)
    _warn_of_other_policies(graph)
    _warn_of_imitating_itself(graph)


def _warn_of_truncation(graph: Graph, context: Context) -> None:
    """Where an update takes tokens for draws of another distribution than they are of."""
    for node in graph.of_op(Op.GENERATE):
        changed = changed_options(node)
        if changed and not includes_truncation(node) and treats_as_untruncated(graph, node):
            _log.warning(
                "%s samples with %s, and its update uses logprobs before that: the gradient is "
                "biased, which %s.truncated=ignore accepts. Without bias: %s",
                node.id,
                ", ".join(f"{name}={value}" for name, value in changed.items()),
                context.train_key,
                neutral_options(changed),
            )


def _warn_of_equal_scores(graph: Graph) -> None:
    """Where scores that are compared within a group can never differ."""
    for node in graph.of_op(Op.ADVANTAGE):
        spec = node.attr("spec")
        if not isinstance(spec, AdvantageSpec) or not compares_a_group(spec):
            continue
        for source in generates_before(graph, node):
            sampling = source.attr("sampling")
            if not isinstance(sampling, Sampling) or sampling.temperature != 0:
                continue
            _log.warning(
                "%s draws the same sample for all of a group (temperature=0), so %s has nothing to "
                "compare and every advantage is 0: nothing will be learnt",
                source.id,
                node.id,
            )


def _warn_of_other_policies(graph: Graph) -> None:
    """Where a policy gradient is over samples of a policy that is never the one that learns."""
    for node in graph.of_op(Op.UPDATE):
        loss, drawn = node.attr("loss"), sampling_node(graph, node)
        if drawn is None or drawn.role == node.role or not isinstance(loss, LossSpec):
            continue
        follows = any(
            graph.node(edge.src).role == node.role
            for sync in graph.of_op(Op.SYNC)
            if sync.role == drawn.role
            for edge in graph.in_edges(sync.id)
        )
        if follows or loss.corrects_behaviour or "advantages" not in loss.needs:
            continue
        _log.warning(
            "%s learns by policy gradient from samples that %s drew, and %s does not correct for "
            "the policy that produced them: the gradient is biased. fl.loss.policy_clip(0.2) "
            "corrects, and fl.loss.cross_entropy() imitates",
            node.id,
            drawn.role,
            called(loss),
        )


def _warn_of_imitating_itself(graph: Graph) -> None:
    """Where a policy imitates all of its own samples: in expectation the gradient is 0."""
    for node in graph.of_op(Op.UPDATE):
        edge, drawn = graph.feeding(node.id, "rollout"), sampling_node(graph, node)
        if edge is None or drawn is None or drawn.role != node.role:
            continue
        chosen = graph.node(edge.src).op in (Op.FILTER, Op.SELECT)
        if isinstance(node.attr("loss"), CrossEntropy) and not chosen:
            _log.warning(
                "%s imitates all that %s draws, good and bad alike: nothing will be learnt. "
                "fl.select.top chooses samples, and advantages weigh them",
                node.id,
                drawn.role,
            )
