"""Runs a graph of any level on made-up numbers, so that two graphs can be compared by what they do.

Models are one number each. Tokens are drawn from a generator that is seeded with all that sampling
depends on; an update moves its model by a sum over exactly what its loss says it reads. What a
graph leaves open comes from the context, and where no context is given must not be open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from zlib import crc32

import numpy as np
import numpy.typing as npt

from flowrl.graph import Graph, Node, Op
from flowrl.graph.signatures import SAMPLING_OPTIONS
from flowrl.passes import Context
from flowrl.specs import KL, AdvantageSpec, CrossEntropy, LossSpec, Sampling, Spec

__all__ = ["run_steps"]

Array = npt.NDArray[np.float64]
Fields = dict[str, Array]

GROUP = "group of each sample"
"""Goes with every field of samples, beside what edges say."""

NUM_PROMPTS, LENGTH = 3, 4


def run_steps(graph: Graph, context: Context | None, num_steps: int) -> list[dict[str, float]]:
    """The weights of every updated role after each step."""
    trained = {str(node.role): 1.0 for node in graph.of_op(Op.UPDATE)}
    carried: dict[str, Fields] = {}
    after = []
    for step in range(num_steps):
        begun = dict(trained)
        made: dict[str, Fields] = {}
        for node in graph.nodes:
            given = _given(graph, node, made, carried)
            made[node.id] = _run(node, given, step, begun, trained, context)
        carried = made
        after.append(dict(trained))
    return after


def _given(
    graph: Graph, node: Node, made: Mapping[str, Fields], carried: Mapping[str, Fields]
) -> dict[str, Fields]:
    """The arguments of a node: the fields that its edges carry, and no others."""
    given = {}
    for edge in graph.in_edges(node.id):
        source = (carried if edge.carried else made).get(edge.src, {})
        given[edge.argument] = {k: v for k, v in source.items() if k in (*edge.fields, GROUP)}
    return given


def _run(
    node: Node,
    given: Mapping[str, Fields],
    step: int,
    begun: Mapping[str, float],
    trained: dict[str, float],
    context: Context | None,
) -> Fields:
    role = str(node.role)
    match node.op:
        case Op.SOURCE:
            return _source(str(node.attr("data")), step)
        case Op.GENERATE:
            weights = _published(given, role, begun, context)
            return _generate(node, given["prompts"]["prompt"], weights, context)
        case Op.SCORE:
            return {**_group(given["rollout"]), "score": _score(role, given["rollout"]["tokens"])}
        case Op.LOGPROBS:
            # A frozen role is the model that it was when the run began.
            weights = trained.get(role, 1.0)
            rollout = given["rollout"]
            return {
                **_group(rollout),
                "logprobs": -weights * (_seed(role) % 7 + 1.0) * rollout["tokens"],
            }
        case Op.FILTER:
            return _filter(given["rollout"], given["scores"]["score"])
        case Op.ADVANTAGE:
            spec = node.attr("spec")
            assert isinstance(spec, AdvantageSpec)
            return {**_group(given["scores"]), "advantage": _advantage(spec, given)}
        case Op.UPDATE:
            trained[role] += _step(node, given, context)
            return {"weights": np.array(trained[role])}
        case Op.SYNC:
            return dict(given["weights"])
        case _:
            raise NotImplementedError(node.op)


def _source(data: str, step: int) -> Fields:
    drawn = np.random.default_rng(_seed(data, step))
    if data == "prompts":
        return {"prompt": drawn.integers(1, 50, NUM_PROMPTS).astype(float)}
    return {
        "tokens": drawn.integers(1, 9, (NUM_PROMPTS, LENGTH)).astype(float),
        "response_mask": drawn.integers(0, 2, (NUM_PROMPTS, LENGTH)).astype(float),
        GROUP: np.arange(NUM_PROMPTS, dtype=float),
    }


def _published(
    given: Mapping[str, Fields], role: str, begun: Mapping[str, float], context: Context | None
) -> float:
    """The weights that generation reads: those of the end of the step before.

    A lowered graph says so with an edge, which carries nothing in the first step.
    """
    if context is not None:
        return begun.get(role, 1.0)
    return float(given.get("weights", {}).get("weights", np.array(1.0)))


def _generate(node: Node, prompts: Array, weights: float, context: Context | None) -> Fields:
    n, sampling = node.attr("n"), node.attr("sampling")
    if context is not None:
        n = context.group_size if n is None else n
        own = {k: node.attr(k) for k in SAMPLING_OPTIONS if node.attr(k) is not None}
        base = sampling if isinstance(sampling, Sampling) else context.sampling
        sampling = replace(base, **own)  # type: ignore[arg-type]
    assert isinstance(n, int)
    assert isinstance(sampling, Sampling)
    drawn = np.random.default_rng(_seed(node.id, sampling, round(weights, 6), *prompts))
    shape = (len(prompts) * n, LENGTH)
    tokens = drawn.integers(1, 4, shape).astype(float)
    return {
        "tokens": tokens,
        "response_mask": drawn.integers(0, 2, shape).astype(float),
        "rollout_logprobs": -tokens * weights,
        GROUP: np.repeat(np.arange(len(prompts), dtype=float), n),
    }


def _score(role: str, tokens: Array) -> Array:
    # Few values, so that groups of equal scores occur.
    return np.array((tokens.sum(axis=1) + _seed(role)) % 2)


def _filter(rollout: Fields, scores: Array) -> Fields:
    groups = rollout[GROUP]
    keep = np.array([np.ptp(scores[groups == group]) > 0 for group in groups], bool)
    return {name: values[keep] for name, values in {**rollout, "score": scores}.items()}


def _advantage(spec: AdvantageSpec, given: Mapping[str, Fields]) -> Array:
    score, groups = given["scores"]["score"], given["scores"][GROUP]
    means = np.array([score[groups == group].mean() for group in groups])
    found: Array = (score - means) * _factor(spec)
    if not spec.per_token:
        return found
    each: Array = found[:, None] * given["rollout"]["response_mask"]
    penalty = getattr(spec, "kl_coefficient", 0.0)
    if penalty:
        reference, drawn = given["reference"]["logprobs"], given["rollout"]["rollout_logprobs"]
        each = each - penalty * (drawn - reference)
    return each


def _step(node: Node, given: Mapping[str, Fields], context: Context | None) -> float:
    """How far an update moves its model."""
    rollout = given["rollout"]
    if not len(rollout["tokens"]):
        return 0.0
    loss, kl = node.attr("loss"), node.attr("kl")
    if context is not None and loss is None:
        loss = context.loss if "rollout_logprobs" in rollout else CrossEntropy()
    assert isinstance(loss, LossSpec)
    each = rollout["tokens"] * rollout["response_mask"]
    if "advantages" in loss.needs:
        weights = _advantages(given, context)
        each = each * (weights if weights.ndim == 2 else weights[:, None])
    total = float(each.sum(axis=1).mean()) * _factor(loss)
    if "behaviour_logprobs" in loss.needs:
        name = node.attr("behaviour_logprobs") if context is None else "rollout_logprobs"
        total += 0.1 * float(rollout[str(name)].mean())
    if isinstance(kl, KL) and kl.coefficient:
        total += kl.coefficient * float(given["reference"]["logprobs"].mean()) * _factor(kl)
    return 0.01 * total


def _advantages(given: Mapping[str, Fields], context: Context | None) -> Array:
    if "advantages" in given:
        return given["advantages"]["advantage"]
    assert context is not None, "a lowered update has advantages"
    rewards = given["rewards"]
    return _advantage(context.advantage, {"scores": rewards})


def _group(fields: Fields) -> Fields:
    return {GROUP: fields[GROUP]}


def _factor(spec: Spec) -> float:
    """A number of its own for each specification."""
    return 1.0 + _seed(spec.to_json()) % 1000 / 1000


def _seed(*parts: object) -> int:
    return crc32(repr(parts).encode())
