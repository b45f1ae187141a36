"""The pool of an environment: answers, failures, limits, hangs, ends and blocked threads."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flowrl.backend.environment import (
    Action,
    Environment,
    EnvironmentContext,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.environments.loop import _Watched
from flowrl.runtime.environments.pool import Answered, EnvironmentPool, EpisodeLost
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.runtime.scoring.pool import FailureKind
from tests.runtime.environment_pools import (
    DEADLINE_S,
    LIMIT_S,
    Scripted,
    action,
    answers,
    begun,
    failure,
    pool_of,
    start,
    stepped,
)
from tests.runtime.shifted_clock import ShiftedClock

HERE = Path(__file__).name


def test_an_episode_is_reset_stepped_and_closed_in_order():
    game = Scripted()
    with pool_of(game) as pool:
        pool.start(start())
        assert pool.wait(DEADLINE_S)
        assert pool.num_pending == 1  # it counts until it is handed out
        assert answers(pool) == [
            Answered(sample=SampleId("0/0/0"), answer=Observation(content="go"))
        ]
        assert stepped(pool) == Outcome(observation="a", reward=0.5)
        assert pool.num_pending == 0
        pool.end(SampleId("0/0/0"))
    assert game.log == ["reset 0/0/0", "step 0/0/0 0", "close 0/0/0", "close"]


def test_what_a_step_raises_is_told_with_the_turn_and_the_users_line():
    async def step(sample: SampleId, action: Action) -> object:
        return {}["missing"]

    with pool_of(Scripted(step)) as pool:
        failed = failure(pool)
    assert failed.kind is FailureKind.RAISED
    assert failed.turn == 0
    assert failed.message.startswith("raised KeyError: 'missing' in turn 0 (")
    assert f"{HERE}:" in failed.frames[-1]
    assert failed.frames[-1].endswith(" in step")


def test_what_a_reset_raises_is_told_too():
    async def reset(episode: EpisodeStart) -> object:
        raise SystemExit(3)

    with pool_of(Scripted(reset=reset)) as pool:
        pool.start(start())
        (answered,) = answers(pool)
    assert isinstance(answered.answer, EpisodeFailure)
    assert answered.answer.turn is None
    assert answered.answer.message.startswith("raised SystemExit: 3 in reset")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "gave no Outcome but None in turn 0"),
        (Outcome(reward=float("nan")), "gave reward=nan, which is no number"),
        (Outcome(reward=1e39), "gave reward=1e[+]39, which is no number"),
        (Outcome(reward="1"), "gave reward='1', which is no number"),  # type: ignore[arg-type]
        (Outcome(done="no"), "gave done='no', which is no truth value"),  # type: ignore[arg-type]
        (Outcome(observation=None), "gave the observation None"),  # type: ignore[arg-type]
        (Outcome(observation=np.array([0.5])), "which is no text and no array of ids"),
        (Outcome(observation=[5, 6]), r"array of ids; token ids are np.array\(\[...\]\)"),  # type: ignore[arg-type]
        (Outcome(state=[1]), "gave state=\\[1\\], which is no text"),  # type: ignore[arg-type]
        (Outcome(metrics={"a": float("inf")}), "gave metric a=inf, which is no number"),
        (Outcome(metrics={"score": 1.0}), "a metric called 'score', which is a name of flowrl"),
    ],
)
def test_what_cannot_be_used_is_a_failure_and_never_a_reward_of_0(value: object, message: str):
    async def step(sample: SampleId, action: Action) -> object:
        return value

    with pool_of(Scripted(step)) as pool:
        failed = failure(pool)
    assert failed.kind is FailureKind.INVALID
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.message)


def test_numbers_of_numpy_come_out_as_pythons_own():
    async def step(sample: SampleId, action: Action) -> object:
        return Outcome(
            reward=np.float32(0.25),  # type: ignore[arg-type]
            done=np.bool_(True),  # type: ignore[arg-type]
            state=np.int32(7),  # type: ignore[arg-type]
            metrics={"a": np.int64(3)},  # type: ignore[dict-item]
        )

    with pool_of(Scripted(step)) as pool:
        begun(pool, "0/0/0")
        outcome = stepped(pool)
    assert outcome == Outcome(reward=0.25, done=True, state=7, metrics={"a": 3.0})
    assert isinstance(outcome, Outcome)
    assert (type(outcome.done), type(outcome.state)) == (bool, int)


def test_a_step_that_never_ends_is_cancelled_and_told_with_the_line_it_waits_at():
    cancelled = threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Outcome()

    with pool_of(Scripted(step), timeout_s=0.05) as pool:
        failed = failure(pool)
        assert cancelled.wait(DEADLINE_S)
    assert failed.kind is FailureKind.TIMEOUT
    assert failed.message.startswith("took longer than 0.05 s in turn 0 (")
    assert failed.frames[-1].endswith(" in step")
    assert f"{HERE}:" in failed.frames[-1]


def test_a_step_that_refuses_to_be_cancelled_holds_nobody_up(caplog: pytest.LogCaptureFixture):
    async def step(sample: SampleId, action: Action) -> object:
        while sample == "0/0/0":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        return Outcome(done=True)

    with pool_of(Scripted(step), timeout_s=0.05) as pool:
        assert failure(pool).kind is FailureKind.TIMEOUT
        pool.end(SampleId("0/0/0"))
        begun(pool, "0/1/0")
        assert stepped(pool, "0/1/0") == Outcome(done=True)
    del pool
    gc.collect()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["1 task of the environment did not end when cancelled"]


def test_a_call_that_is_left_behind_may_be_collected_after_what_it_waits_for():
    async def wait() -> Outcome:
        await asyncio.sleep(0)
        return Outcome()

    waiting = wait()
    watched = _Watched(waiting, SimpleNamespace(), SimpleNamespace()).__await__()  # type: ignore[arg-type]
    next(watched)
    waiting.close()  # as the collector does, in any order
    watched.close()
    assert inspect.getgeneratorstate(watched) == inspect.GEN_CLOSED


def test_a_cancellation_of_its_own_is_a_failure_of_the_step():
    async def step(sample: SampleId, action: Action) -> object:
        raise asyncio.CancelledError

    with pool_of(Scripted(step)) as pool:
        failed = failure(pool)
    assert failed.message.startswith("raised CancelledError: it cancelled itself in turn 0")


def test_episodes_are_served_at_the_same_time():
    met = asyncio.Barrier(3)

    async def step(sample: SampleId, action: Action) -> object:
        await met.wait()  # nobody passes before all three are here
        return Outcome()

    samples = [f"0/{i}/0" for i in range(3)]
    with pool_of(Scripted(step)) as pool:
        begun(pool, *samples)
        for sample in samples:
            pool.submit(SampleId(sample), action())
        assert pool.settle(DEADLINE_S)
        assert {answered.sample for answered in pool.poll()} == set(samples)


def test_no_more_calls_than_allowed_are_under_way_at_once():
    under_way: set[str] = set()
    most: list[int] = []

    async def step(sample: SampleId, action: Action) -> object:
        under_way.add(sample)
        most.append(len(under_way))
        await asyncio.sleep(0)
        under_way.remove(sample)
        return Outcome()

    samples = [f"0/{i}/0" for i in range(9)]
    with pool_of(Scripted(step), room=2) as pool:
        begun(pool, *samples)
        for sample in samples:
            pool.submit(SampleId(sample), action())
        answers(pool, 9)
    assert max(most) == 2


def test_nothing_comes_of_an_episode_that_was_ended():
    closed = threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        await asyncio.Event().wait()
        return Outcome()

    async def close_episode(sample: SampleId) -> None:
        closed.set()

    with pool_of(Scripted(step, close_episode=close_episode)) as pool:
        begun(pool, "0/0/0")
        pool.submit(SampleId("0/0/0"), action())
        assert pool.num_pending == 1
        pool.end(SampleId("0/0/0"))
        assert pool.num_pending == 0
        pool.flush()
        assert closed.wait(DEADLINE_S)
        assert pool.poll() == []
        pool.end(SampleId("0/0/0"))  # once more changes nothing


def test_an_answer_that_is_there_already_is_dropped_with_its_episode():
    with pool_of(Scripted()) as pool:
        pool.start(start())
        assert pool.settle(DEADLINE_S)
        pool.end(SampleId("0/0/0"))
        assert pool.poll() == []
        assert not pool.wait(0.0)


@pytest.mark.parametrize("again", [False, True], ids=["ended", "begun anew"])
def test_an_episode_may_end_in_the_moment_in_which_its_answer_is_there(
    again: bool, caplog: pytest.LogCaptureFixture
):
    """The loop hears of the end when the step is done, and before it has looked at the answer."""
    closed = threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        # What is sent from the loop's own thread comes right before what follows from the return.
        pool.end(sample)
        if again:
            pool.start(start(sample))
        pool.flush()
        return Outcome(done=True)

    async def close_episode(sample: SampleId) -> None:
        closed.set()

    game = Scripted(step, close_episode=close_episode)
    with pool_of(game, room=1) as pool:
        begun(pool, "0/0/0")
        pool.submit(SampleId("0/0/0"), action())
        pool.flush()
        assert closed.wait(DEADLINE_S)
        if again:
            assert [one.answer for one in answers(pool)] == [Observation(content="go")]
        # Its room is free again.
        begun(pool, "0/1/0")
        assert pool.num_pending == 0
    assert [record.getMessage() for record in caplog.records] == []


def test_what_waits_for_room_never_begins_when_the_environment_is_closed(
    caplog: pytest.LogCaptureFixture,
):
    busy = threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        busy.set()
        await asyncio.Event().wait()
        return Outcome()

    game = Scripted(step)
    with pool_of(game, room=1) as pool:
        begun(pool, "0/0/0", "0/1/0")
        pool.submit(SampleId("0/0/0"), action())
        pool.submit(SampleId("0/1/0"), action())
        pool.flush()
        assert busy.wait(DEADLINE_S)
    assert game.log[2:] == ["step 0/0/0 0", "close"]
    assert caplog.records == []


def test_episodes_that_are_ended_right_before_the_end_are_closed_first():
    async def close_episode(sample: SampleId) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        game.log.append("closed")

    game = Scripted(close_episode=close_episode)
    with pool_of(game) as pool:
        begun(pool, "0/0/0")
        pool.end(SampleId("0/0/0"))
    assert game.log == ["reset 0/0/0", "close 0/0/0", "closed", "close"]


def test_an_episode_begins_anew_only_when_the_one_before_is_closed():
    release: list[asyncio.Event] = []
    closing = threading.Event()

    async def close_episode(sample: SampleId) -> None:
        release.append(asyncio.Event())
        closing.set()
        await release[0].wait()
        game.log.append("closed")

    async def step(sample: SampleId, action: Action) -> object:
        release[0].set()  # the step of another episode
        return Outcome()

    game = Scripted(step, close_episode=close_episode)
    with pool_of(game) as pool:
        begun(pool, "0/0/0", "0/1/0")
        pool.end(SampleId("0/0/0"))
        pool.start(start("0/0/0"))
        pool.flush()
        assert closing.wait(DEADLINE_S)
        pool.submit(SampleId("0/1/0"), action())
        assert {answered.sample for answered in answers(pool, 2)} == {"0/0/0", "0/1/0"}
    assert game.log[2:6] == ["close 0/0/0", "step 0/1/0 0", "closed", "reset 0/0/0"]


def test_a_call_that_holds_the_thread_fails_and_the_others_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = ShiftedClock(monkeypatch)
    release = threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        if sample == "0/0/0":
            clock.ahead_s += LIMIT_S + 1
            release.wait()  # blocks the loop
        return Outcome()

    with pool_of(Scripted(step), Scripted(), timeout_s=LIMIT_S, grace_s=0.0) as pool:
        begun(pool, "0/0/0", "0/1/0", "0/2/0")
        pool.submit(SampleId("0/0/0"), action())
        pool.submit(SampleId("0/1/0"), action())
        found = {answered.sample: answered.answer for answered in answers(pool, 2)}
        release.set()
        failed = found[SampleId("0/0/0")]
        assert isinstance(failed, EpisodeFailure)
        assert failed.kind is FailureKind.TIMEOUT
        assert (
            "took longer than 20 s and blocked the environment's thread in turn 0" in failed.message
        )
        assert any(frame.endswith(" in step") for frame in failed.frames)
        assert found[SampleId("0/1/0")] == EpisodeLost(sample=SampleId("0/1/0"))
        # An episode that was idle has lost its environment all the same.
        assert stepped(pool, "0/2/0") == EpisodeLost(sample=SampleId("0/2/0"))
        pool.end(SampleId("0/1/0"))
        begun(pool, "0/1/0")
        assert stepped(pool, "0/1/0") == Outcome(observation="a", reward=0.5)


def test_a_thread_that_seems_blocked_is_given_up_after_the_grace_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = ShiftedClock(monkeypatch)
    inside, release = threading.Event(), threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        inside.set()
        release.wait()
        return Outcome()

    with pool_of(Scripted(step), Scripted(), timeout_s=LIMIT_S, grace_s=LIMIT_S) as pool:
        begun(pool, "0/0/0")
        pool.submit(SampleId("0/0/0"), action())
        pool.flush()
        assert inside.wait(DEADLINE_S)
        assert pool.poll() == []
        clock.ahead_s += LIMIT_S + 1
        assert pool.poll() == []  # suspected from now on
        assert pool.poll() == []
        clock.ahead_s += LIMIT_S + 1
        (answered,) = pool.poll()
        release.set()
    assert isinstance(answered.answer, EpisodeFailure)
    assert answered.answer.kind is FailureKind.TIMEOUT


def test_calls_that_were_held_up_for_a_while_but_are_done_count():
    """The first holds the thread past the limit of all three, and then they are done."""

    async def step(sample: SampleId, action: Action) -> object:
        if sample == "0/0/0":
            threading.Event().wait(0.2)
        return Outcome(done=True)

    samples = [f"0/{i}/0" for i in range(3)]
    with pool_of(Scripted(step), timeout_s=0.1) as pool:
        begun(pool, *samples)
        for sample in samples:
            pool.submit(SampleId(sample), action())
        assert [answered.answer for answered in answers(pool, 3)] == [Outcome(done=True)] * 3


def test_an_environment_that_only_blocks_ends_with_an_error(monkeypatch: pytest.MonkeyPatch):
    clock = ShiftedClock(monkeypatch)
    release = threading.Event()

    async def reset(episode: EpisodeStart) -> object:
        clock.ahead_s += LIMIT_S + 1
        release.wait()
        return Observation()

    blocking = [Scripted(reset=reset) for _ in range(3)]
    with pool_of(*blocking, timeout_s=LIMIT_S, grace_s=0.0) as pool:
        for attempt in range(2):
            pool.start(start(f"0/{attempt}/0"))
            answers(pool)
        pool.start(start("0/2/0"))
        with pytest.raises(WorkerDied, match="blocks its thread again and again") as caught:
            answers(pool)
        release.set()
    assert "3 threads in a row" in str(caught.value)


@pytest.mark.parametrize("dead", [1, 2])
def test_a_replacement_that_dies_before_it_is_ready_is_tried_again_within_the_bounds(
    monkeypatch: pytest.MonkeyPatch, dead: int
):
    clock = ShiftedClock(monkeypatch)
    release = threading.Event()

    async def reset(episode: EpisodeStart) -> object:
        clock.ahead_s += LIMIT_S + 1
        release.wait()
        return Observation()

    def opening(context: EnvironmentContext) -> Environment:
        environment = next(opened)
        if environment is None:
            raise WorkerDied("it died before it was ready")
        return environment

    opened = iter([Scripted(reset=reset), *[None] * dead, Scripted()])
    context = EnvironmentContext(role=RoleName("game"), timeout_s=LIMIT_S)
    with EnvironmentPool(opening, context, grace_s=0.0) as pool:
        pool.start(start("0/0/0"))
        if dead == 2:  # with the first one three in a row
            with pytest.raises(WorkerDied, match="died before it was ready"):
                answers(pool)
        else:
            answers(pool)
            pool.start(start("0/1/0"))
            assert answers(pool)[0].answer == Observation(content="go")
        release.set()


def test_who_waits_for_whom_is_told():
    inside = threading.Event()

    async def step(sample: SampleId, action: Action) -> object:
        inside.set()
        await asyncio.Event().wait()
        return Outcome()

    with pool_of(Scripted(step)) as pool:
        assert pool.describe() == ""
        begun(pool, "0/0/0")
        pool.submit(SampleId("0/0/0"), action(turn=3))
        pool.flush()
        assert inside.wait(DEADLINE_S)
        told = pool.describe()
    assert told.startswith(
        "environment game: 1 calls under way, the oldest, turn 3 of sample 0/0/0"
    )


def test_calls_that_make_no_sense_are_refused():
    with pool_of(Scripted()) as pool:
        with pytest.raises(BackendError, match="waits for no turn"):
            pool.submit(SampleId("0/0/0"), action())
        pool.start(start())
        with pytest.raises(BackendError, match="has begun already"):
            pool.start(start())
        with pytest.raises(BackendError, match="waits for no turn"):
            pool.submit(SampleId("0/0/0"), action())
    with pytest.raises(BackendError, match="is closed"):
        pool.start(start("0/1/0"))
    pool.close()  # once more changes nothing


def test_an_environment_that_cannot_be_made_is_told_with_the_users_line():
    def opening(context: EnvironmentContext) -> Scripted:
        raise ZeroDivisionError("no games today")

    context = EnvironmentContext(role=RoleName("game"))
    with pytest.raises(BackendError, match="cannot be loaded") as caught:
        EnvironmentPool(opening, context)
    assert caught.value.where == "roles.game.environment"
    assert "ZeroDivisionError: no games today" in str(caught.value)
    assert f"{HERE}:" in str(caught.value)


def test_what_goes_wrong_while_closing_is_logged_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
):
    async def close_episode(sample: SampleId) -> None:
        raise OSError("gone")

    with pool_of(Scripted(close_episode=close_episode)) as pool:
        begun(pool, "0/0/0")
        pool.end(SampleId("0/0/0"))
        begun(pool, "0/0/0")
    assert "closing episode 0/0/0 raised OSError: gone" in caplog.text
