"""The planner's plans simulated: that they run, that samples add up, and how near the two are.

What the planner prices in closed form and the simulator plays sample by sample differs, and each
kind of plan has bounds that follow from why:

- Where devices take turns, a step is its parts, and only the rollout is played otherwise: it is
  drawn, where plans have what is expected. Simulated steps are 1 % shorter to 4 % longer.
- Where operations stream, also from one that waits for its batch, the simulation has groups and
  samples complete as they are, and the longest ones last; the plan has them by expectations, chunk
  by chunk. Simulated steps are 3 % shorter to 7 % longer.
- Where what takes turns feeds a stream, as where devices take turns: 1 % shorter to 5 % longer.
- Asynchronous steps are priced as the steady state of batches that overlap as far as ages let them
  (`flowrl.plan.search.overlap`), evenly apart. In truth long and short steps take turns. Simulated
  steps are 2 % shorter to 2 % longer, and up to 5 % longer on mixed devices; without the last one
  of a run, for nothing is drawn ahead of it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

import flowrl as fl
from flowrl import api
from flowrl.plan.many_form import ScheduleStep
from tests.sim.cluster_jobs import Planned, best_plans, config_of, pool, simulated, steady_s

MIXED, ASCEND = "h100_2x8_h20_4x8", "ascend_a2_1x8"
CLUSTERS = ("h100_8", "h100_24", "h100_48", "h100_64", "h100_96", "h100_256", MIXED, ASCEND)

# Of the two grids below, what every run of the tests has: each job, and each cluster here or in a
# test of its own, and so each kind of plan with its bounds. The rest is more of the same plans, of
# which `make bounds` tells whether the bounds hold all over.
PART = {
    ("grpo", "h100_24"),
    ("grpo", MIXED),
    ("ppo", "h100_48"),
    ("ppo", ASCEND),
    ("dapo", "h100_8"),
    ("dapo", "h100_96"),
    ("async", "h100_8"),
}
PART_OF_LARGE = {("grpo", MIXED), ("ppo", "h100_64"), ("dapo", "h100_8")}


def grid(jobs: Sequence[str], clusters: Sequence[str], part: set[tuple[str, str]]) -> list[Any]:
    """Every job on every cluster; what is not of the part is marked."""
    assert part <= set(product(jobs, clusters))
    return [
        pytest.param(*case, marks=() if case in part else pytest.mark.grid)
        for case in product(jobs, clusters)
    ]


def bounds(planned: Planned) -> tuple[float, float]:
    """Least and most seconds of a simulated step."""
    step_s = planned.step_s
    if planned.kind == "asynchronous":
        least, most = 0.98, 1.06
    else:
        least, most = (0.96, 1.08) if planned.streams else (0.98, 1.04)
    return least * step_s, most * step_s


def check(job: str, cluster: str, top: int, **changes: object) -> None:
    plans = best_plans(job, cluster, top, **changes)
    assert len(plans) >= 1
    for planned in plans:
        ahead = planned.kind == "asynchronous"
        report = simulated(planned, steps=9 if ahead else 2)
        assert report.notes == ()
        ends = {end: number for end, number in report.samples.items() if end != "admitted"}
        assert sum(ends.values()) == report.samples["admitted"]
        per_step = planned.stage.plan.operation("actor.generate").num_samples
        assert report.samples["consumed"] == len(report.steps) * per_step
        low, high = bounds(planned)
        seconds = steady_s(report, 4, 1) if ahead else steady_s(report)
        assert low <= seconds <= high, (planned.stage.plan.schedule, planned.step_s, seconds)


@pytest.mark.parametrize(
    ("job", "cluster"),
    [
        ("grpo", "h100_24"),  # the reference waits for its batch, and passes it on in chunks
        ("grpo", "h100_64"),
        ("ppo", MIXED),
        ("dapo", "h100_8"),
        ("async", "h100_8"),
    ],
)
def test_a_plan_is_simulated_near_what_it_predicts(job, cluster):
    check(job, cluster, 1)


def test_so_is_one_whose_engines_divide_experts_over_several_replicas():
    [planned, *_] = best_plans("experts", "h100_16", 1)
    layout = planned.stage.plan.operation("actor.generate").layout
    assert layout.ep > layout.tp
    check("experts", "h100_16", 1)


@pytest.mark.parametrize(("job", "cluster"), grid(["grpo", "ppo", "dapo", "async"], CLUSTERS, PART))
def test_so_are_the_next_best_ones_and_the_best_of_every_kind(job, cluster):
    check(job, cluster, 5)


@pytest.mark.parametrize(
    ("cluster", "staleness"),
    [
        ("h100_16", 2),
        pytest.param("h100_64", 1, marks=pytest.mark.slow),
        ("h100_64", 2),
        pytest.param("h100_64", 3, marks=pytest.mark.slow),
        pytest.param("h100_64", 4, marks=pytest.mark.slow),
        ("h100_256", 1),
    ],
)
def test_so_is_a_plan_whose_batches_overlap(cluster: str, staleness: int):
    """Whatever decides: the trainer, the engines, or the age that samples may have."""
    [planned, *_] = best_plans("async", cluster, 1, **{"train.max_staleness": staleness})
    assert planned.kind == "asynchronous"
    drawn = planned.stage.plan.operation("actor.generate").seconds
    assert drawn is not None
    assert drawn > planned.step_s
    steps = 8 * (staleness + 1)
    low, high = bounds(planned)
    assert low <= steady_s(simulated(planned, steps=steps + 1), steps // 2, 1) <= high


@pytest.mark.parametrize(
    ("cluster", "slots"),
    [
        ("h100_64", 128),
        pytest.param("h100_128", 64, marks=pytest.mark.slow),
    ],
)
def test_so_is_one_whose_batches_wait_for_slots_that_earlier_ones_have(cluster: str, slots: int):
    """Each batch by itself has slots enough, three of them under way at once have not."""
    [planned, *_] = best_plans(f"async_{slots}_slots", cluster, 1, **{"train.max_staleness": 3})
    engine = planned.stage.plan.operation("actor.generate")
    assert engine.slots == slots >= engine.num_samples / engine.layout.dp > slots / 3
    low, high = bounds(planned)
    assert low <= steady_s(simulated(planned, steps=33), 16, 1) <= high


@pytest.mark.parametrize(
    ("job", "cluster"),
    grid(["grpo", "ppo", "dapo"], ["h100_8", "h100_64", MIXED], PART_OF_LARGE),
)
def test_and_those_of_a_step_as_large_as_people_take(job, cluster):
    check(job, cluster, 1, **{"train.prompts_per_step": 512})


def pinned(job: str, **changes: Any) -> Planned:
    """The plan of a job on 64 devices with some pins."""
    config = config_of(job, "h100_64", changes)
    compiled = api.compile(None, config, pool=pool("h100_64"))
    return Planned(stage=compiled.stages[-1], config=compiled.config.plan)


def stream_of(planned: Planned) -> ScheduleStep:
    """The first stream of a plan, from the whole downwards."""
    steps = [planned.stage.plan.schedule]
    return next(step for step in steps if step.kind == "spatial" or steps.extend(step.parts))


def check_turns(planned: Planned, *tasks: str) -> dict[str, tuple[float, float]]:
    """Of a stream from tasks in turns; when each operation begins and ends."""
    first = stream_of(planned).parts[0]
    assert (first.kind, {*first.nodes()}) == ("temporal", {*tasks})
    simulated_s = steady_s(simulated(planned, steps=2))
    assert 0.99 * planned.step_s <= simulated_s <= 1.05 * planned.step_s
    timeline = planned.stage.plan.prediction.timeline or ()
    return {span.node: (span.begin_s, span.end_s) for span in timeline}


def seconds_of(planned: Planned, node: str) -> float:
    seconds = planned.stage.plan.operation(node).seconds
    assert seconds is not None
    return seconds


def test_a_reference_on_the_rollouts_devices_hands_on_when_the_rollout_is_through():
    pins = {"rollout.tp": 2, "rollout.devices": "0-31", "reference.devices": "0-31"}
    changes = {"plan.pins": {**pins, "actor.devices": "32-63"}, "train.prompts_per_step": 512}
    planned = pinned("grpo", **changes)
    begun = check_turns(planned, "actor.generate", "reference.logprobs")
    drawn, passed, learned = (
        seconds_of(planned, node)
        for node in ("actor.generate", "reference.logprobs", "actor.update")
    )
    assert stream_of(planned).chunks == 4
    # Three chunks more cost 0.05 s of each of the three operations.
    first_s = drawn + (passed + 3 * 0.1) / 4
    assert begun["reference.logprobs"] == pytest.approx((drawn, drawn + passed + 0.3))
    assert begun["actor.update"] == pytest.approx((first_s, first_s + learned + 0.15))
    assert planned.step_s == pytest.approx(
        begun["actor.update"][1] + planned.stage.plan.prediction.sync_s
    )


def test_an_update_elsewhere_does_not_wait_for_the_critics():
    devices = {"rollout": "0-31", "reference": "0-31", "critic": "0-31", "actor": "32-63"}
    pins = {f"{role}.devices": on for role, on in devices.items()}
    planned = pinned("ppo", **{"plan.pins": pins, "train.prompts_per_step": 128})
    tasks = ("actor.generate", "reference.logprobs", "critic.values", "critic.update")
    begun = check_turns(planned, *tasks)
    there_s = sum(seconds_of(planned, node) for node in tasks[:-1])
    assert begun["critic.update"][0] == begun["actor.update"][0] == pytest.approx(there_s)


@fl.workflow
def by_group(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
    reference: fl.Policy,
) -> None:
    """PPO whose advantages follow from a sample alone, so that updates begin on chunks."""
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    logprobs = reference.logprobs(rollout)
    advantages, returns = fl.advantage.gae(
        verifier.score(rollout), values, rollout, reference=logprobs, kl=0.1, whiten=False
    )
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


def test_what_takes_turns_with_every_chunk_hands_on_before_the_critic_learns():
    pins = {f"{role}.devices": "0-31" for role in ("rollout", "reference", "critic")}
    pins |= {"actor.devices": "32-63", "rollout.tp": 2}
    config = config_of("ppo", "h100_64", {"train.prompts_per_step": 512, "plan.pins": pins})
    config |= {"stages": ["by_group"], "args": {}}
    compiled = api.compile(by_group, config, pool=pool("h100_64"))
    planned = Planned(stage=compiled.stages[-1], config=compiled.config.plan)
    begun = check_turns(planned, "critic.values", "critic.update")
    chunks = stream_of(planned).chunks
    assert chunks > 1
    before_s, values_s = begun["reference.logprobs"][1], seconds_of(planned, "critic.values")
    assert begun["actor.update"][0] == pytest.approx(before_s + values_s / chunks, rel=0.01)
    assert begun["critic.update"][0] == pytest.approx(before_s + values_s, rel=0.01)
