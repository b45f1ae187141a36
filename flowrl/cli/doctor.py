"""`flowrl doctor`: checks this machine and says what to install or change.

Each check has a line: `ok`, `missing` (something optional is not here) or `problem`. The exit code
is 0 unless a check that the core depends on has a problem; then it is 2.

torch is tried in a process of its own: an installation that crashes or hangs on import is a finding
here, not the end of the command.
"""

from __future__ import annotations

import json as jsonlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from flowrl.cli.backends import BackendRow, collect, table
from flowrl.cluster.command import Runner, run_command
from flowrl.cluster.discover import discover
from flowrl.cluster.pool import ResourcePool
from flowrl.files import encode_json

__all__ = ["Check", "Status", "examine", "render", "run"]

GIB = 1 << 30

_PYTHON = (3, 11)
_MEMORY = 2 * GIB
"""The peak memory of the quick start's processes together is below this."""
_DISK = 2 * GIB
"""The size of a few checkpoints of a small model, with logs."""
_TORCH_TIMEOUT_S = 120.0

_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
npu = getattr(torch, "npu", None)
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "built_for": torch.version.cuda or torch.version.hip or "cpu",
    "cuda": torch.cuda.device_count() if cuda else 0,
    "npu": npu.device_count() if npu is not None and npu.is_available() else 0,
}))
"""

Installed = Callable[[str], str | None]


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    MISSING = "missing"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A line of the report.

    Attributes:
        name: The part of the machine that was checked.
        found: The finding, in one sentence.
        hint: What to do; empty where nothing is to be done.
        stops: True if the core cannot run because of it.
    """

    name: str
    status: Status
    found: str
    hint: str = ""
    stops: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Torch:
    """Returns the result of the probe: `problem` where torch does not import."""

    version: str = ""
    threads: int = 0
    built_for: str = ""
    cuda: int = 0
    npu: int = 0
    problem: str = ""


