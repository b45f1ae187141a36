"""`flowrl doctor` and `flowrl backends`: what this machine and its plug-ins can do.

Each check of `flowrl doctor` has a line: `ok`, `missing` (something optional is not here) or
`problem`. The exit code is 0 unless a check that the core depends on has a problem; then it is 2.

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
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path

from flowrl.backend.plugin import BackendStatus, Plugin
from flowrl.backend.registry import Found, available
from flowrl.cluster.command import Runner, run_command
from flowrl.cluster.discover import discover
from flowrl.cluster.pool import ResourcePool
from flowrl.files import encode_json
from flowrl.wording import counted, table

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


def _ok(name: str, found: str) -> Check:
    return Check(name=name, status=Status.OK, found=found)


def _missing(name: str, found: str, hint: str = "") -> Check:
    return Check(name=name, status=Status.MISSING, found=found, hint=hint)


def _problem(name: str, found: str, hint: str = "", *, stops: bool = False) -> Check:
    return Check(name=name, status=Status.PROBLEM, found=found, hint=hint, stops=stops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Torch:
    """The result of the probe; it has a `problem` if torch does not import."""

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
        backends: The plug-ins; collected where they are not given.
    """
    return (
        *check_machine(runs=runs, run=run, versions=versions, pool=pool, python=python),
        *_backends(collect() if backends is None else backends),
    )


