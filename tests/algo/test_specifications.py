"""Specifications and the table that leads from them to functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from flowrl.algo.resolve import _TABLE
from flowrl.graph import Graph, Level, Node, Op, format_graph, parse
from flowrl.specs import (
    GAE,
    GPG,
    AdaptiveKL,
    CosineLength,
    Difficulty,
    GroupInGroup,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    NormaliseThenSum,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePP,
    ReMax,
    Repetition,
    SoftOverlong,
    Spec,
    StopProperly,
    ZeroVariance,
    spec_from_json,
)

SPECS: list[Spec] = [
    GroupRelative(std="group_others", mean="group_others", zero_std="divide", variance_floor=1e-6),
    LeaveOneOut(batch_std=True),
    LengthWeighted(),
    MaxRL(singleton="raw"),
    NormaliseThenSum(mean="group_others"),
    PassAtK(),
    GPG(norm=2.0),
    GAE(lam_value=1.0, length_alpha=0.05),
    GAE(),
    GroupInGroup(),
    OptimalTokenBaseline(lone_tail="zero"),
    ReinforcePP(mean="group", whiten_eps_place="floor"),
    ReMax(kl_coefficient=0.1),
    Difficulty(low=0.2),
    ZeroVariance(measure="std", singleton="keep"),
    AdaptiveKL(initial=0.2, target=6.0),
    CosineLength(max_tokens=9),
    Repetition(),
    SoftOverlong(max_tokens=9, buffer=3, cap=False),
    StopProperly(),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_specification_reads_back_from_its_json_and_from_the_text_of_a_graph(spec: Spec) -> None:
    assert spec_from_json(spec.family, spec.to_json()) == spec
    node = Node(
        id="x",
        op=Op.ADVANTAGE,
        role=None,
        inputs=(),
        outputs=(),
        attrs=(("spec", spec),),
        source=None,
    )
    graph = Graph(name="g", level=Level.TRACED, nodes=(node,), edges=())
    assert parse(format_graph(graph)) == graph


@pytest.mark.parametrize("row", _TABLE, ids=str)
def test_every_row_of_the_table_names_a_function(row: tuple[str, str]) -> None:
    module, name = _TABLE[row].split(":")
    function: Any = getattr(import_module(module), name)
    assert callable(function)
