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

`Watchdog` stops a run in which nothing progresses any more, and reports who waits for whom. Every
wait in the runtime has a deadline of its own; the watchdog is for what those miss: events that end
the waits without any progress, or a call that never returns.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, TypeVar

from flowrl.errors import SchedulerError

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


class Watchdog:
    """A thread that expects a `beat` at least every `timeout_s` seconds while its block runs.

        with Watchdog(300.0, describe=scheduler.waiting) as watchdog:
            while not done:
                ...
                watchdog.beat()

    Without one it writes the reason to standard error and interrupts the main thread as Ctrl-C
    does, with a real signal, so that a blocking call returns. The block then raises
    `SchedulerError` in the place of that KeyboardInterrupt. A main thread that is still in the
    block after `grace_s` more seconds hangs in a call that ignores signals; then the stacks of all
    threads are written to standard error and the process ends with exit code 1.

    A program with its own SIGINT handler asks `stalled` there, and raises it.

    Args:
        describe: Returns who waits for whom, as text; called in the watchdog's thread, must not
            block.
        clock: Seconds that only grow.
        interrupt: Breaks the main thread's wait.
        abandon: Ends a process whose main thread cannot be interrupted.
    """

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[], str],
        *,
        grace_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        interrupt: Callable[[], None] | None = None,
        abandon: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._describe = describe
        self._clock = clock
        self._interrupt = interrupt or _interrupt_main
        self._abandon = abandon or _abandon_process
        self._last = clock()
        self._stalled: SchedulerError | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stalled(self) -> SchedulerError | None:
        """Why the run was interrupted; None while all is well."""
        return self._stalled

    def beat(self) -> None:
        """Reports progress."""
        self._last = self._clock()

    def check(self) -> float:
        """Looks once: interrupts or abandons where it is time; what the thread does in a loop.

        Returns:
            Seconds until the next look.
        """
        idle_s = self._clock() - self._last
        if self._stalled is None:
            if idle_s < self._timeout_s:
                return self._timeout_s - idle_s
            self._stalled = self._explain()
            print(f"flowrl: {self._stalled}", file=sys.stderr, flush=True)
            self._last = self._clock()
            self._interrupt()
            return self._grace_s
        if idle_s < self._grace_s:
            return self._grace_s - idle_s
        self._abandon()
        return self._grace_s

    def _explain(self) -> SchedulerError:
        try:
            waiting = self._describe()
        except Exception as error:  # the report must come out even when describing fails
            waiting = f"who waits for whom is unknown: {error!r}"
        return SchedulerError(
            f"nothing moved for {self._timeout_s:g} s, the run stops",
            found=waiting,
            hint="resume it from its last checkpoint; "
            "set runtime.stall_timeout_s higher where a step may take longer",
        )

    def _watch(self) -> None:
        wait_s = self._timeout_s
        while not self._ended.wait(wait_s):
            wait_s = self.check()

    def __enter__(self) -> Watchdog:
        self.beat()
        self._thread = threading.Thread(target=self._watch, name="flowrl-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._ended.set()
            if self._thread is not None:
                # A daemon: should `describe` hang in it, the block ends all the same.
                self._thread.join(self._grace_s)
        except KeyboardInterrupt:
            # The thread gave up on the very moment that the block ended.
            if self._stalled is None:
                raise
            kind = KeyboardInterrupt
        if self._stalled is not None and (kind is None or issubclass(kind, KeyboardInterrupt)):
            raise self._stalled from None


def _interrupt_main() -> None:
    # A signal, not _thread.interrupt_main: that one leaves a main thread blocked in a lock asleep.
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def _abandon_process() -> None:
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
