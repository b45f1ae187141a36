"""Measures an inference engine through its protocol: what `flowrl profile` does with it.

Nothing is known of the backend but `GenerateBackend`. The engine is opened without stop tokens, so
every response has exactly the tokens that are asked for, whatever the model says.

What is found, in turn:

- how a driven engine returns from `poll`: after how many steps, and how many once a request ended;
- decode: rows that draw two tokens against rows that draw more, which begin at the prompt or, where
  the engine can go on from kept tokens, deep in a response. Rows share one context there, so that
  what has to be computed before is computed once;
- prefill: what rows that draw two tokens take beside a decode step, alone and together, with
  prompts of their own and shared. So what an engine does once for each row counts here, be it
  before the first step of a row or behind its last;
- whether a step costs by the longest row or by the mean one;
- what it costs more when rows end one after the other, each leaving its slot.

Each time is the median of several, as the median step of a run is what a simulation is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.backend.protocols import Finished, GenerateBackend, GenerateRequest, Progress
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.sim.engine import PollRule
from flowrl.sim.fit import fit_line
from flowrl.sim.profile import DecodePoint, EngineProfile
from flowrl.sim.step_time import DecodeTable, LinearPrefill, TableStep, decode_run_s
from flowrl.specs import Sampling

Timer: TypeAlias = Callable[[], float]
"""A clock in seconds: of the wall, or of this process where others share the machine."""

_NO_TOKENS: Ints = np.zeros(0, np.int64)
_POLL_S = 60.0
"""Seconds that a poll may take; the engine returns as soon as it has something to say."""
_STALL_S = 120.0
"""Seconds without an end after which an engine cannot be measured."""
_DEEP_STEPS = 24
"""Decode steps that are timed at one context."""
_WAVES, _WAVE_ROWS = 12, 8192
"""Short responses that follow one another in each slot, to see how far a poll goes on behind the
first end; of all slots together at most so many."""
_OTHER = np.zeros(4 << 20)
"""32 MiB: more than the caches that a core has to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineQuestion:
    """What an engine is asked.

    Attributes:
        prompts: Tokens of real prompts.
        sampling: Of the rollout; its `max_tokens` is the longest response.
        group_size: Samples that share a prompt.
        max_rows: Most rows to measure: slots, or as many as a step can have.
        max_length: Tokens that the engine can hold of a row.
        budget_s: Seconds to spend, roughly.
        resumes: Whether requests may begin with response tokens.
        polled: Whether a driver polls it in its own process.
        timer: The clock of all measurements.
        publish: Serves the same weights anew, where that is cheap to ask for.
    """

    prompts: Sequence[Ints]
    sampling: Sampling
    group_size: int
    max_rows: int
    max_length: int
    budget_s: float
    resumes: bool
    polled: bool
    timer: Timer
    publish: Callable[[], None] | None = None


def repeated(
    measure: Callable[[], float], *, least: int = 3, most: int = 9, budget_s: float = 0.4
) -> float:
    """The median of several measurements after one that is thrown away; fewer of slow ones."""
    first = measure()
    times: list[float] = []
    spent = 0.0
    while len(times) < least or (len(times) < most and spent < budget_s):
        if first > budget_s and times:
            break  # one of something slow says as much as several of something fast
        times.append(measure())
        spent += times[-1]
    return median(times)


def timed(timer: Timer, call: Callable[[], object]) -> float:
    """Seconds of a call."""
    started = timer()
    call()
    return timer() - started


def after_other_work(timer: Timer, call: Callable[[], object]) -> float:
    """Seconds of a call that finds the processor's caches as a step does: full of other things."""
    _OTHER.sum()
    return timed(timer, call)


def measure_engine(engine: GenerateBackend, question: EngineQuestion, role: str) -> EngineProfile:
    """Measures an engine that holds nothing, and leaves it so."""
    return _Engine(engine, question, role).measure()


