"""Layouts: each dimension against the size that it must divide, and all of them together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.cost.layout import Layout
from flowrl.cost.models import Experts
from flowrl.plan.schema import Rejection
from flowrl.plan.ways.layouts import (
    ENGINE_KINDS,
    FSDP_KINDS,
    MEGATRON_KINDS,
    LayoutRules,
    check_size,
    layouts,
    nearest_divisors,
    why_none,
)
from tests.plan.many_cases import QWEN25_7B

MOE = replace(
    QWEN25_7B,
    num_heads=32,
    num_layers=48,
    experts=Experts(num_experts=128, num_active=8, expert_size=768),
)

TRAINER = LayoutRules(kinds=MEGATRON_KINDS, node_size=8, rows=512, kv_copies=False)
ENGINE = LayoutRules(kinds=ENGINE_KINDS, node_size=8)


def refused(found: tuple[Rejection, ...], choice: str) -> Rejection:
    return next(item for item in found if item.choice == choice)


def test_a_tensor_size_that_no_head_count_allows_names_both_numbers_and_the_nearest():
    found = layouts(QWEN25_7B, 8, ENGINE)
    problem = refused(found.refused, "tp=8")
    assert problem.constraint == "does not divide 28 query heads"
    assert problem.nearest == "4"  # 7 divides the heads, and no columns of the MLP
    assert {layout.tp for layout in found.possible} == {1, 2, 4}


@pytest.mark.parametrize(
    ("name", "size", "constraint"),
    [
        ("tp", 7, "does not divide 4 key heads, and is no multiple of them"),
        ("tp", 3, "does not divide 28 query heads"),
        ("pp", 8, "does not divide 28 layers"),
        ("dp", 24, "does not divide 512 samples of an update"),
        ("ep", 2, "has no use: the model has no experts"),
        ("cp", 16, "would leave the node with its exchanges in every layer"),
    ],
)
def test_each_constraint_names_itself(name: str, size: int, constraint: str):
    rules = replace(TRAINER, kv_copies=True)
    assert constraint in [item.constraint for item in check_size(QWEN25_7B, rules, name, size)]


def test_tensor_and_context_groups_stay_inside_a_node_together():
    layout = Layout(tp=4, cp=4)
    assert layout not in layouts(QWEN25_7B, 16, TRAINER).possible
    assert why_none(QWEN25_7B, 16, TRAINER, lambda one: one == layout) == (
        "tp 4, cp 4, where tp=4 cp=4 would leave the node with its exchanges in every layer "
        "(16 devices, at most 8 of a node)"
    )


def test_key_heads_are_copied_where_the_library_copies_them():
    shape = replace(QWEN25_7B, num_heads=32)
    assert check_size(shape, ENGINE, "tp", 8) == ()
    (problem,) = check_size(shape, TRAINER, "tp", 8)
    assert problem.constraint == "does not divide 4 key heads, and the library copies none"
    assert problem.nearest == "2, 4"


def test_a_tensor_group_stays_inside_its_node():
    shape = replace(QWEN25_7B, num_heads=32, num_kv_heads=32)
    (problem,) = check_size(shape, ENGINE, "tp", 16)
    assert (problem.found, problem.limit) == ("16 devices", "8 of a node")
    assert check_size(shape, replace(ENGINE, node_size=16), "tp", 16) == ()


def test_the_vocabulary_is_padded_before_it_is_split():
    odd = replace(QWEN25_7B, vocab_size=1000, num_heads=20, num_kv_heads=20)
    # 1,000 rows become 1,024, which five ranks cannot share.
    (problem,) = [
        item for item in check_size(odd, ENGINE, "tp", 5) if "vocabulary" in item.constraint
    ]
    assert problem.constraint == "does not divide 1024 rows of the vocabulary (1000, padded)"
    padded = replace(ENGINE, vocabulary_step=0)
    assert not [p for p in check_size(odd, padded, "tp", 5) if "vocab" in p.constraint]


def test_samples_too_short_to_be_cut_refuse_context_parallelism():
    (problem,) = check_size(QWEN25_7B, replace(TRAINER, max_length=2048), "cp", 8)
    assert problem.found == "128 tokens"
    assert problem.nearest == "4"


def test_heads_that_travel_must_divide_too():
    rules = LayoutRules(kinds=MEGATRON_KINDS, node_size=8, cp_splits_heads=True)
    assert [item.nearest for item in check_size(QWEN25_7B, rules, "cp", 8)] == ["4, 7"]
    possible = layouts(QWEN25_7B, 8, rules).possible
    assert Layout(cp=4, dp=2) in possible
    # Of 28 heads each of two tensor ranks has 14, which 4 does not divide.
    layout = Layout(tp=2, cp=4)
    assert layout not in possible
    found = why_none(QWEN25_7B, 8, rules, lambda one: one == layout)
    assert found is not None
    assert found.endswith("cp does not divide the 14 heads of a rank")


def test_experts_are_split_within_a_stage():
    found = layouts(MOE, 16, TRAINER)
    assert Layout(dp=16, ep=16) in found.possible
    assert max(layout.ep for layout in found.possible if layout.pp == 2) == 8
    odd = replace(MOE, experts=Experts(num_experts=60, num_active=4, expert_size=768))
    (problem,) = check_size(odd, TRAINER, "ep", 8)
    assert problem.constraint == "does not divide 60 experts"
    assert problem.nearest == "6, 10"


def test_a_library_without_a_dimension_says_what_it_splits():
    rules = LayoutRules(kinds=FSDP_KINDS, node_size=8)
    assert {layout.tp for layout in layouts(QWEN25_7B, 8, rules).possible} == {1}
    (problem,) = check_size(QWEN25_7B, rules, "tp", 2)
    assert problem.constraint == "splits what the library does not (it has cp, dp, fsdp)"


def test_more_replicas_than_samples_would_idle():
    found = layouts(QWEN25_7B, 64, replace(ENGINE, samples=32))
    assert all(layout.dp <= 32 for layout in found.possible)
    assert refused(found.refused, "dp=64").limit == "32"


def test_nearest_divisors_are_two_of_either_side():
    assert nearest_divisors(28, 8) == "4, 7"
    assert nearest_divisors(7, 2) == "1, 7"


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([8, 14, 28, 32, 40]),
    num_layers=st.integers(1, 60),
    devices=st.integers(1, 96),
    rows=st.sampled_from([96, 500, 512]),
    node=st.sampled_from([1, 4, 8]),
)
def test_all_possible_layouts_are_found_and_no_other(
    heads: int, num_layers: int, devices: int, rows: int, node: int
):
    shape = replace(QWEN25_7B, num_heads=heads, num_kv_heads=2, num_layers=num_layers)
    rules = replace(TRAINER, rows=rows, node_size=node)
    found = layouts(shape, devices, rules)
    # By hand, without the module's tables: every product that gives the devices.
    expected = {
        (tp, pp, devices // (tp * pp * cp), cp)
        for tp in range(1, node + 1)
        for pp in range(1, 17)
        for cp in (1, 2, 4, 8)
        if devices % (tp * pp * cp) == 0
        and heads % tp == 0
        and 2 % tp == 0
        and num_layers % pp == 0
        and tp * cp <= node
        and rows % (devices // (tp * pp * cp)) == 0
    }
    assert {(one.tp, one.pp, one.dp, one.cp) for one in found.possible} == expected
