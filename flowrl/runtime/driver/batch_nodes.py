"""Runs map, advantage and update nodes on the samples of a step.

- `NodeInputs` reads arrays of a node's arguments and the set of samples to which they belong.
- A map node calls the user's function with its fields by key, and checks what it returns.
- A `parent` or `mean_of_children` node takes values from samples to those that were made of them,
  or back.
- An advantage node collects the fields that its specification reads and lays out the result.
- An update node makes the batch that its loss reads, cut into mini-batches of whole groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from flowrl.algo.advantages import AdvantageBatch, Padding, Turns
from flowrl.algo.maps import MapBatch, MapResult
from flowrl.algo.resolve import resolve_advantage, resolve_map
from flowrl.algo.user_functions import check_per_sample
from flowrl.backend.batch import Floats, Mask, SequenceBatch, TrainBatch
from flowrl.backend.protocols import UpdateSpec
from flowrl.errors import RewardError
from flowrl.graph import Edge, Graph, Node, Unit
from flowrl.graph.ir import called, held_field
from flowrl.graph.signatures import PART, ROLLOUT_LOGPROBS
from flowrl.ids import NodeId, SampleId
from flowrl.plan import PlacementPlan
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import Array, SampleSet, StepBatch
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.groups import DataRef, PerSample, Stored
from flowrl.specs import KL, AdvantageSpec, FinishReason, LossSpec, MapSpec
from flowrl.specs.advantage import MaxRL
from flowrl.specs.loss import OutcomeLoss
from flowrl.specs.maps import OwnMap, split_key

OF_SEQUENCES = ("tokens", "response_mask", "turn", "token_reward", "state")
"""Fields that a set's sequences hold, whichever node passed them on."""


class NodeInputs:
    """The inputs of one node in one step.

    Attributes:
        node: The node.
        samples: The set of samples on which the node works.
    """

    __slots__ = ("_parts", "_step", "node", "samples")

    def __init__(self, parts: GraphParts, node: Node, step: StepBatch, samples: SampleSet) -> None:
        self._parts = parts
        self._step = step
        self.node = node
        self.samples = samples

    @property
    def sequences(self) -> SequenceBatch:
        """The node's samples as tokens."""
        return self.samples.sequences

    def edge(self, argument: str) -> Edge | None:
        """Returns the edge that feeds an argument; None without one."""
        return self._parts.graph.feeding(self.node.id, argument)

    def edges(self, argument: str) -> list[Edge]:
        """Returns the edges of an argument that may come several times: `input`, `input_2`, ..."""
        return [
            edge
            for edge in self._parts.graph.in_edges(self.node.id)
            if edge.argument == argument or edge.argument.removeprefix(f"{argument}_").isdecimal()
        ]

    def read(self, source: NodeId, field: str) -> Array:
        """Returns a node's field as an array of that node's set."""
        found = self._step.values.find(source, field)
        if found is None and field in OF_SEQUENCES:
            sequences = self._step.sets[self._parts.made[source]].sequences
            found = getattr(sequences, field)
        if found is None:
            raise KeyError(f"{source} has not given {field!r} for {self.node.id}")
        return found

    def get(self, argument: str, field: str) -> Array | None:
        """Returns a field of an argument; None if nothing feeds it, or it lacks the field."""
        edge = self.edge(argument)
        if edge is None or field not in edge.fields:
            return None
        return self.read(edge.src, field)

    def are_sampled(self, argument: str, field: str) -> bool:
        """True for the logprobs of a rollout as the payloads of the node's samples have them."""
        edge = self.edge(argument)
        return edge is not None and self._step.values.are_sampled(edge.src, field, self.samples)

    def floats(self, argument: str, field: str) -> Floats | None:
        """Returns the values of `get` as float32."""
        found = self.get(argument, field)
        return None if found is None else np.asarray(found, np.float32)

    def for_trainer(self, argument: str, field: str) -> Floats | Stored | None:
        """Returns the values of `floats`, or where the node's trainer finds them in a store."""
        edge = self.edge(argument)
        if edge is None or field not in edge.fields:
            return None
        return self.read_for_trainer(edge.src, field)

    def read_for_trainer(self, source: NodeId, field: str) -> Floats | Stored:
        """Returns a node's field as float32, or where a trainer finds it in a store."""
        found = np.asarray(self.read(source, field), np.float32)
        return self._step.values.stored.get((source, field), found)

    def samples_of(self, edge: Edge) -> SampleSet:
        """Returns the set to which an edge's values belong."""
        return self._step.sets[self._parts.made[edge.src]]

    def is_per_token(self, edge: Edge, field: str) -> bool:
        """True if a field of an edge has one value for each token."""
        output = self._parts.graph.node(edge.src).output(field)
        return output is not None and output.unit is Unit.TOKENS

    def token_floats(self, edge: Edge, field: str) -> Floats:
        """Returns float32 `[T]`: a field of tokens, or one of samples repeated; 0 off responses."""
        values, sequences = self.read(edge.src, field), self.sequences
        if not self.is_per_token(edge, field):
            return sequences.over_tokens(values)
        return np.where(sequences.response_mask, values, np.float32(0)).astype(np.float32)


