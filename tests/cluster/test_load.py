"""Cluster files: machines that one does not have, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cluster import DeviceSpec, Link, load_cluster
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
    ("old", "new", "line", "key", "text"),
    [
        ("memory_gib: 1024", "memory_gb: 1", 4, "nodes.0.memory_gb", "did you mean 'memory_gib'"),
        ("cores: 96", "cores: many", 5, "nodes.0.cores", "'many'"),
        ("cores: 96", "cores: true", 5, "nodes.0.cores", "not true or false"),
        ("cores: 96", "cores: 0", 5, "nodes.0.cores", "must be at least 1"),
        ("cores: 96", "cores: 100001", 5, "nodes.0.cores", "must be at most 100000"),
        ("type: cuda, c", "type: gpu, c", 7, "nodes.0.devices.0.type", "one of cuda, npu, cpu"),
        ("type: cuda, c", "type: gpu, c", 7, "nodes.0.devices.0.type", "it is called cuda"),
        ("kind: nvlink", "kind: infiniband", 10, "nodes.0.links.0.kind", "it is called network"),
        ("reserved: true", "reserved: yes", 8, "nodes.0.devices.1.reserved", "true or false"),
        ("memory_gib: 1024", "memory_gib: .inf", 4, "nodes.0.memory_gib", "finite number"),
        ("memory_gib: 80", "memory_gib: .inf", 7, "nodes.0.devices.0.memory_gib", "finite number"),
        ("    count: 2\n", "    count: 1000000000\n", 2, "nodes.0", "4,000,000,000"),
        ("type: cuda, count: 2", "type: cuda, count: 999999999", 2, "nodes.0", "1,000,000,001"),
        ("    cores: 96\n", "", 2, "nodes.0.cores", "'cores' is missing in nodes.0"),
        ("kind: nvlink", "kind: ethernet", 10, "nodes.0.links.0.kind", "nvlink, hccs"),
        ("kind: nvlink", "kind: RoCEv2", 10, "nodes.0.links.0.kind", "it is called network"),
        ("kind: nvlink", "kind: IB", 10, "nodes.0.links.0.kind", "it is called network"),
        ("kind: nvlink", "kind: NV-Switch", 10, "nodes.0.links.0.kind", "it is called nvlink"),
        ("kind: nvlink", "kind: PCI Express", 10, "nodes.0.links.0.kind", "it is called pcie"),
        ("kind: nvlink", "kind: PCI-E", 10, "nodes.0.links.0.kind", "did you mean 'pcie'"),
        ("kind: nvlink", "kind: HCCS", 10, "nodes.0.links.0.kind", "did you mean 'hccs'"),
        ("cores: 96", "memory_gib: 1024", 5, "", "'memory_gib' is written twice"),
    ],
)
def test_a_wrong_key_or_value_is_named_by_file_and_key(
    tmp_path: Path, old: str, new: str, line: int, key: str, text: str
) -> None:
    assert old in TWO_NODES
    path = written(tmp_path, TWO_NODES.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.where == f"{path}:{line}" + (f" ({key})" if key else "")
    assert text in str(caught.value)
    assert "to fix: " in str(caught.value)
    assert "command line" not in str(caught.value)  # which changes configurations alone


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "memory_gib: 80",
            "memory_gib: 0",
            "1,000,000 GiB (as software reports it: an H100 has 79.1",
        ),
        ("memory_gib: 80", "memory_gib: -80", "from 0.1 to 1,000,000 GiB"),
        ("memory_gib: 80", "tflops: 1.0e+30", "100,000 TFLOP/s (dense bfloat16: an H100 has 989"),
        ("memory_gib: 80", "memory_tb_per_s: 1.0e-9", "0.001 to 1,000 TB/s (an H100 has 3.35"),
        (
            "memory_gib: 80",
            "host_gb_per_s: 1.0e-9",
            "10,000 GB/s (of one device, in one direction: an H100 has 54",
        ),
        (
            "gb_per_s: 50",
            "gb_per_s: 1.0e-9",
            "100,000 GB/s (of one device, in one direction: NVLink of",
        ),
        ("gb_per_s: 50", "gb_per_s: -50", "from 0.01 to 100,000 GB/s"),
        ("gb_per_s: 50", "gb_per_s: 50000000000", "from 0.01 to 100,000 GB/s"),  # bytes, not GB
    ],
)
def test_figures_that_no_machine_has_are_refused_with_their_unit_and_an_example(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(ConfigError, match="must be") as caught:
        load_cluster(written(tmp_path, TWO_NODES.replace(old, new)))
    assert said in str(caught.value)


def test_a_key_is_looked_for_among_those_of_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, TWO_NODES + "name: mine\n")
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_cluster(path)
    assert (caught.value.where, caught.value.expected) == (f"{path}:12 (name)", "nodes")
    # Not `did you mean nodes.name`: nodes have names, files have none.
    assert caught.value.hint == "take it out, or write one of those"


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
    with pytest.raises(ConfigError, match="not YAML"):
        load_cluster(written(tmp_path, "nodes: ["))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"nodes: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        load_cluster(path)
    assert (caught.value.where, caught.value.found) == (str(path), "byte 0xff at 7")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    written(tmp_path, TWO_NODES)
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_cluster(tmp_path / "clusters.yaml")
    assert caught.value.where == str(tmp_path / "clusters.yaml")
    assert caught.value.hint == f"did you mean {tmp_path / 'cluster.yaml'}?"


def test_a_python_file_is_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import flowrl as fl\n")
    with pytest.raises(ConfigError, match="this is a Python file, not a cluster file") as caught:
        load_cluster(tmp_path / "mine.py")
    assert "configs/clusters" in str(caught.value.hint)


def test_two_nodes_of_one_name_are_refused(tmp_path: Path) -> None:
    node = "  - {name: a, memory_gib: 1, cores: 1}\n"
    with pytest.raises(ConfigError, match="two nodes are named 'a'"):
        load_cluster(written(tmp_path, f"nodes:\n{node}{node}"))


def test_two_links_of_one_kind_are_refused_with_the_lines_of_both(tmp_path: Path) -> None:
    more = TWO_NODES + "      - {kind: nvlink, gb_per_s: 300}\n"
    path = written(tmp_path, more)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.what == "two links of 'trainer' are of kind nvlink"
    # The lines of the first and the third link above.
    both = f"{path}:10 (nodes.0.links.0) and {path}:12 (nodes.0.links.2)"
    assert caught.value.where == both
    assert caught.value.found == "gb_per_s 450 and 300"


def test_a_missing_key_is_to_be_added_to_the_file_and_not_on_the_command_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n  - {cores: 8, memory_gib: 64}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}:2 (nodes.0.name): 'name' is missing in nodes.0")
    assert caught.value.hint == "add name to nodes.0 in that file"


def test_what_a_link_is_called_is_told_behind_other_mistakes_too(tmp_path: Path) -> None:
    text = TWO_NODES.replace("kind: nvlink", "kind: infiniband").replace("cores: 96", "cores: 0")
    with pytest.raises(ConfigError) as caught:
        load_cluster(written(tmp_path, text))
    assert "cores must be at least 1" in str(caught.value)
    assert "and 1 more mistake: " in str(caught.value)
    assert "kind cannot be 'infiniband': it is called network" in str(caught.value)


OWN = """\
nodes:
  - name: trainer
    memory_gib: 1024
    cores: 96
    devices:
      - {name: NAME, count: 8, RATES}
    links: [LINKS]
