"""Processes of a backend under test (Linux: proc(5)).

`python -m flowrl.testing.processes BACKEND FOLDER DEVICE DTYPE` opens an engine, prints the ids of
the processes that it started, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from flowrl.backend.plugin import Plugin
from flowrl.backend.registry import find
from flowrl.errors import FlowError, WorkerDied
from flowrl.testing.checked_engine import CheckedEngine, CheckFailed, Models

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
    """Checks that an engine's processes end with `close` and with their driver, and that it says so
    when they are killed.

    Args:
        name: The name of the installed plug-in; without one no driver is started and killed.
    """
    before = descendants()
    engine = CheckedEngine(plugin, models)
    started = descendants() - before
    engine.engine.close()
    _require_gone(started, "after close()", "memory of the device stays taken after a run")
    if not started:
        return "it starts no processes"
    _check_killed(plugin, models)
    if name is None:
        return f"its {len(started)} processes end with close(), and their death is noticed"
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
        driver.stdout.close()
    started = {int(pid) for pid in line.split()}
    if not started:
        raise CheckFailed("the engine did not open in another process", "runs cannot be started")
    _require_gone(
        started,
        "after their driver was killed",
        "a killed run leaves servers that keep the memory of the device",
    )
    return f"its {len(started)} processes end with close() and their driver; their death is noticed"


def _check_killed(plugin: Plugin, models: Models) -> None:
    """Checks that an engine whose processes are killed raises what has a run restart it."""
    before = descendants()
    engine = CheckedEngine(plugin, models)
    started = descendants() - before
    try:
        engine.engine.submit([engine.request(i, max_tokens=90) for i in range(4)])
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + models.timeout_s
        while time.monotonic() < end:
            engine.engine.poll(1.0)
    except FlowError as error:
        if not isinstance(error, WorkerDied):
            raise CheckFailed(
                f"killed during a request, the engine raises {type(error).__name__}: {error}",
                "a run takes this for a mistake of the user's and ends; WorkerDied has it restart "
                "the engine",
            ) from error
    except Exception:  # a run restarts the engine after whatever a library raises
        pass
    else:
        raise CheckFailed(
            f"`poll` raised nothing within {models.timeout_s:g} s after the processes were killed",
            "a run waits for the engine's samples until its stall limit",
        )
    finally:
        engine.engine.close()
    _require_gone(started, "after they were killed and close()", "a restart finds no free memory")


def _require_gone(started: set[int], when: str, meaning: str) -> None:
    left = _wait(started)
    if left:
        raise CheckFailed(
            f"{len(left)} of {len(started)} processes run {_GONE_S:g} s {when}", meaning
        )


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