def check_machine(
    *,
    runs: Path,
    run: Runner = run_command,
    versions: Installed = installed,
    pool: ResourcePool | None = None,
    python: tuple[int, int, int] = sys.version_info[:3],
) -> tuple[Check, ...]:
    """Returns the checks of this machine, without those of plug-ins.

    Args:
        runs: The folder of runs.
        run: Runs the torch probe; tests pass recorded output.
        versions: Returns the version of a distribution.
        pool: This machine; discovered where it is not given.
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
        *(_problem("devices", warning) for warning in machine.warnings),
    )


def _python(found: tuple[int, int, int]) -> Check:
    text, wanted = ".".join(map(str, found)), ".".join(map(str, _PYTHON))
    if found[:2] >= _PYTHON:
        return _ok("python", text)
    hint = f"make the environment with Python {wanted} or newer"
    return _problem("python", f"{text} is older than {wanted}", hint, stops=True)


def _core(versions: Installed) -> Check:
    version = versions("flowrl")
    if version is None:
        found = "not installed, so its plug-ins and workflows are not found"
        return _problem("flowrl", found, "pip install -e .", stops=True)
    lacking = [name for name in _requirements() if versions(name) is None]
    if lacking:
        found = f"{version}, but it needs {', '.join(lacking)}"
        return _problem("flowrl", found, f"pip install {' '.join(lacking)}", stops=True)
    return _ok("flowrl", version)


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
    yield _ok("cores", f"{node.num_cores} for this process{name}")
    free = node.memory_bytes if cpu is None else cpu.budget_bytes
    found = f"{_gib(free)} free of {_gib(node.memory_bytes)}"
    hint = f"close other programs; the quick start takes up to {_gib(_MEMORY)}"
    yield _ok("memory", found) if free >= _MEMORY else _problem("memory", found, hint)


def _disk(runs: Path) -> Check:
    place = _existing(runs)
    free = shutil.disk_usage(place).free
    found = f"{_gib(free)} free at {place}"
    if free >= _DISK:
        return _ok("disk", found)
    return _problem(
        "disk", found, "remove old runs, or set runtime.runs to a folder on a larger disk"
    )


def _runs(runs: Path) -> Check:
    place = _existing(runs)
    try:
        # Tried, not asked: permission bits say nothing of read-only mounts and quotas.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        found = f"{place} cannot be written: {error.strerror or error}"
        hint = "set runtime.runs to a folder that you may write to"
        return _problem("runs", found, hint, stops=True)
    return _ok("runs", f"{runs.resolve()} can be written")


def _existing(path: Path) -> Path:
    path = path.resolve()
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))


_USES = {
    "torch": "pip install 'flowrl[torch]' to train and generate here",
    "transformers": "pip install 'flowrl[torch]' to train and generate here",
    "ray": "pip install 'flowrl[ray]' for executor=ray and plans for its nodes (cluster=ray)",
}
"""Libraries that are optional, with what to do if one is missing."""


def _libraries(torch: _Torch | None, versions: Installed) -> Iterable[Check]:
    for name, use in _USES.items():
        version = versions(name)
        if version is None:
            yield _missing(name, "not installed", use)
        elif name != "torch" or torch is None:
            yield _ok(name, version)
        elif torch.problem:
            hint = "install torch again: pip install --force-reinstall torch"
            if _has_torch_npu(versions):
                hint = (
                    "install Ascend CANN, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to leave "
                    "torch_npu out"
                )
            yield _problem(name, f"{version} does not import: {torch.problem}", hint)
        else:
            yield _ok(
                name,
                f"{torch.version} built for {torch.built_for}, {counted(torch.threads, 'thread')} "
                "by default (runs set runtime.num_threads)",
            )


def _has_torch_npu(versions: Installed) -> bool:
    return bool(versions("torch-npu") or versions("torch_npu"))


def _cards(pool: ResourcePool, kind: str) -> list[str]:
    cards = [device for _, _, device in pool if device.type == kind]
    return [f"{card.id} {card.name} {_gib(card.memory_bytes)}" for card in cards]


def _cuda(pool: ResourcePool, torch: _Torch | None) -> Check:
    cards = _cards(pool, "cuda")
    if not cards:
        return _missing("cuda", "no NVIDIA GPU is visible")
    listed = ", ".join(cards)
    if torch is None or torch.problem or torch.cuda >= len(cards):
        return _ok("cuda", listed)
    for_cpu = torch.built_for == "cpu"
    seen = "torch was built for cpu" if for_cpu else f"torch sees {torch.cuda} of them"
    hint = "install a torch built for CUDA that fits the driver (https://pytorch.org)"
    return _problem("cuda", f"{listed}; but {seen}", hint)


def _npu(pool: ResourcePool, torch: _Torch | None, versions: Installed) -> Check:
    cards = _cards(pool, "npu")
    if not cards:
        return _missing("npu", "no Ascend NPU is visible")
    listed = ", ".join(cards)
    if torch is not None and torch.npu >= len(cards):
        return _ok("npu", listed)
    hint = "pip install 'flowrl[npu]', in the version that fits torch and CANN"
    if _has_torch_npu(versions):
        hint = "check CANN: source its set_env.sh before starting flowrl"
    return _problem("npu", f"{listed}; but torch does not see them", hint)


def _backends(rows: Sequence[BackendRow]) -> Iterable[Check]:
    if not rows:
        yield _problem("backends", "no plug-in is declared", "pip install -e .", stops=True)
    for row in rows:
        name = f"backend {row.name}"
        if row.usable:
            yield _ok(name, f"{', '.join(row.services)} on {', '.join(row.devices)}")
        else:
            yield _problem(name, row.problem, row.hint)


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
    """Returns the report for people."""
    shown = report_lines(checks)
    stopping = [check.name for check in checks if check.stops]
    shown.append("")
    if stopping:
        shown.append(f"flowrl cannot run here: {', '.join(stopping)}")
    else:
        problems = sum(check.status is Status.PROBLEM for check in checks)
        more = f"; {counted(problems, 'problem')} above" if problems else ""
        shown.append(f"flowrl runs here{more}")
    return "\n".join(shown) + "\n"


def report_lines(checks: Sequence[Check]) -> list[str]:
    """Returns a line for each check, with its hint under it."""
    lines = table(("status", "check", "found"), [(c.status, c.name, c.found) for c in checks])
    shown = [lines[0]]
    for check, line in zip(checks, lines[1:], strict=True):
        shown.append(line)
        if check.hint:
            shown.append(f"         to do: {check.hint}")
    return shown


def _of_cluster(runs: Path) -> tuple[Check, ...]:
    """Returns the checks of each node of the Ray cluster at `RAY_ADDRESS`."""
    if installed("ray") is None:
        return (_problem("cluster", "Ray is not installed here", _USES["ray"], stops=True),)
    nodes = import_module("flowrl.runtime.ray.node_checks")  # Ray is for those who ask for it
    return tuple(
        _problem(finding.name, finding.found, finding.hint, stops=True)
        if finding.problem
        else _ok(finding.name, finding.found)
        for finding in nodes.check_nodes(runs)
    )


def run(json: bool, cluster: bool = False, runs: Path = Path("runs")) -> int:
    """Prints the report, as JSON or for people.

    Args:
        cluster: True to check the nodes of the Ray cluster in place of this machine.
        runs: The folder of runs.

    Returns:
        The exit code: 0, or 2 where the core cannot run.
    """
    checks = _of_cluster(runs) if cluster else examine(runs=runs)
    usable = not any(check.stops for check in checks)
    if json:
        report = {"usable": usable, "checks": [asdict(c) for c in checks]}
        print(encode_json(report), end="")
    else:
        print(render(checks), end="")
    return 0 if usable else 2


# Plug-ins.


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """A plug-in as a row of the table.

    Attributes:
        name: The name in `roles.<name>.backend`.
        distribution: The distribution that declares it.
        version: The version of the distribution.
        services: The services that it opens: `generate`, `train`, `score`.
        devices: The types of devices on which it runs.
        dtypes: Parameter types.
        library: Version of the library behind it; empty where there is none.
        usable: True if it can be used on this machine.
        problem: Why it cannot be used; empty when usable.
        hint: What to do about it; empty when usable.
    """

    name: str
    distribution: str
    version: str
    services: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    library: str = ""
    usable: bool = False
    problem: str = ""
    hint: str = ""


def collect() -> tuple[BackendRow, ...]:
    """Returns a row for every declared plug-in, by name; a broken one has a row too."""
    return tuple(describe(found) for found in available())


def describe(found: Found) -> BackendRow:
    """Returns the row of a plug-in."""
    row = BackendRow(
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        problem="it does not load",
    )
    if (error := found.error) is not None:
        problem = error.what + (f" ({error.found})" if error.found else "")
        return replace(row, problem=problem, hint=error.hint or "")
    if found.plugin is None:
        return row
    capabilities = found.plugin.capabilities
    status = _check(found.plugin, found.distribution)
    return replace(
        row,
        services=tuple(sorted(str(service) for service in capabilities.services)),
        devices=tuple(sorted(capabilities.devices)),
        dtypes=tuple(sorted(capabilities.dtypes)),
        library=status.version,
        usable=status.usable,
        problem=status.problem,
        hint=status.hint,
    )


def _check(plugin: Plugin, distribution: str) -> BackendStatus:
    try:
        return plugin.check()
    # Foreign code: one that breaks its promise not to raise must not hide the other plug-ins.
    except Exception as error:
        return BackendStatus(
            usable=False,
            problem=f"its check() raises {type(error).__name__}: {error}",
            hint=f"repair or uninstall {distribution}",
        )


def render_backends(rows: Sequence[BackendRow]) -> str:
    """Returns a table for people, with a hint under each plug-in that cannot be used."""
    if not rows:
        return (
            "no plug-in declares the entry point group flowrl.backends\n"
            "  to do: install flowrl itself, for example `pip install -e .`\n"
        )
    head = ("backend", "usable", "services", "devices", "library", "from")
    cells = [
        (
            row.name,
            "yes" if row.usable else "no",
            " ".join(row.services) or "-",
            " ".join(row.devices) or "-",
            row.library or "-",
            f"{row.distribution} {row.version}".strip(),
        )
        for row in rows
    ]
    first, *lines = table(head, cells)
    shown = [first]
    for row, line in zip(rows, lines, strict=True):
        shown.append(line)
        if not row.usable:
            shown.append(f"  why: {row.problem or 'it does not say'}")
            if row.hint:
                shown.append(f"  to do: {row.hint}")
    return "\n".join(shown) + "\n"


def run_backends(json: bool) -> int:
    """Prints the plug-ins, as JSON or as a table; returns the exit code, always 0."""
    rows = collect()
    if json:
        print(encode_json({"backends": [asdict(row) for row in rows]}), end="")
    else:
        print(render_backends(rows), end="")
    return 0
