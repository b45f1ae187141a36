"""A plan for this machine that a hand has edited is priced by what it decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.cli.files import run_by
from flowrl.errors import PlanError
from flowrl.plan import PlacementPlan, load_plan, save_plan
from flowrl.plan.settle_local import settled
from flowrl.sim.choose_plan import choose_plan
from flowrl.sim.price_local import price_local
from tests.runtime.tiny_runs import tiny_config
from tests.sim.test_choose_plan import LENGTHS, stage_of, times_of


def drawing(plan: PlacementPlan, **changes: Any) -> PlacementPlan:
    """The plan with its operations that generate changed, and nothing else."""
    return replace(
        plan,
        operations=tuple(
            replace(one, **changes) if one.op == "generate" else one for one in plan.operations
        ),
    )


def test_the_step_and_the_reasons_of_an_edited_plan_are_those_of_its_decisions(tmp_path: Path):
    stage = stage_of(tmp_path)
    times = times_of(stage, update_s=1.0, export_s=1.0)
    stage = choose_plan(stage, times, LENGTHS, 0)
    assert stage.local is not None
    # 16 samples for each of two engines, five tokens behind the first: 80 s, updates and export.
    assert stage.plan.prediction.step_s == pytest.approx(83.0)
    edited = drawing(stage.plan, replicas=1)
    given = settled(edited, stage.local.base, stage.graph)

    made = price_local(stage, given, LENGTHS, 0, times)
    assert made.operations == given.operations
    assert made.prediction.step_s == pytest.approx(163.0)  # 32 samples for one engine
    (reason,) = [one for one in made.reasons if one.subject == "actor.generate"]
    assert reason.choice == "temporal: 1 engine process"
    took = "a step takes 163 s where no group is filtered, by a test"
    assert reason.why.startswith(f"the plan's file decides so; {took}")
    assert reason.rejected[0].choice == "temporal: 2 engine processes"
    assert reason.rejected[0].constraint == "83.00 s a step, 49 % shorter"
    assert made.alternatives[0].summary == "2 engine processes"
    assert made.alternatives[0].why_not == "49 % shorter than what the file decides"
    assert "1 engine process" not in [
        one.summary for one in made.alternatives if one.kind == "temporal"
    ]


def test_a_file_that_decides_as_the_planner_says_what_the_planner_says(tmp_path: Path):
    stage = stage_of(tmp_path)
    times = times_of(stage, update_s=1.0, export_s=1.0)
    stage = choose_plan(stage, times, LENGTHS, 0)
    old = replace(
        stage.plan,
        prediction=replace(stage.plan.prediction, step_s=7.0),
        reasons=(),
        alternatives=(),
    )
    assert price_local(stage, old, LENGTHS, 0, times) == stage.plan


def test_placements_that_a_file_has_otherwise_give_its_reasons(tmp_path: Path):
    stage = stage_of(tmp_path)
    times = times_of(stage, update_s=1.0, export_s=1.0)
    stage = choose_plan(stage, times, LENGTHS, 0)
    assert stage.local is not None
    placements = tuple(
        replace(one, replicas=2) if one.role == "verifier" else replace(one, dtype="bfloat16")
        for one in stage.plan.placements
    )
    given = settled(replace(stage.plan, placements=placements), stage.local.base, stage.graph)
    made = price_local(stage, given, LENGTHS, 0, times)
    told = {one.subject: (one.choice, one.why) for one in made.reasons}
    assert told["verifier"] == ("2 processes of its own", "the plan's file decides so")
    assert told["actor.dtype"] == ("bfloat16", "the plan's file decides so")
    assert made.alternatives[0].summary == "2 engine processes, as the configuration has it"


def test_an_edited_file_is_written_with_new_prices_and_then_agrees_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = {**tiny_config(tmp_path), "stages": ["grpo"], "stage": {}, "args": {}}
    compiled = api.compile(None, config)
    before = compiled.plan.prediction.step_s or 0.0
    path, new = tmp_path / "edited.yaml", tmp_path / "new.yaml"
    save_plan(drawing(compiled.plan, process="engines", replicas=2), path)
    with pytest.raises(PlanError) as alone:
        load_plan(path)
    assert "weight_routes.0.transport" in str(alone.value.where)
    assert "flowrl plan CONFIG --plan FILE" in str(alone.value.hint)

    made = run_by(compiled, path).plan
    told = capsys.readouterr().err
    assert f"{path}: a step: " in told
    assert f"{path}: update of actor: " in told
    assert made.prediction.step_s not in (None, before)
    assert sum(one.seconds for one in made.prediction.confidence) < (made.prediction.step_s or 0.0)
    choices = [one.choice for one in made.reasons if one.subject == "actor.generate"]
    assert choices == ["temporal: 2 engine processes"]
    save_plan(made, new)
    assert load_plan(new) == made
    assert run_by(compiled, new).plan == made
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        (lambda plan: drawing(plan, chunk=3), "operations.1.chunk", "placements.0.num_slots"),
        (lambda plan: drawing(plan, replicas=1), "memory.parts", "for 1 engine process"),
        (lambda plan: replace(plan, kind="asynchronous"), "kind", "temporal: 2 engine processes"),
    ],
)
def test_a_file_alone_that_was_edited_in_one_place_is_refused(
    tmp_path: Path, change: Any, key: str, expected: str
):
    stage = stage_of(tmp_path)
    times = times_of(stage, update_s=1.0, export_s=1.0)
    plan = choose_plan(stage, times, LENGTHS, 0).plan
    path = tmp_path / "p.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    save_plan(change(plan), path)
    with pytest.raises(PlanError) as refused:
        load_plan(path)
    assert key in str(refused.value.where)
    assert expected in str(refused.value.expected)
