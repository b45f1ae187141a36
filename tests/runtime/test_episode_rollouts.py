"""A driver whose samples are episodes: scores, failures, filters and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl.backend.environment import Action, EnvironmentContext, Outcome
from flowrl.backend.protocols import ScoreRequest, ScoreResult
from flowrl.data import Tokenizer
from flowrl.errors import RewardError
from flowrl.ids import EngineId, RoleName, SampleId
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.payloads import PayloadStore
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.specs import Sampling
from tests.runtime.episode_worlds import (
    Limits,
    RuleEngine,
    RuleGame,
    expected,
    item,
    request,
    tokenizer_in,
)

GAME = RoleName("game")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_in(tmp_path)


@contextmanager
def driver_of(game: RuleGame, tokenizer: Tokenizer, **changes: Any) -> Iterator[RolloutDriver]:
    limits, store = Limits(), PayloadStore()
    context = EnvironmentContext(role=GAME, timeout_s=60.0)
    judge = changes.get("judge")
    settings = SchedulerSettings(group_size=2, judges_groups=judge is not None)
    with EnvironmentPool(lambda _: game, context) as pool:
        engine = EpisodeEngine(
            engines=[RuleEngine(slots=2)],
            environments=pool,
            tokenizer=tokenizer,
            item_of=lambda sample: store[sample].item,
            seed_of=lambda group: 0,
            max_turns=limits.max_turns,
            max_length=limits.max_length,
            max_observation_tokens=limits.max_observation_tokens,
        )
        values: dict[str, Any] = {
            "scheduler": RolloutScheduler(settings, validate=True),
            "engines": {EngineId("actor[0]"): engine},
            "scorers": {},
            "tokenizer": tokenizer,
            "sampling": Sampling(max_tokens=3),
            "group_size": 2,
            "seed_of": seed_of,
            "judge": None,
            "failures": FailureBudget(0),
            "beat": lambda: None,
            "stop": lambda: False,
            "stall_timeout_s": 60.0,
            "reported": None,
            "store": store,
        }
        yield RolloutDriver(**{**values, **changes})
        engine.close()


def seed_of(sample: SampleId) -> int:
    """As `request` has it."""
    _, index, member = map(int, sample.split("/"))
    return 1000 * index + member


class Breaking(RuleGame):
    """Breaks off one episode."""

    def __init__(self, sample: str) -> None:
        super().__init__()
        self._sample = sample

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        if sample == self._sample:
            raise LookupError("no such move")
        return await super().step(sample, action)


def test_episodes_are_delivered_with_the_scores_of_their_environment(tokenizer: Tokenizer):
    with driver_of(RuleGame(), tokenizer) as driver:
        driver.offer([item(index) for index in range(6)])
        collected = driver.collect(0, 6)
    rows = [row for _, members in collected.groups for row in members]
    assert len(rows) == 12
    for sample, payload in rows:
        _, index, member = map(int, sample.split("/"))
        wanted = expected(request(index, member), Limits())
        assert payload.tokens.tolist() == wanted.tokens.tolist()
        assert payload.score == payload.scores[GAME] == wanted.score
        assert (payload.text, payload.terms) == (wanted.text, wanted.terms)
        assert payload.finish is wanted.reason


class Reading:
    """A scorer that keeps what it was asked."""

    def __init__(self) -> None:
        self.responses: dict[SampleId, str] = {}
        self._waiting: list[ScoreResult | ScoreFailure] = []

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self.responses |= {request.sample: request.response for request in requests}
        self._waiting += [
            ScoreResult(sample=request.sample, score=-7.0, terms={"rule": -7.0})
            for request in requests
        ]

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        answers, self._waiting = self._waiting, []
        return answers

    def wait(self, timeout_s: float) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("reported", [GAME, RoleName("verifier")])
def test_a_rule_beside_an_environment_reads_what_the_policy_read_and_scores_where_it_is_asked(
    reported: RoleName, tokenizer: Tokenizer
):
    reading = Reading()
    scorers = {RoleName("verifier"): reading}
    with driver_of(RuleGame(), tokenizer, scorers=scorers, reported=reported) as driver:
        driver.offer([item(0)])
        ((_, members),) = driver.collect(0, 1).groups
    for sample, payload in members:
        wanted = expected(request(0, int(sample[-1])), Limits())
        assert reading.responses[sample] == wanted.text
        assert payload.score == (wanted.score if reported == GAME else -7.0)
        assert payload.terms == {**wanted.terms, "rule": -7.0}


def test_an_episode_that_breaks_off_past_the_budget_stops_the_run_with_its_turn(
    tokenizer: Tokenizer,
):
    with driver_of(Breaking("0/1/0"), tokenizer) as driver:
        driver.offer([item(index) for index in range(3)])
        with pytest.raises(RewardError, match="sample 0/1/0: the environment of this") as caught:
            driver.collect(0, 3)
    told = str(caught.value)
    assert "raised LookupError: no such move in turn 0 (" in told
    assert "test_episode_rollouts.py:" in told
    assert "correct the environment, or raise rewards.max_failures" in told


def test_an_episode_that_breaks_off_within_the_budget_drops_its_group(tokenizer: Tokenizer):
    failures = FailureBudget(1)
    with driver_of(Breaking("0/1/0"), tokenizer, failures=failures) as driver:
        driver.offer([item(index) for index in range(3)])
        collected = driver.collect(0, 3)
    assert [group for group, _ in collected.groups] == ["0/0", "0/2"]
    reasons = {sample: reason for sample, _, reason in collected.dropped}
    assert reasons[SampleId("0/1/1")] == "incomplete_group"
    assert reasons[SampleId("0/1/0")].startswith("reward_failed: raised LookupError: no such move")
    assert failures.failed == 1


def test_groups_of_episodes_are_judged_by_their_scores(tokenizer: Tokenizer):
    seen = []

    def judge(groups: Any) -> list[str | None]:
        seen.extend([payload.score for _, payload in members] for _, members in groups)
        return ["even" if group == "0/1" else None for group, _ in groups]

    with driver_of(RuleGame(), tokenizer, judge=judge) as driver:
        driver.offer([item(index) for index in range(3)])
        collected = driver.collect(0, 3)
    assert [group for group, _ in collected.groups] == ["0/0", "0/2"]
    assert len(seen) == 3
    assert all(score is not None for scores in seen for score in scores)


def test_the_environment_is_named_when_a_run_waits_for_it(tokenizer: Tokenizer):
    told: list[str] = []

    class Held(RuleGame):
        """Holds its first answer until the driver has said whom it waits for."""

        def __init__(self) -> None:
            super().__init__()
            self.told = threading.Event()

        async def step(self, sample: SampleId, action: Action) -> Outcome:
            self.told.wait(60.0)
            return await super().step(sample, action)

    game = Held()

    def stop() -> bool:
        if game.actions or told:
            return False
        said = driver.describe()
        if "of sample 0/0/" in said and "turn 0" in said:
            told.append(said)
            game.told.set()
        return False

    with driver_of(game, tokenizer, stop=stop) as driver:
        driver.offer([item(0)])
        driver.collect(0, 1)
    assert "environment game: " in told[0]
    assert " stepping" in told[0]
