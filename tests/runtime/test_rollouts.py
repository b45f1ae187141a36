"""The rollout driver over an engine and scorers in memory: order of events, failures, waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flowrl.backend.protocols import (
    Finished,
    GenerateRequest,
    Loaded,
    Progress,
    ScoreRequest,
    ScoreResult,
)
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import RewardError, SchedulerError
from flowrl.ids import EngineId, RoleName, SampleId, group_id
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.payloads import GroupRows
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.scoring.pool import FailureKind, ScoreFailure
from flowrl.specs import FinishReason, Sampling

SAMPLING = Sampling(max_tokens=8)
VERIFIER = RoleName("verifier")
EOS = 99


class World:
    """What happened, in order, and a clock that only waiting moves."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0

    def clock(self) -> float:
        return self.now


class Engine:
    """Ends requests in the order that a test says, one a poll; by default as they came.

    Args:
        order: Samples in the order in which they end; those not named never do.
    """

    def __init__(self, world: World, order: Sequence[str] | None = None, slots: int = 4) -> None:
        self.num_slots = slots
        self.requests: dict[str, GenerateRequest] = {}
        self.most = 0
        self.version = 0
        self._world = world
        self._order = None if order is None else deque(order)
        self._aborted: list[str] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self.requests[request.sample] = request
            self._world.log.append(f"submit {request.sample}")
        self.most = max(self.most, len(self.requests))

    def abort(self, samples: Sequence[SampleId]) -> None:
        self._aborted += [sample for sample in samples if sample in self.requests]

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        if self._aborted:
            return [self._end(self._aborted.pop(0), FinishReason.ABORT)]
        waiting = deque(self.requests) if self._order is None else self._order
        if not waiting or waiting[0] not in self.requests:
            self._world.now += timeout_s
            return []
        return [self._end(waiting.popleft(), FinishReason.STOP)]

    def _end(self, sample: str, reason: FinishReason) -> Finished:
        request = self.requests.pop(sample)
        self._world.log.append(f"{reason} {sample}")
        member = int(sample.rpartition("/")[2])
        tokens = [10 + member] * (member + 1) + [EOS] * (reason is FinishReason.STOP)
        return Finished(
            sample=request.sample,
            attempt=request.attempt,
            reason=reason,
            tokens=np.array(tokens, np.int64),
            logprobs=np.full(len(tokens), -0.5, np.float32),
            versions=((self.version, len(tokens)),),
        )


class Scoring:
    """Scores at the next poll, by a rule; the rule may give a failure's message, or nothing yet."""

    def __init__(self, world: World, rule: Callable[[ScoreRequest], float | str | None]) -> None:
        self.requests: dict[str, ScoreRequest] = {}
        self._world = world
        self._rule = rule
        self._waiting: list[ScoreRequest] = []

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        for request in requests:
            self.requests[request.sample] = request
            self._world.log.append(f"score {request.sample}")
        self._waiting += requests

    def wait(self, timeout_s: float) -> bool:
        self._world.now += timeout_s
        return bool(self._waiting)

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        answers = [(request, self._rule(request)) for request in self._waiting]
        self._waiting = [request for request, answer in answers if answer is None]
        done: list[ScoreResult | ScoreFailure] = []
        for request, answer in answers:
            if isinstance(answer, str):
                done.append(
                    ScoreFailure(sample=request.sample, kind=FailureKind.RAISED, message=answer)
                )
            elif answer is not None:
                done.append(
                    ScoreResult(sample=request.sample, score=answer, terms={"term": answer})
                )
            if answer is not None:
                self._world.log.append(f"scored {request.sample}")
        return done


class Words:
    """A tokenizer: tokens as numbers."""

    def without_end(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:-1] if tokens[-1] == EOS else tokens

    def decode_many(self, responses: Sequence[np.ndarray]) -> list[str]:
        return [" ".join(map(str, tokens.tolist())) for tokens in responses]


def prompts(number: int, first: int = 0) -> list[PromptItem]:
    items = []
    for index in range(first, first + number):
        row = Row(
            index=index,
            prompt=f"prompt {index}",
            answer=f"answer {index}",
            solution="",
            fields={"index": index},
            where=f"rows:{index + 1}",
        )
        items.append(
            PromptItem(
                epoch=0,
                index=index,
                group=group_id(0, index),
                row=row,
                prompt_ids=np.array([index], np.int64),
            )
        )
    return items


def by_member(request: ScoreRequest) -> float:
    return float(request.sample.rpartition("/")[2])


def pairs_of_samples(**settings: Any) -> RolloutScheduler:
    return RolloutScheduler(SchedulerSettings(group_size=2, **settings), validate=True)


