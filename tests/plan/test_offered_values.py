"""What is offered in the place of a pin that cannot be kept: with each of it the job has a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flowrl.cluster import ResourcePool, load_cluster
from flowrl.cost.models import ModelShape
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlanRequest, make_plan
from tests.plan.many_cases import QWEN25_7B, h100, pinned, request
from tests.sizes import every

ROOT = Path(__file__).parents[2]

GIB = 1 << 30

IMPOSSIBLE = """\
H8: actor.dp=28, actor.dp=3, actor.dp=16, actor.dp=999999999999, actor.tp=3, actor.tp=8, actor.pp=5
H8: actor.pp=64, actor.cp=3, actor.cp=16, actor.ep=2, actor.micro_tokens=1, reference.dp=28
H8: reference.pp=32, reference.cp=8, rollout.tp=8, rollout.tp=28, rollout.pp=64, rollout.dp=1000
H8: actor.devices=2-7, actor.devices=1-3, reference.devices=0-4, rollout.devices=0-3 actor.dp=28
H8: actor.tp=2 actor.pp=8, actor.dp=28 rollout.pp=64, actor.tp=4 actor.dp=3, actor.pp=4 actor.cp=4
H16: actor.dp=24, rollout.dp=48, actor.devices=4-11, actor.devices=2-11, rollout.devices=0-11
H16: actor.pp=12, reference.devices=9-14 reference.tp=2, actor.devices=6-9 actor.tp=4
M: rollout.dp=40, actor.dp=64, actor.devices=1-6
A8: actor.pp=7, actor.pp=32, actor.tp=16, rollout.ep=3, actor.dp=28
"""
"""By pools: eight and sixteen H100, two nodes of H100 beside four of H20, and eight A100 with a
model of experts. Cases are apart by commas."""

CASES = [
    (pool, case.strip())
    for pool, _, cases in (line.partition(":") for line in IMPOSSIBLE.splitlines())
    for case in cases.split(",")
]


@cache
def pool_of(name: str) -> ResourcePool:
    if name in ("H8", "H16"):
        return h100(int(name[1:]))
    file = {"M": "h100_2x8_h20_4x8", "A8": "a100_1x8"}[name]
    return load_cluster(ROOT / "configs" / "clusters" / f"{file}.yaml")


@cache
def shape_of(pool: str) -> ModelShape:
    if pool == "A8":
        file = ROOT / "configs" / "models" / "qwen3-30b-a3b.json"
        return ModelShape.from_hf_config(json.loads(file.read_text("utf-8")))
    return QWEN25_7B


def asked(pool: str) -> PlanRequest:
    return request(shape_of(pool), alternatives=0)


SIZES = re.compile(r"set (\w+) to (\d+(?: or \d+)*)")
DEVICES = re.compile(r"set (\S+\.devices) to ([\d,-]+(?: or [\d,-]+)*?)(?=, or |;|$)")
LEFT_OUT = re.compile(r"leave (.+?) out")
BATCHES = re.compile(r"set train\.(prompts_per_step|mini_batches) to (\d+(?: or \d+)*)")


def offers(error: PlanError, pins: list[str]) -> Iterator[list[str]]:
    """The pins after each change that a hint names."""
    hint = error.hint or ""
    said, _, too = hint.partition("; and ")
    gone = re.findall(r"leave (.+?) out too", too)
    kept = [pin for pin in pins if pin not in gone]
    refused = (error.found or "").split(" and ")
    for field, values in SIZES.findall(said):
        (old,) = (pin for pin in refused if pin.partition("=")[0].endswith(f".{field}"))
        for value in values.split(" or "):
            yield [f"{old.partition('=')[0]}={value}" if pin == old else pin for pin in kept]
    for name, values in DEVICES.findall(said):
        for value in values.split(" or "):
            yield [f"{name}={value}" if pin.startswith(f"{name}=") else pin for pin in kept]
    for left in LEFT_OUT.findall(said):
        yield [pin for pin in kept if pin not in left.split(" and ")]


@pytest.mark.parametrize(("pool", "case"), every(5, CASES))
def test_with_each_value_that_is_offered_the_job_has_a_plan(grpo: Graph, pool: str, case: str):
    pins = case.split()
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, pinned(asked(pool), *pins), pool_of(pool))
    changed = list(offers(caught.value, pins))
    assert changed, caught.value
    told = (caught.value.hint or "").partition("; and ")[0]
    for known in (SIZES, DEVICES, LEFT_OUT, BATCHES):
        told = known.sub("", told)
    assert not re.search(r"\d", told), "all numbers are of changes that are tried here"
    for other in changed:
        assert make_plan(grpo, pinned(asked(pool), *other), pool_of(pool)).pins is not None, other
    for field, values in BATCHES.findall(caught.value.hint or ""):
        for value in values.split(" or "):
            batch = replace(pinned(asked(pool), *pins), **{field: int(value)})
            assert make_plan(grpo, batch, pool_of(pool)).pins is not None, (field, value)


def test_sizes_that_other_devices_of_the_pool_have_are_offered_too(grpo: Graph):
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, pinned(asked("M"), "rollout.dp=48"), pool_of("M"))
    said = "48 devices of one kind, and there are 16 x H100-SXM-80GB and 32 x H20-96GB"
    assert said in caught.value.what
    assert (caught.value.hint or "").startswith("set dp to 24 or 32")


def test_what_stands_in_the_way_without_a_pin_is_told_before_the_pin(grpo: Graph):
    small = replace(
        pool_of("H8"),
        nodes=tuple(replace(node, memory_bytes=16 * GIB) for node in pool_of("H8").nodes),
    )
    big = request(replace(QWEN25_7B, num_layers=112), alternatives=0)
    with pytest.raises(PlanError) as bare:
        make_plan(grpo, big, small)
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, pinned(big, "reference.tp=32"), small)
    assert (caught.value.what, caught.value.where) == (bare.value.what, bare.value.where)
    assert (caught.value.hint or "").startswith(f"{bare.value.hint}; and leave reference.tp=32 out")


def test_forward_passes_are_told_the_samples_of_a_step_and_not_of_an_update(grpo: Graph):
    for role, samples in (
        ("reference", "512 samples of a step"),
        ("actor", "128 samples of an up"),
    ):
        with pytest.raises(PlanError, match=f"dp=3 does not divide {samples}"):
            make_plan(grpo, pinned(asked("H8"), f"{role}.dp=3"), pool_of("H8"))
