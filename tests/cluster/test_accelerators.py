"""GPUs and NPUs from recorded output of nvidia-smi and npu-smi."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from flowrl.cluster.accelerators import Found, cuda_devices, npu_devices
from flowrl.cluster.command import CommandResult, ToolFailed, run_command, run_tool
from flowrl.cluster.discover import discover

MIB = 1 << 20
GIB = 1 << 30

# nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free,compute_cap
#            --format=csv,noheader,nounits
TWO_H100 = """\
0, GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, NVIDIA H100 80GB HBM3, 81559, 81007, 9.0
1, GPU-7aa0b3c5-0f2f-01ac-6b05-8da14d6e9005, NVIDIA H100 80GB HBM3, 81559, 4000, 9.0
"""
MIXED = """\
0, GPU-11111111-0000-0000-0000-000000000000, Tesla V100-SXM2-16GB, 16384, 16384, 7.0
1, GPU-22222222-0000-0000-0000-000000000000, NVIDIA A100-SXM4-80GB, 81920, 81920, 8.0
"""
# A card that shares the host's memory reports none of its own.
UNIFIED = "0, GPU-33333333-0000-0000-0000-000000000000, NVIDIA GB10, [N/A], [N/A], 12.1\n"


def answers(text: str) -> Callable[[Sequence[str], float], CommandResult]:
    return lambda argv, timeout_s: CommandResult(returncode=0, stdout=text)


def absent(argv: Sequence[str], timeout_s: float) -> CommandResult:
    raise FileNotFoundError(argv[0])


def cuda(text: str, **environ: str) -> Found:
    return cuda_devices(answers(text), environ, host_bytes=64 * GIB)


def test_cards_are_numbered_and_measured_in_bytes() -> None:
    found = cuda(TWO_H100)
    assert found.warnings == ()
    assert [(d.id, d.memory_bytes, d.available_bytes) for d in found.devices] == [
        ("cuda:0", 81559 * MIB, 81007 * MIB),
        ("cuda:1", 81559 * MIB, 4000 * MIB),
    ]
    assert all(d.bfloat16 for d in found.devices)


def test_no_nvidia_smi_means_no_card_and_no_warning() -> None:
    assert cuda_devices(absent, {}, host_bytes=GIB) == Found()


@pytest.mark.parametrize(
    ("visible", "free_mib"),
    [
        ("1", [4000]),
        ("1,0", [4000, 81007]),
        (" 0 , 1 ", [81007, 4000]),
        ("GPU-7aa0b3c5", [4000]),
        ("GPU-7aa0b3c5-0f2f-01ac-6b05-8da14d6e9005,0", [4000, 81007]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_visibility_variable_selects_and_renumbers(visible: str, free_mib: list[int]) -> None:
    found = cuda(TWO_H100, CUDA_VISIBLE_DEVICES=visible)
    assert found.warnings == ()
    assert [d.available_bytes for d in found.devices] == [free * MIB for free in free_mib]
    assert [d.id for d in found.devices] == [f"cuda:{i}" for i in range(len(free_mib))]


@pytest.mark.parametrize(
    ("visible", "kept"), [("0,7,1", 1), ("x", 0), ("0,0", 1), ("0,,1", 1), ("GPU-", 0)]
)
def test_the_list_ends_at_the_first_word_that_is_no_card_and_a_warning_says_so(
    visible: str, kept: int
) -> None:
    found = cuda(TWO_H100, CUDA_VISIBLE_DEVICES=visible)
    assert len(found.devices) == kept
    assert len(found.warnings) == 1
    assert f"CUDA_VISIBLE_DEVICES={visible}" in found.warnings[0]


def test_a_mig_slice_is_not_used_and_a_warning_says_what_to_do() -> None:
    found = cuda(TWO_H100, CUDA_VISIBLE_DEVICES="MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")
    assert found.devices == ()
    assert "MIG slice" in found.warnings[0]
    assert "YAML" in found.warnings[0]


def test_different_cards_bring_a_warning_unless_the_order_is_pinned() -> None:
    assert "CUDA_DEVICE_ORDER" in cuda(MIXED).warnings[0]
    pinned = cuda(MIXED, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert pinned.warnings == ()
    assert [d.bfloat16 for d in pinned.devices] == [False, True]


def test_a_card_that_shares_host_memory_has_the_host_s() -> None:
    found = cuda(UNIFIED)
    assert found.devices[0].memory_bytes == 64 * GIB
    assert found.devices[0].available_bytes is None
    assert "shares the machine's memory" in found.warnings[0]


def test_an_old_driver_without_compute_capability_is_asked_again() -> None:
    asked: list[str] = []

    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        asked.append(argv[1])
        if "compute_cap" in argv[1]:
            text = 'Field "compute_cap" is not a valid field to query.'
            return CommandResult(returncode=2, stdout=text)
        lines = [line.rpartition(",")[0] for line in TWO_H100.splitlines()]
        return CommandResult(returncode=0, stdout="\n".join(lines))

    found = cuda_devices(run, {}, host_bytes=GIB)
    assert len(asked) == 2
    assert len(found.devices) == 2
    assert found.devices[0].bfloat16


def test_a_driver_that_does_not_answer_is_a_warning_never_silence() -> None:
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."

    def broken(argv: Sequence[str], timeout_s: float) -> CommandResult:
        return CommandResult(returncode=9, stdout=text + "\nMake sure that it is running.")

    def hanging(argv: Sequence[str], timeout_s: float) -> CommandResult:
        raise TimeoutError("nvidia-smi gave no answer in 10 s")

    assert text in cuda_devices(broken, {}, GIB).warnings[0]
    assert "status 9" in cuda_devices(broken, {}, GIB).warnings[0]
    assert "no answer in 10 s" in cuda_devices(hanging, {}, GIB).warnings[0]


def test_a_driver_without_cards_is_no_card_and_no_warning() -> None:
    def none(argv: Sequence[str], timeout_s: float) -> CommandResult:
        return CommandResult(returncode=6, stdout="No devices were found")

    assert cuda_devices(none, {}, GIB) == Found()
    assert cuda("No devices were found\n") == Found()


@pytest.mark.parametrize(
    "line", ["Unable to determine the device handle for GPU 0000:3B:00.0", "0, GPU-1, X, ERR!, 1"]
)
def test_a_line_that_is_not_understood_is_a_warning(line: str) -> None:
    found = cuda(f"{line}\n{TWO_H100}")
    assert len(found.devices) == 2
    assert len(found.warnings) == 1


# npu-smi info -m, on an eight-card host of two-chip cards cut to two, with the controller chips.
NPU_MAP = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  \
Chip Name
\t2                              0                              0                              \
Ascend 910B3
\t2                              1                              -                              \
Mcu
\t5                              0                              1                              \
Ascend 910B3
\t5                              1                              -                              \
Mcu
"""
NPU_MAP_WITH_PHYSICAL_IDS = """\
NPU ID  Chip ID  Chip Logic ID  Chip Phy-ID  Chip Name
0 0 0 0 Ascend910
0 1 1 1 Ascend910
0 2 - - Mcu
"""
# npu-smi info -t usages -i 2 -c 0
NPU_USAGES = """\
\tMemory Capacity(MB)            : 65536
\tMemory Usage Rate(%)           : 4
\tHugepages Total(page)          : 0
\tHBM Capacity(MB)               : 65536
\tHBM Usage Rate(%)              : 50
\tAicore Usage Rate(%)           : 0
"""
NPU_DDR = "\tDDR Capacity(MB)  : 21534\n\tDDR Usage Rate(%)  : 0\n"


