"""Plans over many devices as the simulator has them: devices, engines, streams and weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from flowrl import api
from flowrl.config.schema import PlanConfig
from flowrl.errors import PlanError
from flowrl.plan import PlacementPlan
from flowrl.plan.names import device_names
from flowrl.plan.schema import StartUnit
from flowrl.sim.device_lanes import DeviceLanes
from flowrl.sim.lengths import parse_lengths
from flowrl.sim.of_plan import model_of_stage
from flowrl.sim.planned_times import planned_lengths, planned_times
from tests.sim import cluster_jobs
from tests.sim.cluster_jobs import Planned, best_plans, model_of, pool, simulated, steady_s

MIXED = "h100_2x8_h20_4x8"


def of_kind(kind, job, cluster, **changes):
    return next(one for one in best_plans(job, cluster, 2, **changes) if one.kind == kind)


def edited(planned, **changes):
    """The plan with other operations: `reference={"chunk": 8}` for that role's."""
    plan = planned.stage.plan
    operations = tuple(
        replace(one, **changes.get(one.role or "", {})) if one.seconds is not None else one
        for one in plan.operations
    )
    return replace(planned, stage=planned.stage.with_plan(replace(plan, operations=operations)))


def devices_of(model, lanes):
    """How many devices lanes stand for."""
    number = {lane.name: lane.num_devices for lane in model.lanes}
    return sum(number[lane] for lane in lanes)


def test_devices_that_work_together_are_one_lane():
    sets = [("a:0", "a:1"), ("a:2", "a:3"), ("a:0", "a:1", "a:2", "a:3"), ("b:0", "a:0")]
    lanes = DeviceLanes(sets)
    assert lanes.of(sets[0]) == ("a:0", "a:1")
    assert lanes.of(sets[1]) == ("a:[2-3]",)
    assert lanes.of(sets[2]) == ("a:0", "a:1", "a:[2-3]")
    assert [(lane.name, lane.num_devices) for lane in lanes.models()] == [
        ("a:0", 1),
        ("a:1", 1),
        ("a:[2-3]", 2),
        ("b:0", 1),
    ]


@pytest.mark.parametrize("kind", ["hybrid", "temporal", "spatial"])
def test_each_operation_has_the_devices_that_the_plan_gives_to_it(kind):
    # With lengths that differ more a stream does not pay.
    planned = of_kind(kind, "grpo", "h100_64", **{"plan.sigma": 0.3})
    model = model_of(planned)
    assert sum(lane.num_devices for lane in model.lanes) == 64
    for op in model.ops:
        operation = planned.stage.plan.operation(op.name)
        if operation.seconds is not None:
            assert devices_of(model, op.lanes) == len(operation.devices)
    draws = planned.stage.plan.operation("actor.generate")
    assert len(model.engines) == draws.layout.dp
    for number, engine in enumerate(model.engines):
        size = draws.layout.model_devices
        own = draws.devices[number * size : (number + 1) * size]
        assert engine.lane == device_names(own)
        assert (engine.num_slots, engine.kv_tokens) == (draws.slots, draws.kv_tokens)


def test_a_mixed_pool_draws_on_one_kind_and_learns_on_the_other():
    [planned] = best_plans("grpo", MIXED)
    model = model_of(planned)
    ops = {op.name: op for op in model.ops}
    assert {engine.lane[:4] for engine in model.engines} == {"h20-"}
    assert (
        ops["actor.update"].lanes == ops["reference.logprobs"].lanes == ("h100-[0-1]/cuda:[0-7]",)
    )
    # New weights take the devices that they leave, and those that they come to.
    assert devices_of(model, ops["actor.sync"].lanes) == 48
    assert ops["actor.sync"].publishes == ("actor",)


def test_what_streams_does_so_in_the_chunks_of_the_plan():
    [planned] = best_plans("grpo", MIXED)
    ops = {op.name: op for op in model_of(planned).ops}
    plan = planned.stage.plan
    assert plan.schedule.chunks > 1
    for name in ("reference.logprobs", "actor.update"):
        assert ops[name].chunk == plan.operation(name).chunk == 128 // plan.schedule.chunks
        assert ops[name].piece_s == pytest.approx(0.05 + plan.operation(name).move_s)
    assert ops["actor.update"].after == ("reference.logprobs",)
    assert ops["advantage"].chunk == 0


def test_what_looks_at_single_samples_streams_by_the_sample():
    [planned] = best_plans("grpo", MIXED)
    by_sample = edited(planned, reference={"start": StartUnit.SAMPLE, "chunk": 256})
    ops = {op.name: op for op in model_of(by_sample).ops}
    reader, update = ops["reference.logprobs"], ops["actor.update"]
    assert (reader.by_sample, reader.chunk) == (True, 256)
    assert (update.by_sample, update.after) == (False, ("reference.logprobs",))
    # It reads no later than whole groups, and the update never waits longer for it.
    assert steady_s(simulated(by_sample)) <= steady_s(simulated(planned))


