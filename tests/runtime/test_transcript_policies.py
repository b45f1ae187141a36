"""Transcripts of episodes in which several policies take turns: rewards, scores and versions."""

from __future__ import annotations

import numpy as np

from flowrl.backend.protocols import Finished
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.environments.transcript import FinishedEpisode, Transcript
from flowrl.specs import FinishReason

PRO, CON = RoleName("pro"), RoleName("con")


def said(*tokens: int, version: int) -> Finished:
    return Finished(
        sample=SampleId("0/0/0"),
        attempt=0,
        reason=FinishReason.STOP,
        tokens=np.array(tokens),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=((version, len(tokens)),),
    )


def transcript(num_turns: int) -> Transcript:
    """Turns of two tokens by weights 3 of the first policy, and of one by weights 7 of the other"""
    made = Transcript(policies=(PRO, CON))
    made.open(np.array([9]))
    for turn in range(num_turns):
        made.act(said(1, 2, version=3) if turn % 2 == 0 else said(5, version=7), 0, "x")
        if turn + 1 < num_turns:
            assert made.reward(0.0, {}) is None
            made.observe(np.array([8]))
    return made


def ended(made: Transcript) -> FinishedEpisode:
    return made.end(SampleId("0/0/0"), 0, RoleName("court"), FinishReason.STOP)


def test_a_reward_of_each_policy_counts_for_the_last_turn_that_it_took():
    made = transcript(3)
    assert made.reward((1.0, -0.5), {}) is None
    end = ended(made)
    # The opening, two tokens, the court, one token, the court, two tokens.
    assert end.turn.tolist() == [-1, 0, 0, -1, 1, -1, 2, 2]
    assert end.token_reward.tolist() == [0, 0, 0, 0, -0.5, 0, 0, 1.0]
    assert dict(end.terms) == {"pro_score": 1.0, "con_score": -0.5, "turns": 3.0}
    assert end.score == 1.0  # in reports the first policy's


def test_a_single_reward_is_that_of_the_turn():
    made = transcript(2)
    assert made.reward(0.25, {}) is None
    assert dict(ended(made).terms) == {"pro_score": 0.0, "con_score": 0.25, "turns": 2.0}


def test_a_policy_against_itself_has_a_score_for_each_of_its_turns():
    made = Transcript(policies=(PRO, PRO))
    made.open(np.array([9]))
    for turn in range(2):
        made.act(said(1, version=3), 0, "x")
        made.reward(float(turn), {})
    assert dict(ended(made).terms) == {"pro_score": 0.0, "pro_2_score": 1.0, "turns": 2.0}


def test_rewards_that_no_turn_can_have_are_named():
    assert transcript(2).reward((1.0,), {}) == "gave 1 rewards to 2 policies"
    early = "gave a reward to con, which has not taken a turn yet"
    assert transcript(1).reward((0.0, 1.0), {}) == early
    assert transcript(1).reward((1.0, 0.0), {}) is None


def test_versions_are_those_of_the_first_policy():
    assert ended(transcript(3)).versions == ((3, 8),)
