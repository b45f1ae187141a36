"""Samples that several scorers score, fail on, or that nothing scores."""

from __future__ import annotations

import pytest

from flowrl.backend.protocols import ScoreRequest
from flowrl.ids import RoleName
from flowrl.rollout.policies.limits import Retries
from flowrl.runtime.driver.collected_batch import FailureBudget
from tests.runtime.test_rollouts import (
    VERIFIER,
    Engine,
    Scoring,
    World,
    by_member,
    driver_of,
    pairs_of_samples,
    prompts,
)

JUDGE = RoleName("judge")


def test_a_sample_is_scored_when_every_scorer_has_answered():
    world = World()
    first = Scoring(world, by_member)
    late = Scoring(world, lambda r: 5.0 if world.log.count("scored 0/0/1") else None)
    driver = driver_of(world, Engine(world), scorers={VERIFIER: first, JUDGE: late})
    driver.offer(prompts(1))
    ((_, members),) = driver.collect(1, 1).groups
    payloads = [payload for _, payload in members]
    assert [p.scores for p in payloads] == [{VERIFIER: v, JUDGE: 5.0} for v in (0.0, 1.0)]
    assert [payload.score for payload in payloads] == [0.0, 1.0]  # of the reported role
    assert payloads[0].terms == {"verifier/term": 0.0, "judge/term": 5.0}
    assert world.log.count("score 0/0/0") == 2


@pytest.mark.parametrize(("reported", "score"), [(VERIFIER, 1.0), (JUDGE, 5.0), (None, None)])
def test_the_score_of_a_sample_is_that_of_the_reported_role_alone(reported, score):
    world = World()
    scorers = {VERIFIER: Scoring(world, lambda _: 1.0), JUDGE: Scoring(world, lambda _: 5.0)}
    driver = driver_of(world, Engine(world), scorers=scorers, reported=reported)
    driver.offer(prompts(1))
    ((_, members),) = driver.collect(1, 1).groups
    assert [payload.score for _, payload in members] == [score, score]


def test_a_sample_that_one_scorer_fails_on_is_dropped_whatever_the_other_says():
    world = World()
    scorers = {
        VERIFIER: Scoring(world, by_member),
        JUDGE: Scoring(world, lambda r: "raised X" if r.sample == "0/0/0" else 1.0),
    }
    failures = FailureBudget(1)
    driver = driver_of(world, Engine(world), scorers=scorers, failures=failures)
    driver.offer(prompts(2))
    collected = driver.collect(1, 2)
    assert [group for group, _ in collected.groups] == ["0/1"]
    assert sorted(reason for _, _, reason in collected.dropped) == [
        "incomplete_group",
        "reward_failed: raised X",
    ]
    assert failures.failed == 1
    assert not driver._results.due
    assert not driver._results._terms


def test_a_reward_that_failed_is_asked_again_once_all_scorers_have_answered():
    world = World()
    tries: list[str] = []

    def first_raises(request: ScoreRequest) -> float | str:
        tries.append(request.sample)
        return "raised X" if tries.count(request.sample) == 1 else 2.0

    # Of the first time, the judge answers after the verifier has failed.
    late = Scoring(world, lambda r: 5.0 if world.log.count("scored 0/0/1") else None)
    scorers = {VERIFIER: Scoring(world, first_raises), JUDGE: late}
    retry = pairs_of_samples(retries=Retries(rewards=2))
    failures = FailureBudget(0)
    driver = driver_of(world, Engine(world), scorers=scorers, scheduler=retry, failures=failures)
    driver.offer(prompts(1))
    ((_, members),) = driver.collect(1, 1).groups
    assert [payload.scores for _, payload in members] == [{VERIFIER: 2.0, JUDGE: 5.0}] * 2
    assert members[0][1].terms == {"verifier/term": 2.0, "judge/term": 5.0}
    assert sorted(tries) == ["0/0/0", "0/0/0", "0/0/1", "0/0/1"]
    assert [payload.failure for _, payload in members] == ["", ""]
    assert failures.failed == 0


def test_a_reward_that_goes_on_failing_is_counted_once():
    world = World()
    scorers = {VERIFIER: Scoring(world, lambda r: "no" if r.sample == "0/0/0" else 1.0)}
    retry = pairs_of_samples(retries=Retries(rewards=3))
    failures = FailureBudget(1)
    driver = driver_of(world, Engine(world), scorers=scorers, scheduler=retry, failures=failures)
    driver.offer(prompts(2))
    assert [group for group, _ in driver.collect(1, 2).groups] == ["0/1"]
    assert world.log.count("score 0/0/0") == 3
    assert failures.failed == 1


def test_samples_that_nothing_scores_are_delivered_without_a_score():
    world = World()
    driver = driver_of(world, Engine(world), scorers={})
    driver.offer(prompts(2))
    collected = driver.collect(1, 2)
    payloads = [payload for _, members in collected.groups for _, payload in members]
    assert [payload.score for payload in payloads] == [None] * 4
    assert payloads[1].text == "11 11"