def run_map(inputs: NodeInputs, texts: Texts) -> MapResult:
    """Runs a map; returns the fields that its specification declares."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, MapSpec)
    sequences = inputs.sequences
    batch = MapBatch(
        fields={key: _field(inputs, key, texts) for key in spec.reads},
        groups=sequences.groups,
        offsets=sequences.offsets,
        lengths=sequences.response_lengths,
        truncated=_truncated(inputs.samples),
    )
    given = resolve_map(spec)(batch)
    if isinstance(spec, OwnMap) and spec.alone and len(batch.groups) > 1 and _seen[spec] < _LOOKS:
        _seen[spec] += 1
        check_per_sample(batch, spec, given)
    return given


def run_parent(inputs: NodeInputs) -> Mapping[str, Array]:
    """Returns the values of each sample's parent, whose id is the sample's group."""
    edge = inputs.edge("input")
    assert edge is not None  # the verifier of graphs proves it
    places = {sample: row for row, sample in enumerate(inputs.samples_of(edge).samples)}
    rows = [places[SampleId(group)] for group in inputs.samples.groups]
    return {field: inputs.read(edge.src, field)[rows] for field in edge.fields}


def run_mean_of_children(inputs: NodeInputs) -> Mapping[str, Array]:
    """Returns float32 `[N]`: the mean of the values of each sample's children, which all have."""
    edge = inputs.edge("input")
    assert edge is not None  # the verifier of graphs proves it
    places = {sample: row for row, sample in enumerate(inputs.samples.samples)}
    rows = [places[SampleId(group)] for group in inputs.samples_of(edge).groups]
    counts = np.bincount(rows, minlength=len(places))
    return {
        field: (
            np.bincount(rows, inputs.read(edge.src, field), minlength=len(places)) / counts
        ).astype(np.float32)
        for field in edge.fields
    }


_LOOKS = 8
_seen: Counter[OwnMap] = Counter()
"""Batches at which a map was seen to keep `per_sample`. A few are enough for a mean over the batch
to show; at all of them, the map would cost one and a half times as much."""


def _field(inputs: NodeInputs, key: str, texts: Texts) -> Array:
    """Returns the field of a key: of the n-th argument that has one of that name.

    An argument of other samples gives numbers of samples, in the places of the map's own; the
    verifier of graphs proves it.
    """
    name, place = split_key(key)
    edge = [edge for edge in inputs.edges("input") if name in edge.fields][place]
    if held_field(name) is not None:
        spec = inputs.node.attr("spec")
        assert isinstance(spec, MapSpec)
        reader = f"{called(spec)} ({inputs.node.source or inputs.node.id})"
        return texts.held(inputs.samples_of(edge), name, reader=reader)
    return inputs.read(edge.src, name)


