"""A comparison of plans tells every field, however much else differs."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from flowrl.errors import ConfigError, PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan, schema
from flowrl.plan.plan_fields import FREE_TEXTS
from flowrl.plan.show.diff import diff_plans
from tests.plan.many_cases import h100, pinned, request
from tests.plan.test_every_field import fields_of, named, others, with_value

TURNS = ("rollout.tp=2", "actor.update.offload=all")
APART = ("rollout.devices=0-3", "actor.update.devices=4-7")


def plan_of(graph: Graph, pins: tuple[str, ...]) -> PlacementPlan:
    return make_plan(graph, pinned(request(), *pins), h100(8))


def beside(raw: dict[str, Any]) -> dict[str, Any]:
    """Another plan in many things, none of which is told with the field that is changed."""
    other = copy.deepcopy(raw)
    other["graph"] = "another"
    other["sizes"]["group_size"] += 1
    other["prediction"]["device_s"] *= 2.0
    other["prediction"]["bottleneck"] = None
    return other


@pytest.mark.parametrize(
    "pins", [TURNS, pytest.param(APART, marks=pytest.mark.slow)], ids=["turns", "apart"]
)
def test_every_field_has_a_line_whatever_else_differs(
    grpo: Graph, pins: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(grpo, pins)
    raw = plan.to_dict()
    other = beside(raw)
    told = diff_plans(plan, PlacementPlan.from_json(json.dumps(other)))
    monkeypatch.setattr(schema, "check_plan", lambda plan, where: plan)
    monkeypatch.setattr(schema, "check_numbers", lambda raw, where: None)
    silent: list[str] = []
    seen: set[str] = set()
    for path, value in fields_of(other):
        key = named(path)
        first, *rest = path
        form = f"{first}.{rest[:1] if first == 'operations' else ''}" + re.sub(r"\d+", "N", key)
        if key.startswith(FREE_TEXTS) or first == "version" or form in seen:
            continue
        for changed in others(value):
            try:
                mine = PlacementPlan.from_json(with_value(other, path, changed))
            except (ConfigError, PlanError):
                continue
            seen.add(form)
            if changed != value and set(diff_plans(plan, mine)) == set(told):
                silent.append(f"{key}: {value!r:.40} -> {changed!r:.40}")
            if changed != value:
                break
    assert len(seen) > 250
    assert silent == []


def test_predictions_engines_and_residency_are_compared(grpo: Graph) -> None:
    lines = diff_plans(plan_of(grpo, TURNS), plan_of(grpo, APART))
    for start in (
        "schedule: temporal -> ",
        "order: ",
        "actor residency: ",
        "weights actor to actor.generate: ",
        "actor.generate engine: ",
        "idle device time: ",
        "weight sync: ",
        "memory in rollout of actor: ",
        "actor.update offload: all -> ",
        "actor.update to the host and back: ",
    ):
        assert any(line.startswith(start) for line in lines), start
    (engine,) = (line for line in lines if line.startswith("actor.generate engine: "))
    assert "--mem-fraction-static 0." in engine
    assert "--enable-memory-saver given -> -" in engine
    assert len(lines) == len(set(lines))


def test_what_is_equal_when_rounded_is_told_in_more_digits_with_its_unit(grpo: Graph) -> None:
    plan = plan_of(grpo, APART)
    old = replace(plan.prediction, idle_share=0.0023543197975965935)
    entry = old.memory[0]
    total = entry.memory.total
    part = replace(entry.memory.parts[0], nbytes=entry.memory.parts[0].nbytes - 12902)
    fewer = replace(entry, memory=replace(entry.memory, parts=(part, *entry.memory.parts[1:])))
    new = replace(old, idle_share=0.0023961040735188324, memory=(fewer, *old.memory[1:]))
    lines = diff_plans(replace(plan, prediction=old), replace(plan, prediction=new))
    assert "idle device time: 0.235 % -> 0.240 %" in lines
    (memory,) = (line for line in lines if line.startswith("memory in "))
    assert f": {total / 2**30:.4f} GiB -> " in memory or f": {total:,} bytes -> " in memory
    step = plan.schedule
    assert step is not None
    (line,) = diff_plans(
        replace(plan, schedule=replace(step, ready=(0.50001, 1.0))),
        replace(plan, schedule=replace(step, ready=(0.50004, 1.0))),
    )
    assert " after 50.001, 100.000 % of the first's time" in line
    assert " after 50.004, 100.000 % of the first's time" in line
    assert "ScheduleStep" not in line


def test_what_begins_on_what_is_told_in_words(grpo: Graph) -> None:
    lines = diff_plans(plan_of(grpo, TURNS), plan_of(grpo, APART))
    (begins,) = (line for line in lines if line.startswith("reference.logprobs begins on: "))
    assert begins.startswith("reference.logprobs begins on: the whole batch -> ")
    assert begins.endswith(" groups")


def test_devices_of_another_kind_are_told_once(grpo: Graph) -> None:
    plan = plan_of(grpo, TURNS)
    devices = tuple(
        replace(one, budget_bytes=one.budget_bytes - 1) if one.type == "cuda" else one
        for one in plan.pool.devices
    )
    other = replace(plan, pool=replace(plan.pool, devices=devices))
    (line,) = diff_plans(plan, other)
    assert re.fullmatch(r"budget_bytes of cuda:\[0-7\]: [\d,]+ -> [\d,]+", line)
