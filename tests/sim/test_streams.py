"""Operations that begin on groups or ahead of the trainer, by times that are counted by hand.

Engines draw a token a second, so a response of n tokens holds its row for n seconds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.rollout.policies.prompts import AgeBudget
from flowrl.sim.costs import LinearCost
from flowrl.sim.lengths import Constant, Listed
from flowrl.sim.model import LaneModel, OpModel, RolloutModel
from flowrl.sim.run import simulate
from flowrl.sim.workload import GroupDraw
from tests.sim.worlds import assumed, small_model

READER = OpModel(
    name="reference.logprobs",
    op="logprobs",
    lanes=("reader",),
    cost=LinearCost(row_s=1.5),
    rollout="actor.generate",
    chunk=2,
)


def world(*ops, slots=2, groups=4, size=1, staleness=0, judges=False, **changes):
    """Two rows, four groups of one sample; `ops` before the trainer's own, of five seconds."""
    base = small_model(
        slots=slots, groups=groups, group_size=size, staleness=staleness, judges=judges
    )
    update = replace(base.ops[0], after=tuple(op.name for op in ops), **changes)
    lanes = {*(lane.name for lane in base.lanes)}
    more = dict.fromkeys(lane for op in ops for lane in op.lanes if lane not in lanes)
    return replace(
        base,
        lanes=(*base.lanes, *(LaneModel(name=name, device=name) for name in more)),
        ops=(*ops, update, *base.ops[1:]),
    )


class Given:
    """Lengths in turn, group by group."""

    def __init__(self, *lengths, filtered=()):
        self.lengths, self.filtered = lengths, filtered

    def group(self, number, size):
        numbers = range(number * size, (number + 1) * size)
        lengths = tuple(self.lengths[i % len(self.lengths)] for i in numbers)
        why = "flat" if number in self.filtered else None
        return GroupDraw(prompt_tokens=1, lengths=lengths, filtered=why)

    def __str__(self):
        return "given"


def step_s(model, workload=None, steps=1):
    workload = workload or assumed(Constant(tokens=8))
    workloads = {rollout.name: workload for rollout in model.rollouts}
    return [step.wall_s for step in simulate(model, steps=steps, workloads=workloads).steps]


def test_a_reader_begins_on_groups_while_others_are_drawn():
    """Two groups end at 8 s, two at 16 s; three seconds each to read, then five to learn."""
    assert step_s(world(READER)) == [16 + 3 + 5]
    assert step_s(world(replace(READER, chunk=0))) == [16 + 6 + 5]


def test_groups_are_taken_as_they_are_complete_and_not_as_they_were_offered():
    """The first group is the longest one, and comes last."""
    model = world(replace(READER, cost=LinearCost(token_s=0.1)), slots=4)
    # Pieces of (4 + 1) + (5 + 1) tokens at 5 s, and of (6 + 1) + (20 + 1) at 20 s.
    assert step_s(model, Given(20, 4, 5, 6)) == [pytest.approx(20 + 2.8 + 5)]


def test_a_reader_of_samples_waits_for_no_group():
    """Samples end at 4, 6, 8 and 20 s, groups at 8 and 20; what learns from groups reads them."""
    reader = replace(READER, chunk=1, by_sample=True)
    critic = replace(READER, name="critic.values", lanes=("critic",), after=(READER.name,))
    critic = replace(critic, chunk=1, cost=LinearCost(row_s=2.0))
    lengths = Given(4, 8, 6, 20)
    sizes = {"slots": 4, "groups": 2, "size": 2}
    # Read 4-5.5, 6-7.5, 8-9.5: the first group; and 20-21.5. Values 9.5-13.5 and 21.5-25.5.
    assert step_s(world(reader, critic, **sizes), lengths) == [25.5 + 5]
    by_group = replace(reader, by_sample=False)
    # Read 8-11 and 20-23, values 11-15 and 23-27.
    assert step_s(world(by_group, critic, **sizes), lengths) == [27 + 5]
    # And a reader of samples behind one of groups: 8-11, 11-13, 13-15; 20-23, 23-25, 25-27.
    after = replace(critic, by_sample=True)
    assert step_s(world(by_group, after, **sizes), lengths) == [27 + 5]


