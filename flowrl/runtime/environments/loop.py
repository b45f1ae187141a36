"""One environment on an asyncio loop in a thread of its own, with a time limit for each call.

    send -> [waits for a free place] -> reset or step of the environment -> replies
                                 |-- raised, or gave nothing usable   EpisodeFailure
                                 `-- past its time limit: cancelled   EpisodeFailure

Every call that was sent is answered once, unless its episode is ended first. The answer of a
cancelled call is dropped, even if the call refuses to be cancelled.

Code that blocks the thread (a busy loop in a coroutine) cannot be interrupted from inside. The pool
checks `is_blocked`, gives this loop up and opens another one; the thread is a daemon, so that it
does not keep the process alive.

Orders and answers cross between threads in batches: each crossing costs more than a quick call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any, Protocol, TypeAlias

from flowrl.backend.environment import Action, Environment, EpisodeStart, Observation, Outcome
from flowrl.ids import SampleId
from flowrl.runtime.environments.transcript import (
    EpisodeFailure,
    InvalidAnswer,
    checked_observation,
    checked_outcome,
)
from flowrl.runtime.scoring.pool import FailureKind
from flowrl.runtime.spans import SPANS
from flowrl.runtime.user_errors import described, short_path, user_frames
from flowrl.wording import counted

_log = logging.getLogger(__name__)


_BEAT_S = 0.5
"""Seconds between the signs of life of a loop, where calls have that long."""

_GRACE_S = 1.0
"""Seconds that what is under way has to end when the loop is shut."""

Answer: TypeAlias = Observation | Outcome | EpisodeFailure


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of the environment.

    Attributes:
        ticket: Names the call.
        work: An episode to begin, or a turn to answer.
        sent: When it was sent, in seconds of the monotonic clock.
        begun: Time at which the environment received it; None while it waits for a free place.
    """

    ticket: int
    sample: SampleId
    work: EpisodeStart | Action
    sent: float
    begun: float | None = None

    @property
    def turn(self) -> int | None:
        """The turn to be answered; None for a reset."""
        return self.work.turn if isinstance(self.work, Action) else None

    def __str__(self) -> str:
        return "reset" if self.turn is None else f"turn {self.turn}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a call."""

    ticket: int
    answer: Answer


class Replies(Protocol):
    """Receives answers, from any thread."""

    def put(self, replies: list[Reply], /) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """A running call.

    Attributes:
        end: Time at which its limit is over.
        is_open: True while it occupies a place and its answer is awaited.
    """

    call: Call
    end: float
    coroutine: Coroutine[Any, Any, Observation | Outcome]
    task: asyncio.Task[Answer]
    is_open: bool = True


