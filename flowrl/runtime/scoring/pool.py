"""Processes that score samples, under a time limit for each sample.

    submit -> queue -> worker (one batch at a time) -> poll
                         |-- the reward raised, or returned no number     ScoreFailure
                         |-- past timeout_s, in Python code: interrupted  ScoreFailure
                         |-- past timeout_s + grace_s: the process is killed and replaced; the
                         |   sample it was on fails, the others of its batch are queued again
                         `-- dead: the process is replaced; the sample it was on is scored once
                             more, by itself, and fails where the process dies again

Every submitted sample comes back exactly once, as a `ScoreResult` or a `ScoreFailure`, in any
order. A failure is never a score of 0.

The pool has no thread: limits are enforced and batches sent in `poll` and `wait`, so after a submit
one of them must be called again and again. Nothing here waits for a worker: sockets are
non-blocking, and bytes that a busy worker has not read yet stay in the pool.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from mmap import mmap
from tempfile import TemporaryFile
from typing import IO, cast

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.errors import FlowError, RewardError, WorkerDied
from flowrl.ids import SampleId
from flowrl.runtime.channels import Message
from flowrl.runtime.local.process_channel import ProcessChannel
from flowrl.runtime.local.processes import Output, standard_error
from flowrl.runtime.scoring.messages import BATCH, Status, request_tuple, term_limits
from flowrl.runtime.spans import SPANS

_log = logging.getLogger(__name__)

_MAX_BATCH = 128
"""Samples sent at once: enough to make a round trip cheap for each, few enough to share them."""
_CLOSE_S = 5.0
"""Seconds in which an idle process leaves."""
_MAX_DEATHS = 3
"""Workers that die one after another without having scored anything."""


class FailureKind(StrEnum):
    """Why a sample has no score."""

    RAISED = "raised"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    INVALID = "invalid"
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFailure:
    """A sample without a score.

    Attributes:
        message: The failure, to follow "the reward": `raised KeyError: 'x' (rewards.py:9 in f)`.
        frames: The user's own innermost frames, outermost first: `rewards.py:9 in f`.
        term: The term that failed, if the scorer names it.
    """

    sample: SampleId
    kind: FailureKind
    message: str
    frames: tuple[str, ...] = ()
    term: str = ""

    def error(self) -> RewardError:
        """Returns the failure as an error that names the sample."""
        return RewardError(f"the reward {self.message}", where=f"sample {self.sample}")


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """A process and what the pool knows of it.

    Attributes:
        ready: It has loaded the reward.
        batch: Samples sent to it and not yet answered, in the order they are scored.
        busy: A batch was sent whose end it has not announced.
        overdue: The ticket it was killed for.
    """

    name: str
    channel: ProcessChannel
    memory: mmap
    status: Status
    started: float
    batch: dict[int, ScoreRequest] = field(default_factory=dict)
    ready: bool = False
    busy: bool = False
    overdue: int | None = None


def failure_message(
    kind: FailureKind,
    text: str,
    frames: Sequence[str] = (),
    *,
    limit: str = "",
    term: str = "",
) -> str:
    """Returns the failure, to follow "the reward"; see `ScoreFailure`."""
    at = f" ({frames[-1]})" if frames else f" (term {term})" if term else ""
    match kind:
        case FailureKind.RAISED:
            return f"raised {text}{at}"
        case FailureKind.TIMEOUT:
            return f"took longer than {limit} s{at}{text}"
        case FailureKind.MEMORY:
            return f"ran out of memory{at}; rewards.memory_gb limits a scorer process"
        case FailureKind.INVALID:
            return f"gave no score: {text}"
        case FailureKind.DIED:
            return f"ended its process{at}: {text}"


class ScoringPool:
    """A fixed number of scoring processes.

    Args:
        plugin: Name of a plug-in that offers scores, or `module:attribute` of one.
        context: The context of its scorer.
        timeout_s: Seconds that one sample may take.
        workers: Processes.
        memory_gb: Gigabytes that a process may allocate.
        grace_s: Seconds past `timeout_s` after which a process that could not be interrupted is
            killed.
        start_timeout_s: Seconds that a process may take to load the reward.
        output: Opens where a process of a name prints; by default this process's standard error.

    Raises:
        RewardError: The reward cannot be loaded; with the user's own file and line.
        FlowError: an error of the plug-in about its configuration.

    Processes die with the thread that started them (Linux kills children by thread), so the pool
    belongs to one thread that outlives it.

    >>> with ScoringPool("verify", context, timeout_s=2.0) as pool:   # doctest: +SKIP
    ...     pool.submit(requests)
    ...     while pool.num_pending:
    ...         pool.wait(1.0)
    ...         results = pool.poll()
    """

    def __init__(
        self,
        plugin: str,
        context: ScoreContext,
        *,
        timeout_s: float,
        workers: int = 1,
        memory_gb: float = 4.0,
        grace_s: float = 2.0,
        start_timeout_s: float = 120.0,
        output: Callable[[str], AbstractContextManager[Output]] | None = None,
    ) -> None:
        self._opening = ("open", plugin, context, timeout_s, int(memory_gb * 1e9))
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._limits = term_limits(context)
        # Samples whose batch failed as a whole are sent one by one.
        self._alone: set[int] = set()
        self._died_under: set[int] = set()
        self._start_timeout_s = start_timeout_s
        self._output = output or (lambda name: nullcontext(standard_error()))
        self._queue: deque[tuple[int, ScoreRequest]] = deque()
        self._done: list[ScoreResult | ScoreFailure] = []
        self._next_ticket = 0
        self._num_pending = 0
        self._deaths = 0
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        try:
            for number in range(workers):
                self._workers.append(self._start(f"{context.role}.score[{number}]"))
            while not all(worker.ready for worker in self._workers):
                self._exchange(self.seconds_to_limit())
        except BaseException:
            self.close()
            raise

    # What a driver calls

    @property
    def num_pending(self) -> int:
        """Samples submitted and not yet handed out by `poll`."""
        return self._num_pending

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Queues samples and sends them to processes that have nothing to do; returns at once."""
        if self._closed:
            raise RewardError("samples were submitted to a scoring pool that is closed")
        for request in requests:
            self._queue.append((self._next_ticket, request))
            self._next_ticket += 1
        self._num_pending += len(requests)
        self._dispatch()

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        """Results since the last call; returns at once.

        Raises:
            WorkerDied: Processes die without having scored anything.
            FlowError: A replaced process cannot load the reward any more.
        """
        self._exchange(0.0)
        done, self._done = self._done, []
        self._num_pending -= len(done)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Waits until `poll` has something to give; false after `timeout_s` seconds without.

        Raises what `poll` raises.
        """
        end = time.monotonic() + timeout_s
        while not self._done:
            left = end - time.monotonic()
            if left <= 0 or not self._num_pending:
                return False
            self._exchange(min(left, self.seconds_to_limit()))
        return True

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` should be called.

        It does not show time limits: wait on it no longer than `seconds_to_limit()`.
        """
        # select, poll and epoll take an epoll or kqueue descriptor like any other.
        selector = cast("selectors.EpollSelector", self._selector)
        return selector.fileno()

    def seconds_to_limit(self) -> float:
        """Seconds after which `poll` must be called to enforce the next time limit."""
        now = time.monotonic()
        ends = [now + 1.0]
        for worker in self._workers:
            doing = worker.status.read() if worker.busy else None
            if not worker.ready:
                ends.append(worker.started + self._start_timeout_s)
            elif doing is not None:
                limit_s = self._limit_of(worker.status.term)
                ends.append(doing[1] + limit_s + self._grace_s)
        # A little late rather than a little early, which would spin.
        return max(0.0, min(ends) - now) + 0.001

    def close(self) -> None:
        """Ends all processes; samples without a result are forgotten. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            self._selector.unregister(worker.channel)
            # An idle process sees the end of the stream and leaves by itself.
            worker.channel.hang_up()
            if worker.busy or not worker.ready:
                worker.channel.kill()
        for worker in self._workers:
            worker.channel.kill(_CLOSE_S)
            worker.memory.close()
        self._workers.clear()
        self._selector.close()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    # One turn

    def _exchange(self, timeout_s: float) -> None:
        """Moves bytes, enforces limits, replaces the dead, sends batches."""
        self._selector.select(timeout_s)
        now = time.monotonic()
        for worker in tuple(self._workers):
            self._receive(worker)
            if worker.channel.ended() is not None or self._is_over(worker, now):
                self._replace_dead(worker)
        self._dispatch()

    def _is_over(self, worker: _Worker, now: float) -> bool:
        if not worker.ready:
            if now - worker.started > self._start_timeout_s:
                raise RewardError(
                    "the reward takes too long to load",
                    found=f"more than runtime.start_timeout_s={self._start_timeout_s:g} seconds",
                    hint="move slow work out of the reward file's top level, or raise that limit",
                )
            return False
        doing = worker.status.read()
        if doing is None or now - doing[1] <= self._limit_of(worker.status.term) + self._grace_s:
            return False
        if doing[0] not in (BATCH, *worker.batch):
            return False
        worker.overdue = doing[0]
        return True

    def _limit_of(self, term: str) -> float:
        return self._limits.get(term, self._timeout_s)

    # Bytes

    def _dispatch(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and not worker.busy]
        for num_left in range(len(idle), 0, -1):
            if not self._queue:
                return
            worker = idle[num_left - 1]
            size = min(_MAX_BATCH, -(-len(self._queue) // num_left))
            if self._queue[0][0] in self._alone:
                size = 1
            batch = [self._queue.popleft() for _ in range(size)]
            worker.batch = dict(batch)
            worker.busy = True
            worker.channel.send(("score", [request_tuple(*entry) for entry in batch]))

    def _receive(self, worker: _Worker) -> None:
        for message in worker.channel.receive(0.0):
            self._take(worker, message)

    def _take(self, worker: _Worker, message: Message) -> None:
        match message:
            case ("ready",):
                worker.ready = True
            case ("broken", FlowError() as error):
                raise error
            case ("scores", list(scores), list(failures), float(began), float(ended)):
                if scores or failures:
                    self._deaths = 0
                worker.busy = not ended
                if ended:
                    SPANS.add(worker.name, "score", began, ended)
                for ticket, score, terms in scores:
                    sample = worker.batch.pop(ticket).sample
                    self._done.append(ScoreResult(sample=sample, score=score, terms=terms))
                for ticket, kind, text, frames, term in failures:
                    self._fail(worker, ticket, FailureKind(kind), text, frames, term)
            case _:
                raise AssertionError(f"a scoring process sent {message!r}")

    # Failures

    def _fail(
        self,
        worker: _Worker,
        ticket: int,
        kind: FailureKind,
        text: str,
        frames: tuple[str, ...] = (),
        term: str = "",
    ) -> None:
        key = "its timeout_s" if term in self._limits else "rewards.timeout_s"
        limit = f"{key}={self._limit_of(term):g}"
        message = failure_message(kind, text, frames, limit=limit, term=term)
        sample = worker.batch.pop(ticket).sample
        self._done.append(
            ScoreFailure(sample=sample, kind=kind, message=message, frames=frames, term=term)
        )

    def _replace_dead(self, worker: _Worker) -> None:
        """Takes over from a dead process and starts another in its place."""
        worker.channel.kill()
        # What it had sent before.
        self._receive(worker)
        how = worker.channel.ended()
        self._selector.unregister(worker.channel)
        worker.channel.close(0.0)
        doing, term = worker.status.read(), worker.status.term
        worker.memory.close()
        self._workers.remove(worker)
        if BATCH in (worker.overdue, doing[0] if doing else None):
            self._alone.update(worker.batch)
            self._deaths = 0
        elif worker.overdue in worker.batch:
            text = " and could not be interrupted"
            self._fail(worker, worker.overdue, FailureKind.TIMEOUT, text, term=term)
            self._deaths = 0
        elif doing is not None and doing[0] in worker.batch:
            self._deaths = 0
            if doing[0] in self._died_under:
                self._fail(worker, doing[0], FailureKind.DIED, str(how), term=term)
            else:  # somebody else may have killed it, such as a system that is short of memory
                self._died_under.add(doing[0])
                self._alone.add(doing[0])
        else:
            self._deaths += 1
        self._queue.extendleft(reversed(worker.batch.items()))
        if self._deaths >= _MAX_DEATHS:
            raise WorkerDied(
                "scoring processes die before they score anything",
                found=f"{self._deaths} in a row, the last with {how}",
                hint="see what they print on standard error; is there memory enough?",
            )
        _log.warning("a scoring process died and is replaced: %s", how)
        self._workers.append(self._start(worker.name))

    # Processes

    def _start(self, name: str) -> _Worker:
        with _shared_memory() as file, self._output(name) as output:
            memory = mmap(file.fileno(), Status.NBYTES)
            module = "flowrl.runtime.scoring.worker"
            channel = ProcessChannel(module, output, descriptors=(file.fileno(),))
        worker = _Worker(
            name=name,
            channel=channel,
            memory=memory,
            status=Status(memory),
            started=time.monotonic(),
        )
        self._selector.register(channel, selectors.EVENT_READ)
        channel.send(self._opening)
        return worker


def _shared_memory() -> IO[bytes]:
    """Returns an unnamed file of `Status.NBYTES` zeros, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = open(os.memfd_create("flowrl-scoring"), "r+b")  # noqa: PTH123, SIM115
    else:
        file = TemporaryFile()  # noqa: SIM115
    file.truncate(Status.NBYTES)
    return file
