"""Stops a run in which nothing progresses any more, and reports who waits for whom.

Every wait in the runtime has a deadline of its own; the watchdog is for what those miss: events
that end the waits without any progress, or a call that never returns.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from flowrl.errors import SchedulerError

__all__ = ["Watchdog"]


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
