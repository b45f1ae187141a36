"""Processes of a backend under test (Linux: proc(5)).

`python -m flowrl.testing.processes BACKEND FOLDER DEVICE DTYPE` opens an engine, prints the ids of
the processes that it started, and waits to be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from flowrl.backend.plugin import Plugin
from flowrl.backend.registry import find
from flowrl.testing.checked_engine import CheckFailed, Models

_GONE_S = 30.0
"""The time that an engine's processes have to end after their driver."""


def descendants(pid: int | str = "self") -> set[int]:
    """Returns the processes that a process started, and theirs, of those that run."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = {int(child) for child in file.read_text().split()}
        except OSError:  # the thread has ended
            continue
        for child in children - found:
            found |= {child} | descendants(child)
    return found


def check_processes(plugin: Plugin, models: Models, name: str | None) -> str:
    """Checks that an engine's processes end with `close`, and when their driver is killed.

    Args:
        name: The name of the installed plug-in; None checks `close` alone.
    """
    before = descendants()
    engine = plugin.open_generate(replace(models.context, model=models.first), None)
    started = descendants() - before
    engine.close()
    left = _wait(started)
    if left:
        raise CheckFailed(
            f"{len(left)} of {len(started)} processes run {_GONE_S:g} s after close()",
            "memory of the device stays taken when a run has ended",
        )
    if not started:
        return "it starts no processes"
    if name is None:
        return f"its {len(started)} processes end with close()"
    context = models.context
    command = [sys.executable, "-m", __name__, name, str(models.first)]
    driver = subprocess.Popen(
        [*command, context.device, context.dtype, json.dumps(dict(context.options))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    try:
        line = driver.stdout.readline()
    finally:
        driver.kill()
        driver.wait()
    started = {int(pid) for pid in line.split()}
    if not started:
        raise CheckFailed("the engine did not open in another process", "runs cannot be started")
    left = _wait(started)
    if left:
        raise CheckFailed(
            f"{len(left)} of {len(started)} processes run {_GONE_S:g} s after their driver was "
            "killed",
            "a killed run leaves servers that keep the memory of the device",
        )
    return f"its {len(started)} processes end with close(), and when their driver is killed"


def _wait(pids: set[int]) -> set[int]:
    """Returns those of the processes that still run after `_GONE_S`."""
    end = time.monotonic() + _GONE_S
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def main(arguments: list[str]) -> None:
    """Opens an engine and waits; see the module."""
    name, folder, device, dtype, options = arguments
    context = Models.context_of(
        Path(folder), device=device, dtype=dtype, options=json.loads(options)
    )
    engine = find(name).open_generate(context, None)
    print(*sorted(descendants()), flush=True)
    while True:
        time.sleep(60.0)
        assert engine


if __name__ == "__main__":
    main(sys.argv[1:])
