"""What the nodes of a graph ask of a model: which kind of work, on how many samples, how long.

Upper bounds throughout: a filter may drop groups, and samples may end early; neither is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from flowrl.cost.memory import Phase
from flowrl.graph.ir import Graph, Node, Op
from flowrl.graph.sample_sets import (
    answered_prompts,
    origin_of,
    parents_of,
    sample_edges,
)
from flowrl.specs import Replay, RowCondition, Sampling, SelectSpec
from flowrl.specs.cut import CutSpec, most_before
from flowrl.specs.prompts import PromptTemplate

_PHASES = {
    Op.GENERATE: Phase.ROLLOUT,
    Op.LOGPROBS: Phase.LOGPROBS,
    Op.VALUES: Phase.VALUES,
    Op.UPDATE: Phase.UPDATE,
}


def phase_of(node: Node) -> Phase | None:
    """The kind of work that a node is for a model; None where no model of flowrl's runs."""
    if node.op is Op.SCORE and node.attr("by") == "model":
        return Phase.SCORES
    return _PHASES.get(node.op)


def samples_of_step(graph: Graph, node: Node, prompts: int, group_size: int) -> int:
    """Samples of a step that a node makes or reads at most.

    Args:
        prompts: Prompts (or examples) of a step.
        group_size: Where a rollout does not say.
    """
    groups, reader = prompts, node
    while reader.op not in (Op.SOURCE, Op.GENERATE, Op.INTERACT):
        if reader.op is Op.CONCAT:
            return _joined(graph, reader, lambda p: samples_of_step(graph, p, prompts, group_size))
        spec = reader.attr("spec")
        if isinstance(spec, Replay):
            groups = spec.n
        edge = next((e for e in graph.in_edges(reader.id) if not e.carried), None)
        if edge is None:
            break
        reader = graph.node(edge.src)
    return groups * samples_per_prompt(graph, node, group_size)


def samples_per_prompt(graph: Graph, node: Node, group_size: int) -> int:
    """Samples that a node makes or reads for each prompt (or example) of a step.

    Args:
        group_size: Where a rollout does not say.
    """
    while True:
        match node.op:
            case Op.GENERATE:
                drawn = _drawn(node, group_size)
                parents = parents_of(graph, node)
                if parents is None:
                    return drawn
                return drawn * samples_per_prompt(graph, parents, group_size)
            case Op.INTERACT:
                players = [g for g in graph.of_op(Op.GENERATE) if g.region == node.region]
                return _drawn(players[0], group_size) if players else group_size
            case Op.SOURCE:
                return 2 if node.attr("data") == "pairs" else 1
            case Op.CONCAT:
                return _joined(graph, node, lambda p: samples_per_prompt(graph, p, group_size))
            case Op.PAIR:
                reads = graph.in_edges(node.id)
                return 2 * max(
                    samples_per_prompt(graph, graph.node(edge.src), group_size) for edge in reads
                )
            case _:
                edge = next((e for e in graph.in_edges(node.id) if not e.carried), None)
                if edge is None:
                    return 1
        source = graph.node(edge.src)
        spec = node.attr("spec")
        if isinstance(spec, SelectSpec):
            return _kept(spec, samples_per_prompt(graph, source, group_size))
        node = source


def _joined(graph: Graph, node: Node, count: Callable[[Node], int]) -> int:
    """Returns the samples of joined sets at most; a row is in one of several parts by row."""
    by_split: dict[tuple[str, str], list[tuple[RowCondition | None, int]]] = {}
    for edge in sample_edges(graph, node):
        part = graph.node(edge.src)
        whole, condition = _split_of(graph, part)
        field = "" if condition is None else condition.field
        by_split.setdefault((whole, field), []).append((condition, count(part)))
    total = 0
    for parts in by_split.values():
        given = [condition for condition, _ in parts]
        apart = all(
            a is not None and b is not None and a.excludes(b) for a, b in combinations(given, 2)
        )
        numbers = [number for _, number in parts]
        total += max(numbers) if apart else sum(numbers)
    return total


