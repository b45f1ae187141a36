"""The environments of a run, for the one thread that drives its rollouts.

    start, submit -> the environment's own thread -> poll
                       |-- raised, hung, gave nothing usable     EpisodeFailure
                       `-- the thread is blocked: it is given up, the call that blocks it fails, and
                           the episodes that lived there are lost; a new environment goes on

Every `start` and every `submit` is answered once, in any order, unless its episode is ended first.
A lost episode is not a failure of its own: it restarts, as after an engine that failed.

Requests are sent, and limits on a blocked thread are enforced, in `poll` and the waits, so after a
submit one of them must be called again and again. No wait is longer than its argument.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from flowrl.backend.environment import Action, Environment, EnvironmentContext, EpisodeStart
from flowrl.errors import BackendError, FlowError, WorkerDied
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.environments.loop import Answer, Call, EnvironmentLoop, Replies, Reply
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.runtime.user_errors import described, library_folders, user_frames

_log = logging.getLogger(__name__)

_MAX_LOST_IN_A_ROW = 3
"""Threads that are blocked one after another without a single answer."""
_LOOK_S = 0.5
"""Seconds between looks at a thread that may be blocked."""
_CLOSE_S = 5.0
"""Seconds that the environment's thread has to end."""

OpenEnvironment: TypeAlias = Callable[[EnvironmentContext], Environment]
"""Makes an environment; a plug-in's `open_environment`."""


class Loop(Protocol):
    """An environment that runs somewhere; see `EnvironmentLoop`."""

    def send(self, orders: Sequence[Call | SampleId]) -> None: ...
    def is_blocked(self, limit_s: float) -> bool: ...
    def blocking(self) -> tuple[Call | None, EpisodeFailure | None]: ...
    def stop(self, timeout_s: float) -> bool: ...


OpenLoop: TypeAlias = Callable[[OpenEnvironment, EnvironmentContext, int, Replies], Loop]
"""Opens an environment by a plug-in, for so many calls at once, whose answers go to replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLost:
    """The episode's environment is gone, by no fault of the episode's."""

    sample: SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a `start` (an observation) or a `submit` (an outcome), or a failure."""

    sample: SampleId
    answer: Answer | EpisodeLost


