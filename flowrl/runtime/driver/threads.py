"""Threads of a run: one runs rollouts while the trainer's thread trains.

    trainer's thread                      rollout thread
    call(act) -------------------------> acts, between two rounds of what it serves
    <------------------ result or error
    post(act) -------------------------> acts too; the caller does not wait
    wait_until(condition) <------------- something changed

The served object belongs to the rollout thread alone; other threads reach it through `call`. An
error in a round ends the rounds and is kept for the next `wait_until`. Calls are still answered, so
that the state can be written to a checkpoint.

The thread lives as long as the run: processes that it starts die with it (Linux kills children by
thread).

`BusyThread` is the load of a driver for measurements (`flowrl profile`).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from flowrl.errors import SchedulerError

__all__ = ["BusyThread", "RolloutThread", "RoundServer"]


T = TypeVar("T")

# How long an idle thread or a waiting one sleeps at most before it looks again.
_IDLE_S = 1.0
_WATCH_S = 0.1


class RoundServer(Protocol):
    """The object that the thread drives."""

    def round(self, wake: int) -> int:
        """Does what there is to do, or waits a little for something; how much moved.

        Args:
            wake: A descriptor that is readable when the wait should end.
        """
        ...


class RolloutThread:
    """See the module; opened at once, `close` ends it.

    thread.call(lambda: thread.serve(driver))
    thread.wait_until(lambda: driver.delivered, stop)
    thread.call(thread.rest)
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Future[Any] | None, Callable[[], Any]]] = deque()
        self._served: RoundServer | None = None
        self._paused = False
        self._closing = False
        self._moved = threading.Condition()
        self.failure: BaseException | None = None
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        # A daemon: a call that never comes back must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="flowrl-rollout", daemon=True)
        self._thread.start()

    # The trainer's side

    def call(self, act: Callable[[], T], timeout_s: float) -> T:
        """Returns the result of `act`, run in the thread between two rounds.

        Raises:
            SchedulerError: the thread does not run it in time.
        """
        if threading.current_thread() is self._thread:
            return act()
        future: Future[T] = Future()
        self._calls.append((future, act))
        self._wake()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise  # from `act` itself
            raise SchedulerError(
                f"the rollout's thread has not answered for {timeout_s:g} s",
                hint="raise runtime.stall_timeout_s if a worker that it waits for is slow",
            ) from None

    def post(self, act: Callable[[], object]) -> None:
        """Has `act` done in the thread, before every later call; what it raises ends the rounds."""
        self._calls.append((None, act))
        self._wake()

    def wait_until(self, done: Callable[[], bool], stop: Callable[[], bool]) -> bool:
        """Waits until `done` returns true; returns False if `stop` returned true first.

        Both are called in the caller's thread, after each progress and several times a second.

        Raises:
            BaseException: the error that ended the rounds.
        """
        with self._moved:
            while not done():
                if self.failure is not None:
                    raise self.failure
                if stop():
                    return False
                self._moved.wait(_WATCH_S)
        return True

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self._closing = True
        self._wake()
        self._thread.join(10.0)
        if not self._thread.is_alive() and self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # it has not read the ones before yet
                os.write(self._wake_write, b"!")

    # In the thread, by `call`

    def serve(self, served: RoundServer | None) -> None:
        """Runs rounds of this from now on; None runs nothing."""
        self._served = served
        self._paused = False
        self.failure = None

    def pause(self) -> None:
        """Runs no rounds until `resume`; calls are answered."""
        self._paused = True

    def resume(self) -> None:
        """Runs rounds again."""
        self._paused = False

    # The thread

    def _run(self) -> None:
        while not self._closing:
            self._answer_calls()
            served = self._served
            if served is None or self._paused or self.failure is not None:
                select.select([self._wake_read], [], [], _IDLE_S)
                continue
            try:
                moved = served.round(self._wake_read)
            except BaseException as error:
                self.failure = error
                moved = 1
            if moved:
                with self._moved:
                    self._moved.notify_all()
        self._answer_calls()

    def _answer_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._calls:
            future, act = self._calls.popleft()
            try:
                result = act()
            except BaseException as error:
                if future is not None:
                    future.set_exception(error)
                else:
                    self.failure = self.failure or error
            else:
                if future is not None:
                    future.set_result(result)


_WORK_S, _PAUSE_S = 0.002, 0.004
_SAMPLES, _ROUND = 20_000, 40


class BusyThread:
    """Works for so many seconds from the beginning of the block, and counts.

    Some milliseconds of work follow some milliseconds of waiting, as in a driver whose engines and
    scorers send messages now and then; and as there, it is work on many small objects.

        with BusyThread(0.5) as busy:
            ...
        busy.rounds

    Attributes:
        rounds: Done so far, each some tens of microseconds of its own time.
        worked_s: Seconds so far, without those of waiting.
    """

    def __init__(self, seconds: float) -> None:
        self.rounds = 0
        self.worked_s = 0.0
        self._seconds = seconds
        self._objects = {f"0/{number}/0": [number, 0] for number in range(_SAMPLES)}
        self._thread = threading.Thread(target=self._run, name="flowrl-busy", daemon=True)

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            began, pause = time.monotonic(), time.thread_time() + _WORK_S
            while time.thread_time() < pause:
                self._work()
            self.worked_s += time.monotonic() - began
            time.sleep(_PAUSE_S)

    def _work(self) -> None:
        objects, first = self._objects, self.rounds * _ROUND
        for number in range(first, first + _ROUND):
            name = f"0/{number % _SAMPLES}/0"
            objects[name] = [number, objects[name][1] + 1]
        self.rounds += 1
