"""Plans for this machine, run for real: in one process, on other cores, ahead of the trainer."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl import api
from flowrl.cli.files import run_by
from flowrl.cluster.discover import discover
from flowrl.compiler import CompiledStage
from flowrl.errors import PlanError
from flowrl.files import read_json_lines
from flowrl.observe.rows import StepMetrics
from flowrl.plan import PlacementPlan, save_plan
from flowrl.plan.check.file_lines import lines_of
from flowrl.plan.schema import Transport
from flowrl.runtime.local.engine_process import EngineProcess
from flowrl.runtime.local.plan_checks import require_local_plan
from flowrl.runtime.local.run_checks import require_runnable
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

TWO_CORES = pytest.mark.skipif(
    next(device for _, _, device in discover() if device.type == "cpu").num_cores < 2,
    reason="takes two cores",
)


@fl.workflow
def by_own_logprobs(
    prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward
):
    rollout = actor.generate(prompts)
    advantages = fl.advantage.group_relative(verifier.score(rollout))
    # An engine's logprobs depend, in their last bit, on who shares a batch.
    loss = fl.loss.policy_clip(anchor="old")
    known = reference.logprobs(rollout)
    actor.update(rollout, advantages=advantages, reference=known, loss=loss, kl=fl.kl.k3(0.05))


def config_of(runs: Path, *, kind: str = "auto", **train: Any) -> dict[str, Any]:
    config = {**tiny_config(runs), "stages": ["grpo"], "stage": {}, "plan": {"kind": kind}}
    config["train"] = {**config["train"], "steps": 2, **train}
    config["eval"] = {"every": 0, "num": 4, "metric": "digit"}
    return config


def compiled_of(runs: Path, *, kind: str = "auto", **train: Any) -> api.Compiled:
    config = {**config_of(runs, kind=kind, **train), "args": {}}
    if train.get("max_staleness"):
        return fl.compile(None, config)
    return fl.compile(by_own_logprobs, config)


def learned(compiled: api.Compiled) -> tuple[list[str], bytes]:
    """What a run drew, in order, and the weights that it ends with."""
    folder = compiled.run(display=WatchedDisplay()).folder
    (weights,) = (folder / "model").glob("*.safetensors")
    drawn = [f"{row['step']} {row['sample']} {row['response']}" for row in rows_of(folder)]
    return sorted(drawn), weights.read_bytes()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / "samples.jsonl"))


def with_engines(plan: PlacementPlan, **changes: Any) -> PlacementPlan:
    """The plan with its operations that generate changed."""
    return replace(
        plan,
        operations=tuple(
            replace(one, **changes) if one.op == "generate" else one for one in plan.operations
        ),
    )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Engine processes that were opened: name and core."""
    found: list[tuple[str, int | None]] = []
    own = EngineProcess.__init__

    def init(self: EngineProcess, name: Any, *arguments: Any, **options: Any) -> None:
        found.append((name, options.get("core")))
        own(self, name, *arguments, **options)

    monkeypatch.setattr(EngineProcess, "__init__", init)
    return found


@TWO_CORES
def test_synchronous_plans_learn_the_same_to_the_last_bit(
    tmp_path: Path, opened: list[tuple[str, int | None]]
):
    in_place = compiled_of(tmp_path / "in_place")
    assert in_place.plan.kind == "temporal"
    expected = learned(in_place)
    assert opened == []
    assert len(expected[0]) > 32

    spatial = compiled_of(tmp_path / "spatial", kind="spatial")
    assert spatial.plan.kind == "spatial"
    local = spatial.stages[-1].local
    assert local is not None
    cores = range(1, local.request.num_cores)
    assert spatial.plan.operation("actor.generate").cores == tuple(cores)
    assert learned(spatial) == expected
    available = sorted(os.sched_getaffinity(0))
    assert opened == [(f"actor.generate[{i}]", available[core]) for i, core in enumerate(cores)]

    opened.clear()
    config = config_of(tmp_path / "temporal", kind="temporal")
    config["roles"]["actor"]["num_engines"] = 2
    several = fl.compile(by_own_logprobs, {**config, "args": {}})
    assert several.plan.kind == "temporal"
    assert learned(several) == expected
    assert opened == [("actor.generate[0]", None), ("actor.generate[1]", None)]


