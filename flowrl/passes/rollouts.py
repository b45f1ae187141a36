"""Where the samples of a node come from, and how they were drawn."""

from __future__ import annotations

from flowrl.graph import Graph, Node, Op
from flowrl.specs import Grammar, Sampling
from flowrl.specs.base import format_scalar

__all__ = ["changed_options", "drawn_by", "is_of_sampler", "neutral_options"]

_NEUTRAL: dict[str, float | int] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""For each option that changes which distribution tokens are drawn from, the value that does not.
Temperature is none of them: logprobs are of the temperature-scaled logits."""


def drawn_by(graph: Graph, node: Node) -> Node | None:
    """The `generate` that drew the samples which a node reads; None where no role drew them."""
    while True:
        edge = graph.feeding(node.id, "rollout")
        if edge is None:
            return None
        node = graph.node(edge.src)
        if node.op is Op.GENERATE:
            return node
        if node.op is Op.INTERACT:
            players = [g for g in graph.of_op(Op.GENERATE) if g.region == node.region]
            return players[0] if players else None


def changed_options(generate: Node) -> dict[str, str]:
    """Options by which tokens are drawn from another distribution than their logprobs are of.

    Returns:
        `{"top_p": "0.9"}`, and `grammar` with its kind.
    """
    sampling, grammar = generate.attr("sampling"), generate.attr("grammar")
    changed: dict[str, str] = {}
    if isinstance(sampling, Sampling):
        for name, neutral in _NEUTRAL.items():
            value = getattr(sampling, name)
            if value != neutral:
                changed[name] = format_scalar(value)
    if isinstance(grammar, Grammar):
        changed["grammar"] = grammar.kind
    return changed


def is_of_sampler(generate: Node) -> bool:
    """Whether its logprobs are those of the distribution that its tokens are drawn from."""
    sampling = generate.attr("sampling")
    return isinstance(sampling, Sampling) and sampling.logprobs == "sampler"


def neutral_options(changed: dict[str, str]) -> str:
    """What to set in the place of changed options: `top_p=1.0, top_k=0, no grammar`."""
    return ", ".join(
        f"{name}={format_scalar(_NEUTRAL[name])}" if name in _NEUTRAL else f"no {name}"
        for name in changed
    )