def driver_of(
    world: World,
    engine: Engine,
    rule: Callable[[ScoreRequest], float | str | None] = by_member,
    **changes: Any,
) -> RolloutDriver:
    values: dict[str, Any] = {
        "scheduler": pairs_of_samples(judges_groups=bool(changes.get("judge"))),
        "engines": {EngineId("actor[0]"): engine},
        "scorers": {VERIFIER: Scoring(world, rule)},
        "tokenizer": Words(),
        "sampling": SAMPLING,
        "group_size": 2,
        "seed_of": lambda sample: 1000 + int(sample.rpartition("/")[2]),
        "judge": None,
        "failures": FailureBudget(0),
        "reported": VERIFIER,
        "beat": lambda: world.log.append("beat"),
        "stop": lambda: False,
        "stall_timeout_s": 5.0,
        "clock": world.clock,
    }
    return RolloutDriver(**{**values, **changes})


def test_a_batch_comes_back_in_offer_order_whatever_the_order_of_ends():
    world = World()
    engine = Engine(world, ["0/1/1", "0/0/1", "0/1/0", "0/0/0"])
    driver = driver_of(world, engine)
    driver.offer(prompts(2))
    collected = driver.collect(1, 2)
    assert [group for group, _ in collected.groups] == ["0/0", "0/1"]
    for group, members in collected.groups:
        assert [sample for sample, _ in members] == [f"{group}/0", f"{group}/1"]
        assert [payload.score for _, payload in members] == [0.0, 1.0]
        assert [len(payload.tokens) for _, payload in members] == [2, 3]
        assert [payload.terms for _, payload in members] == [{"term": 0.0}, {"term": 1.0}]
    assert len(driver.store) == 0
    assert (collected.filtered, collected.dropped) == ([], [])


def test_a_finished_sample_is_scored_while_others_still_generate():
    world = World()
    driver = driver_of(world, Engine(world))
    driver.offer(prompts(2))
    driver.collect(1, 2)
    events = [event for event in world.log if event != "beat"]
    first_scored = events.index("scored 0/0/0")
    assert first_scored < events.index("stop 0/0/1")
    # The first group is wholly scored before the last sample of the second has ended.
    assert events.index("scored 0/0/1") < events.index("stop 0/1/1")


def test_requests_carry_the_sample_its_seed_and_its_group():
    world = World()
    engine = Engine(world)
    driver = driver_of(world, engine)
    driver.offer(prompts(1))
    request = engine.requests["0/0/1"]
    assert (request.seed, request.shares_prompt, request.attempt) == (1001, "0/0", 0)
    assert request.sampling is SAMPLING
    assert request.prompt.tolist() == [0]
    assert request.response.tolist() == []


def test_scorers_get_the_text_without_the_end_token_and_the_row():
    world = World()
    driver = driver_of(world, Engine(world))
    driver.offer(prompts(1, first=7))
    collected = driver.collect(1, 1)
    scoring = driver._scorers[VERIFIER]
    assert isinstance(scoring, Scoring)
    request = scoring.requests["0/7/1"]
    assert request.response == "11 11"  # two tokens, then the end of text
    assert request.num_tokens == 3
    assert (request.prompt, request.answer) == ("prompt 7", "answer 7")
    assert request.row == {"index": 7}
    assert request.finish is FinishReason.STOP
    assert collected.groups[0][1][1][1].text == "11 11"


def test_an_engine_never_holds_more_than_twice_its_slots():
    world = World()
    engine = Engine(world, slots=2)
    driver = driver_of(world, engine)
    driver.offer(prompts(8))
    collected = driver.collect(1, 8)
    assert len(collected.groups) == 8
    assert engine.most == 4


def test_filtered_groups_are_judged_at_once_and_told_apart():
    world = World()

    def judge(groups: Sequence[GroupRows]) -> list[str | None]:
        scores = [{payload.score for _, payload in members} for _, members in groups]
        return ["too_even" if len(of_group) == 1 else None for of_group in scores]

    def rule(request: ScoreRequest) -> float:
        return 1.0 if request.sample.startswith("0/1/") else by_member(request)

    driver = driver_of(world, Engine(world), rule, judge=judge)
    driver.offer(prompts(3))
    collected = driver.collect(1, 3)
    assert [group for group, _ in collected.groups] == ["0/0", "0/2"]
    assert [(sample, reason) for sample, _, reason in collected.filtered] == [
        ("0/1/0", "too_even"),
        ("0/1/1", "too_even"),
    ]
    assert collected.num_filtered_groups == 1
    assert len(driver.store) == 0