def _truncated(samples: SampleSet) -> Mask:
    """Returns bool `[N]`, true for responses that ended at `max_tokens`."""
    cut = [payload.finish is FinishReason.LENGTH for payload in samples.payloads]
    return np.array(cut, np.bool_)


def run_advantage(inputs: NodeInputs) -> Mapping[str, Array]:
    """Returns float32 `advantage`, `[N]` or `[T]`, and `returns` `[T]` if it has them."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, AdvantageSpec)
    rewards = [
        np.asarray(inputs.read(edge.src, "score"), np.float32) for edge in inputs.edges("scores")
    ]
    if isinstance(spec, MaxRL) and (lowest := min(float(r.min(initial=0)) for r in rewards)) < 0:
        # Means about 0 make advantages of a million of ordinary scores.
        raise RewardError(
            "max_rl divides by the mean score of each group, and scores below 0 bring it to 0",
            where=str(inputs.node.source or inputs.node.id),
            found=f"a score of {lowest:g}",
            expected="scores of at least 0, such as 1 for a right answer and 0 for a wrong one",
            hint="add a constant to the reward, leave its penalties out, or use "
            "fl.advantage.group_relative",
        )
    function = resolve_advantage(spec)
    if not spec.needs and len(rewards) == 1:  # no arrays of tokens have to be padded
        plain = AdvantageBatch(scores=rewards[0], groups=inputs.samples.numbers)
        return {"advantage": function(plain).advantages}
    places = Padding.of(inputs.sequences.offsets, inputs.sequences.response_mask)
    result = function(_batch(inputs, spec, rewards, places))
    advantages = result.advantages
    values: dict[str, Array] = {
        "advantage": places.flat(advantages) if spec.per_token else advantages
    }
    if spec.gives_returns:
        assert result.returns is not None
        values["returns"] = places.flat(result.returns)
    return values


def _batch(
    inputs: NodeInputs, spec: AdvantageSpec, rewards: list[Floats], places: Padding
) -> AdvantageBatch:
    sequences = inputs.sequences

    def padded(
        argument: str, field: str
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
        values = inputs.get(argument, field)
        return None if values is None else places.pad(values)

    scores = rewards[0] if rewards else np.zeros(len(sequences), np.float32)
    policy_logprobs = padded("policy", "logprobs")
    several = np.stack(rewards, axis=1) if len(rewards) > 1 else None
    return AdvantageBatch(
        scores=scores if several is None else several.sum(axis=1),
        groups=sequences.groups,
        mask=places.pad(sequences.response_mask),
        rewards=several,
        values=padded("values", "values"),
        baselines=_baselines(inputs),
        logprobs=padded("rollout", "rollout_logprobs")
        if policy_logprobs is None
        else policy_logprobs,
        reference_logprobs=padded("reference", "logprobs"),
        sum_pi_squared=_squares(inputs, places),
        token_rewards=padded("rollout", "token_reward"),
        process_rewards=padded("token_rewards", "token_reward"),
        source=inputs.get("rollout", PART.name) if "source" in spec.needs else None,
        turns=turns_of(sequences, places) if "turns" in spec.needs else None,
    )


SQUARES = "sum_pi_squared"
"""The second output of a logprobs node, where an advantage reads it."""


def reads_squares(graph: Graph, node: Node) -> bool:
    """True if an advantage reads sums of squared probabilities of a logprobs node."""
    return any(edge.src == node.id and edge.argument == "policy" for edge in graph.edges)


def _squares(
    inputs: NodeInputs, places: Padding
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    edge = inputs.edge("policy")
    return None if edge is None else places.pad(inputs.read(edge.src, SQUARES))


def _baselines(inputs: NodeInputs) -> Floats | None:
    """Returns float32 `[N]`: the score of the baseline's answer to each sample's prompt.

    Raises:
        RewardError: a prompt has none, because a filter took it out.
    """
    edge = inputs.edge("baseline")
    if edge is None:
        return None
    scores = inputs.read(edge.src, "score").tolist()
    by_group = dict(zip(inputs.samples_of(edge).groups, scores, strict=True))
    for group in inputs.samples.groups:
        if group not in by_group:
            raise RewardError(
                "this prompt has samples to learn from, but no baseline",
                where=str(inputs.node.source or inputs.node.id),
                found=f"group {group}",
                hint="take the baseline's score before any filter",
            )
    return np.array([by_group[group] for group in inputs.samples.groups], np.float32)


def turns_of(sequences: SequenceBatch, places: Padding) -> Turns:
    """Returns the turns of a batch of episodes, in order of samples and time.

    A turn's reward is the sum over its tokens, its state that of its first token.
    """
    turn, state, reward = sequences.turn, sequences.state, sequences.token_reward
    assert turn is not None
    assert state is not None
    assert reward is not None
    sample = np.repeat(np.arange(len(sequences)), sequences.lengths)
    tokens = np.flatnonzero(sequences.response_mask & (turn >= 0))
    begins = np.ones(len(tokens), np.bool_)
    begins[1:] = (np.diff(sample[tokens]) != 0) | (np.diff(turn[tokens]) != 0)
    starts = np.flatnonzero(begins)
    first = tokens[starts]
    number = np.zeros(len(turn), np.int64)  # counted from 1; 0 belongs to no turn
    number[tokens] = np.cumsum(begins)
    summed = np.add.reduceat(reward[tokens], starts) if len(starts) else np.zeros(0)
    return Turns(
        samples=sample[first],
        rewards=summed.astype(np.float64),
        states=state[first],
        tokens=places.pad(number).astype(np.int64) - 1,
    )


DISTRIBUTIONS = "distributions"
"""The second output of a logprobs node, where an update's penalty is the full divergence."""