def npu_run(
    chips: str, usages: Mapping[tuple[str, str], str] | str
) -> Callable[[Sequence[str], float], CommandResult]:
    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        assert argv[0] == "npu-smi"
        if argv[-1] == "-m":
            return CommandResult(returncode=0, stdout=chips)
        text = usages if isinstance(usages, str) else usages[argv[5], argv[7]]
        return CommandResult(returncode=0, stdout=text)

    return run


@pytest.fixture
def npu_root(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_chips_are_numbered_by_logical_id_and_controllers_left_out(npu_root: Path) -> None:
    run = npu_run(NPU_MAP, {("2", "0"): NPU_USAGES, ("5", "0"): NPU_DDR})
    found = npu_devices(run, {}, npu_root)
    assert found.warnings == ()
    assert [(d.id, d.name, d.memory_bytes, d.available_bytes) for d in found.devices] == [
        ("npu:0", "Ascend 910B3", 64 * GIB, 32 * GIB),
        ("npu:1", "Ascend 910B3", 21534 * MIB, 21534 * MIB),
    ]


def test_the_newer_map_with_physical_ids_is_understood(npu_root: Path) -> None:
    found = npu_devices(npu_run(NPU_MAP_WITH_PHYSICAL_IDS, NPU_USAGES), {}, npu_root)
    assert [(d.id, d.name) for d in found.devices] == [
        ("npu:0", "Ascend910"),
        ("npu:1", "Ascend910"),
    ]


@pytest.mark.parametrize(
    ("visible", "kept", "warned"),
    [("1", 1, False), ("0,1", 2, False), ("", 0, False), ("0, 1", 1, True), ("0,8", 1, True)],
)
def test_the_ascend_visibility_variable_ends_at_the_first_wrong_word(
    npu_root: Path, visible: str, kept: int, warned: bool
) -> None:
    environ = {"ASCEND_RT_VISIBLE_DEVICES": visible}
    found = npu_devices(npu_run(NPU_MAP, NPU_USAGES), environ, npu_root)
    assert [d.id for d in found.devices] == [f"npu:{i}" for i in range(kept)]
    assert bool(found.warnings) is warned


def test_without_device_files_npu_smi_is_not_even_asked(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci_manager").touch()

    def never(argv: Sequence[str], timeout_s: float) -> CommandResult:
        raise AssertionError(argv)

    assert npu_devices(never, {}, tmp_path) == Found()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (absent, "npu-smi is not in PATH"),
        (
            npu_run("dcmi model initialized failed, because the device is used.\n", ""),
            "no computing",
        ),
        (npu_run(NPU_MAP, "\n"), "names no memory capacity"),
    ],
)
def test_npus_that_cannot_be_queried_are_a_warning_never_silence(
    npu_root: Path, run: Callable[[Sequence[str], float], CommandResult], message: str
) -> None:
    found = npu_devices(run, {}, npu_root)
    assert found.devices == ()
    assert message in found.warnings[0]


