"""The simulated engine: it does what a loop over single decode steps does, and faster."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.engine import PollRule, SimEngine
from flowrl.sim.lanes import Lane
from flowrl.sim.rows import Ended, Request, join_spans
from flowrl.sim.step_time import ConstantStep
from tests.sim.worlds import LinearStep


def request(name: str, left: int, *, prompt: int = 10, group: str = "0/0", **more) -> Request:
    return Request(
        sample=SampleId(name), attempt=0, prompt=GroupId(group), context=prompt, left=left, **more
    )


@dataclass
class Heard:
    """What an engine reported: `(time, sample, aborted, drawn, spans)`."""

    clock: Clock = field(default_factory=Clock)
    ends: list[tuple] = field(default_factory=list)

    def engine(self, *, slots: int = 4, times=None, **more) -> SimEngine:
        def report(engine: SimEngine, ends) -> None:
            for end in ends:
                self.note(end)

        return SimEngine(
            id=EngineId("e"),
            clock=self.clock,
            lane=Lane(name="e", device="d"),
            times=times or ConstantStep(step_s=1.0, prefill=0.5),
            num_slots=slots,
            report=report,
            **more,
        )

    def note(self, end: Ended) -> None:
        name = end.request.sample
        self.ends.append((self.clock.now, name, end.aborted, end.drawn, end.spans))

    def run(self) -> list[tuple]:
        self.clock.run_until(lambda: False)
        return self.ends


def test_a_row_takes_its_prefill_and_a_step_for_each_further_token():
    heard = Heard()
    heard.engine().submit([request("a", 1), request("b", 4)])
    assert heard.run() == [
        (0.5, "a", False, 1, ((0, 1),)),
        (3.5, "b", False, 4, ((0, 4),)),
    ]


def test_what_the_engine_has_kept_of_a_context_is_not_prefilled():
    """A token takes a second to prefill: 10 of a fresh prompt, 3 new ones of a later turn."""
    heard = Heard()
    engine = heard.engine(times=LinearStep(prefill=1.0))
    engine.submit([request("a", 1)])
    heard.run()
    engine.submit([request("b", 1, prompt=40, fresh=False, cached=37)])
    assert [(t, name) for t, name, *_ in heard.run()] == [(10.0, "a"), (13.0, "b")]


def test_rows_of_a_prompt_hold_and_compute_it_once_where_prefixes_are_kept():
    """A prompt of 40 and 3 of its rows hold 40 + 3 x 10 tokens at their fullest, or 3 x 50."""
    peaks, ends = [], []
    for keeps in (True, False):
        heard = Heard()
        times = LinearStep(prefill=1.0)
        engine = heard.engine(slots=3, times=times, kv_tokens=160, keeps_prefixes=keeps)
        rows = [request(name, 10, prompt=40, shared=40) for name in "abc"]
        engine.submit(rows[:1])
        engine.submit(rows[1:])
        ends.append(heard.run()[-1][0])
        peaks.append(engine.totals.kv_peak)
    assert peaks == [70, 150]
    assert ends[0] < ends[1]


def test_what_rows_hold_together_is_free_when_the_last_of_them_has_left():
    heard = Heard()
    engine = heard.engine(slots=2, kv_tokens=60, keeps_prefixes=True)
    first = [request(name, left, prompt=40, shared=40) for name, left in (("a", 3), ("b", 6))]
    other = request("c", 2, prompt=40, group="1/0", shared=40)
    engine.submit([*first, other])
    assert [name for _, name, *_ in heard.run()] == ["a", "b", "c"]
    assert engine.totals.preempted == 0
    assert engine.totals.kv_peak == 40 + 3 + 3


def test_a_row_waits_until_all_rows_find_their_reserve_free():
    """One holds 11 tokens and grows to 15; another of 11 wants 10 free for each of two: 42 > 40."""
    for reserve, peak in ((1, 30), (10, 15)):
        heard = Heard()
        engine = heard.engine(slots=2, kv_tokens=40, reserve=reserve)
        engine.submit([request("a", 5), request("b", 5, group="1/0")])
        assert [name for _, name, *_ in heard.run()] == ["a", "b"]
        assert engine.totals.kv_peak == peak


def test_a_freed_slot_is_filled_with_the_next_request():
    heard = Heard()
    heard.engine(slots=1).submit([request("a", 3), request("b", 2)])
    assert [(t, name) for t, name, *_ in heard.run()] == [(2.5, "a"), (4.0, "b")]


def test_a_request_that_finds_room_enters_behind_the_step_that_is_being_made():
    heard = Heard()
    engine = heard.engine()
    engine.submit([request("a", 10)])
    heard.clock.at(3.1, engine.submit, [request("b", 2)])
    # a: prefill to 0.5, steps to 3.5, prefill of b to 4.0, and a's last six steps.
    assert [(t, name) for t, name, *_ in heard.run()] == [(5.0, "b"), (10.0, "a")]


def test_an_abort_keeps_the_tokens_of_the_steps_that_were_made():
    heard = Heard()
    engine = heard.engine()
    engine.submit([request("a", 10), request("b", 5)])
    heard.clock.at(2.2, engine.abort, [SampleId("a"), SampleId("nobody")])
    assert heard.run() == [(2.5, "a", True, 3, ((0, 3),)), (4.5, "b", False, 5, ((0, 5),))]


def test_a_waiting_request_is_aborted_without_tokens():
    heard = Heard()
    engine = heard.engine(slots=1)
    engine.submit([request("a", 3), request("b", 3)])
    engine.abort([SampleId("b")])
    assert heard.run()[0][1:] == ("b", True, 0, ())
    assert engine.num_rows == 0


def test_tokens_after_a_publication_are_of_the_new_version():
    heard = Heard()
    engine = heard.engine()
    engine.submit([request("a", 6)])
    heard.clock.at(2.1, engine.publish, 1)
    heard.clock.at(3.1, engine.publish, 2, 10.0)
    [(time_s, _, _, drawn, spans)] = heard.run()
    # Tokens at 0.5, 1.5, 2.5 | 3.5 | loading to 13.5, then 14.5 and 15.5.
    assert (time_s, drawn, spans) == (15.5, 6, ((0, 3), (1, 1), (2, 2)))


def test_a_lost_engine_reports_nothing_and_can_be_used_again():
    heard = Heard()
    engine = heard.engine()
    engine.submit([request("a", 10)])
    heard.clock.at(4.0, engine.lose)
    heard.clock.at(6.0, engine.submit, [request("b", 2)])
    assert [(t, name) for t, name, *_ in heard.run()] == [(7.5, "b")]
    assert engine.lane.busy_s == 4.0 + 1.5


def test_a_slow_engine_takes_longer_from_the_next_step_on():
    heard = Heard()
    engine = heard.engine()
    engine.submit([request("a", 6)])
    heard.clock.at(2.1, engine.slow_down, 3.0)
    assert heard.run()[0][0] == 2.5 + 3 * 3.0


def test_common_prompts_are_computed_once_in_a_prefill():
    heard = Heard()
    times = LinearStep(prefill=0.1)
    heard.engine(times=times).submit(
        [request("a", 1), request("b", 1), request("c", 1, group="0/1"), request("d", 1)]
    )
    assert heard.run()[0][0] == pytest.approx(0.1 * 20)


def test_rows_of_a_full_memory_go_back_and_lose_no_token():
    heard = Heard()
    engine = heard.engine(kv_tokens=50)
    engine.submit([request("a", 30), request("b", 30)])
    ends = {name: (drawn, spans) for _, name, _, drawn, spans in heard.run()}
    assert ends == {"a": (30, ((0, 30),)), "b": (30, ((0, 30),))}
    assert engine.totals.preempted > 0
    assert engine.totals.kv_peak <= 50


def test_a_sample_larger_than_the_memory_is_refused():
    engine = Heard().engine(kv_tokens=20)
    with pytest.raises(SchedulerError, match="larger than the memory") as told:
        engine.submit([request("a", 11)])
    assert told.value.found == "21 tokens"


def test_a_polled_engine_reports_at_the_end_of_its_poll():
    heard = Heard()
    engine = heard.engine(poll=PollRule(steps=8, after_end=3, overhead_s=0.25))
    engine.submit([request("a", 2), request("b", 12)])
    times = [(t, name) for t, name, *_ in heard.run()]
    # Poll 1: 0.25 + prefill 0.5, a ends with step 1, three more steps: 4.75. Poll 2: 7 steps left.
    assert times == [(4.75, "a"), (12.0, "b")]


def test_waiting_requests_are_prefilled_together_where_slots_are_awaited():
    heard = Heard()
    engine = heard.engine(slots=2, admit_at=2)
    engine.submit([request("a", 2), request("b", 5), request("c", 1), request("d", 1)])
    assert [(t, name) for t, name, *_ in heard.run()] == [
        (1.5, "a"),
        (4.5, "b"),
        (5.0, "c"),
        (5.0, "d"),
    ]


def test_spans_of_one_version_are_joined():
    assert join_spans((), ((3, 2),)) == ((3, 2),)
    assert join_spans(((1, 2), (2, 1)), ((2, 4), (3, 1))) == ((1, 2), (2, 5), (3, 1))


class ByStep:
    """The same engine as a loop over single steps: slow, and plain enough to be right."""

    def __init__(self, slots: int, times: LinearStep) -> None:
        self.slots, self.times = slots, times
        self.now = 0.0
        self.waiting: list[list] = []  # [name, prompt, context, left]
        self.rows: list[list] = []
        self.ends: list[tuple[float, str, bool, int]] = []

    def run(self, events: list[tuple[float, str, object]]) -> list[tuple[float, str, bool, int]]:
        events = sorted(events, key=lambda event: event[0])
        while events or self.waiting or self.rows:
            if not self.rows and not self.waiting and events[0][0] > self.now:
                self.now = events[0][0]
            while events and events[0][0] <= self.now:
                self.take(*events.pop(0)[1:])
            ended = self.boundary()
            # A boundary lies behind the prefill too, where someone waits for it or a row is free.
            if self.rows and not ended and not (events and events[0][0] <= self.now):
                self.step()
        return self.ends

    def take(self, kind: str, what: object) -> None:
        if kind == "submit":
            self.waiting.append([*what, 0])
            return
        for held in (self.waiting, self.rows):
            for row in [row for row in held if row[0] == what]:
                held.remove(row)
                self.ends.append((self.now, row[0], True, row[4]))

    def boundary(self) -> bool:
        """Lets requests enter; whether some end with their first token."""
        entering = []
        while self.waiting and len(self.rows) < self.slots:
            row = self.waiting.pop(0)
            entering.append(row)
            self.rows.append(row)
        if not entering:
            return False
        prompts = {row[1]: row[2] for row in entering}
        self.now += self.times.prefill_s(len(entering), sum(prompts.values()))
        for row in entering:
            self.draw(row)
        before = len(self.ends)
        self.finish()
        return len(self.ends) > before

    def step(self) -> None:
        contexts = [row[2] for row in self.rows]
        mean = sum(contexts) / len(contexts)
        self.now += self.times.decode_s(len(contexts), mean, max(contexts))
        for row in self.rows:
            self.draw(row)
        self.finish()

    @staticmethod
    def draw(row: list) -> None:
        row[2] += 1
        row[3] -= 1
        row[4] += 1

    def finish(self) -> None:
        done = [row for row in self.rows if row[3] == 0]
        self.rows = [row for row in self.rows if row[3] > 0]
        self.ends += [(self.now, row[0], False, row[4]) for row in done]


SUBMITS = st.lists(
    st.tuples(
        st.floats(0, 60).map(lambda x: round(x, 1) + 0.05),
        st.integers(1, 25),
        st.integers(1, 5),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=14,
)


@given(
    submits=SUBMITS,
    aborts=st.lists(st.tuples(st.floats(0, 90), st.integers(0, 13)), max_size=4),
    slots=st.integers(1, 5),
    row=st.sampled_from([0.0, 0.125]),
    token=st.sampled_from([0.0, 0.015625]),
    longest=st.sampled_from([0.0, 0.03125]),
    prefill=st.sampled_from([0.0, 0.0625]),
)
@example([(5.55, 1, 1, 0), (0.05, 12, 1, 0)], [(5.0, 0)], 1, 0.0, 0.0, 0.0, 0.0)
@settings(max_examples=150, deadline=None)
def test_stretches_come_to_the_same_as_single_steps(
    submits, aborts, slots, row, token, longest, prefill
):
    times = LinearStep(fixed=0.5, row=row, token=token, longest_token=longest, prefill=prefill)
    prompts = {group: 3 + 2 * group for group in range(4)}
    events: list[tuple[float, str, object]] = []
    heard = Heard()
    engine = heard.engine(slots=slots, times=times)
    for number, (at_s, left, _, group) in enumerate(submits):
        name, key = f"s{number}", f"0/{group}"
        at_s += number / 1024  # no two at once: what comes first is begun at once
        made = request(name, left, prompt=prompts[group], group=key)
        heard.clock.at(at_s, engine.submit, [made])
        events.append((at_s, "submit", (name, key, prompts[group], left)))
    for place, (at_s, number) in enumerate(aborts):
        at_s = round(at_s, 1) + 0.0625 + place / 4096
        heard.clock.at(at_s, engine.abort, [SampleId(f"s{number}")])
        events.append((at_s, "abort", f"s{number}"))
    found = [(t, name, aborted, drawn) for t, name, aborted, drawn, _ in heard.run()]
    expected = ByStep(slots, times).run(events)
    assert sorted(f[1:] for f in found) == sorted(e[1:] for e in expected)
    at = {name: t for t, name, *_ in found}
    for t, name, *_ in expected:
        assert at[name] == pytest.approx(t, abs=1e-6), name
    assert engine.num_rows == 0
    assert engine.totals.tokens == sum(f[3] for f in found)