def test_what_reads_from_something_whole_waits_for_it_and_then_begins_on_its_chunks():
    [planned] = best_plans("grpo", MIXED)
    waits = edited(planned, reference={"start": StartUnit.BATCH, "chunk": 0})
    model = model_of(waits)
    [update] = [op for op in model.ops if op.streams]
    assert (update.name, update.whole) == ("actor.update", True)
    assert update.chunk == waits.stage.plan.operation("actor.update").chunk
    assert model.notes == ()
    assert steady_s(simulated(waits)) > steady_s(simulated(planned))


def test_what_waits_for_its_batch_hands_it_on_in_the_chunks_of_the_schedule():
    """On 24 devices the batch is drawn on all, then the reference feeds the update."""
    planned, *_ = best_plans("grpo", "h100_24")
    plan = planned.stage.plan
    drawn, passed = plan.schedule.parts
    assert (drawn.node, passed.kind) == ("actor.generate", "spatial")
    assert [part.node for part in passed.parts] == ["reference.logprobs", "actor.update"]
    assert plan.operation("reference.logprobs").start is StartUnit.BATCH
    ops = {op.name: op for op in model_of(planned).ops}
    reader, update = ops["reference.logprobs"], ops["actor.update"]
    assert reader.chunk == update.chunk == 128 // passed.chunks
    assert (reader.whole, update.whole) == (True, False)


def test_the_first_part_of_an_asynchronous_plan_runs_ahead():
    longer = {"plan.mean_response_tokens": 4000}
    planned = of_kind("asynchronous", "async", "a100_1x8", **longer)
    first = planned.stage.plan.schedule.parts[0]
    assert [part.node for part in first.parts] == ["actor.generate", "reference.logprobs"]
    model = model_of(planned)
    assert model.ahead == 1
    assert [op.name for op in model.ops if op.ahead] == ["reference.logprobs"]
    report = simulated(planned, steps=6)
    assert set(report.ages) == {0, 1}
    # The trainer never waits for what is read ahead.
    walls = sorted(step.wall_s for step in report.steps[2:])
    assert walls[0] > max(report.seconds("update"), report.seconds("logprobs"))


def test_a_plan_that_takes_turns_draws_nothing_ahead_however_old_samples_may_be():
    planned = of_kind("temporal", "async", "h100_8")
    assert planned.stage.context.max_staleness == 1
    assert model_of(planned).ahead == 0
    assert set(simulated(planned).ages) == {0}


def test_what_comes_from_the_host_is_paid_once_a_batch_and_again_with_every_chunk():
    [planned] = best_plans("grpo", MIXED)
    moved = edited(planned, reference={"seconds": 20.0, "move_s": 4.0})
    ops = {op.name: op for op in model_of(moved).ops}
    reader = ops["reference.logprobs"]
    assert (reader.fixed_s, reader.piece_s) == (4.0, pytest.approx(4.05))


def test_an_operation_takes_the_plans_seconds_for_the_plans_samples():
    for planned in best_plans("ppo", "h100_64", 2):
        times = planned_times(planned.stage, planned.config)
        for operation in planned.stage.plan.operations:
            if operation.seconds is None or operation.op == "generate":
                continue
            node, rows = times.nodes[operation.node], operation.num_samples
            per_row = node.cost.row_s + node.cost.token_s * (220 + 2400)
            assert node.move_s + rows * per_row == pytest.approx(operation.seconds)
            # Half of the tokens of responses take a little more than half of the time.
            halved = node.cost.row_s + node.cost.token_s * (220 + 1200)
            assert 0.5 < halved / per_row < 0.75


def test_lengths_are_drawn_with_the_mean_that_the_plan_has_after_the_cut():
    """What `--lengths` says is the mean before; for sigma 0 and files nothing changes."""
    config = PlanConfig(mean_response_tokens=2400.0, sigma=0.8)
    text = planned_lengths(config, 8192)
    drawn = parse_lengths(text).draw(np.random.default_rng(0), 200_000)
    assert np.minimum(drawn, 8192).mean() == pytest.approx(2400, rel=0.01)
    assert drawn.mean() == pytest.approx(2505, rel=0.01)
    assert (
        planned_lengths(PlanConfig(mean_response_tokens=600.0, sigma=0.0), 8192) == "constant:600"
    )
    assert planned_lengths(PlanConfig(lengths=Path("lengths.jsonl")), 8192) == "lengths.jsonl"