def test_an_engine_process_keeps_to_its_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    core = sorted(os.sched_getaffinity(0))[-1]
    kept: list[set[int]] = []
    own = EngineProcess.wait_ready

    def wait_ready(self: EngineProcess) -> None:
        own(self)
        kept.append(os.sched_getaffinity(self._channel.process.pid))

    monkeypatch.setattr(EngineProcess, "wait_ready", wait_ready)
    compiled = compiled_of(tmp_path, steps=1)
    last = len(os.sched_getaffinity(0)) - 1
    plan = routed(with_engines(compiled.plan, process="drawing", cores=(last,)))
    compiled.with_plan(plan).run(display=WatchedDisplay())
    assert kept == [{core}]


def routed(plan: PlacementPlan) -> PlacementPlan:
    routes = tuple(replace(route, transport=Transport.FOLDER) for route in plan.weight_routes)
    return replace(plan, weight_routes=routes)


def test_a_workflow_that_allows_age_runs_asynchronously_or_in_turns(
    tmp_path: Path, opened: list[tuple[str, int | None]]
):
    ahead = compiled_of(tmp_path / "ahead", max_staleness=2)
    assert ahead.plan.kind == "asynchronous"
    folder = ahead.run(display=WatchedDisplay()).folder
    assert [name for name, _ in opened] == ["actor.generate[0]"]
    steps = list(map(StepMetrics.from_json, read_json_lines(folder / "metrics.jsonl")))
    assert all("staleness/max" in step.extra for step in steps)

    opened.clear()
    turns = compiled_of(tmp_path / "turns", kind="temporal", max_staleness=2)
    assert turns.plan.kind == "temporal"
    folder = turns.run(display=WatchedDisplay()).folder
    assert opened == []
    versions = {step.step: step.version for step in steps_of(folder)}
    assert versions == {1: 0, 2: 1}
    for row in rows_of(folder):
        assert [version for version, _ in row["versions"]] == [versions[row["step"]]]


def steps_of(folder: Path) -> list[StepMetrics]:
    return list(map(StepMetrics.from_json, read_json_lines(folder / "metrics.jsonl")))


def test_a_plan_that_was_edited_is_run_as_it_says(
    tmp_path: Path, opened: list[tuple[str, int | None]]
):
    compiled = compiled_of(tmp_path / "runs", steps=2)
    plan = routed(with_engines(compiled.plan, process="drawing", replicas=3, chunk=4))
    plan = replace(
        plan,
        placements=tuple(
            replace(p, num_slots=4) if p.role == "actor" else p for p in plan.placements
        ),
    )
    path = tmp_path / "edited.yaml"
    save_plan(plan, path)
    folder = compiled.with_plan(path).run(display=WatchedDisplay()).folder
    assert [name for name, _ in opened] == [f"actor.generate[{i}]" for i in range(3)]
    written = PlacementPlan.from_json((folder / "plan.grpo.json").read_text())
    assert written == plan

    # A resumed run goes on as it began.
    opened.clear()
    again = fl.compile(None, folder / "config.yaml", overrides=["train.steps=3"])
    assert again.plan.operation("actor.generate").process == ""
    api.resume(again, folder, display=WatchedDisplay())
    assert len(opened) == 3