def installed(distribution: str) -> str | None:
    """Returns the version of a distribution without an import; None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def examine(
    *,
    runs: Path = Path("runs"),
    run: Runner = run_command,
    versions: Installed = installed,
    pool: ResourcePool | None = None,
    backends: Sequence[BackendRow] | None = None,
    python: tuple[int, int, int] = sys.version_info[:3],
) -> tuple[Check, ...]:
    """Returns all checks in the order in which they are shown.

    Args:
        runs: The folder of runs.
        run: Runs the torch probe; tests pass recorded output.
        versions: Returns the version of a distribution.
        pool: This machine; discovered where it is not given.
        backends: The plug-ins; collected where they are not given.
    """
    machine = discover(run=run) if pool is None else pool
    torch = _probe_torch(run) if versions("torch") else None
    return (
        _python(python),
        _core(versions),
        *_machine(machine),
        _disk(runs),
        _runs(runs),
        *_libraries(torch, versions),
        _cuda(machine, torch),
        _npu(machine, torch, versions),
        *(
            Check(name="devices", status=Status.PROBLEM, found=warning)
            for warning in machine.warnings
        ),
        *_backends(collect() if backends is None else backends),
    )


def _python(found: tuple[int, int, int]) -> Check:
    text = ".".join(map(str, found))
    if found[:2] >= _PYTHON:
        return Check(name="python", status=Status.OK, found=text)
    wanted = ".".join(map(str, _PYTHON))
    return Check(
        name="python",
        status=Status.PROBLEM,
        found=f"{text} is older than {wanted}",
        hint=f"make the environment with Python {wanted} or newer",
        stops=True,
    )


def _core(versions: Installed) -> Check:
    version = versions("flowrl")
    if version is None:
        return Check(
            name="flowrl",
            status=Status.PROBLEM,
            found="not installed, so its plug-ins and workflows are not found",
            hint="pip install -e .",
            stops=True,
        )
    lacking = [name for name in _requirements() if versions(name) is None]
    if lacking:
        return Check(
            name="flowrl",
            status=Status.PROBLEM,
            found=f"{version}, but it needs {', '.join(lacking)}",
            hint=f"pip install {' '.join(lacking)}",
            stops=True,
        )
    return Check(name="flowrl", status=Status.OK, found=version)


def _requirements() -> list[str]:
    """Returns the distributions that flowrl needs without any extra."""
    try:
        declared = metadata.requires("flowrl") or []
    except metadata.PackageNotFoundError:
        return []
    names = (re.match(r"[\w.-]+", line) for line in declared if "extra ==" not in line)
    return [match[0] for match in names if match]


def _machine(pool: ResourcePool) -> Iterable[Check]:
    node = pool.nodes[0]
    cpu = next((device for device in node.devices if device.type == "cpu"), None)
    name = f" ({cpu.name})" if cpu and cpu.name else ""
    yield Check(name="cores", status=Status.OK, found=f"{node.num_cores} for this process{name}")
    free = node.memory_bytes if cpu is None else cpu.budget_bytes
    found = f"{_gib(free)} free of {_gib(node.memory_bytes)}"
    if free >= _MEMORY:
        yield Check(name="memory", status=Status.OK, found=found)
    else:
        yield Check(
            name="memory",
            status=Status.PROBLEM,
            found=found,
            hint=f"close other programs; the quick start takes up to {_gib(_MEMORY)}",
        )


def _disk(runs: Path) -> Check:
    place = _existing(runs)
    free = shutil.disk_usage(place).free
    found = f"{_gib(free)} free at {place}"
    if free >= _DISK:
        return Check(name="disk", status=Status.OK, found=found)
    return Check(
        name="disk",
        status=Status.PROBLEM,
        found=found,
        hint="remove old runs, or set runtime.runs to a folder on a larger disk",
    )


def _runs(runs: Path) -> Check:
    place = _existing(runs)
    try:
        # Tried, not asked: permission bits say nothing of read-only mounts and quotas.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check(
            name="runs",
            status=Status.PROBLEM,
            found=f"{place} cannot be written: {error.strerror or error}",
            hint="set runtime.runs to a folder that you may write to",
            stops=True,
        )
    return Check(name="runs", status=Status.OK, found=f"{runs.resolve()} can be written")


def _existing(path: Path) -> Path:
    path = path.resolve()
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))


def _libraries(torch: _Torch | None, versions: Installed) -> Iterable[Check]:
    if torch is None:
        yield _absent("torch", "pip install 'flowrl[torch]' to train and generate here")
    elif torch.problem:
        yield Check(
            name="torch",
            status=Status.PROBLEM,
            found=f"{versions('torch')} does not import: {torch.problem}",
            hint=_torch_hint(versions),
        )
    else:
        threads = f"{torch.threads} thread{'' if torch.threads == 1 else 's'} by default"
        yield Check(
            name="torch",
            status=Status.OK,
            found=f"{torch.version} built for {torch.built_for}, {threads} "
            "(runs set runtime.num_threads)",
        )
    for name, use in (
        ("transformers", "pip install 'flowrl[torch]' to train and generate here"),
        (
            "ray",
            "pip install 'flowrl[ray]' to plan for its nodes (cluster=ray); no run uses it",
        ),
    ):
        version = versions(name)
        if version:
            yield Check(name=name, status=Status.OK, found=version)
        else:
            yield _absent(name, use)


def _torch_hint(versions: Installed) -> str:
    if versions("torch-npu") or versions("torch_npu"):
        return "install Ascend CANN, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to leave torch_npu out"
    return "install torch again: pip install --force-reinstall torch"


def _absent(name: str, hint: str) -> Check:
    return Check(name=name, status=Status.MISSING, found="not installed", hint=hint)


def _cuda(pool: ResourcePool, torch: _Torch | None) -> Check:
    cards = [device for _, _, device in pool if device.type == "cuda"]
    if not cards:
        return Check(name="cuda", status=Status.MISSING, found="no NVIDIA GPU is visible")
    listed = ", ".join(f"{card.id} {card.name} {_gib(card.memory_bytes)}" for card in cards)
    if torch is None or torch.problem or torch.cuda >= len(cards):
        return Check(name="cuda", status=Status.OK, found=listed)
    seen = (
        f"torch was built for {torch.built_for}"
        if torch.built_for == "cpu"
        else f"torch sees {torch.cuda} of them"
    )
    return Check(
        name="cuda",
        status=Status.PROBLEM,
        found=f"{listed}; but {seen}",
        hint="install a torch built for CUDA that fits the driver (https://pytorch.org)",
    )


def _npu(pool: ResourcePool, torch: _Torch | None, versions: Installed) -> Check:
    chips = [device for _, _, device in pool if device.type == "npu"]
    if not chips:
        return Check(name="npu", status=Status.MISSING, found="no Ascend NPU is visible")
    listed = ", ".join(f"{chip.id} {chip.name} {_gib(chip.memory_bytes)}" for chip in chips)
    if torch is not None and torch.npu >= len(chips):
        return Check(name="npu", status=Status.OK, found=listed)
    if versions("torch-npu") or versions("torch_npu"):
        hint = "check CANN: source its set_env.sh before starting flowrl"
    else:
        hint = "pip install 'flowrl[npu]', in the version that fits torch and CANN"
    return Check(
        name="npu", status=Status.PROBLEM, found=f"{listed}; but torch does not see them", hint=hint
    )


def _backends(rows: Sequence[BackendRow]) -> Iterable[Check]:
    if not rows:
        yield Check(
            name="backends",
            status=Status.PROBLEM,
            found="no plug-in is declared",
            hint="pip install -e .",
            stops=True,
        )
    for row in rows:
        services = f"{', '.join(row.services)} on {', '.join(row.devices)}"
        yield Check(
            name=f"backend {row.name}",
            status=Status.OK if row.usable else Status.PROBLEM,
            found=services if row.usable else row.problem,
            hint=row.hint,
        )


def _probe_torch(run: Runner) -> _Torch:
    try:
        result = run((sys.executable, "-P", "-c", _PROBE), _TORCH_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        return _Torch(problem=str(error))
    lines = result.stdout.strip().splitlines()
    if result.returncode != 0 or not lines:
        said = (result.stderr.strip() or "no message").splitlines()[-1]
        return _Torch(problem=f"{said} (exit code {result.returncode})")
    try:
        # The last line: libraries that torch loads by itself may print before.
        answer: Mapping[str, object] = jsonlib.loads(lines[-1])
        return _Torch(**answer)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return _Torch(problem=f"its answer is not understood: {lines[-1][:60]!r}")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def render(checks: Sequence[Check]) -> str:
    """Returns the report for people: a line for each check, then hints."""
    lines = table(("status", "check", "found"), [(c.status, c.name, c.found) for c in checks])
    shown = [lines[0]]
    for check, line in zip(checks, lines[1:], strict=True):
        shown.append(line)
        if check.hint:
            shown.append(f"         to do: {check.hint}")
    stopping = [check.name for check in checks if check.stops]
    shown.append("")
    if stopping:
        shown.append(f"flowrl cannot run here: {', '.join(stopping)}")
    else:
        problems = sum(check.status is Status.PROBLEM for check in checks)
        more = "" if not problems else f"; {problems} problem{'s' if problems > 1 else ''} above"
        shown.append(f"flowrl runs here{more}")
    return "\n".join(shown) + "\n"


def run(json: bool) -> int:
    """Prints the report, as JSON or for people.

    Returns:
        The exit code: 0, or 2 where the core cannot run.
    """
    checks = examine()
    usable = not any(check.stops for check in checks)
    if json:
        report = {"usable": usable, "checks": [asdict(c) for c in checks]}
        print(encode_json(report), end="")
    else:
        print(render(checks), end="")
    return 0 if usable else 2
