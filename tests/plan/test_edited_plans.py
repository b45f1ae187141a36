"""Plans that a person has edited: alone what contradicts itself is refused; with the configuration
decisions are priced anew, or refused with the numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.check.file_lines import line_of
from flowrl.plan.plan_file import load_plan
from flowrl.plan.priced.anew import priced
from flowrl.plan.priced.changes import changes
from flowrl.plan.request import PlanRequest
from tests.plan.many_cases import h100, pinned, request

Change = Callable[[dict[str, Any]], object]

ASKED = pinned(request(), "rollout.tp=2", "actor.update.recompute=none")


@pytest.fixture(scope="module")
def plan(grpo: Graph) -> PlacementPlan:
    """All on one node, in turn."""
    made = make_plan(grpo, ASKED, h100(8))
    assert made.operation("actor.generate").layout.tp == 2
    return made


def operation(raw: dict[str, Any], node: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in raw["operations"] if one["node"] == node)
    return found


def generate(**values: object) -> Change:
    return lambda raw: operation(raw, "actor.generate").update(values)


def update(**values: object) -> Change:
    return lambda raw: operation(raw, "actor.update").update(values)


def placement(**values: object) -> Change:
    return lambda raw: raw["placements"][0].update(values)


def ten_times_the_cache(raw: dict[str, Any]) -> None:
    operation(raw, "actor.generate")["kv_tokens"] *= 1000


def a_tenth_of_the_cache(raw: dict[str, Any]) -> None:
    operation(raw, "actor.generate")["kv_tokens"] //= 4


def recompute_unpinned(raw: dict[str, Any]) -> None:
    operation(raw, "actor.update")["recompute"] = "full"
    raw["pins"] = []


def larger_passes(raw: dict[str, Any]) -> None:
    operation(raw, "actor.update").update(micro_tokens=200 * 2560, micro_batch=200)


def other_layout(tp: int, dp: int) -> Change:
    """The pin that it has is taken out; all else follows."""

    def change(raw: dict[str, Any]) -> None:
        operation(raw, "actor.generate")["layout"].update(tp=tp, dp=dp)
        raw["pins"] = [pin for pin in raw["pins"] if pin["field"] != "tp"]

    return change


def ten_terabytes(raw: dict[str, Any]) -> None:
    raw["prediction"]["memory"][0]["memory"]["parts"][1]["nbytes"] = 10 * 10**12


def another_flag(name: str) -> Change:
    def change(raw: dict[str, Any]) -> None:
        flag = next(flag for flag in raw["engine_flags"][0]["flags"] if flag[0] == name)
        flag[1] = "3"

    return change


def more_flags(raw: dict[str, Any]) -> None:
    raw["engine_flags"][0]["flags"].append(["--enable-other", ""])


def shorter_bar(raw: dict[str, Any]) -> None:
    raw["prediction"]["timeline"][0]["end_s"] /= 2


def edited(plan: PlacementPlan, change: Change) -> PlacementPlan:
    raw = plan.to_dict()
    change(raw)
    return PlacementPlan.from_json(json.dumps(raw), where="p.json")


def written(plan: PlacementPlan, change: Change, folder: Path, name: str) -> Path:
    raw = plan.to_dict()
    change(raw)
    path = folder / name
    if name.endswith(".json"):
        path.write_text(json.dumps(raw, indent=2))
    else:
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("change", "key", "what"),
    [
        (ten_times_the_cache, "engine_flags.0.flags", "flags of an engine do not follow"),
        (other_layout(4, 2), "engine_flags.0.flags", "flags of an engine do not follow"),
        (
            another_flag("--max-running-requests"),
            "engine_flags.0.flags",
            "flags of an engine do not follow",
        ),
        (
            another_flag("--context-length"),
            "engine_flags.0.flags",
            "flags of an engine do not follow",
        ),
        (generate(seconds=10.0), r"operations.\d.seconds", "takes another time than is predicted"),
        (recompute_unpinned, r"operations.\d", "is not what the plan gives reasons for"),
        (update(offload=["all"]), r"operations.\d", "is not what the plan gives reasons for"),
        (update(micro_tokens=7 * 2560), r"operations.\d.micro_tokens", "other micro-batches"),
        (ten_terabytes, "prediction.memory.0.memory.parts", "holds more than it may"),
        (shorter_bar, "prediction.timeline.0", "takes another time in the timeline"),
        (
            lambda raw: raw["prediction"].update(
                step_s=1.0, timeline=raw["prediction"]["timeline"]
            ),
            "prediction.step_s",
            "the step takes another time than its timeline",
        ),
        (
            lambda raw: raw["prediction"].update(sync_s=77.0),
            "prediction.sync_s",
            "the time of weight sync is not",
        ),
        (
            lambda raw: raw["pool"]["devices"][1].update(budget_bytes=10**13),
            "pool.devices.1.budget_bytes",
            "a plan may fill more of",
        ),
        (update(offload=["disk"]), r"operations.\d.offload", "cannot have this"),
        (generate(replicas=3), r"operations.\d.replicas", "3 replicas in a layout of 4"),
        (generate(chunk=7), r"operations.\d.slots", "are said differently"),
        (lambda raw: raw.update(kind="foo"), "kind", "kind of the schedule is not the one"),
        (lambda raw: raw.update(kind="spatial"), "kind", "kind of the schedule is not the one"),
        (placement(replicas=3), "placements.0.replicas", "another number of replicas"),
        (placement(num_slots=3), r"operations.\d.slots", "are said differently"),
        (
            lambda raw: raw["placements"][0]["layout"].update(tp=7),
            "placements.0.layout",
            "another layout than its operations",
        ),
        (lambda raw: raw.update(residency=[]), "residency", "does not say when"),
        (
            lambda raw: raw["residency"][0].update(action="take"),
            "residency.0",
            "residency does not follow",
        ),
        (
            lambda raw: raw["weight_routes"][0]["source_layout"].update(tp=7),
            "weight_routes.0.source_layout",
            "travel by another layout",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_with_key_and_line(
    plan: PlacementPlan, change: Change, key: str, what: str, tmp_path: Path
) -> None:
    path = written(plan, change, tmp_path, "p.yaml" if change is shorter_bar else "p.json")
    with pytest.raises(PlanError, match=what) as caught:
        load_plan(path)
    assert re.fullmatch(rf"{re.escape(str(path))}:\d+ \({key}\)", str(caught.value.where))
    assert caught.value.hint


def test_a_file_that_nobody_edited_is_taken(plan: PlacementPlan, tmp_path: Path) -> None:
    assert load_plan(written(plan, lambda _: None, tmp_path, "p.json")) == plan


def test_the_line_of_a_key_is_that_of_its_last_part_that_is_there() -> None:
    text = '{\n  "a": [\n    {"b": 1},\n    {"b":\n 2}\n  ]\n}\n'
    assert line_of(text, "a.1.b") == 4
    assert line_of(text, "a.1.c") == 4
    assert line_of(text, "a.5") == 2
    assert line_of("{", "a") is None


@pytest.mark.parametrize(
    "asked",
    [
        request(),
        ASKED,
        pinned(request(), "rollout.devices=0-3", "actor.update.devices=4-7"),
        request(max_staleness=1),
        request(kind="spatial"),
        pinned(request(), "actor.update.offload=optimizer+all", "reference.offload=all"),
    ],
    ids=["free", "pinned", "apart", "asynchronous", "streams", "offload"],
)
def test_what_nobody_edited_is_priced_as_the_planner_did(grpo: Graph, asked: PlanRequest) -> None:
    made = make_plan(grpo, asked, h100(8))
    assert priced(grpo, asked, made, AnalyticCost()) is made
    # Nor is anything merely kept: what the file predicts is not looked at.
    stale = edited(made, lambda raw: raw["prediction"].update(step_s=1.0, sync_s=0.5))
    again = priced(grpo, asked, stale, AnalyticCost())
    assert again.operations == made.operations
    assert again.prediction.memory == made.prediction.memory
    assert again.engine_flags == made.engine_flags
    assert again.weight_routes == made.weight_routes
    assert again.residency == made.residency
    assert again.prediction.step_s == pytest.approx(made.prediction.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "node", "what", "hint"),
    [
        (ten_times_the_cache, "actor.generate", "kv cache", "kv_tokens"),
        (larger_passes, "actor.update", "activations", "micro_tokens: 2560"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused_with_its_numbers(
    grpo: Graph, plan: PlacementPlan, change: Change, node: str, what: str, hint: str
) -> None:
    with pytest.raises(PlanError, match=f"{node} does not fit as the file decides") as caught:
        priced(grpo, ASKED, edited(plan, change), AnalyticCost())
    assert re.search(r"needs [\d.]+ [GT]iB of [\d.]+ GiB", caught.value.what)
    assert what in str(caught.value.found)
    assert hint in str(caught.value.hint)


def test_the_cache_that_is_named_instead_fits(grpo: Graph, plan: PlacementPlan) -> None:
    with pytest.raises(PlanError) as caught:
        priced(grpo, ASKED, edited(plan, ten_times_the_cache), AnalyticCost())
    found = re.search(r"at most ([\d,]+) kv_tokens", str(caught.value.hint))
    assert found is not None
    tokens = int(found[1].replace(",", ""))
    fits = edited(plan, generate(kv_tokens=tokens))
    assert priced(grpo, ASKED, fits, AnalyticCost()).operation("actor.generate").seconds
    with pytest.raises(PlanError, match="does not fit"):
        priced(grpo, ASKED, edited(plan, generate(kv_tokens=int(1.01 * tokens))), AnalyticCost())


def with_little_memory(raw: dict[str, Any]) -> None:
    """Actor and reference hold 14.2 GiB of parameters each, and the update recomputes nothing."""
    raw["pins"] = []
    layout = {"tp": 1, "pp": 1, "cp": 4, "dp": 2, "ep": 1}
    operation(raw, "actor.update").update(recompute="none", offload=["optimizer"], layout=layout)
    operation(raw, "reference.logprobs").update(
        offload=[], layout={"tp": 1, "pp": 1, "cp": 1, "dp": 8, "ep": 1}
    )
    for device in raw["pool"]["devices"]:
        if device["type"] != "cpu":
            device["budget_bytes"] = 69 << 30


def test_parts_that_do_not_fit_say_whose_they_are_and_what_fits_instead(
    grpo: Graph, plan: PlacementPlan
) -> None:
    mine = edited(plan, with_little_memory)
    with pytest.raises(PlanError, match=r"actor\.update does not fit") as caught:
        priced(grpo, ASKED, mine, AnalyticCost())
    found, hint = str(caught.value.found), str(caught.value.hint)
    assert "actor parameters 14.2 GiB" in found
    assert "reference parameters 14.2 GiB" in found
    offered = re.findall(r"([\w.]+)\.(\w+): (\S+) \(a step of ([\d.]+) s\)", hint)
    assert {"reference.logprobs", "actor.update"} == {node for node, *_ in offered}
    assert [float(step) for *_, step in offered] == sorted(float(step) for *_, step in offered)
    for node, key, value, step in offered:
        fits = mine.to_dict()
        given = value.strip("[]").split(",") if key == "offload" else value
        operation(fits, node)[key] = given
        new = priced(grpo, ASKED, PlacementPlan.from_json(json.dumps(fits)), AnalyticCost())
        assert new.prediction.step_s == pytest.approx(float(step), abs=0.06)
    pins = [pin for pin in plan.to_dict()["pins"] if pin["field"] == "recompute"]
    kept = edited(mine, lambda raw: raw.update(pins=pins))
    with pytest.raises(PlanError) as caught:
        priced(grpo, ASKED, kept, AnalyticCost())
    assert re.search(r"actor\.update\.recompute: \w+, and its pin \(", str(caught.value.hint))


@pytest.mark.parametrize(
    ("change", "key", "least"),
    [
        (update(micro_tokens=100), "micro_tokens", "at least 2,560"),
        (generate(kv_tokens=100), "kv_tokens", "at least 2,560"),
        (generate(slots=0), "slots", "at least 1"),
    ],
)
def test_a_file_alone_has_room_for_the_longest_sample(
    plan: PlacementPlan, change: Change, key: str, least: str, tmp_path: Path
) -> None:
    path = written(plan, change, tmp_path, "p.plan.json")
    with pytest.raises(PlanError, match="cannot have this") as caught:
        load_plan(path)
    assert re.search(rf"operations\.\d\.{key}", str(caught.value.where))
    assert str(caught.value.expected).startswith(least)


@pytest.mark.parametrize(
    ("change", "key", "what"),
    [
        (other_layout(8, 1), "layout", "does not divide 28 query heads"),
        (generate(kv_tokens=100), "kv_tokens", "cannot have this"),
        (update(micro_tokens=100), "micro_tokens", "cannot have this"),
        (generate(offload=["all"]), "offload", "cannot have this"),
        (generate(recompute="full"), "recompute", "cannot have this"),
        (update(num_samples=7), "num_samples", "another operation than the configuration has"),
    ],
)
def test_a_decision_that_a_task_cannot_have_is_refused(
    grpo: Graph, plan: PlacementPlan, change: Change, key: str, what: str
) -> None:
    with pytest.raises(PlanError, match=what) as caught:
        priced(grpo, ASKED, edited(plan, change), AnalyticCost(), where="p.json")
    assert re.fullmatch(rf"p\.json: operations\.\d\.{key}", str(caught.value.where))


def test_another_layout_is_priced_as_the_planner_prices_it(
    grpo: Graph, plan: PlacementPlan
) -> None:
    mine = edited(plan, other_layout(4, 2))
    cache = plan.operation("actor.generate").kv_tokens
    new = priced(grpo, ASKED, mine, AnalyticCost())
    own = new.operation("actor.generate")
    assert own.seconds is not None
    assert own.kv_tokens == cache
    assert own.seconds != plan.operation("actor.generate").seconds
    assert dict(new.engine_flags[0].flags)["--tp-size"] == "4"
    assert (own.replicas, new.placement("actor").replicas) == (2, 2)
    (route,) = (one for one in new.weight_routes if one.node == "actor.generate")
    assert route.destination_layout == own.layout
    assert list(priced(grpo, ASKED, new, AnalyticCost()).operations) == list(new.operations)
    total = sum(one.seconds or 0.0 for one in new.operations)
    assert new.kind == "temporal"
    assert new.prediction.step_s == pytest.approx(total + (new.prediction.sync_s or 0.0))
    lines = list(changes(mine, new))
    assert any(line.startswith("actor.generate: ") and "by its layout" in line for line in lines)
    assert any(line.startswith("a step: ") for line in lines)
    told = next(reason for reason in new.reasons if reason.subject == "actor.generate")
    assert told.choice == "tp 4, dp 2"


def test_seconds_memory_and_flags_of_a_file_are_not_believed(
    grpo: Graph, plan: PlacementPlan
) -> None:
    for change, line in (
        (generate(seconds=10.0), r"actor\.generate: [\d.]+ s by its layout, the file says 10\.0 s"),
        (ten_terabytes, r".* of actor: [\d.]+ GiB on .*, the file says 9\.1 TiB"),
        (
            another_flag("--tp-size"),
            r"actor\.generate: its engine is started with --tp-size 2, the file says --tp-size 3",
        ),
        (
            more_flags,
            r"actor\.generate: its engine is started with no --enable-other, the file says "
            r"--enable-other",
        ),
    ):
        mine = edited(plan, change)
        new = priced(grpo, ASKED, mine, AnalyticCost())
        assert new.operations == plan.operations
        assert new.prediction.memory == plan.prediction.memory
        assert new.engine_flags == plan.engine_flags
        (told,) = changes(mine, new)
        assert re.fullmatch(line, told)


def test_recomputation_takes_longer_and_holds_less(grpo: Graph, plan: PlacementPlan) -> None:
    mine = edited(plan, recompute_unpinned)
    new = priced(grpo, ASKED, mine, AnalyticCost())
    before, after = (one.operation("actor.update").seconds for one in (plan, new))
    assert before is not None
    assert after is not None
    assert after > 1.1 * before
    held = [
        max(row.memory.total for row in one.prediction.memory if row.memory.phase == "update")
        for one in (plan, new)
    ]
    assert held[1] < held[0]


def test_a_type_that_a_backend_does_not_have_is_refused_with_its_key(
    grpo: Graph, plan: PlacementPlan
) -> None:
    other = edited(plan, placement(dtype="bfloat8"))
    with pytest.raises(PlanError, match="has no parameters of type bfloat8") as caught:
        priced(grpo, ASKED, other, AnalyticCost())
    assert caught.value.where == "plan: placements.0.dtype"
    assert caught.value.expected == "one of bfloat16, float32"


@pytest.mark.parametrize("key", ["operations.1.layout", "placements.0.layout"])
def test_a_layout_that_none_can_be_is_refused_with_key_and_line(
    plan: PlacementPlan, tmp_path: Path, key: str
) -> None:
    name, number, _ = key.split(".")
    file, raw = tmp_path / "plan.json", json.loads(plan.to_json())
    raw[name][int(number)]["layout"]["ep"] = 5
    file.write_text(json.dumps(raw, indent=1), "utf-8")
    with pytest.raises(PlanError, match="ep=5 does not divide") as caught:
        load_plan(file)
    assert re.fullmatch(rf"{re.escape(str(file))}:\d+ \({key}\)", caught.value.where or "")
