"""Devices that idle because no number of replicas on all of them divides the samples of a step or
of an update: what the plan, its reasons, a refused pin and a sweep say of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan
from flowrl.plan.batches import Batch, batches_near
from flowrl.plan.explain.batches import idle_for_batch, uneven_note
from flowrl.plan.explain.top import sweep_lines
from flowrl.plan.many import Chosen
from flowrl.plan.show.many import seconds_text
from flowrl.plan.sizing import Job, sizes
from flowrl.plan.ways.tasks import tasks_of
from tests.plan.many_cases import h100, pinned, request, searched

# 64 prompts with 8 samples are 512 of a step and, in 4 mini-batches, 128 of an update. 24 devices
# may hold 3, 6, 12 or 24 replicas of a 7B model (28 layers, 4 key heads): 3 must divide the samples
# of an update, twice the prompts. Of multiples of 4 the nearest are 60 and 72.
WHY = (
    "devices idle, for no number of replicas on all {} devices divides the 512 samples of a step "
    "(reference.logprobs) or the 128 samples of an update (actor.update)"
)
SIZES = "60 or 72 prompts a step (train.prompts_per_step) can be shared evenly"
NONE_OF = "leave dp {}, whatever else is divided, and none of these divides {} samples of {}"


def with_reserved() -> ResourcePool:
    """Two nodes of eight, of which two devices each are another's."""
    pool = h100(16)
    nodes = [
        replace(
            node,
            devices=tuple(
                replace(one, reserved=one.id in ("cuda:6", "cuda:7")) for one in node.devices
            ),
        )
        for node in pool.nodes
    ]
    return replace(pool, nodes=tuple(nodes))


def idle_notes(plan: PlacementPlan) -> list[str]:
    return [note for note in plan.notes if note.startswith("devices idle")]


@pytest.mark.parametrize(("pool", "devices"), [(h100(24), 24), (with_reserved(), 12)])
def test_a_plan_whose_devices_idle_for_the_batch_names_the_nearest_that_can_be_shared(
    grpo: Graph, pool: ResourcePool, devices: int
):
    plan = make_plan(grpo, request(), pool)
    (note,) = idle_notes(plan)
    said = f"{WHY.format(devices)}; {SIZES}, which may gain nothing: --explain "
    assert note == said + "plans with them and shows what they take"


@pytest.mark.parametrize(
    ("pool", "devices", "replicas"),
    [(h100(24), 24, "3, 6, 12 or 24"), (with_reserved(), 12, "3, 6 or 12")],
)
def test_each_task_says_why_it_is_not_on_all_devices_of_the_pool(
    grpo: Graph, pool: ResourcePool, devices: int, replicas: str
):
    plan = make_plan(grpo, request(), pool)
    told = {
        reason.subject: one.constraint
        for reason in plan.reasons
        for one in reason.rejected
        if one.choice == f"{devices} devices" and "none of these divides" in one.constraint
    }
    assert told == {
        "reference.logprobs": NONE_OF.format(replicas, 512, "a step"),
        "actor.update": NONE_OF.format(replicas, 128, "an update"),
    }


GAIN = re.compile(
    r"(\d+) prompts a step \(train\.prompts_per_step\) would use all (\d+) devices: (.+?) a sample "
    r"instead of (.+?) \(([\d.]+) % less\), (.+) a step"
)


def test_batches_that_are_tried_take_what_is_said_of_them(grpo: Graph):
    tries = request(try_batches=True)
    plan = make_plan(grpo, tries, h100(24))
    assert plan.prediction.step_s is not None
    (note,) = idle_notes(plan)
    gains = note.removeprefix(f"{WHY.format(24)}: ").split("; ")
    told = [GAIN.fullmatch(gain) for gain in gains]
    now, seen = plan.prediction.step_s / 512, []
    for prompts in (60, 72):
        other = make_plan(grpo, replace(request(), prompts_per_step=prompts), h100(24))
        assert other.prediction.step_s is not None
        then = other.prediction.step_s / (8 * prompts)
        if then > 0.99 * now:
            continue  # of fewer prompts each sample has a larger part of the longest response
        for task in ("reference.logprobs", "actor.update"):
            assert len(other.operation(task).devices) == 24
        less = f"{100 * (1 - then / now):.1f}"
        took = [seconds_text(one) for one in (then, now, other.prediction.step_s)]
        seen.append((str(prompts), "24", took[0], took[1], less, took[2]))
    assert [found and found.groups() for found in told] == seen
    assert [prompts for prompts, *_ in seen] == ["72"]


