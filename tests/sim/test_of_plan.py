"""What is simulated of a compiled stage: its lanes, engines, rollouts and operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl import api
from flowrl.errors import ConfigError
from flowrl.plan.schema import DeviceSummary, Layout
from flowrl.sim.costs import LinearCost
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.of_plan import longest_response, model_of_stage, rollout_nodes
from flowrl.sim.run import simulate
from flowrl.sim.times import StageTimes, assumed_times
from flowrl.sim.workload import open_workload
from tests.runtime.tiny_runs import tiny_config


def stage_of(tmp_path, workflow=None, **changes):
    return api.compile(workflow, tiny_config(tmp_path) | changes).stages[-1]


@pytest.fixture
def stage(tmp_path):
    return stage_of(tmp_path)


def simulated(stage, times=None, *, steps=3, lengths="constant:4", **more):
    times = times or assumed_times(stage)
    workloads = {
        node.id: open_workload(
            lengths,
            stage=stage.name,
            rollout=node.id,
            seed=0,
            prompts=times.prompts,
            longest=longest_response(stage, node),
        )
        for node in rollout_nodes(stage.graph)
    }
    return simulate(model_of_stage(stage, times, **more), steps=steps, workloads=workloads)


def test_what_one_process_does_is_on_one_lane(stage):
    model = model_of_stage(stage, assumed_times(stage))
    assert [(lane.name, lane.device) for lane in model.lanes] == [
        ("main", "cpu:0"),
        ("verifier", "cpu:0"),
    ]
    [engine] = model.engines
    assert (engine.name, engine.lane, engine.num_slots) == ("actor.generate[0]", "main", 8)
    assert engine.capacity == 16
    assert model.driver == "main"


def test_devices_that_an_engine_needs_together_are_one_lane_for_everyone(stage):
    """Two engines of two cards each, and a reference with a replica on each card."""
    cards = tuple(
        DeviceSummary(
            address=f"cuda:{i}",
            node="n",
            type="cuda",
            name="a card",
            memory_bytes=1 << 36,
            budget_bytes=1 << 36,
            num_cores=0,
        )
        for i in range(4)
    )
    names = tuple(card.address for card in cards)
    plan = stage.plan
    placements = tuple(
        replace(p, devices=names, process="engines", replicas=2, layout=Layout(tp=2))
        if p.role == "actor"
        else replace(p, devices=names, process="reference", replicas=4)
        if p.role == "reference"
        else p
        for p in plan.placements
    )
    pool = replace(plan.pool, devices=(*plan.pool.devices, *cards))
    placed = replace(stage, plan=replace(plan, pool=pool, placements=placements))
    model = model_of_stage(placed, assumed_times(placed))
    assert [engine.lane for engine in model.engines] == ["cuda:0-1", "cuda:2-3"]
    ops = {op.name: op for op in model.ops}
    assert ops["reference.logprobs"].lanes == ("cuda:0-1", "cuda:2-3")
    report = simulated(placed)
    assert {lane.device for lane in report.lanes} >= {"cuda:0-1", "cuda:2-3"}


def test_the_scheduler_has_the_stages_settings(stage):
    [rollout] = model_of_stage(stage, assumed_times(stage)).rollouts
    assert rollout.groups == 8
    assert rollout.settings.group_size == 4
    assert rollout.settings.max_staleness == 0
    assert rollout.settings.judges_groups
    assert [scorer.lanes for scorer in rollout.scorers] == [("verifier",)]


def test_operations_on_batches_are_in_the_plans_order_on_their_roles_lanes(stage):
    ops = {op.name: op for op in model_of_stage(stage, assumed_times(stage)).ops}
    assert list(ops) == ["advantage", "reference.logprobs", "actor.update", "actor.sync"]
    assert ops["advantage"].lanes == ()
    assert ops["actor.update"].lanes == ("main",)
    assert ops["actor.update"].calls == 2
    assert ops["actor.update"].micro_batch == 16
    assert ops["actor.update"].kept_only
    assert set(ops["actor.update"].after) == {"advantage", "reference.logprobs"}
    assert ops["actor.sync"].publishes == ("actor",)


def test_work_that_nobody_has_timed_is_told(stage):
    known = assumed_times(stage)
    ops = {key: cost for key, cost in known.ops.items() if key[1] != "update"}
    assert model_of_stage(stage, known).notes == ()
    notes = model_of_stage(stage, replace(known, ops=ops)).notes
    assert notes == ("no time is known for actor.update, so it takes none",)


def test_a_step_takes_what_its_parts_take(stage):
    times = replace(
        assumed_times(stage),
        ops={
            ("actor", "update"): LinearCost(call_s=2.0),
            ("actor", "sync"): LinearCost(call_s=1.0),
        },
    )
    report = simulated(stage, times)
    for step in report.steps:
        assert step.seconds["update"] == 4.0
        assert step.seconds["sync"] == 1.0
        assert step.wall_s == pytest.approx(step.seconds["generate"] + 5.0)
    assert report.samples["consumed"] == 3 * 32


def test_more_engines_than_planned_have_lanes_of_their_own(stage):
    one, four = simulated(stage), simulated(stage, num_engines={"actor": 4})
    assert [lane.lane for lane in four.lanes][2:] == [f"actor.generate[{i}]" for i in range(4)]
    assert four.seconds("generate") < one.seconds("generate")
    assert four.samples == one.samples


def test_ages_keep_within_the_staleness_of_the_config(tmp_path):
    train = tiny_config(tmp_path)["train"] | {"max_staleness": 2}
    stage = stage_of(tmp_path, workflow="async_grpo", train=train, args={})
    report = simulated(stage, steps=8, num_engines={"actor": 2})
    assert 0 < max(report.ages) <= 2


def test_an_asynchronous_engine_is_beside_the_trainer_and_loads_a_folder(tmp_path):
    train = tiny_config(tmp_path)["train"] | {
        "max_staleness": 1,
        "policies": {"publication": "finish"},
    }
    stage = stage_of(tmp_path, workflow="async_grpo", train=train, args={})
    times = assumed_times(stage)
    engine = replace(times.engines["actor"], load_s=1.0, load_folder_s=2.0)
    ops = {**times.ops, ("actor", "sync"): LinearCost(call_s=3.0)}
    ops |= {("actor", "export"): LinearCost(call_s=4.0)}
    model = model_of_stage(stage, replace(times, engines={"actor": engine}, ops=ops))
    [drawn], [rollout] = model.engines, model.rollouts
    assert (drawn.lane, drawn.load_s, drawn.capacity) == ("actor.generate[0]", 2.0, 16)
    assert (model.driver, model.trainer, model.ahead) == ("rollout", "main", 1)
    assert rollout.settings.publication.kind == "finish"
    assert rollout.settings.budget.groups == 8
    [sync] = [op for op in model.ops if op.op == "sync"]
    assert sync.cost.call_s == 4.0


def test_batches_are_refilled_where_the_config_says_so(tmp_path):
    train = tiny_config(tmp_path)["train"] | {"refill": True}
    stage = stage_of(tmp_path, train=train)
    [rollout] = model_of_stage(stage, assumed_times(stage)).rollouts
    assert rollout.settings.refill


def test_a_stage_of_examples_has_no_engine(tmp_path):
    compiled = api.compile(None, tiny_config(tmp_path))
    report = simulated(compiled.stages[0])
    assert report.num_engines == 0
    assert report.samples == {"admitted": 0, "consumed": 0, "filtered": 0, "dropped": 0}
    assert report.steps[0].seconds["update"] > 0


def test_rollouts_of_one_program_take_turns(tmp_path):
    stage = stage_of(tmp_path, workflow="remax", args={})
    model = model_of_stage(stage, assumed_times(stage))
    assert [r.settings.group_size for r in model.rollouts] == [4, 1]
    [update] = [op for op in model.ops if op.op == "update"]
    assert update.rollout == model.rollouts[0].name
    report = simulated(stage, steps=2)
    assert report.samples["consumed"] == 2 * 8 * 5
    # The baseline's samples are consumed, but nothing is learned from them.
    assert [step.num_samples for step in report.steps] == [32, 32]
    assert sum(report.ages.values()) == 2 * 32


def test_a_selection_leaves_less_to_learn_from(tmp_path):
    @fl.workflow
    def best(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts, n=4)
        scores = verifier.score(rollout)
        rollout, scores = fl.select.top(rollout, scores, k=2)
        actor.update(rollout, scores)

    stage = stage_of(tmp_path, workflow=best, args={})
    ops = {op.name: op for op in model_of_stage(stage, assumed_times(stage)).ops}
    assert ops["actor.update"].share == 0.5
    assert ops["actor.update"].rollout == "actor.generate"


def test_episodes_are_played_by_the_policy_with_the_environment():
    stage = api.compile(None, "configs/guess.yaml").stages[-1]
    known = assumed_times(stage)
    times = replace(known, environments={"game": EnvironmentTimes(call_s=1e-5)})
    model = model_of_stage(stage, times)
    (rollout,) = model.rollouts
    assert (rollout.name, rollout.role, rollout.settings.group_size) == (
        "game.interact",
        "actor",
        16,
    )
    assert rollout.environment is not None
    assert rollout.environment.times == EnvironmentTimes(call_s=1e-5)
    assert rollout.environment.shape == EpisodeShape(turn=1, observation=1, max_turns=4)
    node = stage.graph.node(rollout.name)
    assert longest_response(stage, node) == 4
    report = simulated(stage, times)
    assert report.samples["admitted"] == report.samples["consumed"] > 0
    assert any(lane.lane == "game" and lane.busy_s > 0 for lane in report.lanes)


def test_a_role_without_times_is_told(stage):
    with pytest.raises(ConfigError, match="no step times for this role") as told:
        model_of_stage(stage, StageTimes(source="nothing", engines={}))
    assert told.value.where == "roles.actor"
