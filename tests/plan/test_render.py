"""What people read: golden text for fixed pools, and the same facts in the rich form."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrl import api
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.show.diff import diff_plans
from flowrl.plan.show.plan import plan_renderable, plan_text, step_sentences
from tests.plan.many_cases import h100, pinned, request
from tests.runtime.tiny_runs import tiny_config
from tests.sim.test_choose_plan import two_cores


def cpu_plan(graph: Graph, cases: Any) -> PlacementPlan:
    return make_plan(graph, cases.request_for(), cases.pool_of(cases.cpu()))


def gpu_plan(graph: Graph, cases: Any) -> PlacementPlan:
    request = cases.request_for(
        cases.QWEN25_05B,
        capabilities=replace(cases.TORCH, sleep=True),
        max_prompt_tokens=512,
        max_response_tokens=256,
        num_slots=512,
        micro_batch=8,
    )
    pool = cases.pool_of(cases.cpu(64), cases.gpu(0, reserved=True), cases.gpu(1, 24))
    pool = replace(pool, warnings=("the GPUs differ",))
    return make_plan(graph, request, pool)


@pytest.mark.parametrize(("name", "build"), [("cpu", cpu_plan), ("gpu", gpu_plan)])
def test_the_text_of_a_plan_is_the_golden_one(
    grpo: Graph, cases: Any, golden: Any, name: str, build: Any
) -> None:
    golden(f"{name}.txt", plan_text(build(grpo, cases)))


@pytest.mark.parametrize("width", [80, 200])
def test_the_rich_form_holds_the_same_words_as_the_text(
    grpo: Graph, cases: Any, width: int
) -> None:
    plan = gpu_plan(grpo, cases)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(plan_renderable(plan))
    assert isinstance(console.file, io.StringIO)
    rich_words = "".join(console.file.getvalue().split())
    assert rich_words == "".join(plan_text(plan).split())


def test_engines_and_trainers_of_a_role_are_told_apart_in_one_notation(grpo: Graph) -> None:
    pins = ("rollout.tp=2", "actor.update.devices=0-3", "actor.update.tp=4")
    plan = make_plan(grpo, pinned(request(), *pins), h100(8))
    engines = plan.operation("actor.generate")
    rows = plan_text(plan).split("\n\nroles\n", 1)[1].split("\n\n", 1)[0].splitlines()
    (actor,) = (row for row in rows if row.startswith("  actor "))
    told = f"engines: {engines.layout.describe()}, {engines.slots} slots each; trainer: tp 4"
    assert actor.endswith(told)
    assert " actor x " not in actor
    (reference,) = (row for row in rows if row.startswith("  reference "))
    layout = plan.operation("reference.logprobs").layout
    assert reference.endswith(f"logprobs: {layout.describe()}; frozen copy of actor")


def test_the_tree_of_a_hybrid_plan_says_that_it_is_one(grpo: Graph) -> None:
    plan = make_plan(grpo, pinned(request(), "rollout.tp=2", "actor.devices=0-3"), h100(8))
    assert plan.kind == "hybrid"
    lines = plan_text(plan).split("\n\nschedule\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert lines[0] == "  hybrid: some operations take turns, others run at the same time"
    assert lines[1].startswith("  spatial on 8 devices")
    turns = make_plan(grpo, request(), h100(8))
    assert turns.kind == "temporal"
    assert "hybrid:" not in plan_text(turns)


def test_times_of_a_short_step_are_told_in_milliseconds(grpo: Graph) -> None:
    plan = make_plan(grpo, request(alternatives=0), h100(8))
    seconds = plan.prediction.step_s
    assert seconds is not None
    short = replace(
        plan,
        prediction=replace(
            plan.prediction,
            step_s=seconds / 100,
            device_s=0.5,
            timeline=tuple(
                replace(one, begin_s=one.begin_s / 100, end_s=one.end_s / 100)
                for one in plan.prediction.timeline or ()
            ),
        ),
    )
    for one, digits in ((plan, 1), (short, 3)):
        ends = (one.prediction.timeline or ())[0].end_s
        assert f" {ends:.{digits}f} " in plan_text(one)
    assert "0.5 device-seconds per sample\n" in plan_text(short)


def test_a_memory_table_says_of_which_operations_it_has_the_fullest_stage(grpo: Graph) -> None:
    pins = ("rollout.pp=1", "reference.logprobs.pp=1", "actor.update.pp=2")
    plan = make_plan(grpo, pinned(request(), *pins), h100(8))
    assert "and 7 like it (H100-SXM-80GB; of actor.update the fullest of 2 stages): " in plan_text(
        plan
    )
    pins = ("rollout.pp=1", "reference.logprobs.pp=4", "actor.update.pp=2")
    text = plan_text(make_plan(grpo, pinned(request(), *pins), h100(8)))
    assert "; of reference.logprobs and actor.update the fullest stage of each): " in text
    pins = ("rollout.pp=1", "reference.logprobs.pp=1", "actor.update.pp=1")
    assert "fullest" not in plan_text(make_plan(grpo, pinned(request(), *pins), h100(8)))


def test_a_memory_table_fits_eighty_columns(grpo: Graph, cases: Any) -> None:
    lines = plan_text(gpu_plan(grpo, cases)).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("memory of"))
    end = lines.index("", begin)
    assert max(len(line) for line in lines[begin + 1 : end]) <= 80


def test_a_step_tells_of_every_operation_and_switch_in_order(grpo: Graph, cases: Any) -> None:
    sentences = step_sentences(gpu_plan(grpo, cases))
    assert sentences[1] == "actor reloads its kv cache on cuda:1"
    assert sentences[2].startswith("actor generates 64 prompts x 8 samples")
    assert sentences[4] == "actor offloads its kv cache on cuda:1"
    assert sentences[-1] == "actor publishes its new weights"


def test_brackets_in_names_are_printed_and_not_read_as_markup(grpo: Graph, cases: Any) -> None:
    odd = replace(cases.cpu(), name="CPU [bold]x[/bold]")
    plan = make_plan(grpo, cases.request_for(), cases.pool_of(odd))
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(plan_renderable(plan))
    assert isinstance(console.file, io.StringIO)
    assert "CPU [bold]x[/bold]" in console.file.getvalue()


def test_engine_processes_are_told_in_plans_and_their_difference(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config["roles"]["actor"]["num_engines"] = 2
    words = ["stages=[grpo]", "plan.kind=temporal"]
    two = api.compile(None, config, overrides=words, pool=two_cores()).plan
    one = api.compile(None, tiny_config(tmp_path), overrides=words, pool=two_cores()).plan
    (row,) = [line for line in plan_text(two).splitlines() if line.startswith("  actor      torch")]
    assert "main, 2 engine processes" in row
    assert "engine process" not in plan_text(one).split("memory of")[0]
    lines = diff_plans(one, two)
    assert "actor.generate generated by: its role's process -> 2 engine processes" in lines
    assert not [line for line in lines if line.startswith("schedule")]  # both take turns
