"""Runs an advantage node: collects what its specification reads, and lays out what comes back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flowrl.algo import resolve_advantage, resolve_batch_advantage
from flowrl.algo.advantages import AdvantageBatch, Padding, Turns
from flowrl.backend.batch import Floats, SequenceBatch
from flowrl.errors import RewardError
from flowrl.graph import Graph, Node
from flowrl.runtime.node_inputs import NodeInputs
from flowrl.runtime.sample_set import Array
from flowrl.specs import AdvantageSpec, MaxRL

__all__ = ["SQUARES", "reads_squares", "run_advantage", "turns_of"]


def run_advantage(inputs: NodeInputs) -> Mapping[str, Array]:
    """float32 `advantage`, `[N]` or `[T]`, and `returns` `[T]` where the specification has them."""
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
    if not spec.needs and len(rewards) == 1:
        return {"advantage": resolve_advantage(spec)(rewards[0], inputs.sequences.groups)}
    places = Padding.of(inputs.sequences.offsets, inputs.sequences.response_mask)
    result = resolve_batch_advantage(spec)(_batch(inputs, spec, rewards, places))
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
    drawn = padded("policy", "logprobs")
    several = np.stack(rewards, axis=1) if len(rewards) > 1 else None
    return AdvantageBatch(
        scores=scores if several is None else several.sum(axis=1),
        groups=sequences.groups,
        mask=places.pad(sequences.response_mask),
        rewards=several,
        values=padded("values", "values"),
        baselines=_baselines(inputs),
        logprobs=padded("rollout", "rollout_logprobs") if drawn is None else drawn,
        reference_logprobs=padded("reference", "logprobs"),
        sum_pi_squared=_squares(inputs, places),
        token_rewards=padded("rollout", "token_reward"),
        turns=turns_of(sequences, places) if "turns" in spec.needs else None,
    )


SQUARES = "sum_pi_squared"
"""What a logprobs node gives beside logprobs, where an advantage reads it."""


def reads_squares(graph: Graph, node: Node) -> bool:
    """Whether an advantage reads sums of squared probabilities of a logprobs node."""
    return any(edge.src == node.id and edge.argument == "policy" for edge in graph.edges)


def _squares(
    inputs: NodeInputs, places: Padding
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    edge = inputs.edge("policy")
    return None if edge is None else places.pad(inputs.read(edge.src, SQUARES))


def _baselines(inputs: NodeInputs) -> Floats | None:
    """float32 `[N]`: the score of the baseline's answer to each sample's prompt.

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
    """The turns of a batch of episodes, in order of samples and time.

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
