"""Schedules of plans that a person has edited: what does not fit the operations is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from tests.plan.many_cases import h100, pinned, request

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def plan(grpo: Graph) -> PlacementPlan:
    """Rollouts on one node, everything else on the other."""
    asked = pinned(request(), "rollout.devices=0-7", "actor.update.devices=8-15")
    made = make_plan(grpo, asked, h100(16))
    assert made.schedule is not None
    assert made.schedule.kind == "spatial"
    return made


def leaf(step: dict[str, Any], node: str) -> dict[str, Any]:
    """The part of a schedule that runs an operation."""
    if step["node"] == node:
        return step
    return next(found for part in step["parts"] if (found := leaf(part, node)))


def rename(raw: dict[str, Any], node: str, to: str) -> None:
    for part in raw["schedule"]["parts"]:
        if part["node"] == node:
            part["node"] = to
        for inner in part["parts"]:
            if inner["node"] == node:
                inner["node"] = to


def operation(raw: dict[str, Any], node: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in raw["operations"] if one["node"] == node)
    return found


def move_update(raw: dict[str, Any]) -> None:
    """The update on the devices that the rollout has."""
    operation(raw, "actor.update")["devices"] = operation(raw, "actor.generate")["devices"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda d: rename(d, "actor.generate", "critic.values"),
            "the schedule runs what is no operation",
        ),
        (
            lambda d: rename(d, "actor.generate", "actor.update"),
            "the schedule runs actor.update",
        ),
        (
            lambda d: d.update(schedule=d["schedule"]["parts"][1]),
            "the schedule does not run actor.generate",
        ),
        (
            lambda d: d["schedule"].update(parts=[]),
            "a step of a schedule runs one operation, or has two parts",
        ),
        (
            lambda d: d["schedule"].update(kind="run"),
            "a step of a schedule runs one operation, or has two parts",
        ),
        (
            lambda d: d["schedule"].update(kind="temporal", chunks=4),
            "only parts that work at once pass a batch in chunks",
        ),
        (
            lambda d: d["schedule"]["parts"][1].update(kind="asynchronous"),
            "only a whole schedule is asynchronous",
        ),
        (
            lambda d: d["schedule"].update(devices=8),
            "has parts that need 16",
        ),
        (move_update, "share 8 devices"),
        (
            lambda d: operation(d, "actor.update").update(move_s=1e6),
            "the way from the host and back is a part of what actor.update takes",
        ),
        (
            lambda d: operation(d, "actor.update").update(micro_tokens=0),
            "actor.update works on micro-batches of no tokens",
        ),
        (
            lambda d: d["pool"]["machines"][0].update(node_size=0),
            "a number that cannot be",
        ),
        (
            lambda d: d["pool"]["machines"][0]["spec"].update(flops=0.0),
            "a number that cannot be",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    plan: PlacementPlan, change: Change, what: str
) -> None:
    raw = plan.to_dict()
    change(raw)
    with pytest.raises(PlanError, match=what) as caught:
        PlacementPlan.from_json(json.dumps(raw), where="p.json")
    assert str(caught.value.where).startswith("p.json: ")


def test_an_operation_that_is_run_twice_is_refused(plan: PlacementPlan) -> None:
    raw = plan.to_dict()
    draws = leaf(raw["schedule"], "actor.generate")
    raw["schedule"] = {
        "kind": "temporal",
        "devices": 16,
        "node": None,
        "chunks": 1,
        "parts": [raw["schedule"], draws],
    }
    with pytest.raises(PlanError, match=r"the schedule runs actor\.generate twice"):
        PlacementPlan.from_json(json.dumps(raw))


def exchanged(raw: dict[str, Any], *path: int) -> None:
    """The parts of a step of the schedule in the other order."""
    step = raw["schedule"]
    for number in path:
        step = step["parts"][number]
    step["parts"].reverse()


def inner_steps(step: dict[str, Any], *path: int) -> list[tuple[int, ...]]:
    found = [path] if step["parts"] else []
    for number, part in enumerate(step["parts"]):
        found += inner_steps(part, *path, number)
    return found


@pytest.mark.parametrize("kind", ["temporal", "spatial", "asynchronous"])
def test_what_reads_comes_after_what_it_reads_from(grpo: Graph, kind: str):
    """Of a rollout, references and an update each reads from the one before."""
    plan = make_plan(grpo, request(kind=kind, max_staleness=kind == "asynchronous"), h100(16))
    paths = inner_steps(plan.to_dict()["schedule"])
    assert len(paths) == 2
    for path in paths:
        raw = plan.to_dict()
        exchanged(raw, *path)
        with pytest.raises(PlanError, match=r"reads what .* makes, and comes before it") as told:
            PlacementPlan.from_json(json.dumps(raw))
        steps = "".join(f".parts.{number}" for number in path)
        assert str(told.value.where).endswith(f"schedule{steps}.parts")
