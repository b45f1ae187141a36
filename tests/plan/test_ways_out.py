"""What messages suggest is tried: with the change that they name there is a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlanRequest, make_plan
from flowrl.plan.impossible.ways_out import (
    Trial,
    changed_alike,
    found_share,
    more_devices,
    more_memory,
    tries_on,
    wider,
)
from flowrl.plan.node_parts import even_parts
from flowrl.plan.sizing import pool_of_devices
from tests.plan.many_cases import QWEN25_7B, h100, pinned, request

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def refusal(grpo: Graph, asked: PlanRequest, pool: ResourcePool) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, asked, pool)
    return caught.value


def number_in(pattern: str, text: str | None) -> int:
    found = re.search(pattern, text or "")
    assert found is not None, text
    return int(found[1])


def of_gib(gib: int, num_devices: int = 8) -> ResourcePool:
    spec = replace(device_spec("H100-SXM-80GB"), memory_bytes=gib * GIB)
    return pool_of_devices(spec, num_devices)


def sold_with(gib: int) -> ResourcePool:
    """Devices on which software finds less than they are sold with."""
    spec = device_spec("H100-SXM-80GB")
    return pool_of_devices(replace(spec, memory_bytes=int(found_share("cuda", gib) * gib * GIB)), 8)


def with_hosts(pool: ResourcePool, gib: int) -> ResourcePool:
    return replace(pool, nodes=tuple(replace(node, memory_bytes=gib * GIB) for node in pool.nodes))


def test_devices_of_the_size_that_is_told_are_enough_and_smaller_ones_are_not(grpo: Graph):
    told = number_in(r"take devices of (\d+) GiB", refusal(grpo, request(), of_gib(4)).hint)
    assert make_plan(grpo, request(), sold_with(told)).prediction.step_s is not None
    assert refusal(grpo, request(), sold_with(told - 1)).hint is not None


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_devices_of_the_size_that_is_told_are_enough_with_every_share_of_memory(
    grpo: Graph, share: float
):
    options = replace(request().options, memory_share=share)
    asked = replace(request(), options=options)
    told = number_in(r"take devices of (\d+) GiB", refusal(grpo, asked, of_gib(4)).hint)
    assert make_plan(grpo, asked, sold_with(told)).prediction.step_s is not None


def test_of_every_accelerator_of_the_catalogue_software_finds_what_sizes_are_told_with():
    seen = set()
    for file in (ROOT / "configs" / "hardware").glob("*.yaml"):
        for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["devices"].values():
            if entry["type"] != "cpu":
                seen.add(entry["type"])
                sold = entry["memory_gib"]
                assert entry["reported_gib"] / sold >= found_share(entry["type"], sold)
    assert seen == {"cuda", "npu"}


@pytest.mark.slow
def test_hosts_of_the_size_that_is_told_are_enough_and_smaller_ones_are_not(grpo: Graph):
    # 8 x 20 GiB hold a 7B model's update only with its optimizer in the memory of the host.
    small = with_hosts(of_gib(20), 16)
    told = number_in(r"take hosts with (\d+) GiB", refusal(grpo, request(), small).hint)
    assert make_plan(grpo, request(), with_hosts(small, told)).prediction.step_s is not None
    assert refusal(grpo, request(), with_hosts(small, round(0.95 * told))).hint is not None


def test_devices_that_are_told_are_enough_for_the_whole_job(grpo: Graph):
    big = replace(QWEN25_7B, num_layers=112, hidden_size=8192, num_heads=64, num_kv_heads=8)
    told = number_in(r"take (\d+) devices", refusal(grpo, request(big), of_gib(60)).hint)
    assert told > 8
    assert make_plan(grpo, request(big), of_gib(60, told)).prediction.step_s is not None


@pytest.mark.parametrize(
    ("pin", "said", "hint"),
    [
        ("actor.cp=3", "lie unevenly in nodes of 8", "set cp to 2 or 4"),
        ("actor.dp=3", "does not divide 128 samples of an update", "set dp to 2 or 4"),
    ],
)
def test_a_size_that_cannot_be_names_the_reason_and_the_nearest(
    grpo: Graph, pin: str, said: str, hint: str
):
    error = refusal(grpo, pinned(request(), pin), h100(16))
    assert said in error.what
    assert (error.hint or "").startswith(hint)


def test_the_largest_micro_batch_that_is_told_fits_and_a_larger_one_does_not(grpo: Graph):
    error = refusal(grpo, pinned(request(), "actor.micro_tokens=100000000"), h100(8))
    told = number_in(r"set micro_tokens to (\d+)", error.hint)
    assert told % 2560 == 0
    plan = make_plan(grpo, pinned(request(), f"actor.micro_tokens={told}"), h100(8))
    assert plan.operation("actor.update").micro_tokens == told
    more = pinned(request(), f"actor.micro_tokens={told + 2560}")
    assert f"set micro_tokens to {told} " in (refusal(grpo, more, h100(8)).hint or "")


def test_of_pins_that_are_too_much_together_the_fewest_are_named_that_help(grpo: Graph):
    every = ["actor.tp=1", "actor.pp=1", "actor.cp=1", "actor.recompute=none"]
    every.append("actor.micro_tokens=35840")
    error = refusal(grpo, pinned(request(), *every), of_gib(40))
    named = (error.hint or "").partition("leave ")[2].partition(" out: then")[0].split(" and ")
    assert len(named) == 2
    kept = [pin for pin in every if pin not in named]
    assert make_plan(grpo, pinned(request(), *kept), of_gib(40)).prediction.step_s is not None
    for one in named:
        refusal(grpo, pinned(request(), *kept, one), of_gib(40))


def test_sizes_are_looked_for_in_few_steps_and_in_none_on_very_large_pools():
    (group,) = of_gib(10).groups()
    tried: list[int] = []

    def enough(change: Trial) -> bool:
        assert change.group is not None
        tried.append(change.group.device.memory_bytes // GIB)
        return tried[-1] >= 41

    assert more_memory(36 * GIB, group, enough) == "take devices of 45 GiB"
    # 36 GiB are nine tenths of 40, which software finds of 44; then each step of the ladder, and
    # halfway back.
    assert tried == [40, 42, 41]
    assert (
        more_memory(36 * GIB, group, lambda change: False) == "take devices with more than 43.5 GiB"
    )
    # Of more than 48 GiB ECC takes nothing that is sold: 48.6 GiB are found of 49.6, not of 52.9.
    assert more_memory(round(43.74 * GIB), group, lambda change: False).endswith("than 49.6 GiB")
    (large,) = of_gib(10, 1024).groups()
    assert tries_on(1024) == 0
    assert more_memory(36 * GIB, large, enough).startswith("take devices with more than")
    assert more_memory(8 * GIB, large, enough) == "set plan.memory_share to more than 0.79"
    assert more_devices(large, 65536, enough) is None
    assert tried == [40, 42, 41]


@pytest.mark.parametrize(
    ("nodes", "needed", "told"),
    [(11, 16, 16), (6, 16, 16), (3, 4, 4), (3, 5, 5), (11, 17, 18), (4, 8, 8), (4, 13, 13)],
)
def test_no_more_nodes_are_told_than_are_enough_by_round_numbers(
    nodes: int, needed: int, told: int
):
    (group,) = h100(8 * nodes).groups()

    def enough(change: Trial) -> bool:
        return change.group is not None and change.group.num_nodes >= needed

    # Of more than 128 devices six numbers are tried, 18 nodes of those from 17 to 21.
    said = f"take {8 * told} devices ({told} nodes)"
    assert more_devices(group, 65536, enough) == said


def test_a_node_with_few_devices_may_get_more_of_them(grpo: Graph):
    big = replace(QWEN25_7B, num_layers=56)
    told = number_in(r"take (\d+) devices in the node", refusal(grpo, request(big), h100(1)).hint)
    hosts = h100(1).nodes[0].memory_bytes // GIB
    assert make_plan(grpo, request(big), with_hosts(h100(told), hosts)).prediction.step_s
    for fewer in range(2, told):
        refusal(grpo, request(big), with_hosts(h100(fewer), hosts))


def test_devices_beside_each_other_share_the_host_that_there_is():
    (group,) = h100(2).groups()
    tried: list[tuple[int, int | None]] = []

    def enough(change: Trial) -> bool:
        assert change.group is not None
        tried.append((change.group.node_size, change.host))
        return change.group.node_size == 4

    assert more_devices(group, 65536, enough, host=120) == "take 4 devices in the node"
    assert tried == [(3, 80), (4, 60)]


def test_pins_and_a_kind_that_go_together_nowhere_are_what_is_to_be_left_out(grpo: Graph):
    pins = ("rollout.devices=0-7", "actor.devices=4-7")
    error = refusal(grpo, pinned(request(kind="spatial"), *pins), h100(16))
    said = "leave rollout.devices=0-7 out; or leave actor.devices=4-7 out; or leave plan.kind="
    assert (error.hint or "").startswith(f"set rollout.devices to 8-15 or 8-14; or {said}")
    moved = [{"pins": (f"rollout.devices={other}", pins[1])} for other in ("8-15", "8-14")]
    left_out = ({"pins": pins[:1]}, {"pins": pins[1:]}, {"pins": pins, "kind": "auto"})
    for kept in (*moved, *left_out):
        asked = request(kind=str(kept.get("kind", "spatial")))
        plan = make_plan(grpo, pinned(asked, *kept["pins"]), h100(16))
        assert plan.prediction.step_s is not None


def nodes_of_three(nodes: int, host: int, gib: int | None = None) -> ResourcePool:
    """With hosts of so many GiB, and devices that are sold with so many."""
    spec = device_spec("Ascend-A3-die")
    if gib is not None:
        spec = replace(spec, memory_bytes=int(found_share(spec.type, gib) * gib * GIB))
    return with_hosts(pool_of_devices(spec, 3 * nodes, node_size=3), host)


def undivided_by_three() -> PlanRequest:
    """64 heads, 80 layers and 512 samples: of three devices of a node two are used."""
    big = replace(QWEN25_7B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8)
    return request(big, alternatives=0)


def test_of_nodes_that_divide_badly_the_part_that_lacks_least_is_told(grpo: Graph):
    asked = undivided_by_three()
    error = refusal(grpo, asked, nodes_of_three(2, 512))
    assert "with tp 2, pp 2 it needs" in error.what
    gib = number_in(r"take devices of (\d+) GiB", error.hint)
    assert make_plan(grpo, asked, nodes_of_three(2, 512, gib)).prediction.step_s is not None
    refusal(grpo, asked, nodes_of_three(2, 512, round(0.93 * gib)))
    nodes = number_in(r"take (\d+) nodes like these", error.hint)
    assert make_plan(grpo, asked, nodes_of_three(nodes, 512)).prediction.step_s is not None


def test_hosts_are_told_where_a_part_of_the_nodes_lacks_nothing_else(grpo: Graph):
    asked = undivided_by_three()
    hosts = number_in(
        r"take hosts with (\d+) GiB", refusal(grpo, asked, nodes_of_three(4, 64)).hint
    )
    assert make_plan(grpo, asked, nodes_of_three(4, hosts)).prediction.step_s is not None
    refusal(grpo, asked, nodes_of_three(4, round(0.9 * hosts)))


def test_larger_hosts_are_told_only_where_they_are_enough(grpo: Graph):
    spec = device_spec("H20-96GB")
    pool = with_hosts(pool_of_devices(spec, 6, node_size=3), 512)
    error = refusal(grpo, undivided_by_three(), pool)
    assert "only with more in the memory of its host" in error.what
    gib = number_in(r"take devices of (\d+) GiB", error.hint)
    spec = replace(spec, memory_bytes=int(found_share("cuda", gib) * gib * GIB))
    larger = with_hosts(pool_of_devices(spec, 6, node_size=3), 512)
    assert make_plan(grpo, undivided_by_three(), larger).prediction.step_s is not None


def test_what_changes_with_devices_of_a_node_changes_with_a_part_of_them():
    (three,) = nodes_of_three(4, 512).groups()
    (two,) = even_parts([three])
    (other,) = h100(8).groups()
    assert (two.node_size, two.num_nodes, two.in_part, three.in_part) == (2, 4, True, False)
    (larger,) = nodes_of_three(4, 512, gib=200).groups()
    found = changed_alike(two, three, larger)
    assert found is not None
    assert (found.addresses, found.budget_bytes) == (two.addresses, larger.budget_bytes)
    found = changed_alike(two, three, wider(three, 9))
    assert found is not None
    assert (found.num_nodes, found.node_size) == (9, 2)
    assert changed_alike(other, three, larger) is None
    # Of further nodes for a part of the nodes it says nothing.
    (half,) = nodes_of_three(2, 512).groups()
    assert changed_alike(half, three, wider(three, 9)) is None
