"""`flowrl doctor` and `flowrl backends` say what is here, what is not, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flowrl.backend.protocols import BackendStatus, Capabilities, Service
from flowrl.backend.registry import Found
from flowrl.cli import doctor
from flowrl.cli.doctor import BackendRow, Check, Status, describe, examine
from flowrl.cluster.command import CommandResult
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.errors import BackendError

GIB = 1 << 30
TORCH = {"version": "2.13.0", "threads": 2, "built_for": "cpu", "cuda": 0, "npu": 0}
VERSIONS = {"flowrl": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "ray": "2.60.0"}
ROW = BackendRow(
    name="torch",
    distribution="flowrl",
    version="0.1.0",
    services=("generate", "train"),
    devices=("cpu",),
    usable=True,
)


def machine(*extra: Device, memory: int = 24 * GIB) -> ResourcePool:
    cpu = Device(id="cpu:0", type="cpu", name="a CPU", memory_bytes=memory, num_cores=2)
    node = ClusterNode(name="here", devices=(cpu, *extra), memory_bytes=memory, num_cores=2)
    return ResourcePool(nodes=(node,))


def card(kind: str) -> Device:
    return Device(id=f"{kind}:0", type=kind, name="a card", memory_bytes=64 * GIB)


def report(
    tmp_path: Path,
    *,
    torch: dict[str, object] | CommandResult | Exception | None = None,
    lacking: Sequence[str] = (),
    added: Sequence[str] = (),
    pool: ResourcePool | None = None,
    rows: Sequence[BackendRow] = (ROW,),
    python: tuple[int, int, int] = (3, 11, 7),
    runs: Path | None = None,
) -> dict[str, Check]:
    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        if isinstance(torch, Exception):
            raise torch
        if isinstance(torch, CommandResult):
            return torch
        return CommandResult(returncode=0, stdout="a banner\n" + json.dumps(torch or TORCH))

    def versions(name: str) -> str | None:
        if name in lacking:
            return None
        return VERSIONS.get(name, "1.0" if name in added or "-npu" not in name else None)

    checks = examine(
        runs=runs or tmp_path / "runs",
        run=run,
        versions=lambda name: None if name == "torch_npu" else versions(name),
        pool=pool or machine(),
        backends=rows,
        python=python,
    )
    return {check.name: check for check in checks}


def stopping(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.stops}


def test_a_machine_with_everything_but_accelerators_runs(tmp_path):
    checks = report(tmp_path)
    assert {name for name, check in checks.items() if check.status is Status.MISSING} == {
        "cuda",
        "npu",
    }
    assert not any(check.status is Status.PROBLEM or check.stops for check in checks.values())
    assert checks["torch"].found.startswith("2.13.0 built for cpu, 2 threads by default")
    assert checks["cores"].found == "2 for this process (a CPU)"
    assert not (tmp_path / "runs").exists()
    assert "flowrl runs here\n" in doctor.render(list(checks.values()))


def test_without_torch_the_core_still_runs_and_the_extra_is_named(tmp_path):
    checks = report(tmp_path, lacking=("torch", "transformers", "ray"))
    for name, extra in (("torch", "torch"), ("transformers", "torch"), ("ray", "ray")):
        assert checks[name].status is Status.MISSING
        assert f"pip install 'flowrl[{extra}]'" in checks[name].hint
    assert stopping(checks) == set()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            CommandResult(returncode=-11, stderr="Traceback\nSegmentation fault"),
            "Segmentation fault (exit code -11)",
        ),
        (CommandResult(returncode=0, stdout=""), "no message (exit code 0)"),
        (CommandResult(returncode=0, stdout="hello"), "its answer is not understood: 'hello'"),
        (CommandResult(returncode=0, stdout="{}x"), "its answer is not understood"),
        (TimeoutError("python gave no answer in 120 s"), "gave no answer in 120 s"),
    ],
)
def test_a_torch_that_does_not_import_is_a_finding(tmp_path, answer, problem):
    check = report(tmp_path, torch=answer)["torch"]
    assert check.status is Status.PROBLEM
    assert check.found.startswith("2.13.0 does not import: ")
    assert problem in check.found
    assert "install torch again" in check.hint


def test_torch_npu_is_suspected_where_it_is_installed_and_torch_fails(tmp_path):
    failed = CommandResult(returncode=1, stderr="ImportError: libhccl.so")
    check = report(tmp_path, torch=failed, added=("torch-npu",))["torch"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.hint


def test_cards_that_torch_cannot_use_are_a_problem_with_the_reason(tmp_path):
    pool = machine(card("cuda"), card("npu"))
    checks = report(tmp_path, pool=pool)
    assert checks["cuda"].found == "cuda:0 a card 64.0 GiB; but torch was built for cpu"
    assert "built for CUDA" in checks["cuda"].hint
    assert "flowrl[npu]" in checks["npu"].hint
    assert "CANN" in report(tmp_path, pool=pool, added=("torch-npu",))["npu"].hint
    broken = report(tmp_path, pool=pool, torch={**TORCH, "built_for": "12.8"})
    assert "torch sees 0 of them" in broken["cuda"].found
    usable = report(tmp_path, pool=pool, torch={**TORCH, "cuda": 1, "npu": 1})
    assert usable["cuda"].status is usable["npu"].status is Status.OK
    assert stopping(checks) == set()


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({"python": (3, 10, 4)}, "python", "3.10.4 is older than 3.11"),
        ({"lacking": ("flowrl",)}, "flowrl", "not installed"),
        ({"lacking": ("omegaconf", "networkx")}, "flowrl", "it needs networkx, omegaconf"),
        ({"rows": ()}, "backends", "no plug-in is declared"),
        ({"runs": Path("/proc/runs")}, "runs", "/proc cannot be written"),
    ],
)
def test_what_the_core_cannot_do_without_stops(tmp_path, changes, name, told):
    checks = report(tmp_path, **changes)
    assert stopping(checks) == {name}
    assert told in checks[name].found
    assert checks[name].hint
    assert f"flowrl cannot run here: {name}" in doctor.render(list(checks.values()))


def test_little_memory_and_warnings_of_discovery_are_problems_that_do_not_stop(tmp_path):
    small = machine(memory=GIB)
    pool = ResourcePool(nodes=small.nodes, warnings=("nvidia-smi fails",))
    checks = report(tmp_path, pool=pool)
    assert checks["memory"].status is checks["devices"].status is Status.PROBLEM
    assert stopping(checks) == set()
    assert "2 problems above" in doctor.render(list(checks.values()))


def test_every_hint_stands_under_its_check(tmp_path):
    shown = doctor.render(list(report(tmp_path, lacking=("ray",)).values())).splitlines()
    at = next(i for i, line in enumerate(shown) if line.startswith("missing  ray"))
    assert shown[at + 1].strip() == (
        "to do: pip install 'flowrl[ray]' for executor=ray and plans for its nodes (cluster=ray)"
    )


class Plug:
    name = "mine"
    capabilities = Capabilities(
        services=frozenset({Service.TRAIN, Service.GENERATE}), devices=frozenset({"npu", "cpu"})
    )

    def __init__(self, status: BackendStatus | None) -> None:
        self.status = status

    def check(self) -> BackendStatus:
        if self.status is None:
            raise RuntimeError("half installed")
        return self.status


def found(plugin: Plug | None, error: BackendError | None = None) -> Found:
    return Found(name="mine", distribution="my-dist", version="2.0", plugin=plugin, error=error)


def test_a_usable_plugin_shows_its_services_devices_and_library():
    row = describe(found(Plug(BackendStatus(usable=True, version="9.1"))))
    assert (row.services, row.devices, row.library) == (
        ("generate", "train"),
        ("cpu", "npu"),
        "9.1",
    )
    lines = doctor.render_backends([row]).splitlines()
    assert lines[0].split() == ["backend", "usable", "services", "devices", "library", "from"]
    assert lines[1] == "mine     yes     generate train  cpu npu  9.1      my-dist 2.0"


@pytest.mark.parametrize(
    ("declared", "why", "to_do"),
    [
        (
            found(Plug(BackendStatus(usable=False, problem="no CANN", hint="install CANN"))),
            "no CANN",
            "install CANN",
        ),
        (
            found(Plug(None)),
            "its check() raises RuntimeError: half installed",
            "repair or uninstall my-dist",
        ),
        (
            found(None, BackendError("it cannot be imported", found="ImportError", hint="mend it")),
            "it cannot be imported (ImportError)",
            "mend it",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_says_why_and_what_to_do(declared, why, to_do):
    row = describe(declared)
    assert not row.usable
    assert doctor.render_backends([row]).splitlines()[2:] == [f"  why: {why}", f"  to do: {to_do}"]


def test_no_plugin_at_all_is_said(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "available", tuple)
    assert doctor.run_backends(json=False) == 0
    assert "no plug-in declares" in capsys.readouterr().out


def test_json_is_all_that_backends_prints(monkeypatch, capsys):
    usable = found(Plug(BackendStatus(usable=True)))
    monkeypatch.setattr(doctor, "available", lambda: (usable,))
    assert doctor.run_backends(json=True) == 0
    (row,) = json.loads(capsys.readouterr().out)["backends"]
    assert row["name"] == "mine"
    assert row["services"] == ["generate", "train"]


@pytest.mark.parametrize(("stops", "code"), [(False, 0), (True, 2)])
def test_json_of_doctor_says_whether_flowrl_runs_as_its_exit_code_does(
    monkeypatch, capsys, stops, code
):
    check = Check(name="runs", status=Status.PROBLEM, found="no", stops=stops)
    monkeypatch.setattr(doctor, "examine", lambda **options: (check,))
    assert doctor.run(json=True) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["usable"] is not stops
    assert answer["checks"][0]["status"] == "problem"


def test_neither_command_imports_torch_or_ray():
    code = (
        "import sys, flowrl.cli.doctor as b; b.collect(); "
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_probe_of_torch_is_a_program_that_answers():
    pytest.importorskip("torch")
    answer = doctor._probe_torch(doctor.run_command)
    assert answer.problem == ""
    assert answer.threads >= 1