class EnvironmentPool:
    """An environment that serves a run's episodes; see the module.

    Args:
        opening: Makes the environment, and another one when its thread is blocked.
        context: Arguments of the environment; `timeout_s` is the limit of each call.
        concurrency: Calls under way at once; further ones wait, and their time does not run.
        grace_s: Seconds after which a thread that has been blocked for `timeout_s` is given up.
        open_loop: Opens the environment's loop, by default in this process.

    Raises:
        FlowError: An error of the plug-in about its configuration.

    >>> with EnvironmentPool(plugin.open_environment, context) as pool:   # doctest: +SKIP
    ...     pool.start(EpisodeStart(...))
    ...     while pool.wait(1.0):
    ...         for answered in pool.poll():
    ...             ...
    """

    def __init__(
        self,
        opening: OpenEnvironment,
        context: EnvironmentContext,
        *,
        concurrency: int = 256,
        grace_s: float = 2.0,
        open_loop: OpenLoop | None = None,
    ) -> None:
        self._context = context
        self._grace_s = grace_s
        self._check_interval_s = min(_LOOK_S, max(grace_s / 2, 0.01))
        self._next_ticket = 0
        self._pending: dict[int, Call] = {}
        self._calls: dict[SampleId, int] = {}  # the pending call of each episode that has one
        self._hosts: dict[SampleId, Loop] = {}  # where each episode lives
        self._orders: list[Call | SampleId] = []  # not sent yet
        self._done: list[Answered] = []
        self._num_lost_in_a_row = 0
        self._suspected: float | None = None  # since when the thread seems to be blocked
        self._closed = False
        self._replies: SimpleQueue[list[Reply]] = SimpleQueue()
        self._open_loop = partial(
            open_loop or open_loop_here, opening, context, concurrency, self._replies
        )
        self._loop = self._open_loop()

    @property
    def role(self) -> RoleName:
        """The role of the environment."""
        return self._context.role

    @property
    def num_pending(self) -> int:
        """Calls made and not yet handed out by `poll`."""
        return len(self._pending) + len(self._done)

    def start(self, start: EpisodeStart) -> None:
        """Begins an episode; returns at once."""
        if start.sample in self._hosts:
            raise BackendError(
                "the episode has begun already",
                where=f"sample {start.sample}",
                hint="end the earlier one first",
            )
        self._require_open()
        self._hosts[start.sample] = self._loop
        self._send(start.sample, start)

    def submit(self, sample: SampleId, action: Action) -> None:
        """Hands a turn to an episode that has begun; returns at once."""
        self._require_open()
        if sample not in self._hosts or sample in self._calls:
            raise BackendError(
                "the episode waits for no turn",
                where=f"sample {sample}",
                found="a call under way" if sample in self._hosts else "no such episode",
            )
        if self._hosts[sample] is self._loop:
            self._send(sample, action)
        else:
            self._done.append(Answered(sample=sample, answer=EpisodeLost(sample=sample)))

    def end(self, sample: SampleId) -> None:
        """Ends an episode and what it does; no answer comes any more. Unknown ones are ignored."""
        host = self._hosts.pop(sample, None)
        ticket = self._calls.pop(sample, None)
        if ticket is not None:
            del self._pending[ticket]
        self._done = [answered for answered in self._done if answered.sample != sample]
        if host is self._loop and not self._closed:
            self._orders.append(sample)

    def flush(self) -> None:
        """Sends what was asked for on its way, where nothing is polled or waited for soon."""
        if self._orders:
            orders, self._orders = self._orders, []
            self._loop.send(orders)

    def poll(self) -> list[Answered]:
        """Answers since the last call, in the order in which they came; returns at once.

        Raises:
            WorkerDied: environments block their thread one after another and answer nothing.
            FlowError: the environment cannot be opened again.
        """
        self.flush()
        self._take()
        self._check_blocked()
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        """Waits until `poll` has something to give; false after `timeout_s` seconds without.

        Raises what `poll` raises.
        """
        return self._wait(timeout_s, lambda: bool(self._done))

    def settle(self, timeout_s: float) -> bool:
        """Waits until every call is answered; false if some are not after `timeout_s` seconds.

        Raises what `poll` raises.
        """
        return self._wait(timeout_s, lambda: not self._pending)

    def describe(self) -> str:
        """Returns who waits for whom, in one line, or "". May be called from any thread."""
        calls = list(self._pending.copy().values())
        if not calls:
            return ""
        oldest, now = min(calls, key=lambda call: call.sent), time.monotonic()
        state = (
            "waits for a free place"
            if oldest.begun is None
            else f"runs for {now - oldest.begun:.1f} s"
        )
        return (
            f"environment {self.role}: {len(calls)} calls under way, the oldest, {oldest} of "
            f"sample {oldest.sample}, {state}"
        )

    def close(self) -> None:
        """Ends the environment; calls without an answer are forgotten. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.flush()
        self._pending.clear()
        self._calls.clear()
        self._done.clear()
        # One that is blocked is left to its daemon thread.
        blocked = self._loop.is_blocked(self._context.timeout_s)
        self._loop.stop(0.0 if blocked else _CLOSE_S)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    # Inside

    def _require_open(self) -> None:
        if self._closed:
            raise BackendError("the environment is closed", where=f"role {self.role}")

    def _send(self, sample: SampleId, work: EpisodeStart | Action) -> None:
        call = Call(ticket=self._next_ticket, sample=sample, work=work, sent=time.monotonic())
        self._next_ticket += 1
        self._pending[call.ticket] = call
        self._calls[sample] = call.ticket
        self._orders.append(call)

    def _take(self) -> None:
        """Takes new replies; replies to calls that are no longer awaited are dropped."""
        while True:
            try:
                self._accept(self._replies.get_nowait())
            except Empty:
                return

    def _accept(self, replies: list[Reply]) -> None:
        for reply in replies:
            call = self._pending.pop(reply.ticket, None)
            if call is None:
                continue
            self._num_lost_in_a_row = 0
            del self._calls[call.sample]
            self._done.append(Answered(sample=call.sample, answer=reply.answer))

    def _wait(self, timeout_s: float, enough: Callable[[], bool]) -> bool:
        end = time.monotonic() + timeout_s
        self.flush()
        self._take()
        while not enough():
            left = end - time.monotonic()
            if left <= 0 or not self._pending:
                return False
            try:
                self._accept(self._replies.get(timeout=min(left, self._check_interval_s)))
            except Empty:
                self._check_blocked()
            self._take()
        return True

    def _check_blocked(self) -> None:
        """Gives a blocked thread up."""
        if not self._pending or not self._loop.is_blocked(self._context.timeout_s):
            self._suspected = None
            return
        # A process that was stopped, or had no core, looks the same until its threads have run.
        now = time.monotonic()
        if self._suspected is None:
            self._suspected = now
        if now - self._suspected < self._grace_s:
            return
        self._suspected = None
        self._num_lost_in_a_row += 1
        blocking, failure = self._loop.blocking()
        if self._num_lost_in_a_row >= _MAX_LOST_IN_A_ROW:
            raise WorkerDied(
                "the environment blocks its thread again and again, and answers nothing",
                where=f"role {self.role}",
                found=f"{_MAX_LOST_IN_A_ROW} threads in a row"
                + (f"; the last call {failure.message}" if failure else ""),
                hint="await what takes long, or write plain functions, which run in threads",
            )
        self._loop.stop(0.0)
        for call in self._pending.values():
            answer = failure if call is blocking and failure else EpisodeLost(sample=call.sample)
            self._done.append(Answered(sample=call.sample, answer=answer))
        self._pending.clear()
        self._calls.clear()
        self._orders.clear()
        self._loop = self._replacement()

    def _replacement(self) -> Loop:
        """Opens another environment; those that die before they are ready count as lost ones."""
        while True:
            try:
                return self._open_loop()
            except WorkerDied as reason:
                self._num_lost_in_a_row += 1
                if self._num_lost_in_a_row >= _MAX_LOST_IN_A_ROW:
                    raise
                _log.warning("an environment of %s is opened again: %s", self.role, reason)


def open_loop_here(
    opening: OpenEnvironment, context: EnvironmentContext, concurrency: int, replies: Replies
) -> EnvironmentLoop:
    """Opens an environment and its loop in this process.

    Raises:
        FlowError: the environment cannot be opened; with the user's own lines.
    """
    own = (*library_folders(), *_package_of(opening))
    try:
        environment = opening(context)
    except (FlowError, KeyboardInterrupt):
        raise
    # Importing a user's file can raise anything; they get their own lines.
    except BaseException as reason:
        frames = user_frames(traceback.extract_tb(reason.__traceback__), own)
        raise BackendError(
            "the environment cannot be loaded",
            where=f"roles.{context.role}.environment",
            found=f"{described(reason)} ({' from '.join(reversed(frames))})",
        ) from reason
    return EnvironmentLoop(
        environment,
        name=str(context.role),
        timeout_s=context.timeout_s,
        concurrency=concurrency,
        replies=replies,
        own=own,
    )


def _package_of(opening: OpenEnvironment) -> tuple[Path, ...]:
    """Folders of the package that a plug-in comes in; none where a plain function opens."""
    plugin = getattr(opening, "__self__", None)
    package = sys.modules.get(type(plugin).__module__.partition(".")[0])
    return tuple(Path(folder) for folder in getattr(package, "__path__", ()))
