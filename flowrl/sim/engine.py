"""An inference engine on a virtual clock: continuous batching with slots and KV memory.

    submit -> waiting -> (prefill) -> running -> ended -> reported
                 ^                       |
                 +---- preempted --------+   memory is full: tokens kept, keys and values made anew

Between two things that change its batch (`flowrl.sim.rows`) an engine makes decode steps that only
make its rows longer. Such a stretch is one call of the clock, whatever its length. What comes from
outside (a request that finds room, an abort, new weights) ends the stretch at the step that is
being made.

An embedded engine is driven by polls (`PollRule`) and shares its lane with whoever polls it; it
reports at the end of a poll. An engine on its own reports each end at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.lanes import Lane, LaneGroup
from flowrl.sim.rows import Ended, Request, Rows
from flowrl.sim.sharing import Sharing
from flowrl.sim.step_time import StepTime, decode_run_s


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
    totals: EngineTotals = field(default_factory=EngineTotals)
    _rows: Rows = field(init=False)
    _ended: list[Ended] = field(default_factory=list)  # not reported yet
    _aborting: list[tuple[str, SampleId]] = field(default_factory=list)  # of the next boundary
    _published: list[tuple[int, float]] = field(default_factory=list)  # (version, load seconds)
    _stretch: _Stretch | None = None
    _stamp: int = 0  # calls of the clock with another one are void
    _paused: bool = False
    _mute: bool = False
    _away: bool = False  # between two stretches: reporting, or waiting for the lane
    _poll_left: int = 0  # steps left in this poll; 0 between polls
    _pace: float = 1.0  # beside `slow`: of one that shares cores

    def __post_init__(self) -> None:
        self._rows = Rows(
            num_slots=self.num_slots,
            kv_tokens=self.kv_tokens,
            admit_at=self.admit_at,
            keeps_prefixes=self.keeps_prefixes,
            reserve=self.reserve,
            leaves=self._leaves,
        )

    def _leaves(self, request: Request, why: str) -> None:
        if self.recorder is not None:
            self.recorder.row(self, request, why)
        if why == "preempted":
            self.totals.preempted += 1

    # From outside

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self._rows.num

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
            self._rows.wait(request)
        self._stir(wants=self._rows.admits)

    @property
    def version(self) -> int:
        """Of the weights that the next token is drawn with."""
        return self._rows.version

    def abort(self, samples: Iterable[SampleId], rollout: str = "") -> None:
        """Ends requests of a rollout with the tokens they have; unknown ones are ignored."""
        names = ((rollout, sample) for sample in samples)
        self._aborting.extend(name for name in names if name in self._rows.live)
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

    def progress(self, rollout: str = "") -> list[tuple[SampleId, int, int]]:
        """`(sample, attempt, tokens)` of a rollout's rows, after the last whole step."""
        steps, stretch = 0, self._stretch
        if stretch is not None and self.clock.now >= stretch.end_s:
            steps = stretch.steps
        elif stretch is not None and self.clock.now > stretch.prefill_end_s:
            share = self.clock.now - stretch.prefill_end_s
            share /= stretch.end_s - stretch.prefill_end_s
            steps = int(share * stretch.steps)
        return self._rows.progress(steps, rollout)

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
        self._rows.clear()
        self._ended.clear()
        self._aborting.clear()
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
        if load_s or (self._rows.live and not self._paused):
            self._join_others()
        if load_s:
            self.lane.work("load weights", self.clock.now, load_s * self._pace)
            self.clock.at(self.lane.free_s, self._leave_if_idle)
        if not self._rows.live or self._paused:
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
        idle = not self._rows.live or self._paused
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
            self._rows.serve(version)
            load_s += seconds
        self._published.clear()
        for name in self._aborting:
            request = self._rows.live.get(name)
            if request is not None:
                self._ended.append(self._rows.end(request, aborted=True))
        if self._aborting:
            self._aborting.clear()
            self._poll_left = 0  # a driver that aborts looks for the ends at once
        return load_s

    def _run(self) -> None:
        """Begins a stretch: the lane is free, and something is there."""
        now, poll, rows = self.clock.now, self.poll, self._rows
        first_s = 0.0
        if poll is not None and self._poll_left <= 0:
            self._poll_left, first_s = poll.steps, poll.overhead_s
        if rows.admits:
            first_s += self._admit(now)
        steps = rows.steps_to_next()
        if poll is not None:
            steps = min(steps, self._poll_left)
        batch, context, longest = rows.num, rows.mean_context, rows.longest
        decode_s = decode_run_s(self.times, batch, context, longest, steps)
        if rows.some_end_in(steps):
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

    def _admit(self, now: float) -> float:
        """Waiting requests enter; seconds of their prefill, which draws the first token of each."""
        rows, tokens = self._rows.admit(now)
        self.totals.tokens += rows
        return self.times.prefill_s(rows, tokens) if rows else 0.0

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
        self.lane.done("generate", stretch.begin_s, stretch.end_s)
        steps, rows, totals = stretch.steps, self._rows, self.totals
        over = rows.advance(steps)
        totals.steps += steps
        totals.tokens += steps * rows.num
        totals.kv_peak = max(totals.kv_peak, rows.held)
        self._ended += [rows.end(request, aborted=False) for request in over]
        if self.poll is not None:
            self._poll_left -= max(steps, 1)
            if over:
                self._poll_left = min(self._poll_left, self.poll.after_end)
            if not self._rows.live:
                self._poll_left = 0
        self._begin()