def reads_distributions(graph: Graph, node: Node) -> bool:
    """True if an update reads whole distributions of a logprobs node."""
    return any(
        isinstance(kl := graph.node(edge.dst).attr("kl"), KL) and kl.estimator == "full"
        for edge in graph.edges
        if edge.src == node.id and edge.argument == "reference"
    )


def split_groups(groups: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Cuts rows into `parts` mini-batches of whole groups, as even as groups allow.

    Args:
        groups: Group number of each row; equal ones are adjacent.
        parts: Mini-batches asked for; fewer come back where there are fewer groups.

    Returns:
        Row numbers of each mini-batch, in order.

    >>> split_groups([0, 0, 1, 1, 2, 2], 2)
    ((0, 1, 2, 3), (4, 5))
    """
    starts = [row for row in range(len(groups)) if row == 0 or groups[row] != groups[row - 1]]
    parts = min(parts, len(starts))
    if not parts:
        return ()
    pieces = np.array_split(np.array(starts), parts)
    cuts = [int(piece[0]) for piece in pieces] + [len(groups)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


def train_batch(inputs: NodeInputs, sequences: DataRef[SequenceBatch]) -> TrainBatch:
    """Makes the batch with the fields that the update's loss and penalty read, and no others.

    Args:
        sequences: The reference to the node's samples.
    """
    loss = inputs.node.attr("loss")
    assert isinstance(loss, LossSpec)
    needs, advantages = loss.needs, inputs.edge("advantages")
    behaviour: Floats | Stored | None = None
    old: Floats | Stored | None = None
    if "behaviour_logprobs" in needs:
        behaviour = _rollout_logprobs(inputs, sequences)
    preferred = inputs.get("rollout", "preferred") if "preferred" in needs else None
    sampled = np.array(
        [payload.finish is not None for payload in inputs.samples.payloads], np.bool_
    )
    match inputs.node.attr("old_logprobs"):
        case "forward":
            old = inputs.for_trainer("old", "logprobs")
        case "rollout_logprobs":
            old = _rollout_logprobs(inputs, sequences)
        # Otherwise they are those of the update's own forward pass.
    fields: dict[str, Any] = {
        "sequences": sequences,
        "behaviour_logprobs": behaviour,
        "old_logprobs": old,
        "reference_logprobs": inputs.for_trainer("reference", "logprobs"),
        "reference_distributions": _distributions(inputs),
        "advantages": None if advantages is None else _advantages(inputs, advantages),
        "old_values": inputs.for_trainer("values", "values"),
    }
    return TrainBatch(
        **fields,
        returns=inputs.floats("returns", "returns"),
        preferred=None if preferred is None else np.asarray(preferred, np.bool_),
        sampled=None if behaviour is None or sampled.all() else sampled,
        extra=_extra_fields(inputs, loss),
    )


def _rollout_logprobs(
    inputs: NodeInputs, sequences: DataRef[SequenceBatch]
) -> Floats | Stored | None:
    """Returns float32 `[T]` of the rollout, or where they are together with the sequences."""
    if sequences.logprobs is not None and inputs.are_sampled("rollout", ROLLOUT_LOGPROBS.name):
        return sequences.logprobs
    return inputs.floats("rollout", ROLLOUT_LOGPROBS.name)


def _advantages(inputs: NodeInputs, edge: Edge) -> Floats | PerSample:
    if inputs.is_per_token(edge, "advantage"):
        return inputs.token_floats(edge, "advantage")
    return PerSample(inputs.read(edge.src, "advantage"))


def _extra_fields(inputs: NodeInputs, loss: LossSpec) -> dict[str, Floats]:
    """Returns float32 `[T]`, the fields of maps, sources and outcomes that a loss reads.

    Raises:
        RewardError: an outcome is not between 0 and 1.
    """
    edges = inputs.edges("extra")
    fields = {field: inputs.token_floats(edge, field) for edge in edges for field in edge.fields}
    rollout = inputs.edge("rollout")
    if rollout is not None and PART.name in loss.extra_fields and PART.name in rollout.fields:
        fields[PART.name] = inputs.token_floats(rollout, PART.name)
    if isinstance(loss, OutcomeLoss):
        outcomes = fields["score"]
        wrong = np.flatnonzero((outcomes < 0) | (outcomes > 1))
        if len(wrong):
            raise RewardError(
                f"the loss {loss.kind} learns outcomes, of which each is a probability",
                where=str(inputs.node.source or inputs.node.id),
                found=f"a score of {outcomes[wrong[0]]:g}",
                expected="scores from 0 to 1",
                hint="make outcomes of the scores, with a map: batch['score'] > 0",
            )
    return fields


def _distributions(inputs: NodeInputs) -> Floats | Stored | None:
    """Returns float32 `[R, V]` of the reference, if the penalty is the full divergence."""
    kl, edge = inputs.node.attr("kl"), inputs.edge("reference")
    if edge is None or not isinstance(kl, KL) or kl.estimator != "full":
        return None
    return inputs.read_for_trainer(edge.src, DISTRIBUTIONS)


def update_spec(
    inputs: NodeInputs,
    plan: PlacementPlan,
    *,
    kl: KL | None,
    temperature: float,
    max_tokens: int,
) -> UpdateSpec:
    """Returns how the batch is divided into optimizer updates, with the sizes of the plan."""
    loss = inputs.node.attr("loss")
    assert isinstance(loss, LossSpec)
    operation = plan.operation(inputs.node.id)
    return UpdateSpec(
        loss=loss,
        kl=kl,
        temperature=temperature,
        mini_batches=split_groups(inputs.samples.numbers.tolist(), plan.sizes.mini_batches),
        micro_batch=operation.micro_batch,
        recompute=operation.recompute,
        max_tokens=max_tokens,
        old_policy="own" if inputs.node.attr("old_logprobs") == "own" else "given",
        weight=weight if isinstance(weight := inputs.node.attr("weight"), float) else 1.0,
    )