class EnvironmentLoop:
    """A running environment; see the module.

    The public methods are for the thread that made it.

    Args:
        environment: Called in the loop's thread alone.
        timeout_s: Seconds that a call may take, once it has begun.
        concurrency: Calls under way at once; further ones wait.
        replies: Receives the answers, in batches.
        own: Folders whose code is not the user's, which failures do not show.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        name: str,
        timeout_s: float,
        concurrency: int,
        replies: Replies,
        own: Sequence[Path],
    ) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._replies = replies
        self._own = own
        # Looked at by other threads.
        self._inside: Call | None = None  # the call whose code runs
        self._alive = time.monotonic()  # when the loop was last seen to turn
        # The rest belongs to the loop's thread.
        self._name = name
        self._concurrency = self._free_places = concurrency
        self._busy_since = 0.0  # when the first of the calls under way began
        self._calls: dict[SampleId, Call] = {}  # of each episode the one without an answer
        self._queue: deque[Call] = deque()  # those that wait for a free place; ended episodes' too
        self._works: dict[SampleId, _Work] = {}  # of each episode the latest
        self._deadlines: deque[_Work] = deque()  # by their end, which is the order of beginning
        self._timer: asyncio.TimerHandle | None = None  # for the first of them
        self._closing: dict[SampleId, asyncio.Task[None]] = {}
        self._answers: list[Reply] = []  # to be handed out at the loop's next turn
        self._shutting = False  # nothing begins any more
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_error)
        self._thread = threading.Thread(target=self._run, name=f"flowrl-{name}", daemon=True)
        self._thread.start()

    def send(self, orders: Sequence[Call | SampleId]) -> None:
        """Calls to make, and episodes to end, in this order.

        Of one episode only one call may be under way. An episode that is ended has its call
        cancelled, and is closed.
        """
        self._loop.call_soon_threadsafe(self._take, orders)

    def is_blocked(self, limit_s: float) -> bool:
        """True if some code has kept the thread busy for longer than `limit_s` seconds."""
        return time.monotonic() - self._alive > limit_s

    def blocking(self) -> tuple[Call | None, EpisodeFailure | None]:
        """Returns the call whose code blocks the thread, and its failure with its line."""
        call = self._inside
        if call is None:
            return None, None
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        return call, self._timeout(call, stack, " and blocked the environment's thread")

    def stop(self, timeout_s: float) -> bool:
        """Closes the environment and ends the thread; false where it has not ended in time.

        Calls under way are cancelled, those that wait never begin, and episodes that are being
        closed have a moment for it.
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._shut)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # In the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.call_soon(self._show_life)
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _show_life(self) -> None:
        self._alive = time.monotonic()
        self._loop.call_later(min(_BEAT_S, self._timeout_s / 2), self._show_life)

    def _take(self, orders: Sequence[Call | SampleId]) -> None:
        if self._shutting:
            return
        for order in orders:
            if isinstance(order, Call):
                self._begin(order)
            else:
                self._end(order)
        self._launch()

    def _begin(self, call: Call) -> None:
        self._calls[call.sample] = call
        closing = self._closing.get(call.sample)
        if closing is None:
            self._queue.append(call)
        else:
            # The same sample's episode before: an aborted one restarts.
            closing.add_done_callback(lambda _: self._begin_again(call))

    def _begin_again(self, call: Call) -> None:
        self._queue.append(call)
        self._launch()

    def _launch(self) -> None:
        """Begins waiting calls while there are free places."""
        while self._queue and self._free_places > 0 and not self._shutting:
            call = self._queue.popleft()
            if self._calls.get(call.sample) is not call:
                continue  # its episode was ended
            if self._free_places == self._concurrency:
                self._busy_since = SPANS.now()
            self._free_places -= 1
            call.begun = time.monotonic()
            coroutine = self._call(call)
            task = self._loop.create_task(self._answer(call, coroutine))
            end = call.begun + self._timeout_s
            work = _Work(call=call, end=end, coroutine=coroutine, task=task)
            task.add_done_callback(partial(self._end_of_work, work))
            self._works[call.sample] = work
            self._deadlines.append(work)
        self._expire_calls()

    def _end_of_work(self, work: _Work, task: asyncio.Task[Answer]) -> None:
        # A coroutine that was cancelled before it began would warn that it was never awaited.
        work.coroutine.close()
        if not work.is_open:
            return
        if task.cancelled():
            what = "raised CancelledError: it cancelled itself"
            answer: Answer = self._failure(work.call, FailureKind.RAISED, what, ())
        else:
            answer = task.result()
        self._release_place(work)
        self._reply(work.call, answer)
        self._launch()

    def _release_place(self, work: _Work) -> None:
        """Frees the place of a call."""
        work.is_open = False
        self._free_places += 1
        if self._free_places == self._concurrency:
            SPANS.add(self._name, "environment", self._busy_since, SPANS.now())

    def _reply(self, call: Call, answer: Answer) -> None:
        del self._calls[call.sample]
        if not self._answers:
            # Others that end in the same turn of the loop come along.
            self._loop.call_soon(self._send_replies)
        self._answers.append(Reply(ticket=call.ticket, answer=answer))

    def _send_replies(self) -> None:
        answers, self._answers = self._answers, []
        self._replies.put(answers)

    def _expire_calls(self) -> None:
        """Has the timer go off when the first call that is under way has had its time."""
        while self._deadlines and not self._deadlines[0].is_open:
            self._deadlines.popleft()
        if self._timer is None and self._deadlines:
            self._timer = self._loop.call_at(self._deadlines[0].end, self._expire)

    def _expire(self) -> None:
        self._timer = None
        while self._deadlines and self._deadlines[0].end <= self._loop.time():
            work = self._deadlines.popleft()
            # One that is done, on a thread that was busy for a while, is answered next.
            if work.is_open and not work.task.done():
                self._release_place(work)
                # Whether it lets itself be cancelled or not: its answer is not waited for.
                failure = self._timeout(work.call, _where_it_waits(work.coroutine), "")
                work.task.cancel()
                self._reply(work.call, failure)
        self._launch()

    async def _call(self, call: Call) -> Observation | Outcome:
        match call.work:
            case EpisodeStart():
                return checked_observation(await self._environment.reset(call.work))
            case Action():
                return checked_outcome(await self._environment.step(call.sample, call.work))

    async def _answer(
        self, call: Call, coroutine: Coroutine[Any, Any, Observation | Outcome]
    ) -> Answer:
        """Returns the call's answer, whatever its code does; only a cancellation is raised."""
        try:
            return await _Watched(coroutine, self, call)
        except asyncio.CancelledError:
            raise
        except InvalidAnswer as unusable:
            return self._failure(
                call, FailureKind.INVALID, f"gave {unusable}", self._frame_of_call(call)
            )
        # What a user's code raises is its own failure, SystemExit included: it must not reach the
        # loop, which it would end.
        except BaseException as reason:
            trace = traceback.extract_tb(reason.__traceback__)
            frames = user_frames(trace, self._own, or_any=False)
            # An error that a plug-in raises about the user's method has no line of the user's.
            frames = frames or self._frame_of_call(call) or user_frames(trace, self._own)
            what = f"raised {described(reason)}"
            return self._failure(call, FailureKind.RAISED, what, frames)

    def _frame_of_call(self, call: Call) -> tuple[str, ...]:
        """Returns the user's method that answers a call, if the environment knows it."""
        places: Mapping[str, str] = getattr(self._environment, "places", {})
        place = places.get("reset" if call.turn is None else "step")
        return () if place is None else (short_path(place),)

    def _timeout(self, call: Call, stack: Sequence[FrameSummary], more: str) -> EpisodeFailure:
        frames = user_frames(stack, self._own, or_any=False)
        what = f"took longer than {self._timeout_s:g} s{more}"
        return self._failure(call, FailureKind.TIMEOUT, what, frames)

    def _failure(
        self, call: Call, kind: FailureKind, what: str, frames: tuple[str, ...]
    ) -> EpisodeFailure:
        at = f" ({frames[-1]})" if frames else ""
        return EpisodeFailure(
            sample=call.sample,
            turn=call.turn,
            kind=kind,
            message=f"{what} in {call}{at}",
            frames=frames,
        )

    # Ends

    def _end(self, sample: SampleId) -> None:
        self._calls.pop(sample, None)
        before: set[asyncio.Task[Any]] = set()
        work = self._works.pop(sample, None)
        if work is not None:
            if work.is_open:
                # Also where its task is done: the loop calls `_end_of_work` later, when its answer
                # would pass for that of a call of the restarted episode.
                self._release_place(work)
                work.task.cancel()
            if not work.task.done():
                before.add(work.task)
        if sample in self._closing:
            before.add(self._closing[sample])
        self._closing[sample] = self._loop.create_task(self._close_episode(sample, before))

    async def _close_episode(self, sample: SampleId, before: set[asyncio.Task[Any]]) -> None:
        if before:
            await asyncio.wait(before, timeout=self._timeout_s)
        environment = self._environment
        await self._suppressed(lambda: environment.close_episode(sample), f"episode {sample}")
        if self._closing.get(sample) is asyncio.current_task():
            del self._closing[sample]

    async def _suppressed(self, close: Callable[[], Awaitable[None]], what: str) -> None:
        """Runs what no sample waits for; what goes wrong is logged."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await close()
        except TimeoutError:
            _log.warning("closing %s took longer than %g s", what, self._timeout_s)
        except asyncio.CancelledError:
            raise
        except BaseException as reason:
            _log.warning("closing %s raised %s", what, described(reason))

    def _shut(self) -> None:
        if not self._shutting:
            self._shutting = True
            self._loop.create_task(self._close())

    async def _close(self) -> None:
        grace_s = min(_GRACE_S, self._timeout_s)
        closing = set(self._closing.values())
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in others - closing:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=grace_s)
        if refused := sum(not task.done() for task in others - closing):
            _log.warning(
                "%s of the environment did not end when cancelled", counted(refused, "task")
            )
        late = {task for task in closing if not task.done()}
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=grace_s)
        await self._suppressed(self._environment.close, "the environment")
        self._loop.stop()


class _Watched:
    """An awaitable that runs a coroutine and notes, for other threads, when its code is running."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Observation | Outcome],
        loop: EnvironmentLoop,
        call: Call,
    ) -> None:
        self._coroutine = coroutine
        self._loop = loop
        self._call = call

    def __await__(self) -> Generator[Any, Any, Observation | Outcome]:
        resume: Callable[[Any], Any] = self._coroutine.send
        value: object = None
        while True:
            self._loop._inside = self._call
            try:
                waited_for = resume(value)
            except StopIteration as end:
                answer: Observation | Outcome = end.value
                return answer
            finally:
                self._loop._inside = None
            try:
                value, resume = (yield waited_for), self._coroutine.send
            except GeneratorExit:
                # One that was left behind is collected, maybe after what it waits for.
                self._coroutine.close()
                raise
            except BaseException as reason:
                value, resume = reason, self._coroutine.throw


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs errors of callbacks, as event loops do."""
    # A task that is left when the loop is closed has refused to be cancelled; that was reported.
    if not (loop.is_closed() and "task" in context):
        loop.default_exception_handler(context)


def _where_it_waits(coroutine: object) -> list[FrameSummary]:
    """Returns the frames of a suspended coroutine and those it awaits, outermost first."""
    stack: list[FrameSummary] = []
    while True:
        frame = getattr(coroutine, "cr_frame", None)
        if not isinstance(frame, FrameType):
            return stack
        code = frame.f_code
        stack.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        coroutine = getattr(coroutine, "cr_await", None)
