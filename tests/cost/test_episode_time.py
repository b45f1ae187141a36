"""What episodes take: the work of two sides, the way of one episode, and how many are in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrl.cost.episode_time import CallSeconds, Episodes, PlayedEstimate, play
from flowrl.cost.lengths import ConstantLengths, LognormalLengths, expected_maximum
from flowrl.cost.source import Estimate

DRAWING = Estimate(seconds=100.0, parts=(("decode", 95.0), ("tail of it", 20.0), ("prefill", 5.0)))
EPISODES = Episodes(turns=10.0, most_turns=16, said=40.0)
CALLS = CallSeconds(reset_s=1.0, step_s=0.5, wait_s=0.1)


def row_s(rows: int) -> float:
    return {1: 0.01, 4: 0.015, 8: 0.02}[rows]


def played(**changes: Any) -> PlayedEstimate:
    """64 episodes of 1,000 tokens, 400 of them said, on two replicas of 8 rows."""
    given: dict[str, Any] = {
        "row_s": row_s,
        "chunk_s": 0.64,
        "chunk_tokens": 8192,
        "replicas": 2,
        "samples": 64,
        "slots": 8,
        "lengths": ConstantLengths(tokens=1000.0),
        "episodes": EPISODES,
        "calls": CALLS,
        "at_once": 8.0,
        "takes_turns": False,
    }
    return play(DRAWING, **(given | changes))


def test_what_is_said_is_read_and_not_drawn():
    found = played()
    # 0.6 of 95 s of decoding; prompts; 64 x 10 x 40 tokens in chunks of 8,192 on two replicas.
    assert found.policy_s == pytest.approx(0.6 * 95 + 5 + 64 * 400 / 2 / 8192 * 0.64)
    parts = dict(found.estimate.parts)
    assert parts["decode"] == pytest.approx(57.0)
    assert parts["tail of it"] == pytest.approx(12.0)
    assert parts["prefill"] == pytest.approx(6.0)


def test_both_work_at_once_behind_the_first_round_or_in_turns():
    apart = played()
    # 64 x (10 steps + a reset) / 8 at once; 32 in flight, so 20 rounds of turns.
    assert apart.environment_s == pytest.approx(64 * 6 / 8)
    assert apart.estimate.seconds == pytest.approx(63 + 48 / 20)
    assert apart.bound == "policy"
    in_turns = played(takes_turns=True)
    assert in_turns.estimate.seconds == pytest.approx(63 + 48)
    assert in_turns.bound == "both in turns"
    slow = played(at_once=4.0)
    assert slow.estimate.seconds == pytest.approx(96 + 63 / 20)
    assert slow.bound == "environment"


def test_an_environment_that_takes_nothing_changes_nothing():
    free = CallSeconds(source="unknown")
    assert played(calls=free).estimate.seconds == pytest.approx(63.0)
    assert played(calls=free, takes_turns=True).bound == "policy"


def test_no_rollout_is_faster_than_its_longest_episode():
    late = replace(CALLS, step_s=0.0, reset_s=0.0, wait_s=20.0)
    lengths = LognormalLengths(mean=1000.0, sigma=0.8, maximum=4000.0)
    found = played(calls=late, samples=8, lengths=lengths)
    # The longest of 8 would take more turns than there are; 17 answers that are late.
    longest = expected_maximum(lengths, 8)
    assert 10 * longest / 1000 > 16
    assert found.estimate.seconds == pytest.approx(0.6 * longest * 0.01 + 17 * 20.0)
    assert found.bound == "the longest episode"


def test_what_is_in_flight_bounds_the_pace():
    slow = CallSeconds(step_s=5.0, reset_s=5.0)
    found = played(calls=slow, at_once=1000.0)
    # A mean episode draws 600 tokens at the pace of 8 rows; 64 / 32 of them follow one another.
    assert found.estimate.seconds == pytest.approx(2 * (600 * 0.02 + 11 * 5.0))
    assert found.bound == "episodes in flight"
    assert dict(found.estimate.parts)["waits"] == pytest.approx(found.estimate.seconds - 63.0)
