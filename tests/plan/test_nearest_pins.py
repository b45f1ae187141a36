"""Pins that say what is always so, and values that are offered in the place of what cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.backend.protocols import Capabilities, Service
from flowrl.cluster import ResourcePool, load_cluster
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlanRequest, make_plan
from tests.plan.conftest import TINY
from tests.plan.many_cases import QWEN25_7B, h100, pinned, request
from tests.sizes import every

BIG = replace(QWEN25_7B, num_layers=112)
"""A model of 27 billion parameters."""


def asked(*pins: str, big: bool = False) -> PlanRequest:
    return pinned(request(BIG if big else QWEN25_7B, alternatives=0), *pins)


def nodes_of_three(folder: Path, nodes: int, name: str = "H100-SXM-80GB") -> ResourcePool:
    file = folder / "three.yaml"
    file.write_text(
        "nodes:\n"
        f"  - {{name: n, count: {nodes}, memory_gib: 2048, cores: 64, "
        f"devices: [{{name: {name}, count: 3}}]}}\n",
        "utf-8",
    )
    return load_cluster(file)


@pytest.mark.parametrize(
    ("pin", "node"),
    [
        ("reference.logprobs.recompute=none", "reference.logprobs"),
        ("reference.recompute=none", "reference.logprobs"),
        ("rollout.recompute=none", "actor.generate"),
        ("rollout.offload=none", "actor.generate"),
        ("rollout.cp=1", "actor.generate"),
        ("actor.ep=1", "actor.update"),
    ],
)
def test_a_pin_of_what_is_always_so_is_kept_and_changes_nothing(grpo: Graph, pin: str, node: str):
    bare, plan = (make_plan(grpo, asked(*pins), h100(8)) for pins in ((), (pin,)))
    (kept,) = plan.pins
    assert (f"{kept.subject}.{kept.field}={kept.value}", kept.nodes) == (pin, (node,))
    assert (plan.operations, plan.prediction) == (bare.operations, bare.prediction)


def test_on_one_device_too(grpo: Graph, cases: Any):
    pool = cases.pool_of(cases.cpu(64))
    bare = cases.request_for(max_response_tokens=512)
    pins = ("rollout.recompute=none", "rollout.offload=none", "reference.recompute=none")
    plan = make_plan(grpo, pinned(bare, *pins), pool)
    assert [pin.nodes for pin in plan.pins] == [
        *[("actor.generate",)] * 2,
        ("reference.logprobs",),
    ]


def test_it_says_nothing_of_how_the_trainer_of_the_same_role_runs(grpo: Graph):
    """On one device recomputation is of a role: that its rollouts have none is no wish for it."""
    again = Capabilities(
        services=frozenset({Service.GENERATE, Service.TRAIN}),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        shares_weights=True,
        recompute=frozenset({"full"}),
    )
    wanted = asked("rollout.recompute=none")
    roles = tuple(
        replace(role, capabilities=again, shape=TINY, recompute="full")
        if role.name == "actor"
        else role
        for role in wanted.roles
    )
    assert make_plan(grpo, replace(wanted, roles=roles), h100(1)).pins[0].value == "none"


OFFER = re.compile(r"set (?:(\S+)\.)?(\w+) to ([\w,+-]+?)(?: or ([\w,+-]+?))?(?=, or|; or|$)")


def offers(error: PlanError, wanted: PlanRequest) -> Iterator[tuple[str, str]]:
    """`rollout.offload`, `none` for each value that a hint names."""
    subjects = {pin.field: pin.subject for pin in wanted.options.pins}
    for subject, field, *values in OFFER.findall(error.hint or ""):
        for value in filter(None, values):
            yield f"{subject or subjects[field]}.{field}", value


def refused(graph: Graph, wanted: PlanRequest, pool: ResourcePool) -> dict[str, list[str]]:
    """The values that a refusal offers, by pin; with each of them the job has a plan."""
    with pytest.raises(PlanError) as caught:
        make_plan(graph, wanted, pool)
    found: dict[str, list[str]] = {}
    for name, value in offers(caught.value, wanted):
        found.setdefault(name, []).append(value)
        subject, _, field = name.rpartition(".")
        pins = tuple(
            replace(pin, value=value) if (pin.subject, pin.field) == (subject, field) else pin
            for pin in wanted.options.pins
        )
        changed = replace(wanted, options=replace(wanted.options, pins=pins))
        assert make_plan(graph, changed, pool).pins
    return found


@pytest.mark.parametrize(
    ("pins", "expected"),
    every(
        3,
        [
            ("reference.recompute=full", {"reference.recompute": ["none"]}),
            ("rollout.offload=all", {"rollout.offload": ["none"]}),
            ("reference.offload=optimizer", {"reference.offload": ["none", "all"]}),
            ("actor.devices=0-30", {"actor.devices": ["0-7", "0-3"]}),
            ("actor.devices=9-12", {"actor.devices": ["4-7", "6-7"]}),
            ("rollout.devices=3,3", {"rollout.devices": ["3", "6-7"]}),
            ("actor.devices=all", {"actor.devices": ["0-7", "0-3"]}),
            ("actor.dp=0", {"actor.dp": ["1"]}),
            ("actor.tp=2 update.tp=4", {"actor.tp": ["4"], "update.tp": ["2"]}),
            ("rollout.devices=0-5 rollout.tp=4", {"rollout.devices": ["0-3", "0-7"]}),
            ("rollout.devices=0-5 rollout.pp=4 rollout.tp=1", {"rollout.devices": ["0-3", "0-7"]}),
        ],
    ),
)
def test_what_cannot_be_is_told_with_the_nearest_that_can(
    grpo: Graph, pins: str, expected: dict[str, list[str]]
):
    found = refused(grpo, asked(*pins.split()), h100(8))
    assert {name: found[name] for name in expected} == expected


def test_devices_of_two_kinds_are_told_with_some_of_one(grpo: Graph):
    pool = load_cluster(
        Path(__file__).parents[2] / "configs" / "clusters" / "h100_2x8_h20_4x8.yaml"
    )
    assert refused(grpo, asked("actor.devices=12-20"), pool) == {
        "actor.devices": ["12-15", "16-19"]
    }


@pytest.mark.parametrize(
    ("devices", "pins", "expected"),
    [
        (8, "actor.devices=6-7", {"actor.devices": ["4-7", "0-3"]}),
        (8, "actor.dp=4", {"actor.dp": ["1", "2"]}),
        (4, "actor.offload=none", {"actor.offload": ["optimizer", "optimizer+all"]}),
        (
            4,
            "actor.recompute=none actor.dp=1 actor.micro_tokens=25600",
            {"actor.recompute": ["full"]},
        ),
    ],
)
def test_where_memory_is_short_the_nearest_value_that_fits_is_told(
    grpo: Graph, devices: int, pins: str, expected: dict[str, list[str]]
):
    found = refused(grpo, asked(*pins.split(), big=True), h100(devices))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    "pin", ["actor.devices=2-5", "rollout.devices=2-5", "actor.devices=1-10", "actor.devices=4-9"]
)
def test_devices_across_nodes_of_three_are_told_with_the_nearest_blocks(
    grpo: Graph, pin: str, tmp_path: Path
):
    assert refused(grpo, asked(pin), nodes_of_three(tmp_path, 4))


@pytest.mark.parametrize(
    ("pin", "other"),
    [
        ("actor.devices=5-6", "3-4,6-7"),
        ("actor.devices=8", "3-4,6-7"),
        ("rollout.devices=8", "0-1,3-4,6-7"),
    ],
)
def test_where_only_shares_of_nodes_do_some_of_these_are_told(
    grpo: Graph, pin: str, other: str, tmp_path: Path
):
    """No three devices divide 28 heads, so two of each node do the work."""
    found = refused(grpo, asked(pin, big=True), nodes_of_three(tmp_path, 3))
    assert found[pin.partition("=")[0]][0] == other
