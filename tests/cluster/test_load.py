"""Cluster files: machines that one does not have, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cluster import Link, load_cluster
from flowrl.errors import ConfigError

GIB = 1 << 30

TWO_NODES = """\
nodes:
  - name: trainer
    count: 2
    memory_gib: 1024
    cores: 96
    devices:
      - {type: cuda, count: 2, name: H100-SXM-80GB, memory_gib: 80}
      - {type: cuda, name: V100, memory_gib: 16, bfloat16: false, reserved: true}
    links:
      - {kind: nvlink, gb_per_s: 450}
      - {kind: network, gb_per_s: 50}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_counts_expand_to_nodes_and_devices_with_addresses(tmp_path: Path) -> None:
    pool = load_cluster(written(tmp_path, TWO_NODES))
    assert [address for address, _, _ in pool] == [
        f"trainer-{node}/{device}"
        for node in (0, 1)
        for device in ("cpu:0", "cuda:0", "cuda:1", "cuda:2")
    ]
    card = pool.device("trainer-1/cuda:1")
    assert (card.name, card.memory_bytes, card.bfloat16) == ("H100-SXM-80GB", 80 * GIB, True)
    assert pool.device("trainer-0/cuda:2").reserved
    assert pool.device("trainer-0/cpu:0").num_cores == 96
    assert pool.nodes[0].links == (
        Link(ends=("*", "*"), kind="nvlink", bytes_per_s=450e9),
        Link(ends=("*", "network"), kind="network", bytes_per_s=50e9),
    )


def test_the_example_laptop_loads() -> None:
    path = Path(__file__).parents[2] / "configs" / "clusters" / "laptop.yaml"
    pool = load_cluster(path)
    assert [address for address, _, _ in pool] == ["cpu:0"]
    assert pool.types == {"cpu"}


def test_a_device_that_is_not_there_is_a_key_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        load_cluster(written(tmp_path, TWO_NODES)).device("cpu:0")


@pytest.mark.parametrize(
    ("old", "new", "where", "text"),
    [
        ("memory_gib: 1024", "memory_gb: 1024", "nodes.0.memory_gb", "did you mean 'memory_gib'"),
        ("cores: 96", "cores: many", "nodes.0.cores", "'many'"),
        ("cores: 96", "cores: 0", "nodes.0.cores", "greater than or equal to 1"),
        (
            "type: cuda, count: 2",
            "type: gpu, count: 2",
            "nodes.0.devices.0.type",
            "'cuda', 'npu' or 'cpu'",
        ),
        ("memory_gib: 1024", "memory_gib: .inf", "nodes.0.memory_gib", "finite number"),
        ("memory_gib: 80", "memory_gib: .inf", "nodes.0.devices.0.memory_gib", "finite number"),
        ("    count: 2\n", "    count: 1000000000\n", "nodes.0", "4,000,000,000"),
        ("type: cuda, count: 2", "type: cuda, count: 999999999", "nodes.0", "1,000,000,001"),
        ("    cores: 96\n", "", "nodes.0.cores", "required"),
        ("kind: nvlink", "kind: ethernet", "nodes.0.links.0.kind", "'nvlink'"),
    ],
)
def test_a_wrong_key_or_value_is_named_by_file_and_key(
    tmp_path: Path, old: str, new: str, where: str, text: str
) -> None:
    assert old in TWO_NODES
    path = written(tmp_path, TWO_NODES.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.where == f"{path}: {where}"
    assert text in str(caught.value)


def test_a_key_is_looked_for_among_those_of_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, TWO_NODES + "name: mine\n")
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_cluster(path)
    assert (caught.value.where, caught.value.expected) == (f"{path}: name", "one of nodes")
    assert caught.value.hint is None  # nodes have names, files have none


def test_a_configuration_in_the_place_of_a_cluster_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="describes no machines") as caught:
        load_cluster(written(tmp_path, "name: quickstart\nstages: [grpo]\n"))
    assert caught.value.found == "keys name, stages"
    assert "a configuration goes before it" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "nodes: []", "nodes: 3"])
def test_a_file_without_nodes_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_cluster(written(tmp_path, text))


def test_text_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a YAML file"):
        load_cluster(written(tmp_path, "nodes: ["))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"nodes: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        load_cluster(path)
    assert (caught.value.where, caught.value.found) == (str(path), "byte 0xff at 7")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_cluster(tmp_path / "none.yaml")
    assert caught.value.where == str(tmp_path / "none.yaml")


def test_two_nodes_of_one_name_are_refused(tmp_path: Path) -> None:
    node = "  - {name: a, memory_gib: 1, cores: 1}\n"
    with pytest.raises(ConfigError, match="two nodes are named 'a'"):
        load_cluster(written(tmp_path, f"nodes:\n{node}{node}"))