def test_discovery_lists_the_cpu_first_and_logs_what_failed(
    npu_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        if argv[0] == "nvidia-smi":
            raise TimeoutError("nvidia-smi gave no answer in 10 s")
        return npu_run(NPU_MAP, NPU_USAGES)(argv, timeout_s)

    with caplog.at_level(logging.WARNING, logger="flowrl.cluster"):
        pool = discover(run=run, environ={}, root=npu_root)
    assert [address for address, _, _ in pool] == ["cpu:0", "npu:0", "npu:1"]
    assert pool.types == {"cpu", "npu"}
    assert pool.warnings == ("NVIDIA GPUs are not used: nvidia-smi gave no answer in 10 s",)
    assert [record.getMessage() for record in caplog.records] == list(pool.warnings)


def test_this_machine_can_be_discovered() -> None:
    pool = discover()
    device = pool.device("cpu:0")
    assert device.num_cores >= 1
    assert 0 < device.budget_bytes <= device.memory_bytes


def test_commands_run_for_real_with_a_deadline() -> None:
    assert run_command(["printf", "a"], 5.0).stdout == "a"
    with pytest.raises(TimeoutError, match="gave no answer"):
        run_command(["sleep", "60"], 0.05)
    assert run_tool(run_command, ["no-such-tool-of-any-vendor"]) is None
    with pytest.raises(ToolFailed, match="status 1"):
        run_tool(run_command, ["false"])
