"""Runs a graph of any level on made-up numbers, so that two graphs can be compared by what they do.

Models are one number each. Tokens are drawn from a generator that is seeded with all that sampling
depends on; an update moves its model by a sum over exactly what its loss says it reads, once for
each mini-batch. What a traced graph leaves open comes from the context; a lowered one must say it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
import numpy.typing as npt

from flowrl.graph import Graph, Level, Node, Op
from flowrl.graph.ir import sums_of
from flowrl.graph.signatures import SAMPLING_OPTIONS
from flowrl.passes import Context
from flowrl.specs import (
    KL,
    AdvantageSpec,
    CrossEntropy,
    LossSpec,
    MapSpec,
    RowCondition,
    Sampling,
    SelectSpec,
    Spec,
)

__all__ = ["run_steps"]

Array = npt.NDArray[np.float64]
Fields = dict[str, Array]

GROUP = "group of each sample"
"""Goes with every field of samples, beside what edges say."""

NUM_PROMPTS, LENGTH = 3, 4


@dataclass
class World:
    """What there is beside the graph.

    Attributes:
        context: Fills what a traced graph leaves open; says which models are copies.
        step: Counted from 0.
        weights: Of every model, now.
        begun: The same at the start of the step.
        logged: What log nodes saw in the step.
        terms: Of a sum, those that wait for the last one.
        held: What replay nodes got in the step before.
    """

    context: Context
    open: bool
    step: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    terms: list[tuple[Node, Mapping[str, Fields]]] = field(default_factory=list)
    held: dict[str, Fields] = field(default_factory=dict)


def run_steps(graph: Graph, context: Context, num_steps: int) -> list[dict[str, float]]:
    """The weights of every role that learns, and all that is logged, after each step.

    Weights that a role takes over show in what is drawn and compared with them.
    """
    changing = {str(node.role): 1.0 for node in graph.of_op(Op.UPDATE, Op.SYNC)}
    world = World(context=context, open=graph.level is Level.TRACED, weights=changing)
    learns = {str(node.role) for node in graph.of_op(Op.UPDATE)}
    carried: dict[str, Fields] = {}
    after = []
    for world.step in range(num_steps):
        world.begun, world.logged = dict(world.weights), {}
        made: dict[str, Fields] = {}
        for node in graph.nodes:
            if node.id in made:
                continue  # a turn of an episode that was played already
            given = _given(graph, node, made, carried)
            if node.op is Op.INTERACT:
                (player,) = (g for g in graph.of_op(Op.GENERATE) if g.region == node.region)
                turns = _given(graph, player, made, carried)
                made[player.id] = {}
                made[node.id] = _play(node, player, given, turns, world)
            else:
                made[node.id] = _run(graph, node, given, world)
        carried = made
        learnt = {role: each for role, each in world.weights.items() if role in learns}
        after.append({**learnt, **world.logged})
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


def _run(graph: Graph, node: Node, given: Mapping[str, Fields], world: World) -> Fields:
    role = str(node.role)
    match node.op:
        case Op.SOURCE:
            return _source(str(node.attr("data")), world.step)
        case Op.PAIR:
            return _pair(given["preferred"], given["other"])
        case Op.WHERE:
            return _where(node, given)
        case Op.CONCAT:
            return _concat(node, given)
        case Op.GENERATE:
            return _generate(node, given["prompts"]["prompt"], given, world)
        case Op.SCORE if node.attr("by") == "model":
            values = _forward(role, given["rollout"]["tokens"], world)
            return {**_group(given["rollout"]), "score": values.sum(axis=1)}
        case Op.SCORE:
            return {**_group(given["rollout"]), "score": _score(role, given["rollout"]["tokens"])}
        case Op.LOGPROBS | Op.VALUES:
            name = "logprobs" if node.op is Op.LOGPROBS else "values"
            values = _forward(role, given["rollout"]["tokens"], world)
            return {**_group(given["rollout"]), name: values}
        case Op.FILTER:
            return _filter(given["rollout"], given["scores"]["score"])
        case Op.SELECT:
            return _select(node, given["rollout"], given["scores"]["score"])
        case Op.REPLAY:
            return _replay(node, {**given["rollout"], "score": given["scores"]["score"]}, world)
        case Op.MAP:
            return _map(node, given)
        case Op.PROMPTS_OF:
            return {"prompt": given["rollout"]["tokens"].sum(axis=1) + _factor_of(node)}
        case Op.PARENT:
            return _parent(given["rollout"], given["input"])
        case Op.MEAN_OF_CHILDREN:
            return _mean_of_children(given["rollout"], given["input"])
        case Op.ADVANTAGE:
            spec = node.attr("spec")
            assert isinstance(spec, AdvantageSpec)
            return {**_group(given["scores"]), **_advantage(spec, given)}
        case Op.UPDATE:
            world.terms.append((node, given))
            if node.id == _last_of_sum(graph, node):
                _update(world.terms, world)
                world.terms = []
            return {"weights": np.array(world.weights[role])}
        case Op.SYNC:
            return _sync(node, given["weights"], world)
        case Op.LOG:
            (name,) = (name for name in given["value"] if name != GROUP)
            value = given["value"][name]
            world.logged[str(node.attr("name"))] = float(value.mean()) if value.size else 0.0
            return {}
        case _:
            raise NotImplementedError(node.op)


def _forward(role: str, tokens: Array, world: World, weights: float | None = None) -> Array:
    """What a model says of each token; a copy of another model says what that one began with."""
    if weights is None:
        weights = world.weights.get(role, 1.0)
    model = world.context.copies.get(role, role)
    said: Array = -weights * (_seed(model) % 7 + 1.0) * tokens
    return said


def _source(data: str, step: int) -> Fields:
    drawn = np.random.default_rng(_seed(data, step))
    if data == "prompts":
        return {"prompt": drawn.integers(1, 50, NUM_PROMPTS).astype(float)}
    size = NUM_PROMPTS * (2 if data == "pairs" else 1)
    fields = {
        "tokens": drawn.integers(1, 9, (size, LENGTH)).astype(float),
        "response_mask": drawn.integers(0, 2, (size, LENGTH)).astype(float),
        GROUP: np.repeat(np.arange(NUM_PROMPTS, dtype=float), size // NUM_PROMPTS),
    }
    if data == "pairs":
        fields["preferred"] = np.tile([1.0, 0.0], NUM_PROMPTS)
    return fields


def _published(given: Mapping[str, Fields], role: str, world: World) -> float:
    """The weights that generation reads: those of the end of the step before.

    A lowered graph says so with an edge, which carries nothing in the first step.
    """
    if world.open:
        return world.begun.get(role, 1.0)
    return float(given.get("weights", {}).get("weights", np.array(1.0)))


def _generate(node: Node, prompts: Array, given: Mapping[str, Fields], world: World) -> Fields:
    weights = _published(given, str(node.role), world)
    n, sampling = node.attr("n"), node.attr("sampling")
    if world.open:
        n = world.context.group_size if n is None else n
        own = {k: node.attr(k) for k in SAMPLING_OPTIONS if node.attr(k) is not None}
        base = sampling if isinstance(sampling, Sampling) else world.context.sampling
        sampling = replace(base, **own)  # type: ignore[arg-type]
    assert isinstance(n, int)
    assert isinstance(sampling, Sampling)
    drawn = np.random.default_rng(_seed(node.id, sampling, round(weights, 6), *prompts))
    shape = (len(prompts) * n, LENGTH)
    tokens = drawn.integers(1, 4, shape).astype(float)
    return {
        "tokens": tokens,
        "response_mask": drawn.integers(0, 2, shape).astype(float),
        # Those of the trainer, where the weights are the same.
        "rollout_logprobs": _forward(str(node.role), tokens, world, weights),
        GROUP: np.repeat(np.arange(len(prompts), dtype=float), n),
    }


def _play(
    node: Node,
    player: Node,
    given: Mapping[str, Fields],
    turns: Mapping[str, Fields],
    world: World,
) -> Fields:
    """Episodes of two turns, which half of the tokens belong to each."""
    said = _generate(player, given["prompts"]["prompt"] + _seed(node.role), turns, world)
    tokens = said["tokens"]
    turn = np.broadcast_to(np.arange(LENGTH) // 2, tokens.shape).astype(float)
    reward = (tokens + _seed(node.role)) % 2 * node.attr("max_turns")
    score = reward.sum(axis=1) % 2
    return {**said, "turn": turn, "token_reward": reward, "state": tokens % 2, "score": score}


def _score(role: str, tokens: Array) -> Array:
    # Few values, so that groups of equal scores occur.
    return np.array((tokens.sum(axis=1) + _seed(role)) % 2)


def _filter(rollout: Fields, scores: Array) -> Fields:
    groups = rollout[GROUP]
    keep = np.array([np.ptp(scores[groups == group]) > 0 for group in groups], bool)
    return {name: values[keep] for name, values in {**rollout, "score": scores}.items()}


def _select(node: Node, rollout: Fields, scores: Array) -> Fields:
    spec, groups = node.attr("spec"), rollout[GROUP]
    assert isinstance(spec, SelectSpec)
    rows: list[int] = []
    for group in np.unique(groups):
        ranked = sorted(np.flatnonzero(groups == group), key=lambda row: -scores[row])
        rows += [ranked[0], ranked[-1]] if spec.pairs else ranked[: getattr(spec, "k", 1)]
    fields = {**rollout, "score": scores}
    if spec.pairs:
        fields["preferred"] = np.ones(len(scores))
    kept = {name: values[rows] for name, values in fields.items()}
    if spec.pairs:
        kept["preferred"] = np.tile([1.0, 0.0], len(rows) // 2)
    return kept


def _where(node: Node, given: Mapping[str, Fields]) -> Fields:
    """Prompts and groups of every other place, or the others."""
    spec = node.attr("spec")
    assert isinstance(spec, RowCondition)
    if "prompts" in given:
        prompts = given["prompts"]["prompt"]
        return {"prompt": prompts[np.arange(len(prompts)) % 2 == spec.excluded]}
    fields = {name: values for part in given.values() for name, values in part.items()}
    keep = given["rollout"][GROUP] % 2 == spec.excluded
    return {name: values[keep] for name, values in fields.items()}


def _concat(node: Node, given: Mapping[str, Fields]) -> Fields:
    sizes = [len(part["tokens"]) for name, part in given.items() if name.startswith("rollout")]
    merged: list[Fields] = [{} for _ in sizes]
    for name, fields in given.items():
        merged[int(name.partition("_")[2] or 1) - 1] |= fields
    missing = node.attr("missing_logprob")
    joined = {
        name: np.concatenate(
            [
                part.get(name, np.full((size, LENGTH), missing))
                for part, size in zip(merged, sizes, strict=True)
            ]
        )
        for name in (GROUP, *(field.name for field in node.outputs if field.name != "source"))
    }
    joined["source"] = np.repeat(np.arange(len(sizes), dtype=float), sizes)
    order = np.argsort(joined[GROUP], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _pair(preferred: Fields, other: Fields) -> Fields:
    rows: list[tuple[int, int]] = []
    for group in np.unique(preferred[GROUP]):
        mine, theirs = (np.flatnonzero(side[GROUP] == group) for side in (preferred, other))
        size = max(len(mine), len(theirs)) if 1 in (len(mine), len(theirs)) else len(mine)
        rows += [(mine[k % len(mine)], theirs[k % len(theirs)]) for k in range(size) if len(theirs)]
    both, sides = [name for name in preferred if name in other], (preferred, other)
    pairs = {
        name: np.array(
            [side[name][row] for pair in rows for side, row in zip(sides, pair, strict=True)]
        )
        for name in both
    }
    return {**pairs, "preferred": np.tile([1.0, 0.0], len(rows))}


def _replay(node: Node, given: Fields, world: World) -> Fields:
    """Returns what it got in the step before, and nothing in the first one."""
    nothing = {name: values[:0] for name, values in given.items()}
    earlier, world.held[node.id] = world.held.get(node.id, nothing), given
    return earlier


def _map(node: Node, given: Mapping[str, Fields]) -> Fields:
    spec = node.attr("spec")
    assert isinstance(spec, MapSpec)
    total: Array | float = 0.0
    for place, fields in enumerate(given.values()):
        for name, values in fields.items():
            if name != GROUP:
                each = values.mean(axis=1) if values.ndim == 2 else values
                total = total + each * (place + 1) * _factor(spec)
    first = next(iter(given.values()))
    return {**_group(first), **{name: np.asarray(total) for name, _, _ in spec.gives}}


def _parent(children: Fields, values: Fields) -> Fields:
    """The group of a child is the row of its parent."""
    rows = children[GROUP].astype(int)
    return {**{name: each[rows] for name, each in values.items()}, **_group(children)}


def _mean_of_children(parents: Fields, values: Fields) -> Fields:
    rows = range(len(parents[GROUP]))
    means = {
        name: np.array([each[values[GROUP] == row].mean() for row in rows])
        for name, each in values.items()
    }
    return {**means, **_group(parents)}


def _advantage(spec: AdvantageSpec, given: Mapping[str, Fields]) -> Fields:
    score, groups = given["scores"]["score"], given["scores"][GROUP]
    means = np.array([score[groups == group].mean() for group in groups])
    found: Array = (score - means) * _factor(spec)
    if not spec.per_token:
        return {"advantage": found}
    rollout = given["rollout"]
    each: Array = found[:, None] * rollout["response_mask"]
    if "values" in spec.needs:
        each = each - 0.1 * given["values"]["values"]
    if "turns" in spec.needs:
        each = each + rollout["token_reward"] * (rollout["turn"] + rollout["state"])
    penalty = getattr(spec, "kl_coefficient", 0.0)
    if penalty:
        each = each - penalty * (rollout["rollout_logprobs"] - given["reference"]["logprobs"])
    return {"advantage": each, "returns": each + 1.0} if spec.gives_returns else {"advantage": each}


def _sync(node: Node, given: Fields, world: World) -> Fields:
    """One of the program refreshes its role every so often; one of the compiler publishes."""
    every = node.attr("every")
    if isinstance(every, int) and (world.step + 1) % every == 0:
        decay, role = node.attr("decay"), str(node.role)
        own = (decay if isinstance(decay, float) else 0.0) * world.weights[role]
        world.weights[role] = own + (1 - (decay or 0.0)) * float(given["weights"])  # type: ignore[operator]
    return {"weights": np.array(world.weights[str(node.role)])}


def _last_of_sum(graph: Graph, node: Node) -> str:
    """The update that moves the model: of the terms of a sum, the last one."""
    name = node.attr("sum")
    return node.id if name is None else sums_of(graph)[str(name)][-1].id


def _update(terms: Sequence[tuple[Node, Mapping[str, Fields]]], world: World) -> None:
    """Moves a model once for each mini-batch, all of them of the same samples."""
    every = terms[0][0].attr("every")
    terms = [term for term in terms if len(term[1]["rollout"]["tokens"])]
    if isinstance(every, int) and (world.step + 1) % every:
        return
    given_old = [_old_logprobs(node, given, world) for node, given in terms]
    for _ in range(world.context.mini_batches):
        moves: dict[str, float] = {}
        for (node, given), old in zip(terms, given_old, strict=True):
            role, weight = str(node.role), node.attr("weight")
            if node.attr("old_logprobs") == "own":
                old = _forward(role, given["rollout"]["tokens"], world)
            factor = weight if isinstance(weight, float) else 1.0
            moves[role] = moves.get(role, 0.0) + factor * _loss(node, given, old, world)
        for role, move in moves.items():
            world.weights[role] += 0.01 * move


def _old_logprobs(node: Node, given: Mapping[str, Fields], world: World) -> Array | None:
    """Of the policy at the start of the step."""
    if "old" in given:
        return given["old"]["logprobs"]
    if world.open:
        role = str(node.role)
        return _forward(role, given["rollout"]["tokens"], world, world.begun[role])
    if node.attr("old_logprobs") == "rollout_logprobs":
        return given["rollout"]["rollout_logprobs"]
    return None


def _loss(node: Node, given: Mapping[str, Fields], old: Array | None, world: World) -> float:
    rollout, role = given["rollout"], str(node.role)
    loss, kl = node.attr("loss"), node.attr("kl")
    if world.open and loss is None:
        loss = world.context.loss if "rollout_logprobs" in rollout else CrossEntropy()
    assert isinstance(loss, LossSpec)
    each = rollout["tokens"] * rollout["response_mask"] * world.weights[role]
    if "advantages" in loss.needs:
        weights = _advantages(given, world)
        each = each * (weights if weights.ndim == 2 else weights[:, None])
    total = float(each.sum(axis=1).mean()) * _factor(loss)
    if "behaviour_logprobs" in loss.needs:
        name = "rollout_logprobs" if world.open else str(node.attr("behaviour_logprobs"))
        total += 0.1 * float(rollout[name].mean())
    if "old_logprobs" in loss.needs:
        assert old is not None
        total += 0.3 * float((old * rollout["response_mask"]).mean())
    if "returns" in loss.needs:
        total += 0.1 * float(given["returns"]["returns"].mean())
    if "old_values" in loss.needs:
        total += 0.2 * float(given["values"]["values"].mean())
    if "preferred" in loss.needs:
        total += float((rollout["tokens"].sum(axis=1) * (rollout["preferred"] - 0.5)).mean())
    if "reference_logprobs" in loss.needs:
        total += 0.1 * float(given["reference"]["logprobs"].mean())
    if isinstance(kl, KL) and kl.coefficient:
        total += kl.coefficient * float(given["reference"]["logprobs"].mean()) * _factor(kl)
    return float(np.tanh(total))


def _advantages(given: Mapping[str, Fields], world: World) -> Array:
    if "advantages" in given:
        return given["advantages"]["advantage"]
    assert world.open, "a lowered update has advantages"
    return _advantage(world.context.advantage, {"scores": given["rewards"]})["advantage"]


def _group(fields: Fields) -> Fields:
    return {GROUP: fields[GROUP]}


def _factor(spec: Spec) -> float:
    """A number of its own for each specification."""
    return 1.0 + _seed(spec.to_json()) % 1000 / 1000


def _factor_of(node: Node) -> float:
    spec = node.attr("spec")
    assert isinstance(spec, Spec)
    return _factor(spec)


def _seed(*parts: object) -> int:
    return crc32(repr(parts).encode())
