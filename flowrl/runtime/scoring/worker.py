"""A process that scores: `python -m flowrl.runtime.scoring.worker SOCKET MEMORY PARENT`.

It is started by `flowrl.runtime.scoring.pool.ScoringPool` with two open file descriptors and dies
with the process that started it. Time limits are kept here where Python code can be interrupted: a
timer raises an exception inside the reward. Code that cannot be interrupted is the pool's business.

What the reward prints goes to standard error: standard output belongs to the command.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from mmap import mmap
from pathlib import Path
from types import FrameType, TracebackType
from typing import cast

from flowrl.backend.plugin import Plugin
from flowrl.backend.protocols import (
    NamesTerms,
    ScoreBackend,
    ScoreContext,
    ScoreRequest,
    ScoreResult,
    ScoresBatches,
)
from flowrl.errors import FlowError, RewardError
from flowrl.ids import SampleId
from flowrl.runtime.local.process_channel import SocketMailbox
from flowrl.runtime.local.processes import die_with, named_plugin
from flowrl.runtime.scoring.messages import BATCH, RequestTuple, Status, term_limits
from flowrl.runtime.user_errors import described, library_folders, short_path, user_frames
from flowrl.specs import FinishReason

# Results wait this long for company; a slow reward does not hold back those that ended before it.
_FLUSH_S = 0.003
# A reward that swallows the exception of its time limit meets it again after this.
_REPEAT_S = 0.05
_MAX_TEXT = 300
# Batches hold scores in float32, whose largest number is 3.4e38; sums over a batch stay below it.
_MAX_SCORE = 1e30


class _TimeIsUp(BaseException):
    """Raised inside a reward; no `except Exception` of the user's catches it."""