def test_a_run_goes_on_by_a_plan_that_was_edited_in_its_folder_priced_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One of two places is edited: the other one and the step follow, are told, and are kept."""
    folder = compiled_of(tmp_path, steps=1).run(display=WatchedDisplay()).folder
    file = folder / "plan.grpo.json"
    begun = PlacementPlan.from_json(file.read_text("utf-8"))

    def go_on(steps: int) -> PlacementPlan:
        caplog.clear()
        again = fl.compile(None, folder / "config.yaml", overrides=[f"train.steps={steps}"])
        api.resume(again, folder, display=WatchedDisplay())
        return PlacementPlan.from_json(file.read_text("utf-8"))

    assert go_on(2) == begun
    assert not caplog.messages

    fewer = tuple(
        replace(one, num_slots=2) if one.role == "actor" else one for one in begun.placements
    )
    save_plan(replace(begun, placements=fewer), file)
    now = go_on(3)
    assert now.operation("actor.generate").chunk == 2
    assert begun.prediction.step_s is not None
    assert now.prediction.step_s is not None
    assert now.prediction.step_s > begun.prediction.step_s
    chunk, step = caplog.messages
    assert re.search(r"plan\.grpo\.json:\d+ \(operations\.\d\.chunk\): 2 follows", chunk)
    assert "a step: " in step
    assert "the file says" in step
    yaml = (folder / "plan.grpo.yaml").read_text("utf-8")
    assert yaml == now.to_yaml()


def test_an_edit_in_a_run_folder_that_cannot_be_run_is_refused_with_its_line(tmp_path: Path):
    compiled = compiled_of(tmp_path, steps=1)
    folder = compiled.run(display=WatchedDisplay()).folder
    file = folder / "plan.grpo.json"
    edited = replace(PlacementPlan.from_json(file.read_text("utf-8")), kind="asynchronous")
    save_plan(edited, file)
    with pytest.raises(PlanError) as caught:
        api.resume(compiled, folder, display=WatchedDisplay())
    assert re.search(r"plan\.grpo\.json:\d+ \(kind\)$", caught.value.where or "")
    assert caught.value.hint == "set train.max_staleness to let samples be older"
    assert PlacementPlan.from_json(file.read_text("utf-8")) == edited


def refused(compiled: api.Compiled, plan: PlacementPlan) -> str:
    with pytest.raises(PlanError) as caught:
        require_runnable(compiled.config, [stage.with_plan(plan) for stage in compiled.stages])
    return str(caught.value)


def test_what_cannot_be_run_as_it_says_is_refused_with_the_reason(tmp_path: Path):
    compiled = compiled_of(tmp_path)
    plan = compiled.plan

    def placed(role: str, **changes: Any) -> PlacementPlan:
        rows = tuple(replace(p, **changes) if p.role == role else p for p in plan.placements)
        return replace(plan, placements=rows)

    assert "knows no such kind" in refused(compiled, replace(plan, kind="hybrid"))
    message = refused(compiled, replace(plan, kind="asynchronous"))
    assert "newest weights only" in message
    assert "set train.max_staleness" in message
    sizes = replace(plan.sizes, group_size=5)
    assert "sizes.group_size" in refused(compiled, replace(plan, sizes=sizes))
    assert "placements.0.process" in refused(compiled, placed("actor", process="elsewhere"))
    assert "devices that are not here" in refused(compiled, placed("actor", devices=("cuda:7",)))
    assert "at least 1 of each" in refused(compiled, placed("actor", num_slots=0))
    assert "backend" in refused(compiled, placed("verifier", backend="torch"))
    assert "chunk" in refused(compiled, placed("actor", num_slots=3))
    assert "memory is planned for" in refused(compiled, placed("actor", num_slots=10**6))
    apart = with_engines(plan, process="drawing")
    assert "cannot read the trainer's weights in place" in refused(compiled, apart)
    assert "which another role has" in refused(compiled, with_engines(plan, process="verifier"))
    assert "with 1 engine" in refused(compiled, with_engines(plan, replicas=2))
    cores = routed(with_engines(plan, process="drawing", cores=(0, 0)))
    assert "each engine has one core" in refused(compiled, cores)
    cores = routed(with_engines(plan, process="drawing", cores=(100_000,)))
    assert "no such core" in refused(compiled, cores)
    updates = tuple(
        replace(one, micro_batch=1) if one.op == "update" else one for one in plan.operations
    )
    assert "micro_batch" in refused(compiled, replace(plan, operations=updates))


def test_a_program_that_runs_line_by_line_has_no_engine_processes(tmp_path: Path):
    config = config_of(tmp_path, kind="spatial")
    eager = fl.compile(None, config, overrides=["executor=eager"])
    assert eager.plan.operation("actor.generate").process == ""
    stage: CompiledStage = eager.stages[-1]
    plan = routed(with_engines(stage.plan, process="drawing"))
    with pytest.raises(PlanError, match="line by line"):
        require_local_plan(stage.with_plan(plan))


def test_what_follows_from_who_draws_is_made_anew_in_an_edited_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    compiled = compiled_of(tmp_path)
    path, plan = tmp_path / "p.yaml", compiled.plan
    # One place each, of what is written in two.
    drawing = with_engines(plan, process="drawing", replicas=2)
    placed = tuple(
        replace(one, num_slots=4)
        if one.role == "actor"
        else replace(one, replicas=2)
        if one.role == "verifier"
        else one
        for one in plan.placements
    )
    save_plan(replace(drawing, placements=placed), path)
    ran = run_by(compiled, path)
    require_runnable(ran.config, ran.stages)
    assert ran.plan.operation("actor.generate").chunk == 4
    assert ran.plan.operation("verifier.score").replicas == 2
    assert ran.plan.weight_routes[0].transport == Transport.FOLDER
    assert {one.transport for one in ran.plan.channels if one.source == "actor.generate"} == {
        Transport.PIPE
    }
    parts = [part.name for part in ran.plan.prediction.memory[0].memory.parts]
    assert parts.count("engine processes") == 1
    told = capsys.readouterr().err
    route = r"p\.yaml:\d+ \(weight_routes\.0\.transport\): folder follows from the rest, "
    assert re.search(route + "the file says in_place", told)
    assert re.search(r"\(operations\.\d\.replicas\): 2 follows", told)

    # In both places, and otherwise: nobody knows which is meant.
    twice = tuple(replace(one, num_slots=5) if one.role == "actor" else one for one in placed)
    save_plan(replace(with_engines(plan, chunk=4), placements=twice), path)
    with pytest.raises(PlanError) as caught, lines_of(path):
        require_runnable(compiled.config, run_by(compiled, path).stages)
    assert re.fullmatch(
        rf"{re.escape(str(path))}:\d+ \(operations\.\d\.chunk\)", str(caught.value.where)
    )
    assert "placement actor" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["spatial", "asynchronous"])
def test_a_kind_that_draws_in_the_main_process_is_refused_with_the_fix(tmp_path: Path, kind: str):
    compiled = compiled_of(tmp_path, max_staleness=1 if kind == "asynchronous" else 0)
    plan = with_engines(compiled.plan, process="", cores=(), replicas=1)
    routes = compiled.stages[-1].local
    assert routes is not None
    plan = replace(plan, kind=kind, weight_routes=routes.base.weight_routes)
    message = refused(compiled, plan)
    assert "kind" in message
    assert "generates in 'main'" in message
    assert re.search(r"write operations\.\d\.process: actor\.generate", message)


def test_weights_go_through_a_folder_only_where_another_process_draws(tmp_path: Path):
    compiled = compiled_of(tmp_path)
    message = refused(compiled, routed(compiled.plan))
    assert "weight_routes.0.transport" in message
    assert "in_place" in message


def test_a_plan_over_many_devices_is_not_run_here(tmp_path: Path):
    cluster = tmp_path / "four.yaml"
    cluster.write_text(
        "nodes: [{name: n, cores: 4, memory_gib: 64, "
        "devices: [{type: cuda, count: 4, name: H100-SXM-80GB}]}]\n"
    )
    config = {**config_of(tmp_path), "cluster": str(cluster)}
    (stage,) = fl.compile(None, config).stages
    with pytest.raises(PlanError, match="runs plans for one device"):
        require_local_plan(stage)


def test_a_plan_of_another_workflow_is_named(tmp_path: Path):
    compiled = compiled_of(tmp_path)
    with pytest.raises(fl.ConfigError, match="of no stage of this run") as caught:
        compiled.with_plan(replace(compiled.plan, graph="ppo"))
    assert "a plan of 'ppo'; expected: a plan of '" in str(caught.value)
    assert "the configuration that has a stage 'ppo'" in str(caught.value)