def test_where_no_batch_that_can_be_shared_takes_less_that_is_told(grpo: Graph):
    asked, (group,) = request(), h100(24).groups()
    found = searched(grpo, asked, h100(24))
    uneven = idle_for_batch(found, asked, group)
    tried: list[Batch] = []

    def as_long(batch: Batch) -> Chosen:
        tried.append(batch)
        return found.best

    (note,) = uneven_note(found, uneven, asked, as_long)
    assert note == f"{WHY.format(24)}; {SIZES}, and with none of these a sample takes 1 % less"
    assert {60, 72} <= {batch.prompts for batch in tried}


def test_times_of_a_sample_are_told_in_as_many_digits_as_tell_them_apart(grpo: Graph):
    asked = replace(request(try_batches=True), prompts_per_step=128)
    (note,) = idle_notes(make_plan(grpo, asked, h100(48)))
    gains = [GAIN.search(gain) for gain in note.split("; ")]
    # 19 ms both, in whole milliseconds.
    assert [found is not None and found[3] != found[4] for found in gains] == [True]


@pytest.mark.parametrize(
    ("asked", "devices"),
    [
        (request(), 16),
        (replace(request(), prompts_per_step=72), 24),
        (request(objective="device_time"), 24),
        (pinned(request(), "reference.devices=0-7", "actor.update.devices=0-15"), 24),
    ],
)
def test_nothing_is_said_of_batches_that_are_shared_or_of_devices_that_were_asked_for(
    grpo: Graph, asked: PlanRequest, devices: int
):
    assert idle_notes(make_plan(grpo, asked, h100(devices))) == []


def test_fewer_or_more_mini_batches_are_named_where_they_can_be_shared_evenly(grpo: Graph):
    # 96 prompts with 8 samples in 12 mini-batches: 64 samples of an update. 72 and 108 prompts have
    # 48 and 72 of them, and so have 96 prompts in 16 mini-batches; in 8 it is 96.
    asked = replace(request(), prompts_per_step=96, mini_batches=12)
    (update,) = (task for task in tasks_of(grpo, asked) if task.updates)
    assert update.even_rows == 64
    assert batches_near([(update, (3, 6, 12, 24))], asked) == (
        Batch(prompts=72, mini_batches=12),
        Batch(prompts=108, mini_batches=12),
        Batch(prompts=96, mini_batches=8),
        Batch(prompts=96, mini_batches=16),
    )


@pytest.mark.parametrize("pin", ["actor.update.dp=3", "actor.update.devices=0-23"])
def test_a_pin_that_the_batch_forbids_names_batches_with_which_it_is_kept(grpo: Graph, pin: str):
    asked = pinned(request(), pin)
    with pytest.raises(PlanError) as refused:
        make_plan(grpo, asked, h100(24))
    assert refused.value.hint is not None
    assert "set train.prompts_per_step to 60 or 72" in refused.value.hint
    for prompts in (60, 72):
        plan = make_plan(grpo, replace(asked, prompts_per_step=prompts), h100(24))
        update = plan.operation("actor.update")
        kept = update.layout.dp == 3 if pin.endswith("dp=3") else len(update.devices) == 24
        assert kept


def test_a_sweep_marks_the_rows_whose_devices_idle_for_the_batch(grpo: Graph):
    spec = device_spec("H100-SXM-80GB")
    job = Job(graph=grpo, request=request(), spec=spec, cost=AnalyticCost())
    lines = sweep_lines(sizes(job, [16, 24]), job)
    marked = [line.split()[0] for line in lines if line.endswith(" *")]
    assert marked == ["24"]
    assert f"* {WHY.format(24)}; {SIZES}, which may gain nothing" in lines
