"""The plan as data: it survives JSON and YAML, and broken files are named by file and key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.errors import ConfigError, PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, load_plan, make_plan, save_plan

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def plan(grpo: Graph, cases: Any) -> PlacementPlan:
    return make_plan(grpo, cases.request_for(), cases.pool_of(cases.cpu()))


def test_a_plan_survives_json_and_yaml(plan: PlacementPlan) -> None:
    assert PlacementPlan.from_json(plan.to_json()) == plan
    assert PlacementPlan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
def test_a_saved_plan_loads_equal(plan: PlacementPlan, tmp_path: Path, name: str) -> None:
    save_plan(plan, tmp_path / name)
    assert load_plan(tmp_path / name) == plan


def test_lookups_find_what_is_there_and_raise_for_the_rest(plan: PlacementPlan) -> None:
    assert plan.placement("actor").num_slots == 256
    assert plan.operation("actor.update").micro_batch == 32
    with pytest.raises(KeyError):
        plan.placement("critic")
    with pytest.raises(KeyError):
        plan.operation("critic.update")


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda d: d.update(extra=1), "extra", "unknown key"),
        (lambda d: d["placements"][0].update(devises=[]), "placements.0.devises", "unknown key"),
        (
            lambda d: d["prediction"]["memory"][0]["memory"]["parts"][0].update(size=1),
            "prediction.memory.0.memory.parts.0.size",
            "unknown key",
        ),
        (
            lambda d: d["placements"][0].update(backed=d["placements"][0].pop("backend")),
            "placements.0.backed",
            "unknown key",
        ),
        (lambda d: d["placements"][1].pop("backend"), "placements.1.backend", "missing key"),
        (
            lambda d: d["placements"][0].update(replicas="2"),
            "placements.0.replicas",
            "whole number",
        ),
        (lambda d: d["operations"][0].update(start="soon"), "operations.0.start", "'sample'"),
        (lambda d: d.update(version=99), "version", "not a plan of this format"),
        (lambda d: d.pop("version"), "version", "not a plan of this format"),
    ],
)
def test_a_file_of_the_wrong_form_is_named_by_file_and_key(
    plan: PlacementPlan, tmp_path: Path, change: Change, where: str, what: str
) -> None:
    raw = plan.to_dict()
    change(raw)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    # What is not in the file has no line.
    assert caught.value.where in (f"{path}:1 ({where})", f"{path}: {where}")
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        (lambda d: d["placements"][0].update(devices=["cuda:0"]), "placements.0.devices", "cuda:0"),
        (lambda d: d["placements"][1].update(copy_of="critic"), "placements.1.copy_of", "critic"),
        (lambda d: d["operations"][1].update(role="critic"), "operations.1.role", "critic"),
        (lambda d: d["operations"][1].update(after=["sources"]), "operations.1.after", "sources"),
        (lambda d: d["weight_routes"][0].update(after="x"), "weight_routes.0.after", "x"),
        (lambda d: d["channels"][0].update(destination="x"), "channels.0.destination", "x"),
    ],
)
def test_an_edited_plan_that_contradicts_itself_is_refused(
    plan: PlacementPlan, change: Change, where: str, found: str
) -> None:
    raw = plan.to_dict()
    change(raw)
    with pytest.raises(PlanError) as caught:
        PlacementPlan.from_json(json.dumps(raw), where="p.json")
    assert caught.value.where == f"p.json: {where}"
    assert caught.value.found == repr(found)


def test_a_role_placed_twice_is_refused(plan: PlacementPlan) -> None:
    raw = plan.to_dict()
    raw["placements"].append(raw["placements"][0])
    with pytest.raises(PlanError, match="'actor' is there twice"):
        PlacementPlan.from_json(json.dumps(raw))


@pytest.mark.parametrize(("name", "text"), [("p.json", "{"), ("p.yaml", "a: [")])
def test_text_that_cannot_be_parsed_is_a_config_error(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not (JSON|YAML)"):
        load_plan(path)


@pytest.mark.parametrize("name", ["p.json", "p.yaml"])
def test_a_plan_that_is_not_utf_8_is_a_config_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"version: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        load_plan(path)
    assert (caught.value.where, caught.value.found) == (str(path), "byte 0xff at 9")


def test_a_plan_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plan(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["[]", "null", '"plan"'])
def test_json_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a plan of this format"):
        PlacementPlan.from_json(text)


@pytest.mark.parametrize(
    ("change", "where", "found", "expected"),
    [
        (
            lambda d: d["operations"][0].update(seconds=float("nan")),
            "operations.0.seconds",
            "nan",
            "a finite number",
        ),
        (
            lambda d: d["prediction"].update(step_s=float("inf")),
            "prediction.step_s",
            "inf",
            "a finite number",
        ),
        (
            lambda d: d["operations"][1].update(seconds=-0.5),
            "operations.1.seconds",
            "-0.5",
            "no negative number",
        ),
        (
            lambda d: d["prediction"]["memory"][0]["memory"]["parts"][0].update(nbytes=-1),
            "prediction.memory.0.memory.parts.0.nbytes",
            "-1",
            "no negative number",
        ),
        (
            lambda d: d["placements"][0]["layout"].update(tp=0),
            "placements.0.layout.tp",
            "0",
            "at least 1",
        ),
        (
            lambda d: d["prediction"].update(idle_share=1.5),
            "prediction.idle_share",
            "1.5",
            "a share, 0 to 1",
        ),
        (
            lambda d: d["operations"][0].update(cores=[0, -2]),
            "operations.0.cores.1",
            "-2",
            "no negative number",
        ),
    ],
)
@pytest.mark.parametrize("name", ["p.json", "p.yaml"])
def test_a_number_that_cannot_be_is_named_by_file_and_key(
    plan: PlacementPlan,
    tmp_path: Path,
    name: str,
    change: Change,
    where: str,
    found: str,
    expected: str,
) -> None:
    raw = plan.to_dict()
    change(raw)
    path = tmp_path / name
    path.write_text(json.dumps(raw) if name == "p.json" else yaml.safe_dump(raw))
    with pytest.raises(PlanError, match="a number that cannot be") as caught:
        load_plan(path)
    assert re.fullmatch(rf"{re.escape(str(path))}:\d+ \({where}\)", str(caught.value.where))
    assert (caught.value.found, caught.value.expected) == (found, expected)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d["prediction"].update(bottleneck="x"), "prediction.bottleneck"),
        (lambda d: d["prediction"]["memory"][0].update(device="x"), "prediction.memory.0.device"),
        (lambda d: d["prediction"]["memory"][0].update(active="x"), "prediction.memory.0.active"),
        (lambda d: d["weight_routes"][0].update(node="x"), "weight_routes.0.node"),
    ],
)
def test_what_is_predicted_is_of_the_plan_itself(
    plan: PlacementPlan, change: Change, where: str
) -> None:
    raw = plan.to_dict()
    change(raw)
    with pytest.raises(PlanError, match="names what the plan does not have") as caught:
        PlacementPlan.from_json(json.dumps(raw), where="p")
    assert (caught.value.where, caught.value.found) == (f"p: {where}", "'x'")
