"""Specifications and the table that leads from them to functions."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest

from flowrl.algo.resolve import _TABLE
from flowrl.graph import Graph, Level, Node, Op, format_graph
from flowrl.ids import NodeId
from flowrl.specs import KL, GroupRelative, Spec, spec_from_json
from flowrl.specs.advantage import (
    GAE,
    GPG,
    Distill,
    GroupInGroup,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    NormaliseThenSum,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePP,
    ReMax,
)
from flowrl.specs.base import wrong_fields
from flowrl.specs.filters import BestAndWorst, Difficulty, Threshold, Top, ZeroVariance
from flowrl.specs.maps import CosineLength, Repetition, SoftOverlong, StopProperly
from tests.graph_text import parse

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
    CosineLength(max_tokens=9),
    Repetition(),
    SoftOverlong(max_tokens=9, buffer=3, cap=False),
    StopProperly(),
    BestAndWorst(),
    Top(k=2),
    Threshold(at_least=-0.5),
    Distill(score_weight=-0.5),
    KL(estimator="k3", coefficient=0.1, clamp_input=20.0, target=0.1),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_specification_reads_back_from_its_json_and_from_the_text_of_a_graph(spec: Spec) -> None:
    assert spec_from_json(spec.family, spec.to_json()) == spec
    node = Node(
        id=NodeId("x"),
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


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_numbers_within_bounds_are_right(spec: Spec) -> None:
    assert list(wrong_fields(spec)) == []


@pytest.mark.parametrize(
    ("spec", "field", "expected"),
    [
        (GAE(gamma=-3.0), "gamma", "a number from 0 to 1"),
        (GAE(lam_value=2.0), "lam_value", "a number from 0 to 1 or None"),
        (GAE(whiten_eps=-1.0), "whiten_eps", "a finite number from 0 up"),
        (GroupRelative(ddof=2), "ddof", "a whole number from 0 to 1"),
        (GPG(norm=0.0), "norm", "a number above 0"),
        (Distill(coefficient=math.inf), "coefficient", "a finite number"),
        (KL(estimator="k3", coefficient=-0.1), "coefficient", "a finite number from 0 up"),
        (
            KL(estimator="k3", coefficient=0.1, clamp_input=-1.0),
            "clamp_input",
            "a number above 0 or None",
        ),
        (KL(estimator="k3", coefficient=0.1, horizon=0), "horizon", "a whole number from 1 up"),
        (
            KL(estimator="k3", coefficient=0.0, target=0.1),
            "coefficient",
            "a number above 0, as there is a target",
        ),
        (
            KL(estimator="full", coefficient=0.1, clamp_output=2.0),
            "clamp_output",
            "None: the full divergence is finite without a clamp",
        ),
        (Difficulty(low=0.9, high=0.1), "low", "a number below high=0.1"),
        (Difficulty(low=0.5, high=0.5), "low", "a number below high=0.5"),
        (Threshold(at_least=math.inf), "at_least", "a finite number"),
        (Top(k=0), "k", "a whole number from 1 up"),
        (BestAndWorst(tolerance=-1.0), "tolerance", "a number from 0 up"),
        (SoftOverlong(max_tokens=9, buffer=-2), "buffer", "a whole number from 0 up"),
        (CosineLength(max_tokens=0), "max_tokens", "a whole number from 1 up"),
        (Repetition(max_penalty=1.0), "max_penalty", "a number of at most 0"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_number_out_of_bounds_is_told_with_what_it_may_be(
    spec: Spec, field: str, expected: str
) -> None:
    value = getattr(spec, field)
    assert list(wrong_fields(spec)) == [(field, value, expected)]
