"""The plan for this machine is chosen by simulating each; plans for others are simulated too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.cluster.discover import discover
from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ResourcePool
from flowrl.compiler import CompiledStage
from flowrl.compiler.lengths import lengths_of
from flowrl.config.schema import PlanConfig
from flowrl.errors import ConfigError, PlanError
from flowrl.plan.local import LocalChoice, LocalRequest, default_choice, engines_of, local_choices
from flowrl.sim.choose_plan import choose_plan, predicted_choices, workloads_of
from flowrl.sim.costs import LinearCost
from flowrl.sim.of_plan import model_of_stage
from flowrl.sim.planned_times import planned_lengths, planned_times
from flowrl.sim.run import simulate
from flowrl.sim.times import EngineTimes, StageTimes, assumed_times
from flowrl.sim.workload import open_workload
from tests.runtime.tiny_runs import tiny_config

CONFIGS = Path(__file__).parents[2] / "configs"
LENGTHS = PlanConfig(mean_response_tokens=1000)
"""Above the longest, so that every response has as many tokens as it may."""


class Step:
    """A decode step that takes a second for each row."""

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        return float(batch)

    def prefill_s(self, rows: int, tokens: int) -> float:
        return 0.0

    def leave_s(self) -> float:
        return 0.0


def two_cores() -> ResourcePool:
    """This machine with two cores."""
    pool = discover()
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(device, num_cores=2) for device in node.devices if device.type == "cpu"
            ),
        )
        for node in pool.nodes
    )
    return replace(pool, nodes=nodes)


def stage_of(runs: Path, **changes: Any) -> CompiledStage:
    config = {**tiny_config(runs), "stages": ["grpo"], "stage": {}, "args": {}, **changes}
    return api.compile(None, config, pool=two_cores()).stages[-1]


def times_of(stage: CompiledStage, *, update_s: float, export_s: float) -> StageTimes:
    return replace(
        assumed_times(stage),
        source="a test",
        engines={"actor": EngineTimes(step=Step())},
        ops={
            ("actor", "update"): LinearCost(call_s=update_s),
            ("actor", "export"): LinearCost(call_s=export_s),
        },
    )


def names(choices: Any) -> list[tuple[str, int]]:
    return [(choice.kind, choice.engines[0][1]) for choice in choices]


def test_choices_keep_within_the_cores_and_what_was_asked_for():
    request = LocalRequest(roles=("actor",), fixed={}, num_cores=2)
    assert names(local_choices(request)) == [
        ("temporal", 0),
        ("temporal", 1),
        ("temporal", 2),
        ("spatial", 1),
    ]
    ahead = replace(request, may_run_ahead=True)
    assert names(local_choices(ahead))[-1] == ("asynchronous", 1)
    assert names(local_choices(replace(request, fixed={"actor": 2}))) == [("temporal", 2)]
    assert names(local_choices(replace(ahead, must_run_ahead=True))) == [("asynchronous", 1)]
    assert names(local_choices(replace(request, num_cores=1))) == [("temporal", 0)]
    assert names(local_choices(replace(ahead, in_process=True))) == [("asynchronous", 0)]
    for choice in (default_choice(request), default_choice(ahead)):
        assert choice in local_choices(ahead)


def test_kinds_that_cannot_be_are_refused():
    request = LocalRequest(roles=("actor",), fixed={}, num_cores=1, where="plan.kind")
    with pytest.raises(PlanError, match="too few cores for each engine"):
        default_choice(replace(request, kind="spatial"))
    with pytest.raises(PlanError, match="ahead of the trainer"):
        default_choice(replace(request, kind="asynchronous"))
    with pytest.raises(PlanError, match="generated ahead of the trainer"):
        default_choice(replace(request, kind="temporal", must_run_ahead=True))


def test_the_fastest_plan_is_taken_and_the_others_are_told(tmp_path: Path):
    stage = stage_of(tmp_path)
    # 16 samples an engine with 5 tokens behind the first: 80 s; two updates, one export.
    slow = choose_plan(stage, times_of(stage, update_s=1.0, export_s=1.0), LENGTHS, 0)
    assert engines_of(slow.plan, "actor").processes == 2
    assert slow.plan.prediction.step_s == pytest.approx(80.0 + 2.0 + 1.0)
    assert slow.placed.node("actor.generate").attr("process") == "actor.generate"
    (reason,) = [one for one in slow.plan.reasons if one.subject == "actor.generate"]
    assert reason.choice == "temporal: 2 engine processes"
    assert "by a test" in reason.why
    assert len(reason.rejected) == len(slow.plan.alternatives) == 3
    times = [one.step_s or 0.0 for one in slow.plan.alternatives]
    assert times == sorted(times)
    # Where weights travel for long, the engine that reads them in place is faster.
    costly = choose_plan(stage, times_of(stage, update_s=1.0, export_s=500.0), LENGTHS, 0)
    assert engines_of(costly.plan, "actor").processes == 0
    assert costly.plan.weight_routes[0].transport == "in_place"


def test_drawing_ahead_is_taken_where_the_workflow_allows_it_and_it_is_faster(tmp_path: Path):
    train = tiny_config(tmp_path)["train"] | {"max_staleness": 1}
    stage = stage_of(tmp_path, train=train)
    times = times_of(stage, update_s=200.0, export_s=0.0)
    chosen = choose_plan(stage, times, LENGTHS, 0)
    assert chosen.plan.kind == "asynchronous"
    found, _ = predicted_choices(stage, times, LENGTHS, 0)
    assert {one.choice.kind for one in found} == {"temporal", "spatial", "asynchronous"}


def test_processes_that_do_not_fit_are_left_out(tmp_path: Path):
    stage = stage_of(tmp_path)
    assert stage.local is not None
    base = stage.local.base
    peak = base.prediction.peak("cpu:0")
    assert peak is not None
    devices = tuple(
        replace(one, budget_bytes=peak.memory.total + (700 << 20)) for one in base.pool.devices
    )
    local = replace(stage.local, base=replace(base, pool=replace(base.pool, devices=devices)))
    small = replace(stage, local=local)
    times = times_of(stage, update_s=1.0, export_s=1.0)
    found, too_large = predicted_choices(small, times, LENGTHS, 0)
    assert ("temporal", 2) not in names(one.choice for one in found)
    assert ("temporal", 0) in names(one.choice for one in found)
    assert [one.choice for one in too_large] == ["temporal: 2 engine processes"]
    assert "needs" in too_large[0].constraint


def test_a_profile_of_another_model_is_not_used_and_that_is_told(tmp_path: Path):
    config = tiny_config(tmp_path)
    (tmp_path / "tiny.profile.json").write_text("{}")
    compiled = api.compile(None, config)
    if compiled.stages[-1].local is None or len(compiled.stages[-1].local.choices()) < 2:
        pytest.skip("takes two cores")
    assert any("cannot be used" in reason.why for reason in compiled.plan.reasons)
    assert engines_of(compiled.plan, "actor").processes == 0
    with pytest.raises(ConfigError):
        api.compile(None, config, overrides=[f"plan.profile={tmp_path / 'tiny.profile.json'}"])


def test_a_kind_is_asked_of_the_stages_that_draw():
    overrides = ["plan.kind=spatial", f"cluster={CONFIGS / 'clusters' / 'laptop.yaml'}"]
    compiled = api.compile(None, CONFIGS / "quickstart.yaml", overrides=overrides)
    assert [stage.plan.kind for stage in compiled.stages] == ["temporal", "spatial"]


def test_choices_are_told_in_words():
    assert (
        str(LocalChoice(kind="temporal", engines=(("actor", 0),)))
        == "generated in the main process"
    )
    choice = LocalChoice(kind="spatial", engines=(("a", 1), ("b", 2)), pinned=True)
    assert str(choice) == (
        "a: 1 engine process, b: 2 engine processes on other cores than the trainer"
    )


@pytest.mark.parametrize("name", ["grpo_qwen25_7b", "ppo_qwen25_7b", "grpo_qwen25_32b"])
def test_plans_over_many_devices_are_simulated_near_what_they_predict(name: str):
    pool = load_cluster(CONFIGS / "clusters" / "h100_8x8.yaml")
    # A quarter of the prompts: the plan is made for them too, and a test is quick.
    data = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
    words = ["train.prompts_per_step=128", f"data.train={data}"]
    words += [f"plan.pins.{task}.devices=0-63" for task in ("rollout", "actor")]
    compiled = api.compile(None, CONFIGS / f"{name}.yaml", overrides=words, pool=pool)
    (stage,) = compiled.stages[-1:]
    plan = compiled.config.plan
    times = planned_times(stage, plan)
    model = model_of_stage(stage, times)
    (rollout,) = model.rollouts
    longest = stage.plan.operation("actor.generate").max_tokens
    workload = open_workload(
        planned_lengths(plan, longest),
        stage=stage.name,
        rollout=rollout.name,
        seed=0,
        prompts=times.prompts,
        longest=longest,
    )
    report = simulate(model, steps=1, workloads={rollout.name: workload})
    assert stage.plan.prediction.step_s is not None
    assert report.step_s == pytest.approx(stage.plan.prediction.step_s, rel=0.25)
    assert report.samples["consumed"] == report.samples["admitted"]


def test_lengths_that_nobody_names_are_those_of_all_plans(tmp_path: Path):
    stage = stage_of(tmp_path)
    times = times_of(stage, update_s=1.0, export_s=1.0)
    found = workloads_of(stage, times, PlanConfig(), 0)["actor.generate"]
    assert str(found) == f"{planned_lengths(PlanConfig(), 6)}, which cut at 6 is 3.0 on average"
    assert lengths_of(PlanConfig(), 6).mean == 3.0
    guessed, said = (choose_plan(stage, times, plan, 0).plan for plan in (PlanConfig(), LENGTHS))
    assert guessed.notes[-2].startswith("responses of 3 tokens on average, half of the longest; ")
    assert guessed.notes[-1].startswith("response lengths spread lognormally with sigma 0.7; ")
    assert said.notes == guessed.notes[:-2]


def test_the_only_plan_there_is_has_its_price_too(tmp_path: Path):
    roles = tiny_config(tmp_path)["roles"]
    roles["actor"]["num_engines"] = 2
    stage = stage_of(tmp_path, roles=roles, plan={"kind": "temporal"})
    assert stage.local is not None
    assert len(stage.local.choices()) == 1
    priced = choose_plan(stage, times_of(stage, update_s=1.0, export_s=1.0), LENGTHS, 0)
    assert priced.plan.prediction.step_s == pytest.approx(80.0 + 2.0 + 1.0)
    assert priced.plan.alternatives == ()
    (reason,) = [one for one in priced.plan.reasons if one.subject == "actor.generate"]
    assert reason.choice == "temporal: 2 engine processes"
    assert "by a test" in reason.why


def test_a_profile_of_another_name_is_told_where_the_command_line_gives_a_name(tmp_path: Path):
    profile = tmp_path / "tiny.profile.json"
    profile.write_text("{}")
    named = api.compile(None, tiny_config(tmp_path), overrides=["name=other"])
    (reason,) = [one for one in named.plan.reasons if one.subject == "profile"]
    assert f"there is no {tmp_path / 'other.profile.json'}" in reason.why
    assert str(profile) in reason.why
    assert "plan.profile=FILE" in reason.why
    profile.unlink()
    named = api.compile(None, tiny_config(tmp_path), overrides=["name=other"])
    assert not [one for one in named.plan.reasons if one.subject == "profile"]
