"""What episodes take: the pace of two sides, and of each episode between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrl.cost.episode_time import CallSeconds, Episodes, Pace, PlayedEstimate, play
from flowrl.cost.lengths import ConstantLengths
from flowrl.cost.occupancy import EngineBatch
from flowrl.cost.source import Estimate

DRAWING = Estimate(seconds=100.0, parts=(("decode", 95.0), ("prefill", 5.0)))
EPISODES = Episodes(turns=10.0, most_turns=16, said=40.0)
CALLS = CallSeconds(reset_s=1.0, step_s=0.5, wait_s=0.1)


def played(*, slots: int = 16, **changes: Any) -> PlayedEstimate:
    """64 episodes of 1,000 tokens, 400 of them said, on two replicas of 16 rows, all in flight."""
    engines = EngineBatch(
        replicas=2,
        samples=64,
        group_size=4,
        prompt_tokens=100.0,
        slots=slots,
        kv_tokens=1_000_000,
    )
    given: dict[str, Any] = {
        "pace": Pace(lambda rows, context: 0.02, 16, (1.0, 1000.0)),
        "chunk_s": 0.64,
        "chunk_tokens": 8192,
        "lengths": ConstantLengths(tokens=1000.0),
        "episodes": EPISODES,
        "calls": CALLS,
        "at_once": 64.0,
        "takes_turns": False,
    }
    return play(DRAWING, engines, **(given | changes))


def test_what_is_said_is_read_and_not_drawn():
    found = played()
    # 32 in flight on 16 rows: two steps of 0.02 s for 0.6 of 1,000 tokens; 400 tokens of each read.
    parts = dict(found.estimate.parts)
    assert parts["decode"] == pytest.approx(1000 * 0.6 * 2 * 0.02)
    assert parts["prefill"] == pytest.approx(5 + 32 * 400 * 0.64 / 8192)
    assert found.policy_s == pytest.approx(24 + 5 + 1)


def test_the_slower_side_decides_and_both_add_up_where_they_take_turns():
    wide = played()
    # 64 x (10 steps + a reset), 64 at once.
    assert wide.environment_s == pytest.approx(6.0)
    assert (wide.estimate.seconds, wide.bound) == (pytest.approx(30.0), "policy")
    narrow = played(at_once=8.0)
    # Prompts enter before.
    assert (narrow.estimate.seconds, narrow.bound) == (pytest.approx(48.0 + 5.0), "environment")
    turns = played(takes_turns=True)
    assert (turns.estimate.seconds, turns.bound) == (pytest.approx(30.0 + 6.0), "both in turns")


def test_an_environment_that_takes_nothing_changes_nothing():
    free = CallSeconds(source="unknown")
    assert played(calls=free).estimate.seconds == pytest.approx(30.0)
    assert played(calls=free, takes_turns=True).bound == "policy"


def test_each_episode_waits_for_its_own_answers():
    late = CallSeconds(reset_s=1.0, step_s=0.5, wait_s=5.0)
    found = played(calls=late, at_once=1e6)
    # A step for each token that is drawn, and 10 x 5.5 + 1 + 5 s of answers.
    assert found.estimate.seconds == pytest.approx(5 + 600 * 0.02 + 61)
    assert found.bound == "each episode's own way"
    assert dict(found.estimate.parts)["waits"] == pytest.approx(12 + 61 - 25)
    # Two batches behind each other where half of them are in flight.
    twice = played(calls=late, at_once=1e6, slots=8)
    assert twice.estimate.seconds == pytest.approx(5 + 2 * (600 * 0.02 + 61))


def test_a_policy_among_others_draws_its_turns_and_waits_for_theirs():
    lengths = ConstantLengths(tokens=1000.0)
    one = EPISODES.of_one(3, lengths)
    assert 3 * one.drawn_share(lengths) == pytest.approx(EPISODES.drawn_share(lengths))
    assert (one.turns, one.most_turns) == (pytest.approx(10 / 3), 6)
    # Alone on its rows an episode waits for all of its 600 tokens, whoever draws them.
    calls = CallSeconds()
    mine, whole = (
        played(slots=64, episodes=each, calls=calls).estimate.seconds for each in (one, EPISODES)
    )
    entering = 5.0
    assert mine - entering == pytest.approx(600 * 0.02)
    assert whole - entering == pytest.approx(600 * 0.02 + 32 * 400 * 0.64 / 8192)
    assert EPISODES.of_one(1, lengths) == EPISODES


def test_behind_its_most_turns_an_episode_calls_nobody():
    late = CallSeconds(step_s=50.0)
    few = Episodes(turns=10.0, most_turns=4, said=40.0)
    found = played(calls=late, episodes=few)
    # 64 x 4 steps, 64 at once.
    assert (found.environment_s, found.estimate.seconds) == (200.0, 200.0)


def test_the_pace_is_linear_between_what_was_asked():
    pace = Pace(lambda rows, context: rows + context / 100, 6, (100.0, 300.0))
    found = pace.at(np.array([1.0, 3.0, 5.0]), np.array([100.0, 200.0, 400.0]))
    assert found.tolist() == pytest.approx([2.0, 5.0, 9.0])
