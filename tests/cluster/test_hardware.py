"""The hardware catalogue: figures with sources, found by the names that drivers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cluster import hardware
from flowrl.cluster.efficiencies import efficiencies_of
from flowrl.cluster.hardware import catalogue, device_spec, find_spec
from flowrl.errors import ConfigError

GIB = 1 << 30


def test_figures_are_those_of_the_data_sheet_in_bytes_and_operations() -> None:
    spec = device_spec("H100-SXM-80GB")
    assert (spec.type, spec.flops) == ("cuda", 989e12)
    # Of the 80 GiB that it is sold with CUDA finds this much.
    assert spec.memory_bytes == int(79.11 * GIB)
    assert spec.memory_bytes_per_s == 3.35e12
    assert (spec.intra_bytes_per_s, spec.inter_bytes_per_s) == (450e9, 50e9)
    assert (spec.measured_flops, spec.measured_memory_bytes_per_s) == (798e12, 3.0e12)
    assert device_spec("A100-SXM-80GB").measured_flops is None
    h20 = device_spec("H20-96GB")
    assert (h20.measured_flops, h20.measured_attention_flops) == (132e12, 84e12)
    assert device_spec("Ascend-A3-die").sibling_bytes_per_s == 224e9


def test_every_device_has_a_source_and_measures_no_more_than_its_peak() -> None:
    assert {spec.type for spec in catalogue().values()} == {"cuda", "npu", "cpu"}
    for name, spec in catalogue().items():
        assert spec.name == name
        assert len(spec.source) > 10
        assert (spec.measured_flops or 0) < spec.flops
        assert (spec.measured_memory_bytes_per_s or 0) < spec.memory_bytes_per_s
        assert (spec.measured_attention_flops or 0) <= (spec.measured_flops or 0)
        assert spec.inter_bytes_per_s < spec.intra_bytes_per_s <= spec.memory_bytes_per_s


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("nvidia a100-sxm4-80gb", "A100-SXM-80GB"),
        ("h20-96gb", "H20-96GB"),
        ("910B3", "Ascend-A2-910B-313T"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM-80GB"),
        ("A100-SXM4-80GB", "A100-SXM-80GB"),
        ("Tesla A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA L20", "L20-48GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("nvidia_b200", "B200-SXM-180GB"),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_gives(name: str, found: str) -> None:
    assert device_spec(name).name == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100", "A100-SXM-80GB"),
        ("a100-80gb", "A100-SXM-80GB"),
        ("Ascend-A3", "Ascend-A3-die"),
        ("ascend_a2_376t", "Ascend-A2-910B-376T"),
        ("4090", "RTX-4090-24GB"),
    ],
)
def test_words_that_one_device_alone_has_are_its_name(name: str, found: str) -> None:
    assert device_spec(name).name == found


def test_every_accelerator_says_whose_efficiencies_hold() -> None:
    said = {name: spec.efficiencies for name, spec in catalogue().items()}
    assert said.pop("CPU") is None
    assert {name for name, whose in said.items() if whose == "hopper"} == {
        "H100-SXM-80GB",
        "H100-PCIE-80GB",
        "H100-NVL-94GB",
        "H200-SXM-141GB",
        "H20-96GB",
        "H800-SXM-80GB",
        "B200-SXM-180GB",
        "GB200-186GB",
    }
    assert set(said.values()) == {"ampere", "hopper"}
    # A name alone tells the same: plans that were written before say nothing else.
    assert {name: efficiencies_of(catalogue()[name].type, name) for name in said} == said


def test_words_of_several_devices_list_exactly_those() -> None:
    with pytest.raises(ConfigError, match="Ascend-A2 may be any of 2 devices") as caught:
        device_spec("Ascend-A2", where="--device")
    assert caught.value.expected == "one of Ascend-A2-910B-376T, Ascend-A2-910B-313T"
    # A part of a word is no abbreviation: H20 and H200 are two devices.
    with pytest.raises(ConfigError, match="no such device"):
        device_spec("H10")


def test_an_unknown_device_gets_the_nearest_and_the_way_out() -> None:
    assert find_spec("H900") is None
    with pytest.raises(ConfigError) as caught:
        device_spec("H100-SXM-80", where="c.yaml: nodes.0.devices.0")
    text = str(caught.value)
    assert text.startswith("c.yaml: nodes.0.devices.0: no such device")
    assert "expected: one of H100-SXM-80GB, " in text
    assert "add one of your own to the files of configs/hardware" in text
    assert "tflops" in text
    with pytest.raises(ConfigError) as caught:
        device_spec("H900", where="--device")
    listed = (caught.value.expected or "").removeprefix("one of ").split(", ")
    assert sorted(listed) == sorted(catalogue())
    assert listed[:3] == ["H100-SXM-80GB", "H200-SXM-141GB", "H800-SXM-80GB"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: {}", "devices must not be empty"),
        ("devices: {X: {type: cuda}}", "bf16_tflops"),
        ("devices: [", "cannot be read"),
        ("devices: {X: {bf16_tflops: 9.0e+14}}", "from 0.001 to 100,000 TFLOP/s"),
    ],
)
def test_a_broken_file_of_the_catalogue_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.setattr(hardware, "_FOLDERS", (tmp_path,))
    hardware._read.cache_clear()
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            catalogue()
        assert str(caught.value).startswith(str(tmp_path / "own.yaml"))
        assert caught.value.hint
        monkeypatch.setattr(hardware, "_FOLDERS", (tmp_path / "none",))
        with pytest.raises(ConfigError, match="missing from this installation"):
            catalogue()
    finally:
        hardware._read.cache_clear()
