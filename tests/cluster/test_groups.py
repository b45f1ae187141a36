"""Groups of equal devices, CPUs as several devices, and the clusters that are described."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.cluster import ClusterNode, Device, Link, ResourcePool, load_cluster, split_cpus
from flowrl.errors import ConfigError, PlanError

GIB = 1 << 30
CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


def card(index: int, name: str = "H100-SXM-80GB", **changes: object) -> Device:
    device = Device(id=f"cuda:{index}", type="cuda", name=name, memory_bytes=80 * GIB)
    return replace(device, **changes)  # type: ignore[arg-type]


def node(name: str, *devices: Device, links: tuple[Link, ...] = ()) -> ClusterNode:
    cpu = Device(id="cpu:0", type="cpu", name="Xeon", memory_bytes=64 * GIB, num_cores=8)
    return ClusterNode(
        name=name, devices=(cpu, *devices), memory_bytes=64 * GIB, num_cores=8, links=links
    )


def written(tmp_path: Path, devices: str, links: str = "") -> Path:
    path = tmp_path / "cluster.yaml"
    head = "nodes:\n  - {name: a, memory_gib: 64, cores: 4, devices: ["
    path.write_text(f"{head}{devices}], links: [{links}]}}\n")
    return path


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("h100_1x8", [("H100-SXM-80GB", 8, 8)]),
        ("h100_8x8", [("H100-SXM-80GB", 64, 8)]),
        ("h100_128x8", [("H100-SXM-80GB", 1024, 8)]),
        ("h100_1024x8", [("H100-SXM-80GB", 8192, 8)]),
        ("a100_1x8", [("A100-SXM-80GB", 8, 8)]),
        ("a100_8x8", [("A100-SXM-80GB", 64, 8)]),
        ("h20_1x8", [("H20-96GB", 8, 8)]),
        ("h20_8x8", [("H20-96GB", 64, 8)]),
        ("h100_2x8_h20_4x8", [("H100-SXM-80GB", 16, 8), ("H20-96GB", 32, 8)]),
        ("ascend_a2_1x8", [("Ascend-A2-910B-376T", 8, 8)]),
        ("ascend_a3_1x16", [("Ascend-A3-die", 16, 16)]),
        ("laptop", [("CPU", 1, 1)]),
    ],
)
def test_the_clusters_that_come_along_have_these_devices(
    name: str, groups: list[tuple[str, int, int]]
) -> None:
    found = load_cluster(CLUSTERS / f"{name}.yaml").groups()
    assert [(g.machine.spec.name, len(g.addresses), g.machine.node_size) for g in found] == groups


def test_every_cluster_that_comes_along_is_tested() -> None:
    assert len(list(CLUSTERS.glob("*.yaml"))) == 12


def test_addresses_of_a_group_go_node_by_node() -> None:
    (group,) = load_cluster(CLUSTERS / "h100_8x8.yaml").groups()
    assert group.addresses[:9] == (*(f"h100-0/cuda:{i}" for i in range(8)), "h100-1/cuda:0")
    assert (group.num_nodes, group.addresses[-1]) == (8, "h100-7/cuda:7")


def test_nodes_of_one_entry_share_their_devices() -> None:
    pool = load_cluster(CLUSTERS / "h100_1024x8.yaml")
    assert len({id(each.devices) for each in pool.nodes}) == 1


def test_reserved_devices_are_in_no_group_and_split_the_nodes_by_what_is_left() -> None:
    full, part = node("a", card(0), card(1)), node("b", card(0), card(1, reserved=True))
    groups = ResourcePool(nodes=(full, part)).groups()
    assert [group.addresses for group in groups] == [("a/cuda:0", "a/cuda:1"), ("b/cuda:0",)]
    assert [group.node_size for group in groups] == [2, 1]


def test_devices_with_other_links_memory_or_name_are_apart() -> None:
    link = Link(ends=("*", "*"), kind="nvlink", bytes_per_s=200e9)
    pool = ResourcePool(
        nodes=(
            node("a", card(0), card(1, name="H20-96GB"), card(2, memory_bytes=40 * GIB)),
            node("b", card(0), links=(link,)),
        )
    )
    assert [group.addresses for group in pool.groups()] == [
        ("a/cuda:0",),
        ("a/cuda:1",),
        ("a/cuda:2",),
        ("b/cuda:0",),
    ]
    assert [group.machine.spec.intra_bytes_per_s for group in pool.groups()[::3]] == [450e9, 200e9]
    assert pool.groups()[2].machine.spec.memory_bytes == 40 * GIB


def test_free_memory_does_not_split_a_group_and_the_least_counts() -> None:
    pool = ResourcePool(
        nodes=(node("a", card(0, available_bytes=70 * GIB), card(1, available_bytes=60 * GIB)),)
    )
    (group,) = pool.groups()
    assert group.budget_bytes == 54 * GIB  # nine tenths


def test_plans_may_be_told_to_fill_more_or_less_of_accelerators_and_take_cpus_as_they_are() -> None:
    shared = (card(0, available_bytes=70 * GIB), card(1))
    nodes = (node("a", *shared), replace(node("b"), devices=node("a", *shared).devices))
    pool = ResourcePool(nodes=nodes)
    for share in (1.0, 0.5):
        filled = pool.filled_to(share)
        for address, _, device in filled:
            before = pool.device(address)
            free = before.free_bytes
            assert device.memory_bytes == before.memory_bytes
            assert device.budget_bytes == (free if device.type == "cpu" else share * free)
        assert filled.filled_to(share) is filled


def test_cpus_are_a_group_where_there_is_no_accelerator_or_where_they_are_asked_for() -> None:
    (alone,) = ResourcePool(nodes=(node("a"), node("b"))).groups()
    assert alone.addresses == ("a/cpu:0", "b/cpu:0")
    # Eight cores of 100 GFLOP/s.
    assert alone.machine.spec.flops == pytest.approx(0.8e12)
    with_card = ResourcePool(nodes=(node("a", card(0)),))
    assert [group.device.type for group in with_card.groups()] == ["cuda"]
    assert [group.device.type for group in with_card.groups("cpu")] == ["cpu"]
    assert with_card.groups("npu") == ()


def test_a_device_without_figures_can_be_used_but_not_timed() -> None:
    (group,) = ResourcePool(nodes=(node("a", card(0, name="GPU-9000")),)).groups()
    assert group.budget_bytes == 72 * GIB  # nine tenths
    with pytest.raises(PlanError, match="no figures are known of GPU-9000"):
        group.machine  # noqa: B018


def test_a_device_of_the_catalogue_needs_its_name_alone(tmp_path: Path) -> None:
    pool = load_cluster(written(tmp_path, "{name: NVIDIA H20, count: 2}"))
    device = pool.device("cuda:1")
    assert (device.type, device.name, device.memory_bytes) == ("cuda", "H20-96GB", 95 * GIB)


def test_figures_of_the_file_take_the_place_of_the_catalogue_s(tmp_path: Path) -> None:
    entry = "{name: H100-SXM-80GB, memory_gib: 94, tflops: 800, host_gb_per_s: 20}"
    links = "{kind: network, gb_per_s: 25}, {kind: pcie, gb_per_s: 10}, {kind: nvlink, gb_per_s: 9}"
    (group,) = load_cluster(written(tmp_path, entry, links)).groups()
    spec = group.machine.spec
    assert (spec.flops, spec.memory_bytes, spec.memory_bytes_per_s) == (800e12, 94 * GIB, 3.35e12)
    assert (spec.inter_bytes_per_s, spec.host_bytes_per_s, spec.intra_bytes_per_s) == (
        25e9,
        10e9,
        9e9,
    )
    # Measured on a device with other rates.
    assert (spec.measured_flops, spec.measured_memory_bytes_per_s) == (None, 3.0e12)


def test_cards_that_only_pcie_joins_talk_over_it(tmp_path: Path) -> None:
    path = written(tmp_path, "{name: A100-SXM-80GB}", "{kind: pcie, gb_per_s: 12}")
    (group,) = load_cluster(path).groups()
    assert group.machine.spec.intra_bytes_per_s == 12e9


def test_a_device_of_no_catalogue_brings_all_its_figures_or_none(tmp_path: Path) -> None:
    entry = "{name: X1, type: npu, memory_gib: 32%s}"
    (bare,) = load_cluster(written(tmp_path, entry % "")).groups()
    assert bare.spec is None
    figures = ", tflops: 100, memory_tb_per_s: 1, host_gb_per_s: 20"
    links = "{kind: hccs, gb_per_s: 30}, {kind: network, gb_per_s: 5}"
    (whole,) = load_cluster(written(tmp_path, entry % figures, links)).groups()
    assert whole.machine.spec.flops == 100e12
    assert whole.machine.spec.intra_bytes_per_s == 30e9
    with pytest.raises(ConfigError, match="not complete") as caught:
        load_cluster(written(tmp_path, entry % figures))
    assert caught.value.expected == "a link nvlink, hccs or pcie, a link network"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("{name: H1000}", "no such device"),
        ("{count: 2}", "a device needs a name"),
        ("{name: H20-96GB, type: npu}", "H20-96GB is of another type"),
        ("{type: cpu, count: 5}", "a node of 4 cores cannot have 5 CPU devices"),
        ("{type: cpu, count: 2, memory_gib: 4}", "a CPU has no memory_gib of its own"),
        ("{type: cpu, reserved: true}", "a CPU has no reserved of its own"),
        ("{type: cpu, name: Xeon}", "a CPU has no name of its own"),
        ("{name: CPU, tflops: 3}", "a CPU has no tflops of its own"),
    ],
)
def test_devices_that_cannot_be_are_named(tmp_path: Path, devices: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_cluster(written(tmp_path, devices))


@pytest.mark.parametrize("entry", ["{type: cpu, count: 3}", "{name: CPU, count: 3}"])
def test_a_cpu_can_be_several_devices_that_share_cores_and_memory(
    tmp_path: Path, entry: str
) -> None:
    pool = load_cluster(written(tmp_path, f"{entry}, {{name: H20-96GB}}"))
    assert [address for address, _, _ in pool] == ["cpu:0", "cpu:1", "cpu:2", "cuda:0"]
    assert [pool.device(f"cpu:{i}").num_cores for i in range(3)] == [2, 1, 1]
    assert pool.device("cpu:2").memory_bytes == 64 * GIB // 3


def test_splitting_keeps_what_is_free_and_refuses_less_than_a_core() -> None:
    measured = Device(
        id="cpu:0",
        type="cpu",
        name="Xeon",
        memory_bytes=64 * GIB,
        available_bytes=40 * GIB,
        num_cores=2,
    )
    one = ClusterNode(name="a", devices=(measured,), memory_bytes=64 * GIB, num_cores=2)
    pool = split_cpus(ResourcePool(nodes=(one,)), 2)
    (group,) = pool.groups()
    assert (group.addresses, group.budget_bytes) == (("cpu:0", "cpu:1"), 20 * GIB)
    assert group.machine.spec.flops == pytest.approx(0.1e12)
    with pytest.raises(PlanError, match="a CPU of 2 cores cannot be 3 devices"):
        split_cpus(ResourcePool(nodes=(one,)), 3)


def test_an_address_finds_its_device_among_thousands() -> None:
    pool = load_cluster(CLUSTERS / "h100_1024x8.yaml")
    assert pool.device("h100-1023/cuda:7").name == "H100-SXM-80GB"
    with pytest.raises(KeyError):
        pool.device("h100-10/cuda:8")