class _Alarm:
    """The timer of one sample at a time, or of the term that is computed.

    It fires first after `_FLUSH_S`, to send earlier results away, and then at the limit.

    Attributes:
        expired: The limit was reached. What a reward returns after that is worth nothing: it may
            have caught the exception with a bare `except` that returns 0.
    """

    def __init__(self, timeout_s: float, flush: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._flush = flush
        self._armed = False
        self._end = 0.0
        self.expired = False
        self._handler = self._fire

    def arm(self, now: float, limit_s: float | None = None) -> None:
        """Starts the limit; the handler is set again, since rewards may use the signal too."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        if signal.getsignal(signal.SIGALRM) is not self._handler:
            signal.signal(signal.SIGALRM, self._handler)
        self._end = now + limit_s
        self.expired = False
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, min(_FLUSH_S, limit_s), _REPEAT_S)

    def disarm(self) -> None:
        """Ends it; idempotent."""
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _fire(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        left = self._end - time.monotonic()
        if left <= 0:
            self.expired = True
            raise _TimeIsUp
        self._flush()
        signal.setitimer(signal.ITIMER_REAL, left, _REPEAT_S)


class _Worker:
    """Scores what comes until the pool closes its end."""

    def __init__(
        self,
        mailbox: SocketMailbox,
        status: Status,
        own: tuple[Path, ...],
        limits: Mapping[str, float],
    ) -> None:
        self._mailbox = mailbox
        self._status = status
        self._own = own
        self._limits = limits
        self._pid = os.getpid()
        self._scores: list[tuple[int, float, dict[str, float]]] = []
        self._failures: list[tuple[int, str, str, tuple[str, ...], str]] = []

    def run(self, scorer: ScoreBackend, timeout_s: float) -> None:
        """Works until nothing more comes."""
        alarm = _Alarm(timeout_s, self._flush)
        if isinstance(scorer, NamesTerms):
            scorer.on_term = partial(self._enter, alarm) if self._limits else self._status.enter
        while (messages := self._mailbox.receive()) is not None:
            for _, requests in messages:
                began = time.time()
                self._all(scorer, alarm, cast(list[RequestTuple], requests))
                self._send(began, time.time())
        scorer.close()

    def _enter(self, alarm: _Alarm, term: str) -> None:
        """Notes a term, whose time limit begins."""
        now = time.monotonic()
        self._status.enter(term)
        self._status.restart(now)
        alarm.arm(now, self._limits.get(term))

    def _all(self, scorer: ScoreBackend, alarm: _Alarm, requests: list[RequestTuple]) -> None:
        """Scores samples together as far as the scorer gains by it.

        If a batch fails, each of its samples is scored by itself, so that it fails alone.
        """
        if not isinstance(scorer, ScoresBatches) or scorer.batch_size == 1:
            for values in requests:
                self._one(scorer, alarm, values)
            return
        for first in range(0, len(requests), scorer.batch_size):
            batch = requests[first : first + scorer.batch_size]
            if len(batch) == 1 or not self._together(scorer, alarm, batch):
                for values in batch:
                    self._one(scorer, alarm, values)
            self._flush()

    def _together(
        self, scorer: ScoresBatches, alarm: _Alarm, batch: Sequence[RequestTuple]
    ) -> bool:
        """Scores a batch in one call; returns False if that fails."""
        self._status.begin(BATCH, time.monotonic())
        try:
            alarm.arm(time.monotonic())
            results = scorer.score_batch([_request(values) for values in batch])
            scored = [checked_score(result) for result in results]
        # The samples are scored again one by one, which reports what is wrong with which.
        except BaseException:
            return False
        finally:
            alarm.disarm()
            self._status.end()
            if os.getpid() != self._pid:
                os._exit(0)
        if alarm.expired or len(scored) != len(batch):
            return False
        self._scores += [(v[0], *each) for v, each in zip(batch, scored, strict=True)]
        return True

    def _one(self, scorer: ScoreBackend, alarm: _Alarm, values: RequestTuple) -> None:
        ticket, request = values[0], _request(values)
        began = time.monotonic()
        self._status.begin(ticket, began)
        try:
            try:
                alarm.arm(began)
                result = scorer.score(request)
            finally:
                alarm.disarm()
                if os.getpid() != self._pid:
                    # A child that the reward forked came back out of it. It is no second worker.
                    os._exit(0)
            scored = checked_score(result)
        # Whatever a user's reward raises is its own failure, SystemExit included.
        except BaseException as reason:
            # The timer may fire between the reward's return and the line that stops it.
            alarm.disarm()
            self._judge(ticket, reason, expired=alarm.expired)
        else:
            if alarm.expired:
                self._fail(ticket, "timeout", "", ())
            else:
                self._scores.append((ticket, *scored))
        finally:
            self._status.end()
        if time.monotonic() - began > _FLUSH_S:
            self._flush()

    def _judge(self, ticket: int, reason: BaseException, *, expired: bool) -> None:
        if expired:
            self._fail(ticket, "timeout", "", self._frames(reason.__traceback__))
        else:
            kind, message = classified(reason)
            trace = reason.__traceback__ if kind in ("raised", "memory") else None
            self._fail(ticket, kind, message, self._frames(trace) if trace else ())

    def _fail(self, ticket: int, kind: str, message: str, frames: tuple[str, ...]) -> None:
        self._failures.append((ticket, kind, message, frames, self._status.term))

    def _flush(self) -> None:
        if self._scores or self._failures:
            self._send(0.0, 0.0)

    def _send(self, began: float, ended: float) -> None:
        message = ("scores", self._scores, self._failures, began, ended)
        self._scores, self._failures = [], []
        self._mailbox.send(message)

    def _frames(self, trace: TracebackType | None) -> tuple[str, ...]:
        frames = traceback.extract_tb(trace)
        # A time limit that is met outside the user's code has no line of the user's.
        timed_out = bool(frames) and frames[-1].name == _Alarm._fire.__name__
        return user_frames(frames, self._own, or_any=not timed_out)


def main(arguments: list[str]) -> None:
    """Runs a worker on inherited file descriptors."""
    sock_fd, memory_fd, parent = map(int, arguments)
    die_with(parent)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Lines that a reward printed before it hung or died are worth most.
        sys.stdout.reconfigure(line_buffering=True)
    mailbox = SocketMailbox(socket.socket(fileno=sock_fd))
    status = Status(mmap(memory_fd, Status.NBYTES))
    os.close(memory_fd)
    messages = mailbox.receive()
    if messages is None:
        return
    _, plugin, context, timeout_s, memory_nbytes = messages[0]
    limit = cast(int, memory_nbytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    own = library_folders()
    try:
        backend = named_plugin(str(plugin))
        own += package_folders(backend)
        scorer = backend.open_score(cast(ScoreContext, context))
    except FlowError as reason:
        mailbox.send(("broken", reason))
        return
    # Importing a user's file can raise anything; they get their own frames.
    except BaseException as reason:
        mailbox.send(("broken", unloadable(reason, own)))
        return
    mailbox.send(("ready",))
    limits = term_limits(cast(ScoreContext, context))
    _Worker(mailbox, status, own, limits).run(scorer, cast(float, timeout_s))


def package_folders(plugin: Plugin) -> tuple[Path, ...]:
    """Returns the folders of a plug-in's package, whose code is not the user's."""
    package = sys.modules[type(plugin).__module__.partition(".")[0]]
    return tuple(Path(folder) for folder in getattr(package, "__path__", ()))


def classified(reason: BaseException) -> tuple[str, str]:
    """Returns the kind of a reward's exception (`raised`, `memory`, `invalid`), and its text."""
    if isinstance(reason, MemoryError):
        return "memory", ""
    if isinstance(reason, RewardError):
        found = f" ({reason.found})" if reason.found else ""
        return "invalid", f"{reason.what}{found}"[:_MAX_TEXT]
    return "raised", described(reason)


def _request(values: RequestTuple) -> ScoreRequest:
    _, sample, prompt, response, answer, row, finish, num_tokens, tokens = values
    return ScoreRequest(
        sample=SampleId(sample),
        prompt=prompt,
        response=response,
        answer=answer,
        row=cast(dict[str, object], row),
        finish=FinishReason(finish),
        num_tokens=num_tokens,
        tokens=tokens,
    )


def checked_score(result: object) -> tuple[float, dict[str, float]]:
    """Returns score and terms; a scorer is a plug-in, so its return value is checked.

    Raises:
        RewardError: it is no score.
    """
    if not isinstance(result, ScoreResult):
        raise RewardError("the scorer returned no ScoreResult", found=type(result).__name__)
    terms = {str(name): float(value) for name, value in result.terms.items()}
    score = float(result.score)
    named = {**terms, "the score": score}
    strange = [f"{name}={value:g}" for name, value in named.items() if not abs(value) <= _MAX_SCORE]
    if strange:
        raise RewardError(
            f"the score is no number of at most {_MAX_SCORE:g}", found=", ".join(strange)
        )
    return score, terms


def unloadable(reason: BaseException, own: tuple[Path, ...]) -> RewardError:
    """Returns the error of running a reward's file, with the user's own line."""
    frames = list(user_frames(traceback.extract_tb(reason.__traceback__), own))
    if isinstance(reason, SyntaxError) and reason.filename:
        frames = [f"{short_path(reason.filename)}:{reason.lineno}"]
    return RewardError(
        "the reward cannot be loaded",
        where=frames[-1] if frames else None,
        found=described(reason),
        hint=f"called from {' from '.join(reversed(frames[:-1]))}" if frames[:-1] else None,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