def test_figures_of_devices_are_those_that_the_plan_was_made_with():
    """Not the catalogue's: a cluster file may say others."""
    [planned] = best_plans("grpo", MIXED)
    plan = planned.stage.plan
    thin = {"memory_bytes_per_s": 1e12, "measured_memory_bytes_per_s": 1e12}
    machines = tuple(replace(one, spec=replace(one.spec, **thin)) for one in plan.pool.machines)
    slower = replace(plan, pool=replace(plan.pool, machines=machines))
    assert PlacementPlan.from_json(slower.to_json()) == slower
    slow = replace(planned, stage=planned.stage.with_plan(slower))
    assert simulated(slow).seconds("generate") > 1.3 * simulated(planned).seconds("generate")
    raw = plan.to_dict()
    raw["pool"]["devices"][1]["machine"] = 7
    with pytest.raises(PlanError, match="names what the plan does not have"):
        PlacementPlan.from_json(json.dumps(raw))


def test_fewer_engines_than_planned_are_the_plans_first_and_more_have_devices_of_their_own():
    planned = best_plans("grpo", "h100_64", 2)[0]
    times = planned_times(planned.stage, planned.config)
    number = len(model_of(planned).engines)
    models = [
        model_of_stage(planned.stage, times, num_engines=asked)
        for asked in ({}, {"actor": 2}, {"actor": number + 1})
    ]
    lanes = [[engine.lane for engine in model.engines] for model in models]
    assert len(lanes[0]) == number > 2
    assert lanes[1] == lanes[0][:2]
    assert lanes[2] == [*lanes[0], f"actor.generate[{number}]"]
    told = "1 engine of actor.generate on devices that the plan has not"
    assert [any(told in note for note in model.notes) for model in models] == [False, False, True]


def test_a_step_of_shorter_responses_is_shorter_in_every_part():
    planned = best_plans("grpo", "h100_64", 2)[0]
    long, short = simulated(planned), simulated(planned, lengths="constant:64")
    for kind in ("generate", "logprobs", "update"):
        assert short.seconds(kind) < 0.3 * long.seconds(kind)


def episodes(pins=(), **environment):
    words = [f"cluster={cluster_jobs.CONFIGS}/clusters/h100_8x8.yaml", "train.group_size=4"]
    words += [f"plan.environments.world.{key}={value}" for key, value in environment.items()]
    words += [f"plan.pins.{pin}" for pin in pins]
    compiled = api.compile(None, cluster_jobs.CONFIGS / "agent_qwen25_7b.yaml", overrides=words)
    return Planned(stage=compiled.stages[-1], config=compiled.config.plan)


def test_episodes_go_as_the_plan_has_them(monkeypatch):
    """6,000 tokens with what is said in them: 10 turns of 400, and 200 said before each."""
    monkeypatch.chdir(cluster_jobs.CONFIGS.parent)
    planned = episodes()
    model = model_of(planned)
    [rollout] = model.rollouts
    shape = rollout.environment.shape
    assert (shape.turn, shape.observation, shape.turns(4000)) == (400, 200, (400,) * 10)
    assert all(engine.keeps_prefixes for engine in model.engines)
    report = simulated(planned)
    tokens = [step.num_tokens / (128 * 4) for step in report.steps]
    assert sum(tokens) / 2 == pytest.approx(4000, rel=0.05)
    assert planned.step_s * 0.95 <= steady_s(report) <= planned.step_s * 1.4
    world = next(lane for lane in report.lanes if lane.lane == "world")
    hosts = planned.stage.plan.operation("world.interact").devices
    assert len(hosts) > 1
    assert world.device == device_names(hosts)
    for step in report.steps:  # updates begin on groups, so they overlap with drawing
        drawn_s = step.seconds["generate"] + step.seconds["environment"]
        assert drawn_s < step.wall_s < sum(step.seconds.values())
    calls = 2 * 128 * 4 * (5.0 + 10 * 2.0)
    at_once = planned.stage.plan.operation("world.interact").environment.at_once
    assert world.busy_s == pytest.approx(calls / at_once, rel=0.15)  # 16 turns at most


@pytest.mark.parametrize("mode", ["together", "apart"])
def test_an_environment_on_accelerators_has_their_lane(mode, monkeypatch):
    """On the policy's own they take turns; apart, both work at once."""
    monkeypatch.chdir(cluster_jobs.CONFIGS.parent)
    words = {"device": "accelerator", "concurrency": 16, "memory_gib": 20}
    planned = episodes(**words, pins=(f"world.environment={mode}",))
    model = model_of(planned)
    [rollout] = model.rollouts
    own = planned.stage.plan.operation("world.interact")
    assert own.environment.mode == mode
    lane = next(lane for lane in model.lanes if lane.name == rollout.environment.lane)
    assert lane.name == device_names(own.devices)
    assert devices_of(model, lane.parts or (lane.name,)) == len(own.devices)
    assert sum(lane.num_devices for lane in model.lanes) == 64
    drawing = {part for engine in model.engines for part in (engine.lane,)}
    assert (drawing <= {*lane.parts}) == (mode == "together")
    ratio = steady_s(simulated(planned)) / planned.step_s
    assert 0.8 < ratio < 1.4


