"""The ways to run a task: they fit, none is beaten, and each says what it spends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import kv_capacity
from flowrl.cost.source import Estimate
from flowrl.graph import Graph
from flowrl.plan.ways.candidate import Candidate, pareto
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.pin_filter import OWN, Filter
from flowrl.plan.ways.tasks import TaskWork, tasks_of
from tests.plan.many_cases import h100, request

GIB = 1 << 30


def candidates(host: int | None = None, max_staleness: int = 0) -> Candidates:
    (group,) = h100(16).groups()
    return Candidates(request(max_staleness=max_staleness), group, AnalyticCost(), host)


def task(grpo: Graph, name: str) -> TaskWork:
    return next(one for one in tasks_of(grpo, request()) if one.id == name)


def way(seconds: float, resident: int, peak: int, **changes: object) -> Candidate:
    made = Candidate(
        layout=Layout(dp=8),
        estimate=Estimate(seconds=seconds),
        resident=resident * GIB,
        peak=peak * GIB,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_way_that_is_slower_and_larger_is_left_out():
    fast, small, beaten = way(1.0, 20, 60), way(2.0, 5, 60), way(3.0, 20, 60)
    assert pareto([beaten, small, fast], 64 * GIB, shared=False) == (fast, small)


def test_ways_that_differ_by_less_than_a_step_of_memory_are_one():
    fast, slower = way(1.0, 21, 62), way(2.0, 20, 61)
    assert pareto([fast, slower], 64 * GIB, shared=False) == (fast,)


def test_of_about_equal_ways_the_plain_one_is_kept():
    plain = way(1.0, 20, 60)
    cut = way(0.99, 20, 60, layout=Layout(pp=2, dp=4))
    assert pareto([plain, cut], 64 * GIB, shared=False) == (plain,)
    much = way(0.9, 20, 60, layout=Layout(pp=2, dp=4))
    assert pareto([plain, much], 64 * GIB, shared=False) == (much,)


def test_ways_that_may_share_parameters_are_compared_in_one_form_only():
    one = way(1.0, 20, 60, weight_bytes=GIB, form="tp 1")
    other = way(2.0, 20, 60, weight_bytes=GIB, form="tp 2")
    assert pareto([one, other], 64 * GIB, shared=True) == (one, other)
    assert pareto([one, other], 64 * GIB, shared=False) == (one,)


@pytest.mark.parametrize("name", ["actor.generate", "reference.logprobs", "actor.update"])
def test_every_way_fits_and_its_numbers_agree(grpo: Graph, name: str):
    made, work = candidates(), task(grpo, name)
    found = made.of_task(work, 16, Filter(), shared=False)
    assert found
    for one in found:
        assert one.layout.num_devices == 16
        assert 0 <= one.weight_bytes <= one.resident <= one.peak <= made.budget
        assert made.memory(work, one).total == pytest.approx(one.peak, abs=1)
    seconds = [one.seconds for one in found]
    assert min(seconds) > 0


def test_an_engine_gives_its_memory_back_and_its_cache_is_what_is_free(grpo: Graph):
    made, work = candidates(), task(grpo, "actor.generate")
    for one in made.of_task(work, 8, Filter(), shared=False):
        assert one.resident < 6 * GIB
        assert one.slots == min(64, -(-512 // one.layout.dp))
        most = kv_capacity(work.shape, one.layout, free_bytes=one.peak)
        assert request().max_length <= one.kv_tokens <= min(most, one.slots * 2560)


def test_what_is_worth_having_of_one_batch_stays_where_samples_may_be_stale(grpo: Graph):
    work = task(grpo, "actor.generate")
    for devices in (4, 8, 16):
        alone, ahead = (
            candidates(max_staleness=old).of_task(work, devices, Filter(), shared=False)
            for old in (0, 3)
        )
        assert set(alone) == {one for one in ahead if not one.overlaps}
        assert all(not one.overlaps for one in alone)


@pytest.mark.parametrize(("mean", "longest"), [(2400.0, 8192), (9000.0, 32768)])
def test_rollouts_whose_time_is_not_asked_for_are_not_worth_having(
    grpo: Graph, mean: float, longest: int, monkeypatch: pytest.MonkeyPatch
):
    """Of 64 to 2,048 samples of a replica the longest overflow the smaller caches by far."""
    lengths = LognormalLengths(mean=mean, sigma=0.8, maximum=float(longest))
    asked = replace(
        request(lengths=lengths),
        prompts_per_step=256,
        max_response_tokens=longest,
        max_length=longest + 512,
    )
    (group,) = h100(32).groups()
    work = replace(task(grpo, "actor.generate"), slots=256, samples=2048)
    timed: list[Layout] = []
    rollout = AnalyticCost.rollout

    def counted(self: AnalyticCost, shape: ModelShape, layout: Layout, *where: Any, **what: Any):
        timed.append(layout)
        return rollout(self, shape, layout, *where, **what)

    monkeypatch.setattr(AnalyticCost, "rollout", counted)
    spared, asked_for_all = 0, 0
    for devices in (2, 6, 8, 24, 32):
        timed.clear()
        found = Candidates(asked, group, AnalyticCost()).of_task(
            work, devices, Filter(), shared=False
        )
        asked_for = len(timed)
        made = Candidates(asked, group, AnalyticCost())
        every = [
            one
            for layout in made.layouts(work, devices).possible
            for one in made.of_layout(work, layout, Filter())
        ]
        assert found == made.worth_having(every, work, shared=False)
        spared += len(timed) - 2 * asked_for
        asked_for_all += asked_for
    assert spared > asked_for_all / 4


def test_batches_that_overlap_have_a_cache_that_does_not_overflow(grpo: Graph):
    """Of 48 samples of a replica all are under way at once, of four batches 64."""
    work = replace(task(grpo, "actor.generate"), samples=192)
    layout = Layout(tp=2, dp=4)
    (alone, *_), ahead = (
        candidates(max_staleness=old).of_layout(work, layout, Filter()) for old in (0, 3)
    )
    assert (alone.slots, {one.slots for one in ahead if one.overlaps}) == (48, {64})
    caches = [one.kv_tokens for one in ahead]
    assert max(caches) == 64 * request().max_length
    assert alone in ahead


def test_a_pass_over_a_batch_is_all_its_own(grpo: Graph):
    """However many batches are under way, each takes all of it: nothing is done for several."""
    for one in candidates().of_task(task(grpo, "reference.logprobs"), 8, Filter(), shared=False):
        assert one.dense_s == one.period_s == one.seconds
    for one in candidates().of_task(task(grpo, "actor.generate"), 8, Filter(), shared=False):
        assert one.dense_s < one.period_s


def test_what_is_on_the_host_is_moved_and_counted(grpo: Graph):
    made, work = candidates(), task(grpo, "actor.update")
    layout = Layout(tp=2, dp=8)
    here, away = None, None
    for one in made.of_layout(work, layout, Filter(recompute="none")):
        if one.offload == ():
            here = one
        if one.offload == ("all",):
            away = one
    assert here is not None
    assert away is not None
    moved = here.resident - away.resident
    assert away.host == moved > 0
    assert away.move_s == pytest.approx(2 * AnalyticCost().move(moved, made.machine).seconds)
    full = candidates(host=moved - 1)
    assert all(one.offload != ("all",) for one in full.of_layout(work, layout, Filter()))


def test_a_forward_pass_takes_smaller_micro_batches_where_large_ones_do_not_fit(grpo: Graph):
    asked, layout = task(grpo, "reference.logprobs"), Layout(dp=8)
    large, _ = candidates().of_layout(asked, layout, Filter())
    tight = candidates()
    tight.budget = large.peak - 1
    small, _ = tight.of_layout(asked, layout, Filter())
    assert small.micro_tokens < large.micro_tokens
    assert small.peak <= tight.budget
    tight = candidates()
    tight.budget = small.peak - 1
    assert tight.of_layout(asked, layout, Filter()) == ()


def test_a_frozen_model_is_fetched_and_not_brought_back(grpo: Graph):
    made, work = candidates(), task(grpo, "reference.logprobs")
    kept, fetched = made.of_layout(work, Layout(dp=16), Filter())
    assert fetched.move_s == pytest.approx(
        AnalyticCost().move(kept.weight_bytes, made.machine).seconds
    )


def test_pinned_ways_are_the_only_ones(grpo: Graph):
    made, work = candidates(), task(grpo, "actor.update")
    only = Filter(layout=(("tp", 2),), recompute="full", offload="none")
    found = made.of_task(work, 16, only, shared=False)
    assert found
    assert {(one.layout.tp, one.recompute, one.offload) for one in found} == {(2, "full", ())}


def test_an_optimizer_streams_from_the_host_where_that_is_pinned_whatever_room_there_is(
    grpo: Graph,
):
    work, layout = task(grpo, "actor.update"), Layout(tp=4, dp=2)
    assert all(
        "optimizer" not in one.offload for one in candidates().of_layout(work, layout, Filter())
    )
    for offload in ("optimizer", "optimizer+all"):
        found = candidates().of_layout(work, layout, Filter(offload=offload))
        assert {"+".join(one.offload) for one in found} == {offload}


def test_a_filter_can_leave_any_one_pin_out():
    full = Filter(
        layout=(("tp", 2), ("pp", 1)),
        devices=8,
        recompute="full",
        offload="all",
        micro_tokens=64,
        environment="apart",
        own=4,
    )
    assert full.without("environment") == replace(full, environment=None)
    assert full.without(OWN) == replace(full, own=None)
    assert full.without("devices") == replace(full, devices=None)
    assert full.without("tp") == replace(full, layout=(("pp", 1),))
    for field in ("devices", "recompute", "offload", "micro_tokens", "environment", OWN, "tp"):
        assert full.without(field) != full
