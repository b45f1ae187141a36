"""The rows of a simulated engine: who waits for one, who is on one, and what they hold.

    wait -> (admit) -> on a row -> (steps) -> is_over -> end
              ^                      |
              +---- preempted -------+   memory is full: tokens kept, keys and values made anew

It knows no seconds: `flowrl.sim.engine` says when requests enter and how many steps are made. Rows
wait in a heap for the step in which they end, so that any number of steps costs the logarithm of
the batch.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from flowrl.ids import GroupId, SampleId

Spans = tuple[tuple[int, int], ...]
"""`((version, tokens), ...)`, in order."""


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
        rollout: Whose sample it is; samples of several rollouts may have the same id.
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
    rollout: str = ""
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


@dataclass(slots=True, eq=False, kw_only=True)
class Rows:
    """See the module.

    Attributes:
        num_slots: Rows at once.
        kv_tokens: Tokens whose keys and values fit; None where slots are the limit.
        admit_at: Free slots that waiting requests wait for, so that they are prefilled together.
        keeps_prefixes: Rows of a prompt hold and compute it once.
        reserve: Tokens that each row has to find free when another is let in.
        leaves: Is told of a request that is about to leave its row, and why: `ended`, `aborted` or
            `preempted`.
        live: Every request that has not ended, on a row or not, by rollout and sample.
        num: Rows in use.
        steps: Decode steps made since the engine was made.
    """

    num_slots: int
    kv_tokens: int | None
    admit_at: int
    keeps_prefixes: bool
    reserve: int
    leaves: Callable[[Request, str], None]
    live: dict[tuple[str, SampleId], Request] = field(default_factory=dict)
    num: int = 0
    steps: int = 0
    _waiting: deque[Request] = field(default_factory=deque)  # and ended ones, which are skipped
    _by_end: list[tuple[int, int, Request]] = field(default_factory=list)  # heap (ends_at, row, ..)
    _by_length: list[tuple[int, int, Request]] = field(default_factory=list)  # heap (-key, row, ..)
    # Entries of both heaps are current while their request is on that very row.
    _num_waiting: int = 0
    _kv: int = 0  # tokens of all rows, prompts with each
    _saved: int = 0  # of those, what rows hold together with others of their prompt
    _of_prompt: dict[GroupId, int] = field(default_factory=dict)  # rows; of engines that save
    _entered: int = 0  # rows ever entered
    _marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # (steps, version)

    @property
    def admits(self) -> bool:
        """Whether requests wait, and as many slots are free as they wait for."""
        free = self.num_slots - self.num
        return 0 < min(self._num_waiting, self.admit_at) <= free

    @property
    def version(self) -> int:
        """Of the weights that the next token is drawn with."""
        return self._marks[-1][1]

    @property
    def held(self) -> int:
        """Tokens in memory."""
        return self._kv - self._saved

    @property
    def _free(self) -> float:
        """Tokens that there is still room for."""
        return math.inf if self.kv_tokens is None else self.kv_tokens - self._kv + self._saved

    @property
    def mean_context(self) -> float:
        """Tokens of a row; 0 without rows."""
        return self._kv / self.num if self.num else 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        if not self.num:
            return 0
        heap = self._by_length
        while heap[0][2].row != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2].key + self.steps

    def wait(self, request: Request) -> None:
        """A request that enters as soon as there is room."""
        self._waiting.append(request)
        self.live[request.rollout, request.sample] = request
        self._num_waiting += 1

    def serve(self, version: int) -> None:
        """Weights that draw from the next step on."""
        self._marks.append((self.steps, version))

    def admit(self, now: float) -> tuple[int, int]:
        """Waiting requests enter while there is room, at `now`; rows and tokens to prefill."""
        rows = tokens = 0
        prompts: set[GroupId] = set()
        while self._num_waiting and self.num < self.num_slots:
            request = self._waiting[0]
            if self.live.get((request.rollout, request.sample)) is not request:
                self._waiting.popleft()
                continue
            there = request.shared if request.prompt in self._of_prompt else 0
            # Room for the row, and for what all rows have to find free.
            needed = request.context - there + 1 + (self.num + 1) * self.reserve
            if self.num and needed > self._free:
                break
            self._waiting.popleft()
            self._num_waiting -= 1
            if not (request.fresh and request.prompt in prompts):
                tokens += request.context - max(request.cached, there)
            if request.fresh:
                prompts.add(request.prompt)
            self._enter(request, now)
            rows += 1
        return rows, tokens

    def _enter(self, request: Request, now: float) -> None:
        self._entered += 1
        request.row, request.entered_s = self._entered, now
        request.began_at = self.steps
        request.ends_at = self.steps + request.left - 1
        request.key = request.context + 1 - self.steps
        request.version = self.version
        self.num += 1
        self._kv += request.context + 1
        if self.keeps_prefixes and request.shared:
            others = self._of_prompt.get(request.prompt, 0)
            self._of_prompt[request.prompt] = others + 1
            if others:
                self._saved += request.shared
        heapq.heappush(self._by_end, (request.ends_at, request.row, request))
        heapq.heappush(self._by_length, (-request.key, request.row, request))

    def steps_to_next(self) -> int:
        """Decode steps until a row ends or memory is full, which puts rows back where it is."""
        heap = self._by_end
        self._forget_left()
        if not heap:
            return 0
        steps = heap[0][0] - self.steps
        if self.kv_tokens is not None and steps:
            while (room := int(self._free) // self.num) < 1:
                self._preempt()
            steps = min(heap[0][0] - self.steps, room)
        return steps

    def _forget_left(self) -> None:
        """Has a row on top of the heap that has not left meanwhile."""
        heap = self._by_end
        while heap and heap[0][2].row != heap[0][1]:
            heapq.heappop(heap)

    def some_end_in(self, steps: int) -> bool:
        """Whether a row ends with so many steps more; not asked of more than `steps_to_next`."""
        return bool(self.num) and self._by_end[0][0] == self.steps + steps

    def advance(self, steps: int) -> list[Request]:
        """Every row has drawn so many tokens more; those that are over now, and yet to `end`."""
        self.steps += steps
        self._kv += steps * self.num
        heap, over = self._by_end, []
        while heap and heap[0][0] <= self.steps:
            _, row, request = heapq.heappop(heap)
            if request.row == row:
                over.append(request)
        return over

    def progress(self, further: int, rollout: str) -> list[tuple[SampleId, int, int]]:
        """`(sample, attempt, tokens of the attempt)` of a rollout's rows, after some more steps."""
        steps = self.steps + further
        return [
            (request.sample, request.attempt, request.drawn + steps - request.began_at + 1)
            for request in self.live.values()
            if request.row >= 0 and request.rollout == rollout
        ]

    def _preempt(self) -> None:
        """Puts the row that entered last back to the front of the queue, with its tokens."""
        request = max((r for _, row, r in self._by_end if r.row == row), key=lambda r: r.row)
        drawn = self.steps - request.began_at + 1
        request.spans = self._spans(request, drawn)
        self._leave(request, "preempted")
        request.drawn += drawn
        request.left -= drawn
        request.context += drawn
        request.fresh, request.cached = False, 0
        self._waiting.appendleft(request)
        self._num_waiting += 1
        self._forget_left()

    def end(self, request: Request, *, aborted: bool) -> Ended:
        """A request is over, on a row or before it had one."""
        if request.row < 0:
            drawn, spans = 0, request.spans
            self._num_waiting -= 1
        else:
            drawn = self.steps - request.began_at + 1
            spans = self._spans(request, drawn)
            self._leave(request, "aborted" if aborted else "ended")
        del self.live[request.rollout, request.sample]
        return Ended(request=request, aborted=aborted, drawn=request.drawn + drawn, spans=spans)

    def _leave(self, request: Request, why: str) -> None:
        self.leaves(request, why)
        self._kv -= request.key + self.steps
        others = self._of_prompt.pop(request.prompt, 0) - 1
        if others > 0:
            self._of_prompt[request.prompt] = others
            self._saved -= request.shared
        self.num -= 1
        request.row = -1

    def clear(self) -> None:
        """All requests are gone with the engine; nothing is told of them."""
        for request in self.live.values():
            request.row = -1
        for held in (self.live, self._waiting, self._by_end, self._by_length, self._of_prompt):
            held.clear()
        self.num = self._num_waiting = self._kv = self._saved = 0

    def _spans(self, request: Request, drawn: int) -> Spans:
        """Versions of all tokens of the attempt, the last `drawn` of them on this row."""
        marks = self._marks
        if marks[-1][1] == request.version:  # versions only rise
            return join_spans(request.spans, ((request.version, drawn),))
        spans: list[tuple[int, int]] = []
        end = self.steps
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
