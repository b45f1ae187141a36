"""An inference engine on a virtual clock: continuous batching with slots and KV memory.

    submit -> waiting -> (prefill) -> running -> ended -> reported
                 ^                       |
                 +---- preempted --------+   memory is full: tokens kept, keys and values made anew

Between two things that change its batch an engine makes decode steps that only make its rows
longer. Such a stretch is one call of the clock, whatever its length, and costs the logarithm of the
batch: rows wait in a heap for the step in which they end. What comes from outside (a request that
finds room, an abort, new weights) ends the stretch at the step that is being made.

An embedded engine is driven by polls (`PollRule`) and shares its lane with whoever polls it; it
reports at the end of a poll. An engine on its own reports each end at once.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.lanes import Lane, LaneGroup
from flowrl.sim.sharing import Sharing
from flowrl.sim.step_time import StepTime, decode_run_s

__all__ = ["Ended", "EngineTotals", "PollRule", "Request", "RowRecorder", "SimEngine", "Spans"]

Spans = tuple[tuple[int, int], ...]
"""`((version, tokens), ...)`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollRule:
    """When a driven engine returns to its driver.

    Attributes:
        steps: Decode steps of a poll at most.
        after_end: Steps that a poll still makes once a request has ended.
        overhead_s: Seconds of a poll beside the engine's own.
    """

    steps: int
    after_end: int
    overhead_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One attempt at a sample.

    Attributes:
        prompt: Names the prompt; fresh rows that enter together compute it once.
        context: Tokens before the next one to draw: prompt, and response so far.
        left: Response tokens still to draw; at least 1.
        fresh: It begins from the prompt alone.
        shared: Tokens of the context that all of its prompt have, the prompt's own.
        cached: Tokens of the context that need not be computed again.
        drawn: Tokens of this attempt that were drawn before it was last put back.
        spans: Versions of those.
    """

    sample: SampleId
    attempt: int
    prompt: GroupId
    context: int
    left: int
    fresh: bool = True
    shared: int = 0
    cached: int = 0
    drawn: int = 0
    spans: Spans = ()
    # On a row; `row` is the number of its entrance, -1 off the rows.
    row: int = -1
    began_at: int = 0  # decode steps that the engine had made before its first token there
    ends_at: int = 0  # steps made when it has drawn its last token
    key: int = 0  # its context is `key` plus the steps made
    version: int = 0  # of the weights that drew its first token there
    entered_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that is over.

    Attributes:
        drawn: Response tokens of the attempt.
        spans: Their versions.
    """

    request: Request
    aborted: bool
    drawn: int
    spans: Spans


class RowRecorder(Protocol):
    """Is told of requests that leave a row (the trace)."""

    def row(self, engine: SimEngine, request: Request, why: str) -> None:
        """The request leaves now: `ended`, `aborted` or `preempted`."""
        ...


@dataclass(slots=True)
class EngineTotals:
    """What an engine did so far.

    Attributes:
        tokens: Response tokens drawn.
        steps: Decode steps.
        kv_peak: Tokens held at once at most.
        preempted: Times that a row was put back because memory was full.
    """

    tokens: int = 0
    steps: int = 0
    kv_peak: int = 0
    preempted: int = 0


@dataclass(slots=True)
class _Stretch:
    """A prefill, then decode steps of unchanging rows; times of the clock."""

    begin_s: float
    prefill_end_s: float
    end_s: float
    steps: int
    batch: int
    context: float
    longest: int
    slow: float