def test_a_failed_reward_past_the_budget_names_the_sample():
    world = World()

    def rule(request: ScoreRequest) -> float | str:
        return "raised KeyError: 'x'" if request.sample == "0/1/0" else 1.0

    driver = driver_of(world, Engine(world), rule)
    driver.offer(prompts(2))
    with pytest.raises(RewardError, match=r"sample 0/1/0: .* raised KeyError: 'x'") as caught:
        driver.collect(1, 2)
    assert "'prompt 1'" in str(caught.value)
    assert "'10'" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_failed_rewards_within_the_budget_drop_their_group_and_are_counted():
    world = World()

    def rule(request: ScoreRequest) -> float | str:
        return "raised ValueError" if request.sample in ("0/0/1", "0/2/0") else 1.0

    failures = FailureBudget(2)
    driver = driver_of(world, Engine(world), rule, failures=failures)
    driver.offer(prompts(3))
    collected = driver.collect(1, 3)
    assert [group for group, _ in collected.groups] == ["0/1"]
    reasons = {sample: reason for sample, _, reason in collected.dropped}
    assert reasons == {
        "0/0/0": "incomplete_group",
        "0/0/1": "reward_failed: raised ValueError",
        "0/2/0": "reward_failed: raised ValueError",
        "0/2/1": "incomplete_group",
    }
    assert failures.failed == 2
    assert len(driver.store) == 0
    # The budget is of the run, not of the batch.
    driver.offer(prompts(3, first=3))
    assert driver.collect(2, 3).dropped == []
    assert failures.failed == 2


def test_a_failed_reward_may_have_a_fixed_score_which_keeps_its_group():
    world = World()

    def rule(request: ScoreRequest) -> float | str:
        return "raised ValueError" if request.sample == "0/0/1" else 1.0

    failures = FailureBudget(0, score=-1.0)
    driver = driver_of(world, Engine(world), rule, failures=failures)
    driver.offer(prompts(1))
    collected = driver.collect(1, 1)
    ((group, members),) = collected.groups
    assert group == "0/0"
    assert [(payload.score, payload.failure) for _, payload in members] == [
        (1.0, ""),
        (-1.0, "raised ValueError"),
    ]
    assert (collected.dropped, failures.failed) == ([], 0)


def test_the_first_step_of_a_group_whose_member_failed_does_not_hold_the_engine():
    """The other member still runs when the group is dropped: it is aborted, and its end ignored."""
    world = World()

    def rule(request: ScoreRequest) -> str:
        return "raised ValueError"

    engine = Engine(world, ["0/0/0"])  # the second member would never end by itself
    driver = driver_of(world, engine, rule, failures=FailureBudget(1))
    driver.offer(prompts(1))
    collected = driver.collect(1, 1)
    assert collected.groups == []
    assert sorted(sample for sample, _, _ in collected.dropped) == ["0/0/0", "0/0/1"]
    driver.offer(prompts(1, first=1))
    engine._order = deque(["0/1/0", "0/1/1"])
    driver._scorers[VERIFIER] = Scoring(world, by_member)  # type: ignore[assignment]
    assert [group for group, _ in driver.collect(2, 1).groups] == ["0/1"]
    assert engine.requests == {}


def test_nothing_of_a_dropped_sample_is_left_for_the_next_driver():
    """An evaluation shares engine and scorers, and its samples may have the same ids."""
    world = World()
    num_slow = 0

    def rule(request: ScoreRequest) -> float | str | None:
        nonlocal num_slow
        if "score 0/0/1" not in world.log:
            return None  # so that both are with the scorer when the first one fails
        if request.sample == "0/0/0":
            return "raised ValueError"
        num_slow += 1
        return 1.0 if num_slow > 3 else None

    driver = driver_of(world, Engine(world), rule, failures=FailureBudget(1))
    driver.offer(prompts(1))
    collected = driver.collect(1, 1)
    assert sorted(sample for sample, _, _ in collected.dropped) == ["0/0/0", "0/0/1"]
    assert world.log.count("scored 0/0/1") == 1
    scoring = driver._scorers[VERIFIER]
    assert isinstance(scoring, Scoring)
    assert scoring.poll() == []


@pytest.mark.parametrize("later", ["0/0/0", "0/0/1"])
def test_the_state_does_not_say_which_scores_came_together_with_a_failure(later: str):
    """One member fails and the other is scored: in the same poll, or in two, in either order."""

    def state_when(slow: str) -> dict[str, Any]:
        world = World()

        def rule(request: ScoreRequest) -> float | str | None:
            ended = {"score 0/0/0", "score 0/0/1"} <= set(world.log)
            if not ended or (request.sample == slow and world.now < 1.0):
                return None
            return "raised ValueError" if request.sample == "0/0/0" else 1.0

        driver = driver_of(world, Engine(world), rule, failures=FailureBudget(1))
        driver.offer(prompts(1))
        driver.collect(1, 1)
        state = driver.scheduler.to_json()
        return {key: value for key, value in state.items() if key not in ("timers", "engines")}

    together, apart = state_when(""), state_when(later)
    assert together.pop("last_event_id") <= apart.pop("last_event_id")
    assert together == apart


