"""Whatever a hand changes in a written plan is refused, priced, or told: field by field."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import ConfigError, PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.plan_fields import FREE_TEXTS
from flowrl.plan.priced.anew import priced
from flowrl.plan.priced.changes import changes
from flowrl.plan.request import PlanRequest
from flowrl.plan.show.diff import diff_plans
from tests.plan.many_cases import h100, pinned, request
from tests.sizes import every

FACTS = (
    r"pool\.devices\.\d+\.(name|memory_bytes|num_cores|budget_bytes)",
    r"pool\.machines\.\d+\.node_size",
    r"pool\.machines\.\d+\.spec\.(name|source|aliases|\w*flops|\w*bytes|\w*bytes_per_s)",
)
"""Facts about machines, of which some decide nothing in some plans: a comparison tells them."""

DECIDED = ("pins",)
"""To take a pin out is a decision, from which nothing else follows."""

CHECKED_BEFORE = (r"graph", r"sizes\.\w+")
"""Refused with a configuration before a plan is priced (`flowrl.compiler`)."""

Path = tuple[str | int, ...]


def fields_of(raw: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value that is no group of others, and every list."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield from fields_of(value, (*path, key))
        return
    yield path, raw
    if isinstance(raw, list):
        for i, value in enumerate(raw):
            if isinstance(value, dict):
                yield from fields_of(value, (*path, i))


def others(value: object) -> Iterator[object]:
    """Values in the place of one."""
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
        case float():
            yield 1.5 * value + 10.0
        case str():
            yield from ("foo", "spatial", "pipe")
        case list() if value:
            yield []
            yield value[:-1]
        case list():
            yield ["all"]
        case None:
            yield from ("actor", 7)


def named(path: Path) -> str:
    return ".".join(map(str, path))


def with_value(raw: dict[str, Any], path: Path, value: object) -> str:
    found: Any = copy.deepcopy(raw)
    inner = found
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return json.dumps(found)


def silent(plan: PlacementPlan, graph: Graph, asked: PlanRequest, step: int) -> Iterator[str]:
    """Changed fields of which nobody says anything."""
    raw = plan.to_dict()
    seen: set[str] = set()
    for path, value in fields_of(raw):
        key = named(path)
        form = re.sub(r"\d+", "N", key)
        if path[0] == "operations":
            form = re.sub(r"(\d+)(.*)", lambda m: m[1] + re.sub(r"\d+", "N", m[2]), key)
        if key.startswith(FREE_TEXTS) or form in seen:
            continue
        seen.add(form)
        if len(seen) % step:
            continue
        for other in others(value):
            if other == value:
                continue
            said = f"{key}: {value!r:.40} -> {other!r:.40}"
            try:
                mine = PlacementPlan.from_json(with_value(raw, path, other))
            except (ConfigError, PlanError):
                continue
            if not diff_plans(plan, mine):
                yield f"no difference told of {said}"
            try:
                new = priced(graph, asked, mine, AnalyticCost())
            except PlanError:
                continue
            known = any(re.fullmatch(one, key) for one in (*FACTS, *DECIDED, *CHECKED_BEFORE))
            if not known and not any(True for _ in changes(mine, new)):
                yield said


TURNS = pinned(request(), "rollout.tp=2", "actor.update.offload=all")
APART = pinned(request(), "rollout.devices=0-3", "actor.update.devices=4-7")


@pytest.mark.parametrize(("asked", "step"), every(3, [(TURNS, 6), (TURNS, 1), (APART, 1)]))
def test_no_field_of_a_plan_is_changed_in_silence(
    grpo: Graph, asked: PlanRequest, step: int
) -> None:
    """Of the fields, each `step`th one is changed."""
    plan = make_plan(grpo, asked, h100(8))
    assert list(silent(plan, grpo, asked, step)) == []