@dataclass(slots=True, eq=False, kw_only=True)
class SimEngine:
    """See the module.

    Attributes:
        lane: What it computes on.
        times: What its steps cost.
        num_slots: Rows at once.
        report: Called with what ended.
        kv_tokens: Tokens whose keys and values it can hold; None where slots are the limit.
        admit_at: Free slots that waiting requests wait for, so that they are prefilled together.
        poll: Set for an engine that its driver polls.
        keeps_prefixes: What a sample has drawn and heard is not computed again in its next turn,
            and rows of a prompt hold and compute it once (prefix caches of SGLang and vLLM).
        reserve: Tokens that each row has to find free when another is let in.
        recorder: Is told of rows; None records nothing.
        slow: Everything takes so many times as long.
        sharing: What it shares cores with, where it is a process among others.
        drawn_s: When it last ended a stretch.
    """

    id: EngineId
    clock: Clock
    lane: Lane | LaneGroup
    times: StepTime
    num_slots: int
    report: Callable[[SimEngine, Sequence[Ended]], None]
    kv_tokens: int | None = None
    admit_at: int = 1
    poll: PollRule | None = None
    keeps_prefixes: bool = False
    reserve: int = 1
    recorder: RowRecorder | None = None
    slow: float = 1.0
    sharing: Sharing | None = None
    drawn_s: float = 0.0
    totals: EngineTotals = field(default_factory=EngineTotals)
    _live: dict[SampleId, Request] = field(default_factory=dict)  # every request not ended
    _waiting: deque[Request] = field(default_factory=deque)  # and ended ones, which are skipped
    _rows: list[tuple[int, int, Request]] = field(default_factory=list)  # heap (ends_at, row, ...)
    _by_length: list[tuple[int, int, Request]] = field(default_factory=list)  # heap (-key, row, ..)
    # Entries of both heaps are current while their request is on that very row.
    _num_waiting: int = 0
    _num_rows: int = 0
    _kv: int = 0  # tokens of all rows, prompts with each
    _saved: int = 0  # of those, what rows hold together with others of their prompt
    _of_prompt: dict[GroupId, int] = field(default_factory=dict)  # rows; of engines that save
    _decoded: int = 0  # steps made, since the engine was made
    _entered: int = 0  # rows ever entered
    _marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # (steps, version)
    _ended: list[Ended] = field(default_factory=list)  # not reported yet
    _aborting: list[SampleId] = field(default_factory=list)  # of the next boundary
    _published: list[tuple[int, float]] = field(default_factory=list)  # (version, load seconds)
    _stretch: _Stretch | None = None
    _stamp: int = 0  # calls of the clock with another one are void
    _paused: bool = False
    _mute: bool = False
    _away: bool = False  # between two stretches: reporting, or waiting for the lane
    _poll_left: int = 0  # steps left in this poll; 0 between polls
    _pace: float = 1.0  # beside `slow`: of one that shares cores

    # From outside

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self._num_rows

    def submit(self, requests: Iterable[Request]) -> None:
        """Takes requests; they enter as soon as there is room.

        Raises:
            SchedulerError: one that is larger than the engine's memory.
        """
        for request in requests:
            if self.kv_tokens is not None and request.context + request.left > self.kv_tokens:
                raise SchedulerError(
                    "a sample is larger than the memory of its engine",
                    where=f"engine {self.id}, sample {request.sample}",
                    found=f"{request.context + request.left} tokens",
                    expected=f"at most {self.kv_tokens} (kv_tokens)",
                    hint="give the role more memory, or lower train.sampling.max_tokens",
                )
            self._waiting.append(request)
            self._live[request.sample] = request
            self._num_waiting += 1
        self._stir(wants=self._admits())

    def abort(self, samples: Iterable[SampleId]) -> None:
        """Ends requests with the tokens they have; unknown ones are ignored."""
        self._aborting.extend(sample for sample in samples if sample in self._live)
        self._stir(wants=True)

    def publish(self, version: int, load_s: float = 0.0) -> None:
        """Serves other weights from the next step on, once they are loaded."""
        self._published.append((version, load_s))
        self._stir(wants=True)

    def pause(self) -> None:
        """Makes no tokens from the next step on; aborts and weights are taken all the same."""
        self._paused = True
        self._stir(wants=True)

    def go_on(self) -> None:
        """Makes tokens again."""
        self._paused = self._mute = False
        self._stir(wants=False)

    def hush(self) -> None:
        """Does and says nothing, from the next step on until `go_on`."""
        self._mute = True
        self._stir(wants=True)

    def progress(self) -> list[tuple[SampleId, int, int]]:
        """`(sample, attempt, tokens of the attempt)` of every row, after the last whole step."""
        steps = self._decoded
        stretch = self._stretch
        if stretch is not None and self.clock.now >= stretch.end_s:
            steps += stretch.steps
        elif stretch is not None and self.clock.now > stretch.prefill_end_s:
            share = self.clock.now - stretch.prefill_end_s
            share /= stretch.end_s - stretch.prefill_end_s
            steps += int(share * stretch.steps)
        return [
            (request.sample, request.attempt, request.drawn + steps - request.began_at + 1)
            for request in self._live.values()
            if request.row >= 0
        ]

    def give_way(self) -> None:
        """Ends what it does with the current step, for someone who wants its lane."""
        self._stir(wants=True)

    def slow_down(self, factor: float) -> None:
        """Changes `slow` from the next step on."""
        self.slow = factor
        self._stir(wants=True)

    def set_pace(self, pace: float) -> None:
        """Goes on at another pace, from this very moment."""
        change, self._pace = pace / self._pace, pace
        stretch, now = self._stretch, self.clock.now
        if stretch is None or now >= stretch.end_s:
            return
        end_s = stretch.end_s
        # From here on the stretch looks as if it had had this pace from its beginning.
        stretch.prefill_end_s = now + (stretch.prefill_end_s - now) * change
        stretch.end_s = now + (end_s - now) * change
        stretch.slow *= change
        self.lane.shorten(end_s, stretch.end_s)
        self._stamp += 1
        self.clock.at(stretch.end_s, self._finish, self._stamp)

    def lose(self) -> None:
        """It is gone with all that it held; nothing is reported."""
        stretch, now = self._stretch, self.clock.now
        if stretch is not None and stretch.begin_s <= now < stretch.end_s:
            self.lane.shorten(stretch.end_s, now)
            self.lane.done("generate", stretch.begin_s, now)
        self._stamp += 1
        self._stretch, self._away, self._poll_left = None, False, 0
        self._paused = self._mute = False
        for request in self._live.values():
            request.row = -1
        for held in (self._live, self._waiting, self._rows, self._by_length, self._ended):
            held.clear()
        self._aborting.clear()
        self._of_prompt.clear()
        self._num_rows = self._num_waiting = self._kv = self._saved = 0
        self._leave_if_idle()

    # From one stretch to the next

    def _stir(self, *, wants: bool) -> None:
        """Begins if idle. A stretch ends with its current step where someone wants something."""
        if self._away:
            return
        if self._stretch is None:
            self._begin()
        elif wants and self.poll is None:
            self._cut(self._stretch)

    def _begin(self) -> None:
        """At a boundary: takes up what came from outside, reports, and begins a stretch."""
        while True:
            if self._mute:
                return
            load_s = self._take_up()
            if not (self._ended and self._poll_left <= 0):
                break
            ends, self._ended = self._ended, []
            self._away = True
            self.report(self, ends)
            self._away = False
        if load_s or (self._live and not self._paused):
            self._join_others()
        if load_s:
            self.lane.work("load weights", self.clock.now, load_s * self._pace)
            self.clock.at(self.lane.free_s, self._leave_if_idle)
        if not self._live or self._paused:
            self._poll_left = 0
            self._leave_if_idle()
        elif self.lane.free_s > self.clock.now:
            self._away = True
            self.clock.at(self.lane.free_s, self._try_again, self._stamp)
        else:
            self._run()

    def _join_others(self) -> None:
        if self.sharing is not None:
            self.sharing.enter(self)

    def _leave_if_idle(self) -> None:
        idle = not self._live or self._paused
        if self.sharing is not None and idle and self.lane.free_s <= self.clock.now:
            self.sharing.leave(self)

    def _try_again(self, stamp: int) -> None:
        if stamp == self._stamp:
            self._away = False
            self._begin()

    def _take_up(self) -> float:
        """Publications and aborts that waited for a boundary; seconds that loading takes."""
        load_s = 0.0
        for version, seconds in self._published:
            self._marks.append((self._decoded, version))
            load_s += seconds
        self._published.clear()
        for sample in self._aborting:
            request = self._live.get(sample)
            if request is not None:
                self._end(request, aborted=True)
        if self._aborting:
            self._aborting.clear()
            self._poll_left = 0  # a driver that aborts looks for the ends at once
        return load_s

    def _run(self) -> None:
        """Begins a stretch: the lane is free, and something is there."""
        now, poll = self.clock.now, self.poll
        first_s = 0.0
        if poll is not None and self._poll_left <= 0:
            self._poll_left, first_s = poll.steps, poll.overhead_s
        if self._admits():
            first_s += self._admit(now)
        steps = self._steps_to_next()
        batch = self._num_rows
        context = self._kv / batch if batch else 0.0
        longest = self._longest_key() + self._decoded if batch else 0
        decode_s = decode_run_s(self.times, batch, context, longest, steps)
        if batch and self._rows[0][0] == self._decoded + steps:
            decode_s += self.times.leave_s()
        slow = self.slow * self._pace
        begin, end = self.lane.take(now, (first_s + decode_s) * slow)
        stretch = self._stretch = _Stretch(
            begin_s=begin,
            prefill_end_s=begin + first_s * slow,
            end_s=end,
            steps=steps,
            batch=batch,
            context=context,
            longest=longest,
            slow=slow,
        )
        self.clock.at(stretch.end_s, self._finish, self._stamp)

    def _cut(self, stretch: _Stretch) -> None:
        """Ends the stretch with the step that is being made."""
        now = self.clock.now
        base = stretch.prefill_end_s

        def end_of(steps: int) -> float:
            run_s = decode_run_s(self.times, stretch.batch, stretch.context, stretch.longest, steps)
            return base + run_s * stretch.slow

        steps = bisect_left(range(stretch.steps), now, key=end_of)
        if steps >= stretch.steps:
            return
        end = max(end_of(steps), now)
        self.lane.shorten(stretch.end_s, end)
        stretch.steps, stretch.end_s = steps, end
        self._stamp += 1
        self.clock.at(end, self._finish, self._stamp)

    def _finish(self, stamp: int) -> None:
        """The stretch is over: rows that have drawn their last token end."""
        stretch = self._stretch
        if stamp != self._stamp or stretch is None:
            return
        self._stretch = None
        self.drawn_s = stretch.end_s
        self.lane.done("generate", stretch.begin_s, stretch.end_s)
        steps = stretch.steps
        self._decoded += steps
        self._kv += steps * self._num_rows
        totals = self.totals
        totals.steps += steps
        totals.tokens += steps * self._num_rows
        totals.kv_peak = max(totals.kv_peak, self._kv - self._saved)
        rows, num_ended = self._rows, len(self._ended)
        while rows and rows[0][0] <= self._decoded:
            _, row, request = heapq.heappop(rows)
            if request.row == row:
                self._end(request, aborted=False)
        if self.poll is not None:
            self._poll_left -= max(steps, 1)
            if len(self._ended) > num_ended:
                self._poll_left = min(self._poll_left, self.poll.after_end)
            if not self._live:
                self._poll_left = 0
        self._begin()

    # Rows

    def _admits(self) -> bool:
        free = self.num_slots - self._num_rows
        return 0 < min(self._num_waiting, self.admit_at) <= free

    def _admit(self, now: float) -> float:
        """Waiting requests enter while there is room; seconds of their prefill."""
        rows = tokens = 0
        prompts: set[GroupId] = set()
        while self._num_waiting and self._num_rows < self.num_slots:
            request = self._waiting[0]
            if self._live.get(request.sample) is not request:
                self._waiting.popleft()
                continue
            there = request.shared if request.prompt in self._of_prompt else 0
            # Room for the row, and for what all rows have to find free.
            needed = request.context - there + 1 + (self._num_rows + 1) * self.reserve
            if self._num_rows and needed > self._free:
                break
            self._waiting.popleft()
            self._num_waiting -= 1
            if not (request.fresh and request.prompt in prompts):
                tokens += request.context - max(request.cached, there)
            if request.fresh:
                prompts.add(request.prompt)
            self._enter(request, now)
            rows += 1
        self.totals.tokens += rows
        return self.times.prefill_s(rows, tokens) if rows else 0.0

    @property
    def _free(self) -> float:
        """Tokens that there is still room for."""
        return math.inf if self.kv_tokens is None else self.kv_tokens - self._kv + self._saved

    def _enter(self, request: Request, now: float) -> None:
        self._entered += 1
        request.row, request.entered_s = self._entered, now
        request.began_at = self._decoded
        request.ends_at = self._decoded + request.left - 1
        request.key = request.context + 1 - self._decoded
        request.version = self._marks[-1][1]
        self._num_rows += 1
        self._kv += request.context + 1
        if self.keeps_prefixes and request.shared:
            others = self._of_prompt.get(request.prompt, 0)
            self._of_prompt[request.prompt] = others + 1
            if others:
                self._saved += request.shared
        heapq.heappush(self._rows, (request.ends_at, request.row, request))
        heapq.heappush(self._by_length, (-request.key, request.row, request))

    def _steps_to_next(self) -> int:
        """Decode steps until a row ends, memory is full, or the poll is over."""
        rows = self._rows
        while rows and rows[0][2].row != rows[0][1]:
            heapq.heappop(rows)
        if not rows:
            return 0
        steps = rows[0][0] - self._decoded
        if self.kv_tokens is not None and steps:
            while (room := int(self._free) // self._num_rows) < 1:
                self._preempt()
            steps = min(rows[0][0] - self._decoded, room)
        return steps if self.poll is None else min(steps, self._poll_left)

    def _longest_key(self) -> int:
        heap = self._by_length
        while heap[0][2].row != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2].key

    def _preempt(self) -> None:
        """Puts the row that entered last back to the front of the queue, with its tokens."""
        request = max((r for _, row, r in self._rows if r.row == row), key=lambda r: r.row)
        drawn = self._decoded - request.began_at + 1
        request.spans = self._spans(request, drawn)
        self._leave(request, "preempted")
        request.drawn += drawn
        request.left -= drawn
        request.context += drawn
        request.fresh, request.cached = False, 0
        self._waiting.appendleft(request)
        self._num_waiting += 1
        self.totals.preempted += 1
        rows = self._rows
        while rows[0][2].row != rows[0][1]:
            heapq.heappop(rows)

    def _end(self, request: Request, *, aborted: bool) -> None:
        if request.row < 0:
            drawn, spans = 0, request.spans
            self._num_waiting -= 1
        else:
            drawn = self._decoded - request.began_at + 1
            spans = self._spans(request, drawn)
            self._leave(request, "aborted" if aborted else "ended")
        del self._live[request.sample]
        self._ended.append(
            Ended(request=request, aborted=aborted, drawn=request.drawn + drawn, spans=spans)
        )

    def _leave(self, request: Request, why: str) -> None:
        if self.recorder is not None:
            self.recorder.row(self, request, why)
        self._kv -= request.key + self._decoded
        others = self._of_prompt.pop(request.prompt, 0) - 1
        if others > 0:
            self._of_prompt[request.prompt] = others
            self._saved -= request.shared
        self._num_rows -= 1
        request.row = -1

    def _spans(self, request: Request, drawn: int) -> Spans:
        """Versions of all tokens of the attempt, the last `drawn` of them on this row."""
        marks = self._marks
        if marks[-1][1] == request.version:  # versions only rise
            return join_spans(request.spans, ((request.version, drawn),))
        spans: list[tuple[int, int]] = []
        end = self._decoded
        # Step s is drawn by the last publication before it; the first token by `version`.
        for made, version in reversed(marks):
            begin = max(made, request.began_at)
            if begin < end:
                spans.append((version, end - begin))
                end = begin
            if made <= request.began_at:
                break
        return join_spans(request.spans, ((request.version, 1), *reversed(spans)))


def join_spans(first: Spans, second: Spans) -> Spans:
    """Spans one after the other; neighbours of one version become one.

    >>> join_spans(((0, 2),), ((0, 1), (1, 5)))
    ((0, 3), (1, 5))
    """
    joined: list[tuple[int, int]] = list(first)
    for version, count in second:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        else:
            joined.append((version, count))
    return tuple(joined)