def test_a_reader_of_samples_behind_a_filter_reads_those_of_kept_groups():
    reader = replace(READER, chunk=1, by_sample=True, kept_only=True)
    sizes = {"slots": 4, "groups": 2, "size": 2, "judges": True}
    lengths = Given(4, 8, 6, 20, filtered={1})
    report = simulate(world(reader, **sizes), steps=1, workloads={"actor.generate": lengths})
    read = next(lane for lane in report.lanes if lane.lane == "reader")
    assert read.busy_s == 2 * 1.5
    before = world(replace(reader, kept_only=False), **sizes)
    report = simulate(before, steps=1, workloads={"actor.generate": lengths})
    assert next(lane for lane in report.lanes if lane.lane == "reader").busy_s == 4 * 1.5


def test_what_reads_in_a_row_passes_pieces_on():
    """Each has lanes of its own: 8-11 and 11-15 for the first piece, 16-19 and 19-23 after it."""
    critic = replace(
        READER,
        name="critic.values",
        lanes=("critic",),
        after=(READER.name,),
        cost=LinearCost(row_s=2.0),
    )
    assert step_s(world(READER, critic)) == [16 + 3 + 4 + 5]


def test_those_that_share_devices_alternate():
    """By pieces of one group: read 8-9.5 and 9.5-11, then values 11-13 and 13-15."""
    one = replace(READER, chunk=1)
    critic = replace(one, name="critic.values", after=(READER.name,), cost=LinearCost(row_s=2.0))
    assert step_s(world(one, critic)) == [16 + 3 + 4 + 5]
    # All four groups at once at 8 s: 6 + 8 seconds of one device.
    assert step_s(world(one, critic, slots=4)) == [8 + 6 + 8 + 5]


def test_further_pieces_cost_more_and_the_first_one_what_a_batch_costs():
    model = world(replace(READER, piece_s=0.5, fixed_s=10.0))
    # 8 s: 10 + 3 until 21; then 0.5 + 3 until 24.5.
    assert step_s(model) == [24.5 + 5]


def test_what_is_left_of_a_batch_is_a_last_piece():
    """Groups end at 8, 8 and 16 s: a piece of two, and one of one."""
    assert step_s(world(READER, groups=3)) == [16 + 1.5 + 5]


def test_a_reader_on_the_engines_devices_takes_them_between_two_steps():
    """8-11 it reads and nobody draws; the other two groups are drawn until 19."""
    assert step_s(world(replace(READER, lanes=("engine[0]",)))) == [19 + 3 + 5]


def test_filtered_groups_are_read_by_those_that_come_before_the_filter_alone():
    workload = Given(8, filtered={0, 1})
    before = world(READER, judges=True)
    behind = world(replace(READER, kept_only=True), judges=True)
    assert step_s(before, workload) == [16 + 3 + 5]
    # The last two groups alone, when the batch is there.
    assert step_s(behind, workload) == [16 + 3 + 5]
    whole = replace(READER, kept_only=True, chunk=4)
    assert step_s(world(whole, judges=True), workload) == [16 + 3 + 5]
    assert step_s(world(replace(whole, kept_only=False), judges=True), workload) == [16 + 6 + 5]


def test_samples_add_up_and_every_group_is_read_once_when_batches_are_refilled():
    """Of four filtered groups two are drawn anew, and so on, until four are kept."""
    model = world(replace(READER, kept_only=True), judges=True)
    [rollout] = model.rollouts
    refill = replace(rollout, settings=replace(rollout.settings, refill=True))
    model = replace(model, rollouts=(refill,))
    lengths = Given(3, 8, 5, filtered=set(range(0, 60, 3)))
    report = simulate(model, steps=3, workloads={rollout.name: lengths})
    ends = {end: number for end, number in report.samples.items() if end != "admitted"}
    assert sum(ends.values()) == report.samples["admitted"]
    assert report.samples["consumed"] == 12
    read = next(lane for lane in report.lanes if lane.lane == "reader")
    assert read.busy_s == 12 * 1.5