def _split_of(graph: Graph, node: Node) -> tuple[str, RowCondition | None]:
    """Returns the set or the prompts of which a set is a part, and the condition of the part."""
    while True:
        spec = node.attr("spec")
        edge = graph.feeding(node.id, "rollout") or graph.feeding(node.id, "prompts")
        if edge is None:
            return node.id, None
        if isinstance(spec, RowCondition):
            return edge.src, spec
        node = graph.node(edge.src)


def _kept(spec: SelectSpec, size: int) -> int:
    """Samples of a group of `size` that a selection keeps at most."""
    kept = 2 if spec.pairs else getattr(spec, "k", size)
    return min(size, int(kept))


def _drawn(generate: Node, group_size: int) -> int:
    number = generate.attr("n")
    return number if isinstance(number, int) else group_size


def prompt_bound(graph: Graph, generate: Node, longest: int, sampling: Sampling) -> int:
    """Tokens of a prompt at most.

    Args:
        longest: Tokens of a prompt of the data.
        sampling: Where a rollout does not say.
    """
    return int(
        sum(
            _asked_and_continued(
                graph, generate, longest, lambda of: response_bound(graph, of, sampling)
            )
        )
    )


def mean_prompt(graph: Graph, node: Node, prompt: float, response: float) -> float:
    """Tokens on average of the prompts that the samples of a node answer.

    Those of joined sets count as often as the sets have samples.

    Args:
        graph: A lowered graph, whose rollouts say how many samples they make.
        prompt: Tokens of a prompt of the data.
        response: Those of a response.
    """
    if node.op is Op.GENERATE:
        return sum(_asked_and_continued(graph, node, prompt, lambda _: response))
    parts = [graph.node(edge.src) for edge in sample_edges(graph, node)]
    counts = [samples_per_prompt(graph, part, 1) for part in parts]
    tokens = sum(
        count * mean_prompt(graph, part, prompt, response)
        for count, part in zip(counts, parts, strict=True)
    )
    return tokens / sum(counts) if counts else prompt


def _asked_and_continued(
    graph: Graph, generate: Node, prompt: float, response_of: Callable[[Node], float]
) -> tuple[float, float]:
    """Returns the tokens that are asked, and those of a response that is continued.

    A prompt that is made of a sample has the sample's tokens and a template, or those up to a cut.
    No tokenizer makes more tokens of a text than it has bytes; a text of the data row counts as a
    prompt.

    Args:
        prompt: Tokens of a prompt of the data.
        response_of: Tokens of a rollout's response.
    """
    prompts, parents = answered_prompts(graph, generate), parents_of(graph, generate)
    if prompts is None or parents is None:
        return prompt, 0
    spec = graph.node(prompts).attr("spec")
    parent = origin_of(graph, parents)
    asked, continued = _asked_and_continued(graph, parent, prompt, response_of)
    response = response_of(parent)
    if isinstance(spec, CutSpec):
        return asked, continued + most_before(spec, round(response))
    assert isinstance(spec, PromptTemplate)
    said = continued + response
    tokens = {"prompt": asked, "response": said, "opponent": said}
    texts = sum(len(text.encode()) for text in spec.pieces[::2])
    return texts + sum(tokens.get(name, prompt) for name in spec.names), 0


def response_bound(graph: Graph, generate: Node, sampling: Sampling) -> int:
    """Tokens that come after the prompt at most.

    An episode of several turns has its turns and what the environment says before each.

    Args:
        sampling: Where the node does not say.
    """
    own = generate.attr("sampling")
    tokens = own.max_tokens if isinstance(own, Sampling) else sampling.max_tokens
    for episode in graph.of_op(Op.INTERACT):
        if generate.region is not None and episode.region == generate.region:
            turns, said = episode.attr("max_turns"), episode.attr("max_observation_tokens")
            assert isinstance(turns, int)
            assert isinstance(said, int)
            return turns * (tokens + said)
    return tokens
