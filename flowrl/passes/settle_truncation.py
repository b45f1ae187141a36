"""Refuses or settles rollouts sampled from another distribution than their logprobs are of.

The logprobs of a rollout are those of the temperature-scaled logits, before top-p, top-k, min-p,
penalties, forbidden stop tokens and grammars. An update that weighs tokens by them, or by what the
trainer computes, treats the tokens as samples of a distribution that they are not of: its gradient
is biased.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flowrl.errors import GraphError
from flowrl.graph import Graph, Node, Op
from flowrl.graph.sample_sets import sampling_nodes
from flowrl.passes.context import Context
from flowrl.specs import Grammar, LossSpec, Sampling
from flowrl.specs.base import format_scalar

_NEUTRAL: dict[str, float | int] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""The neutral value of each option that changes the distribution that tokens are sampled from.
Temperature is none of them: logprobs are of the temperature-scaled logits."""


def changed_options(generate: Node) -> dict[str, str]:
    """Returns the options that make the sampled distribution differ from that of the logprobs.

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


def includes_truncation(generate: Node) -> bool:
    """True if its logprobs are of the distribution that its tokens are sampled from."""
    sampling = generate.attr("sampling")
    return isinstance(sampling, Sampling) and sampling.logprobs == "sampler"


def neutral_options(changed: dict[str, str]) -> str:
    """Returns the neutral values of changed options: `top_p=1.0, top_k=0, no grammar`."""
    return ", ".join(
        f"{name}={format_scalar(_NEUTRAL[name])}" if name in _NEUTRAL else f"no {name}"
        for name in changed
    )


SAMPLER: Literal["sampler"] = "sampler"


def settle_truncation(graph: Graph, context: Context) -> Graph:
    """Treats each truncated rollout that a policy gradient reads as `context.truncated` says.

    - `refuse`: an error names each option and its neutral value.
    - `ignore`: the rollout stays as it is.
    - `repeat`: its sampling says `logprobs="sampler"`: the engine reports logprobs after
      truncation, and every logprobs and update node of these samples truncates in the same way. So
      does a program that asks for `fl.Sampling(logprobs="sampler")`.

    Raises:
        GraphError: refused; or a trainer cannot repeat the truncation.
    """
    for generate in graph.of_op(Op.GENERATE):
        sampling = generate.attr("sampling")
        changed = changed_options(generate)
        readers = treats_as_untruncated(graph, generate)
        if not changed or not isinstance(sampling, Sampling):
            continue
        if not readers and not includes_truncation(generate):
            continue
        repeats = context.truncated == "repeat" or includes_truncation(generate)
        if context.truncated == "ignore" and not repeats:
            continue
        if not repeats:
            raise _refused(generate, readers[0], changed, context)
        _check_repeatable(graph, generate, changed, context)
        after = replace(sampling, logprobs=SAMPLER)
        graph = graph.replacing(generate.with_attrs(sampling=after))
    return graph


def treats_as_untruncated(graph: Graph, generate: Node) -> tuple[Node, ...]:
    """Returns the updates whose policy gradient is over samples of `generate`."""
    return tuple(
        node
        for node in graph.of_op(Op.UPDATE)
        if _is_policy_gradient(node) and _reads(graph, node, generate)
    )


def _is_policy_gradient(update: Node) -> bool:
    loss = update.attr("loss")
    if not isinstance(loss, LossSpec) or loss.predicts != "logprobs":
        return False
    return "advantages" in loss.needs or "behaviour_logprobs" in loss.needs


def _reads(graph: Graph, node: Node, generate: Node) -> bool:
    return generate in sampling_nodes(graph, node)


def _refused(generate: Node, update: Node, changed: dict[str, str], context: Context) -> GraphError:
    key = context.train_key
    suggestions = [
        f"write {neutral_options(changed)} in the program or in {key}.sampling",
        f"{key}.truncated=ignore trains with the bias",
    ]
    if set(changed) <= context.repeats_truncation.get(str(update.role), frozenset()):
        suggestions.append(f"{key}.truncated=repeat has the trainer truncate in the same way")
    return generate.error(
        f"{generate.id} samples with {_format_options(changed)}, but its logprobs are those before "
        f"that, so the gradient of {update.id} would be biased",
        expected=neutral_options(changed),
        hint="; or ".join(suggestions),
    )


def _check_repeatable(
    graph: Graph, generate: Node, changed: dict[str, str], context: Context
) -> None:
    """Checks that the engine reports the truncation and every pass over the samples repeats it."""
    passes = [n for n in graph.of_op(Op.LOGPROBS, Op.UPDATE) if _reads(graph, n, generate)]
    for node in (generate, *passes):
        able = context.repeats_truncation.get(str(node.role), frozenset())
        unable = {name: value for name, value in changed.items() if name not in able}
        if not unable:
            continue
        key = f"{context.train_key}.truncated"
        raise node.error(
            f"the backend of {node.role} cannot include in logprobs that {generate.id} samples "
            f"with {_format_options(unable)}",
            found=f"{key}=repeat, and it repeats {', '.join(sorted(able)) or 'nothing'}",
            expected=neutral_options(unable),
            hint=f"set these, or train with the bias: {key}=ignore",
        )


def _format_options(changed: dict[str, str]) -> str:
    return ", ".join(
        f"a grammar ({value})" if name == "grammar" else f"{name}={value}"
        for name, value in changed.items()
    )