class _Engine:
    def __init__(self, engine: GenerateBackend, question: EngineQuestion, role: str) -> None:
        self.engine = engine
        self.question = question
        self.role = role
        self.timer = question.timer
        self.num_calls = 0
        lengths = sorted(len(prompt) for prompt in question.prompts)
        self.typical = next(p for p in question.prompts if len(p) == lengths[len(lengths) // 2])
        self.varies = lengths[0] != lengths[-1]
        # The longest response that fits behind a typical prompt.
        self.room = min(
            question.max_length - len(self.typical), max(question.sampling.max_tokens, 16)
        )
        if self.room < 3:
            raise BackendError(
                "no response fits behind the prompts, so nothing can be measured",
                where=f"role {role}",
                found=f"{len(self.typical)} prompt tokens of {question.max_length}",
                expected="room for at least one token",
                hint="raise the model's max_length, or lower data.max_prompt_tokens",
            )

    def measure(self) -> EngineProfile:
        poll = self._poll_rule() if self.question.polled else None
        points = _monotone(self._decode())
        profile = EngineProfile(
            role=self.role,
            decode=points,
            prefill=self._prefill(points),
            longest_share=self._longest_share(points),
            poll=poll,
            load_s=self._load_s(),
        )
        return self._with_ends(profile)

    # One run of requests

    def _run(self, requests: Sequence[tuple[Ints, Ints, int, str]]) -> float:
        """Seconds from submission to the last end; each is (prompt, kept, tokens, prompt key)."""
        self._submit(requests)
        left, started = len(requests), self.timer()
        begun = self._begun
        while left:
            left -= sum(isinstance(o, Finished) for o in self.engine.poll(_POLL_S))
            if self.timer() - started > _STALL_S:
                raise BackendError(
                    f"the engine did not end {left} requests in {_STALL_S:g} s",
                    where=f"role {self.role}",
                    expected="all of them, as in a run",
                    hint="stop what else runs here and measure again; `flowrl doctor` checks it",
                )
        return self.timer() - begun

    def _submit(self, requests: Sequence[tuple[Ints, Ints, int, str]]) -> None:
        self.num_calls += 1
        _OTHER.sum()
        made = [
            GenerateRequest(
                sample=SampleId(f"{self.num_calls}/{i}/0"),
                attempt=0,
                prompt=prompt,
                response=kept,
                sampling=replace(
                    self.question.sampling, max_tokens=len(kept) + tokens, min_tokens=0
                ),
                seed=i,
                shares_prompt=key,
            )
            for i, (prompt, kept, tokens, key) in enumerate(requests)
        ]
        self._begun = self.timer()
        self.engine.submit(made)

    def _groups(self, rows: int) -> list[tuple[Ints, str]]:
        """A prompt for each of so many rows, as a step has them: groups of real prompts."""
        size, prompts = self.question.group_size, self.question.prompts
        return [(prompts[(i // size) % len(prompts)], str(i // size)) for i in range(rows)]

    # What is found

    def _prefill(self, points: Sequence[DecodePoint]) -> LinearPrefill:
        question, table = self.question, _table(points)
        context = len(self.typical) + 1.0
        rows = sorted({1, question.group_size, min(64, question.max_rows), question.max_rows})
        features: list[list[float]] = []
        seconds: list[float] = []
        started = self.timer()
        for number in rows:
            shared = [(p, _NO_TOKENS, 2, key) for p, key in self._groups(number)]
            alone = [
                (question.prompts[i % len(question.prompts)], _NO_TOKENS, 2, f"own {i}")
                for i in range(number)
            ]
            for requests in (shared, alone):
                prompts = {key: len(prompt) for prompt, _, _, key in requests}
                feature = [1.0, float(number), float(sum(prompts.values()))]
                if feature in features:
                    continue
                spent = repeated(lambda requests=requests: self._run(requests))  # type: ignore[misc]
                features.append(feature)
                seconds.append(max(spent - table.at(number, context), 0.05 * spent))
            if self.timer() - started > question.budget_s / 3:
                break
        (call_s, row_s, token_s), _ = fit_line(features, seconds)
        return LinearPrefill(call_s=call_s, row_s=row_s, token_s=token_s)

    def _load_s(self) -> float:
        """What the first step after a publication takes beside."""
        publish, one = self.question.publish, [(self.typical, _NO_TOKENS, 1, "one")]
        if publish is None:
            return 0.0

        def after() -> float:
            publish()
            return self._run(one) - self._run(one)

        return float(f"{max(0.0, repeated(after)):.6g}")

    def _poll_rule(self) -> PollRule:
        """Polls a row with room for many steps, then beside one that ends early."""
        tokens = self.room
        self._submit([(self.typical, _NO_TOKENS, tokens, "long")])
        steps = self._progress_of_a_poll(tokens)
        self._drain()
        self._submit(
            [(self.typical, _NO_TOKENS, 2, "short"), (self.typical, _NO_TOKENS, tokens, "long")]
        )
        self.engine.poll(_POLL_S)
        self.engine.abort([SampleId(f"{self.num_calls}/1/0")])
        ended = self._drain()
        made = max((len(end.tokens) for end in ended), default=tokens)
        # The prefill has drawn one token of each.
        after_end = max(1, made - 2)
        if made >= tokens:  # no response is long enough to show it, but a row of them may be
            after_end = max(after_end, self._after_end_of_waves())
        # One that ended in its first poll does not show how many steps a poll has.
        return PollRule(
            steps=max(1, steps - 1) if steps < tokens else tokens + after_end, after_end=after_end
        )

    def _after_end_of_waves(self) -> int:
        """Steps of a poll behind the first end, by responses of one step that follow each other."""
        slots = self.engine.num_slots
        if slots * _WAVES > _WAVE_ROWS:
            return 0
        self._submit([(self.typical, _NO_TOKENS, 2, "wave")] * (slots * _WAVES))
        ended = sum(isinstance(output, Finished) for output in self.engine.poll(_POLL_S))
        self.engine.abort([SampleId(f"{self.num_calls}/{i}/0") for i in range(slots * _WAVES)])
        self._drain()
        return ended // slots - 1

    def _progress_of_a_poll(self, most: int) -> int:
        outputs = self.engine.poll(_POLL_S)
        counts = [o.num_tokens for o in outputs if isinstance(o, Progress)]
        return min(counts, default=most)

    def _drain(self) -> list[Finished]:
        ended: list[Finished] = []
        while outputs := self.engine.poll(_POLL_S):
            ended += [output for output in outputs if isinstance(output, Finished)]
        return ended

    def _step_s(self, contexts: Sequence[tuple[Ints, Ints]], steps: int) -> float:
        """Seconds of one decode step of these rows, over `steps` of them."""
        requests = [
            (prompt, kept, 2, f"{len(prompt)} and {len(kept)} tokens") for prompt, kept in contexts
        ]
        more = [(prompt, kept, steps + 2, key) for prompt, kept, _, key in requests]

        begins: list[float] = []

        def once() -> float:
            begins.append(self._run(requests))  # in turns, so that both see the same machine
            return self._run(more)

        whole = repeated(once, most=7)
        # What others do to the machine can hide a short step, but it is no less than nothing.
        return max(whole - median(begins[1:]), 0.05 * whole) / steps

    def _decode(self) -> list[DecodePoint]:
        question, points = self.question, []
        batches = [2**i for i in range(0, 20, 2) if 2**i < question.max_rows]
        batches.append(question.max_rows)
        started = self.timer()
        for batch in batches:
            for kept in self._depths():
                steps = min(_DEEP_STEPS, self.room - len(kept) - 2)
                context = len(self.typical) + len(kept) + 2 + (steps - 1) / 2
                seconds = self._step_s(self._rows(batch, kept), steps)
                points.append(DecodePoint(batch=batch, context=context, seconds=seconds))
            if self.timer() - started > question.budget_s:
                break
        return points

    def _rows(self, batch: int, kept: Ints) -> list[tuple[Ints, Ints]]:
        """Rows of one context; where prompts differ in length, every other one a token shorter.

        Engines may have a faster way for rows that are exactly alike, as those of a run then never
        are.
        """
        other = self.typical[1:] if self.varies and len(self.typical) > 1 else self.typical
        return [(other if i % 2 else self.typical, kept) for i in range(batch)]

    def _depths(self) -> list[Ints]:
        """Kept responses to begin from: none, half of the room, and nearly all of it."""
        if not self.question.resumes or self.room < 2 * _DEEP_STEPS:
            return [_NO_TOKENS]
        last = self.room - _DEEP_STEPS - 2
        return [self._kept(0), self._kept(last // 2), self._kept(last)]

    def _kept(self, tokens: int) -> Ints:
        repeats = -(-tokens // len(self.typical))
        return np.tile(self.typical, repeats)[:tokens] if tokens else _NO_TOKENS

    def _longest_share(self, points: Sequence[DecodePoint]) -> float:
        """Half of the rows short, half long: between which of the two is the step?"""
        depths = self._depths()
        if len(depths) == 1:
            return 1.0  # all rows are alike, and it makes no difference
        batch = max(p.batch for p in points if p.batch <= 64)
        steps = min(_DEEP_STEPS, self.room - len(depths[-1]) - 2)
        half = batch // 2
        if not half:
            return 1.0
        rows = [(self.typical, depths[0])] * half + [(self.typical, depths[-1])] * (batch - half)
        mixed = self._step_s(rows, steps)
        table = _table(points)
        short, long = (
            len(self.typical) + len(depth) + 1 + (steps - 1) / 2
            for depth in (depths[0], depths[-1])
        )
        mean = (half * short + (batch - half) * long) / batch
        at_mean, at_longest = table.at(batch, mean), table.at(batch, long)
        if at_longest - at_mean < 0.02 * at_mean:
            return 1.0
        return round(min(1.0, max(0.0, (mixed - at_mean) / (at_longest - at_mean))), 3)

    def _with_ends(self, profile: EngineProfile) -> EngineProfile:
        """Finds what rows cost more that end one after the other than together."""
        rows = min(64, self.question.max_rows)
        longest = min(self.room, 32)
        lengths = [1 + (i * 7919) % longest for i in range(rows)]
        fits = self.question.max_length - longest
        requests = [
            (prompt[:fits], _NO_TOKENS, length, key)
            for (prompt, key), length in zip(self._groups(rows), lengths, strict=True)
        ]
        times = len(set(lengths)) - 1  # the prefill's line knows the end of all rows at once
        if times < 1:
            return profile
        measured = repeated(lambda: self._run(requests))
        prompts = {key: len(prompt) for prompt, _, _, key in requests}
        step = TableStep(
            decode=_table(profile.decode),
            prefill=profile.prefill,
            longest_share=profile.longest_share,
        )
        predicted = step.prefill_s(rows, sum(prompts.values()))
        predicted += _staggered_s(step, [(n, len(prompt)) for prompt, _, n, _ in requests])
        leave_s = float(f"{max(0.0, measured - predicted) / times:.6g}")
        call_s = max(0.0, profile.prefill.call_s - leave_s)
        return replace(profile, leave_s=leave_s, prefill=replace(profile.prefill, call_s=call_s))


def _staggered_s(step: TableStep, rows: Sequence[tuple[int, int]]) -> float:
    """Seconds of the decode steps of rows of `(response, prompt)` tokens, as they end."""
    left, made, seconds = sorted(rows), 1, 0.0
    while left:
        ending = left[0][0]
        contexts = [prompt + made for _, prompt in left]
        mean = sum(contexts) / len(contexts)
        seconds += decode_run_s(step, len(left), mean, max(contexts), ending - made)
        made = ending
        left = [row for row in left if row[0] > ending]
    return seconds


def _table(points: Sequence[DecodePoint]) -> DecodeTable:
    return DecodeTable((p.batch, p.context, p.seconds) for p in points)


def _monotone(points: Sequence[DecodePoint]) -> tuple[DecodePoint, ...]:
    """A step with fewer rows or shorter ones takes no longer: what is above is noise, and is cut.

    Noise is whatever else the machine does, so it only ever makes a time longer.
    """
    found = []
    for point in sorted(points, key=lambda p: (p.batch, p.context)):
        above = [p.seconds for p in points if p.batch >= point.batch and p.context >= point.context]
        found.append(replace(point, seconds=float(f"{min(above):.6g}")))
    return tuple(found)