def test_what_may_run_ahead_reads_the_next_batch_while_the_trainer_learns():
    """Drawing takes 8 s and begins with a publication; reading takes 4, learning 10.

    In turn that is 14 s a step: a batch that was drawn meanwhile is read, and then learned from.
    Ahead, the batch drawn from 0 is read until 12 and learned from until 22; the one drawn from 10,
    where the batch before was published, is read until 22. So two steps take 22 s.
    """
    reader = replace(READER, chunk=0, cost=LinearCost(row_s=1.0))

    def two_steps(op):
        model = world(op, slots=4, staleness=1, cost=LinearCost(call_s=10.0))
        settings = replace(model.rollouts[0].settings, admission=AgeBudget(groups=4))
        model = replace(model, rollouts=(replace(model.rollouts[0], settings=settings),))
        return sum(step_s(model, steps=6)[-2:])

    assert two_steps(reader) == 28
    assert two_steps(replace(reader, ahead=True)) == 22


def two_rollouts(*ops, shared=False, after=()):
    base = world(*ops)
    rival = RolloutModel(
        name="rival.generate",
        role="rival",
        groups=4,
        settings=base.rollouts[0].settings,
        after=after,
    )
    lane = "engine[0]" if shared else "other"
    engine = replace(base.engines[0], name="rival[0]", role="rival", lane=lane)
    return replace(
        base,
        lanes=(*base.lanes, LaneModel(name="other", device="other")),
        engines=(*base.engines, engine),
        rollouts=(*base.rollouts, rival),
    )


def test_rollouts_draw_at_once_on_devices_of_their_own_and_else_in_turn():
    assert step_s(two_rollouts()) == [16 + 5]
    assert step_s(two_rollouts(after=("actor.generate",))) == [32 + 5]
    assert step_s(two_rollouts(shared=True)) == [32 + 5]


def test_an_operation_on_one_of_two_batches_need_not_wait_for_the_other():
    reader = replace(READER, chunk=0, ahead=True)
    # It reads 16-22 while the other one is drawn until 32.
    assert step_s(two_rollouts(reader, shared=True)) == [32 + 5]
    assert step_s(two_rollouts(replace(reader, ahead=False), shared=True)) == [32 + 6 + 5]


def test_what_reads_two_rollouts_begins_on_prompts_that_both_have():
    both = replace(READER, beside=("rival.generate",))
    # Both have two prompts at 8 s and the others at 16 s; in turn, only the last ones of both.
    assert step_s(two_rollouts(both)) == [16 + 3 + 5]
    assert step_s(two_rollouts(both, shared=True)) == [32 + 3 + 5]


def test_an_engine_on_several_lanes_takes_all_of_them():
    """A reader has one of the engine's two devices: it pauses the engine like any other."""
    base = world(replace(READER, lanes=("engine[0]",)))
    pair = LaneModel(name="pair", device="pair", parts=("engine[0]", "spare"))
    model = replace(
        base,
        lanes=(*base.lanes, LaneModel(name="spare", device="spare", num_devices=1), pair),
        engines=(replace(base.engines[0], lane="pair"),),
    )
    report = simulate(
        model, steps=1, workloads={"actor.generate": assumed(Listed(values=(8,), source="eights"))}
    )
    assert report.steps[0].wall_s == 19 + 3 + 5
    busy = {lane.lane: lane.busy_s for lane in report.lanes}
    assert (busy["engine[0]"], busy["spare"]) == (16 + 6, 16)
    assert report.num_devices == 1
    assert report.idle_share == pytest.approx(1 - 16 / 27)


def whole(name, seconds, *, lane=None, chunk=1, **changes):
    """What takes so long for the batch, once that is there, and hands it on."""
    cost = LinearCost(row_s=seconds / 4)
    changes = {"lanes": (lane or name,), "whole": True, **changes}
    return replace(READER, name=name, cost=cost, chunk=chunk, **changes)