"""
RATES = "type: cuda, memory_gib: 40, tflops: 312, memory_tb_per_s: 1.555, host_gb_per_s: 25"
NVLINK = "{kind: nvlink, gb_per_s: 300}"
NETWORK = "{kind: network, gb_per_s: 3.1}"


def own(name: str, *, rates: str = RATES, links: str = f"{NVLINK}, {NETWORK}") -> str:
    return OWN.replace("NAME", name).replace("RATES", rates).replace("LINKS", links)


@pytest.mark.parametrize(
    ("rates", "links", "missing", "hint"),
    [
        (
            RATES,
            NVLINK,
            "a link network",
            "add - {kind: network, gb_per_s: ...} to the links of its node: what one device has of "
            "it, in one direction",
        ),
        (
            RATES,
            NETWORK,
            "a link nvlink, hccs or pcie",
            "add - {kind: nvlink, gb_per_s: ...} (or hccs or pcie) to the links of its node: what "
            "one device has of it, in one direction",
        ),
        (
            RATES.replace("tflops: 312, ", ""),
            f"{NVLINK}, {NETWORK}",
            "tflops",
            "add tflops: ... to the device",
        ),
        (
            "type: cuda, memory_gib: 40, tflops: 312",
            "{kind: pcie, gb_per_s: 25}",
            "memory_tb_per_s, a link network",
            "add memory_tb_per_s: ... to the device, and - {kind: network, gb_per_s: ...} to the "
            "links of its node: what one device has of it, in one direction",
        ),
    ],
)
def test_rates_that_lack_a_part_are_answered_with_the_lines_to_add(
    tmp_path: Path, rates: str, links: str, missing: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match="its figures are not complete") as caught:
        load_cluster(written(tmp_path, own("mine", rates=rates, links=links)))
    assert (caught.value.expected, caught.value.hint) == (missing, hint)


def spec_of(tmp_path: Path, text: str) -> DeviceSpec:
    (group,) = load_cluster(written(tmp_path, text)).groups("cuda")
    return group.machine.spec


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("A100-40", "ampere"),
        ("NVIDIA A100-PCIE-40GB", "ampere"),
        ("NVIDIA A100X", "ampere"),
        ("gpu_a30", "ampere"),
        ("NVIDIA GeForce RTX 3090", "ampere"),
        ("NVIDIA RTX 6000 Ada Generation", "ampere"),
        ("NVIDIA L4", "ampere"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("H20-3e", "hopper"),
        ("nvidia-b300", "hopper"),
        ("V100", None),
        ("MI300X", None),
        ("A1000", None),  # a part of a word is no product
        ("H100 or A100", None),
    ],
)
def test_the_product_tells_the_generation_wherever_in_the_name_it_stands(
    tmp_path: Path, name: str, generation: str | None
) -> None:
    assert spec_of(tmp_path, own(name)).generation == generation


def test_an_npu_is_an_ascend_whatever_it_is_called(tmp_path: Path) -> None:
    rates = RATES.replace("cuda", "npu")
    links = f"{{kind: hccs, gb_per_s: 196}}, {NETWORK}"
    (group,) = load_cluster(written(tmp_path, own("mine", rates=rates, links=links))).groups("npu")
    assert group.machine.spec.generation == "ampere"


@pytest.mark.parametrize("name", ["mine", "H100-SXM-80GB", "A100-40"])
@pytest.mark.parametrize("generation", ["ampere", "hopper"])
def test_a_description_says_whose_efficiencies_hold_whatever_the_name_is(
    tmp_path: Path, name: str, generation: str
) -> None:
    said = RATES + f", efficiencies: {generation}"
    assert spec_of(tmp_path, own(name, rates=said)).generation == generation


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("volta", "take ampere, the earlier of the generations that were calibrated"),
        ("Ada Lovelace", "take ampere, whose kernels Ada runs"),
        ("Blackwell", "take hopper, which Blackwell for data centres is priced by"),
        ("HOPPER", "did you mean 'hopper'?"),
    ],
)
def test_efficiencies_of_a_generation_without_rows_are_refused_with_those_to_take(
    tmp_path: Path, said: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=f"efficiencies cannot be '{said}'") as caught:
        load_cluster(written(tmp_path, own("mine", rates=RATES + f", efficiencies: {said}")))
    assert (caught.value.expected, caught.value.hint) == ("one of ampere, hopper", hint)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ("memory_gib: 80", "A100-SXM-80GB"),
        ("memory_gib: 79.15", "A100-SXM-80GB"),
        ("memory_gib: 20", "A100-SXM-80GB"),  # a part of one; no A100 is sold so
        (RATES, "A100"),  # SXM or PCIe: all that matters is said
    ],
)
def test_memory_decides_between_devices_of_one_short_name(
    tmp_path: Path, rates: str, found: str
) -> None:
    assert spec_of(tmp_path, own("A100", rates=rates)).name == found
    assert spec_of(tmp_path, own("H100", rates="memory_gib: 94")).name == "H100-NVL-94GB"


def test_a_short_name_and_a_memory_of_several_devices_list_these(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A100 with 40 GiB may be any of 2 devices") as caught:
        load_cluster(written(tmp_path, own("A100", rates="memory_gib: 40")))
    assert caught.value.hint == "write A100-SXM-40GB or A100-PCIE-40GB"