def test_an_aborted_sample_has_left_the_engine_when_its_batch_is_delivered():
    world = World()
    engine = Engine(world, ["0/0/0"])  # the second member would never end by itself
    driver = driver_of(world, engine, lambda _: "raised ValueError", failures=FailureBudget(1))
    driver.offer(prompts(1))
    driver.collect(1, 1)
    assert engine.requests == {}
    assert engine.poll(0.0) == []


def test_a_sample_that_never_ends_is_named_when_the_wait_is_over():
    world = World()
    driver = driver_of(world, Engine(world, ["0/0/0", "0/0/1", "0/1/1"]))
    driver.offer(prompts(2))
    with pytest.raises(SchedulerError, match="nothing moved for 5 s") as caught:
        driver.collect(1, 2)
    assert "0/1/0" in str(caught.value)
    assert "actor[0]" in str(caught.value)
    assert caught.value.exit_code == 1
    assert 5.0 < world.now < 7.0  # the injected clock; real time does not pass


def test_scorers_that_never_answer_are_named_when_the_wait_is_over():
    world = World()
    driver = driver_of(
        world, Engine(world), lambda request: None if request.sample == "0/0/1" else 1.0
    )
    driver.offer(prompts(1))
    with pytest.raises(SchedulerError) as caught:
        driver.collect(1, 1)
    assert "0/0/1" in str(caught.value)
    assert "scor" in str(caught.value)


def test_a_move_puts_the_end_of_the_wait_off():
    world = World()
    engine = Engine(world, [])
    driver = driver_of(world, engine)
    driver.offer(prompts(1))
    polls = 0
    poll = engine.poll

    def slow(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        nonlocal polls
        polls += 1
        world.now += 4.0  # below the limit of 5, each time
        if polls < 5:
            sample = SampleId("0/0/0")
            return [Progress(sample=sample, attempt=0, num_tokens=polls)]
        engine._order = deque(list(engine.requests))
        return poll(timeout_s)

    engine.poll = slow  # type: ignore[method-assign]
    assert len(driver.collect(1, 1).groups) == 1
    assert world.now > 20.0


def test_stop_ends_a_collection_between_two_polls():
    world = World()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    engine = Engine(world)
    driver = driver_of(world, engine, stop=stop)
    driver.offer(prompts(2))
    with pytest.raises(KeyboardInterrupt):
        driver.collect(1, 2)
    assert sum(event.startswith("stop") for event in world.log) == 2
    assert len(engine.requests) == 2


def test_failed_rewards_of_a_rollout_that_is_given_up_are_not_counted():
    """After a resume the rollout is made anew, and the same rewards fail again."""
    world = World()
    failures = FailureBudget(2)
    driver = driver_of(
        world,
        Engine(world),
        lambda _: "raised ValueError",
        failures=failures,
        stop=lambda: failures.failed == 1,
    )
    driver.offer(prompts(2))
    with pytest.raises(KeyboardInterrupt):
        driver.collect(1, 2)
    assert "scored 0/0/0" in world.log
    assert failures.failed == 0


def test_every_move_beats_for_the_watchdog():
    world = World()
    driver = driver_of(world, Engine(world))
    driver.offer(prompts(1))
    driver.collect(1, 1)
    assert world.log.count("beat") >= 2


def test_two_batches_in_a_row_are_independent():
    world = World()
    engine = Engine(world)
    driver = driver_of(world, engine)
    for batch in (1, 2):
        driver.offer(prompts(2, first=2 * batch))
        collected = driver.collect(batch, 2)
        assert [group for group, _ in collected.groups] == [
            f"0/{2 * batch}",
            f"0/{2 * batch + 1}",
        ]
        assert collected.version == batch - 1
        # The clock moves only while scorers are waited for.
        assert (collected.seconds.dispatch, collected.seconds.collect) == (0.0, 0.0)
        driver.publish(batch)
        engine.version = batch
    assert driver.scheduler.version == 2


def test_samples_of_older_weights_than_allowed_are_dropped_not_delivered():
    world = World()
    driver = driver_of(world, Engine(world))  # an engine that goes on serving version 0
    driver.publish(1)
    driver.offer(prompts(1))
    collected = driver.collect(1, 1)
    assert collected.groups == []
    assert {reason for _, _, reason in collected.dropped} >= {"aged"}
