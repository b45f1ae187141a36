"""The thread that rollouts run in: calls, rounds, errors, and standing still."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from flowrl.errors import SchedulerError
from flowrl.runtime.driver.threads import RolloutThread

DEADLINE_S = 30.0


class Counting:
    """Counts its rounds; a test can have it raise."""

    def __init__(self) -> None:
        self.rounds = 0
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def round(self, wake: int) -> int:
        self.thread = threading.current_thread()
        if self.error is not None:
            raise self.error
        self.rounds += 1
        select.select([wake], [], [], 0.01)
        return 1


@pytest.fixture
def thread() -> Iterator[RolloutThread]:
    opened = RolloutThread()
    yield opened
    opened.close()


def never() -> bool:
    return False


def test_calls_are_made_in_the_thread_and_give_their_result(thread: RolloutThread):
    names = [thread.call(lambda: threading.current_thread().name, DEADLINE_S) for _ in range(3)]
    assert names == ["flowrl-rollout"] * 3
    nested = thread.call(lambda: thread.call(lambda: 5, DEADLINE_S), DEADLINE_S)
    assert nested == 5


def test_an_error_of_a_call_is_raised_where_it_was_called(thread: RolloutThread):
    def broken() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.call(broken, DEADLINE_S)
    assert thread.call(lambda: 1, DEADLINE_S) == 1


def test_a_thread_that_does_not_come_to_a_call_is_told_of(thread: RolloutThread):
    held = threading.Event()
    other = threading.Thread(target=lambda: thread.call(held.wait, DEADLINE_S))
    other.start()
    with pytest.raises(SchedulerError, match="has not answered"):
        thread.call(lambda: 1, 0.05)
    held.set()
    other.join(DEADLINE_S)


def test_rounds_go_on_until_nothing_is_served(thread: RolloutThread):
    served = Counting()
    thread.call(lambda: thread.serve(served), DEADLINE_S)
    assert thread.wait_until(lambda: served.rounds >= 3, never)
    thread.call(lambda: thread.serve(None), DEADLINE_S)
    before = served.rounds
    thread.call(lambda: None, DEADLINE_S)
    assert served.rounds == before
    assert served.thread is not threading.current_thread()


def test_a_resting_thread_answers_calls_and_makes_no_rounds(thread: RolloutThread):
    served = Counting()
    thread.call(lambda: thread.serve(served), DEADLINE_S)
    assert thread.wait_until(lambda: served.rounds > 0, never)
    thread.call(thread.pause, DEADLINE_S)
    before = served.rounds
    for _ in range(5):
        thread.call(lambda: None, DEADLINE_S)
    assert served.rounds == before
    thread.call(thread.resume, DEADLINE_S)
    assert thread.wait_until(lambda: served.rounds > before, never)


def test_an_error_of_a_round_is_raised_by_whoever_waits_and_calls_are_still_answered(
    thread: RolloutThread,
):
    served = Counting()
    thread.call(lambda: thread.serve(served), DEADLINE_S)
    served.error = SchedulerError("nothing moves")
    with pytest.raises(SchedulerError, match="nothing moves"):
        thread.wait_until(never, never)
    assert isinstance(thread.failure, SchedulerError)
    assert thread.call(lambda: 7, DEADLINE_S) == 7
    # What is served next begins anew.
    thread.call(lambda: thread.serve(Counting()), DEADLINE_S)
    assert thread.failure is None


def test_what_is_posted_is_done_before_later_calls_and_what_it_raises_ends_the_rounds(
    thread: RolloutThread,
):
    done: list[int] = []
    for number in range(3):
        thread.post(lambda number=number: done.append(number))  # type: ignore[misc]
    assert thread.call(lambda: list(done), DEADLINE_S) == [0, 1, 2]
    served = Counting()
    thread.call(lambda: thread.serve(served), DEADLINE_S)
    thread.post(lambda: done[9])
    with pytest.raises(IndexError):
        thread.wait_until(never, never)
    before = served.rounds
    thread.call(lambda: None, DEADLINE_S)
    assert served.rounds == before


def test_a_wait_ends_when_it_is_asked_to_stop(thread: RolloutThread):
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert not thread.wait_until(never, stop)


def test_a_closed_thread_has_ended_and_closed_what_it_had_open():
    thread = RolloutThread()
    thread.call(lambda: thread.serve(Counting()), DEADLINE_S)
    descriptor = thread._wake_read
    thread.close()
    thread.close()
    assert not thread._thread.is_alive()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