def test_an_operation_on_a_batch_hands_it_on_chunk_by_chunk():
    """In 4 chunks: 8 s there at 10, 12, 14 and 16; the reader takes a second for each.

    The other way around, the first of 4 s is there after one, and the reader takes 8.
    """
    slow, quick = whole("first", 8.0), whole("first", 4.0)
    reader = {"after": ("first",), "whole": False}
    assert step_s(world(slow, whole("second", 4.0, **reader), slots=4)) == [8 + 8 + 1 + 5]
    assert step_s(world(quick, whole("second", 8.0, **reader), slots=4)) == [8 + 1 + 8 + 5]
    # In 2 chunks, and every chunk but the first costs half a second more, on both sides.
    pair = {"chunk": 2, "piece_s": 0.5}
    two = world(whole("first", 8.0, **pair), whole("second", 4.0, **reader, **pair), slots=4)
    assert step_s(two) == [8 + 8.5 + 2.5 + 5]


def test_nothing_of_a_batch_is_begun_before_all_of_it_is_there():
    """Groups end at 8 and at 16 s; a reader of groups has the first two by then, but not their
    input."""
    reader = whole("second", 4.0, after=("first",), whole=False)
    assert step_s(world(whole("first", 8.0), reader)) == [16 + 8 + 1 + 5]
    alone = replace(reader, after=())
    assert step_s(world(alone, slots=2)) == [16 + 2 + 5]


def test_chunks_are_dealt_alike_in_length():
    """Of 1, 2, 3 and 30 tokens, which end in this order, 1 and 3 go together, 2 and 30 do."""
    cost = LinearCost(token_s=1.0)
    first = replace(whole("first", 0.0, chunk=2), cost=cost)
    reader = replace(whole("second", 0.0, chunk=2, after=("first",)), cost=cost, whole=False)
    # A prompt token each: 6 s, then 34, each on the one and then on the other.
    lengths = Given(1, 2, 3, 30)
    assert step_s(world(first, reader, slots=4), lengths) == [30 + 6 + 34 + 34 + 5]


def test_several_pass_a_batch_on_in_a_row_and_those_that_share_devices_alternate():
    first = whole("first", 8.0)
    second = whole("second", 4.0, after=("first",))
    last = whole("last", 4.0, after=("second",), whole=False)
    # There at 2, 4, 6, 8 of the first; each chunk then takes a second on both others.
    assert step_s(world(first, second, last, slots=4)) == [8 + 8 + 1 + 1 + 5]
    # On one lane 0-2, 2-3, 3-5, 5-6, ... 9-11, 11-12.
    shared = world(first, replace(second, lanes=("first",)), last, slots=4)
    assert step_s(shared) == [8 + 12 + 1 + 5]
    # Neither reads the other; what reads both waits for the later one of each chunk.
    beside = replace(second, lanes=("first",), after=())
    both = replace(last, after=("first", "second"))
    assert step_s(world(first, beside, both, slots=4)) == [8 + 12 + 1 + 5]


def test_what_reads_from_an_operation_that_hands_nothing_on_waits_for_that():
    """The first is done at 16, whatever its readers do in chunks: 16-20 and, a chunk behind, 21."""
    first = whole("first", 8.0, chunk=0, whole=False)
    second = whole("second", 4.0, after=("first",))
    last = whole("last", 4.0, after=("second",), whole=False)
    assert step_s(world(first, second, last, slots=4)) == [16 + 4 + 1 + 5]


def test_a_batch_that_is_handed_on_ahead_of_the_trainer_is_followed_by_the_next_one():
    """Drawn from 0 and from a publication on in 8 s, read in 4; learned from in 10: as whole."""
    reader = whole("first", 4.0, ahead=True)
    model = world(reader, slots=4, staleness=1, cost=LinearCost(call_s=10.0))
    settings = replace(model.rollouts[0].settings, admission=AgeBudget(groups=4))
    model = replace(model, rollouts=(replace(model.rollouts[0], settings=settings),))
    assert sum(step_s(model, steps=6)[-2:]) == 22


def test_steps_that_hand_batches_on_are_alike():
    reader = whole("second", 4.0, after=("first",), whole=False)
    assert step_s(world(whole("first", 8.0), reader, slots=4), steps=3) == [22, 22, 22]