@fl.workflow
def rivals(prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy, verifier: fl.Reward):
    mine, theirs = actor.generate(prompts, n=4), rival.generate(prompts, n=4)
    actor.update(mine, verifier.score(mine))
    rival.update(theirs, verifier.score(theirs))


def of_workflow(workflow, cluster, *, pins=None, **roles):
    changes = {"train.prompts_per_step": 128, "train.refill": False, "plan.pins": pins or {}}
    config = cluster_jobs.config_of("dapo", cluster, changes)
    name = workflow if isinstance(workflow, str) else workflow.name
    config["stages"], config["roles"] = [name], config["roles"] | roles
    compiled = api.compile(
        None if isinstance(workflow, str) else workflow, config, pool=pool(cluster)
    )
    return Planned(stage=compiled.stages[-1], config=compiled.config.plan)


@pytest.mark.parametrize("cluster", ["h100_8", "h100_64"])
def test_several_policies_draw_and_learn_as_the_plan_has_them(cluster):
    planned = of_workflow(rivals, cluster, rival={"copy_of": "actor", "num_slots": 64})
    model = model_of(planned)
    assert {engine.role for engine in model.engines} == {"actor", "rival"}
    report = simulated(planned)
    assert steady_s(report) == pytest.approx(planned.step_s, rel=0.05)
    assert report.samples["consumed"] == 2 * 2 * 128 * 4


def test_two_rollouts_of_one_policy_have_engines_where_the_plan_has_them():
    pins = {"rollout.devices": "0-31", "actor.devices": "32-63"}
    planned = of_workflow("remax", "h100_64", pins=pins)
    model = model_of(planned)
    plan = planned.stage.plan
    drawn = [plan.operation(rollout.name) for rollout in model.rollouts]
    assert len(model.engines) == sum(one.layout.dp for one in drawn)
    update = next(op for op in model.ops if op.op == "update")
    assert update.beside == ("actor.generate.2",)
    sync = next(op for op in model.ops if op.op == "sync")
    assert sync.publishes == tuple(rollout.role for rollout in model.rollouts)
    report = simulated(planned)
    assert steady_s(report) == pytest.approx(planned.step_s, rel=0.05)
    assert report.samples["consumed"] == 2 * 128 * 9


def test_a_stage_of_examples_learns_rows_a_second():
    config = cluster_jobs.config_of("grpo", "h100_64", {"train.prompts_per_step": 128})
    config |= {"stages": ["sft"], "roles": {"actor": config["roles"]["actor"]}}
    del config["args"], config["rewards"]
    compiled = api.compile(None, config, pool=pool("h100_64"))
    planned = Planned(stage=compiled.stages[-1], config=compiled.config.plan)
    report = simulated(planned)
    assert steady_s(report) == pytest.approx(planned.step_s)
    assert report.rows_per_s == pytest.approx(128 / planned.step_s)
    assert report.samples_per_s == 0


def test_devices_on_which_nothing_runs_are_idle():
    changes = {"plan.objective": "device_time"}
    [planned, *_] = best_plans("grpo", "h100_64", **changes)
    assert planned.stage.plan.schedule.devices < 64
    model = model_of(planned)
    used = {lane for op in model.ops for lane in op.lanes} | {e.lane for e in model.engines}
    idle = [lane for lane in model.lanes if lane.num_devices and lane.name not in used]
    assert sum(lane.num_devices for lane in model.lanes) == 64
    assert sum(lane.num_devices for lane in idle) > 0
    assert [lane for lane in model.lanes if not lane.in_use] == idle
    report, plan = simulated(planned), planned.stage.plan
    shares = {lane.lane: lane.idle_share for lane in report.lanes}
    assert all(shares[lane.name] == 1.0 for lane in idle)
    # Of the devices that the plan uses, device seconds are counted, and idle ones.
    number = 64 - sum(lane.num_devices for lane in idle)
    assert report.num_devices == number
    assert plan.prediction.device_s == pytest.approx(planned.step_s * number / (128 * 8))
    assert report.idle_share == pytest.approx(plan.prediction.idle_share, abs=0.05)


def test_a_models_operation_without_devices_is_refused():
    [planned] = best_plans("grpo", MIXED)
    broken = edited(planned, reference={"devices": ()})
    with pytest.raises(PlanError, match="a model's operation has no device"):
        model_of_stage(broken.stage, planned_times(planned.stage, planned.config))
