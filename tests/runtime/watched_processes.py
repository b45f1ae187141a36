"""A run of the command, every process that belongs to it, and what these hold in shared memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import yaml

from tests.runtime.tiny_runs import tiny_config

__all__ = ["ENDINGS", "WatchedCommand", "started"]

ENDINGS: dict[str, tuple[signal.Signals | None, set[int]]] = {
    "normal": (None, {0}),
    "Ctrl-C": (signal.SIGINT, {130}),
    "SIGTERM": (signal.SIGTERM, {130}),
    "SIGKILL": (signal.SIGKILL, {-signal.SIGKILL}),
}
"""The signal that a run gets, if any, and the exit codes that may follow."""

_MARK = "FLOWRL_TEST_COMMAND"
_DEADLINE_S = 150.0
_SHARED_MEMORY = Path("/dev/shm")


class WatchedCommand:
    """`flowrl run CONFIG`, whose processes are known by a variable that all of them inherit.

    Args:
        variables: Variables of its environment, which has none of Ray's but these.
    """

    def __init__(self, config: Path, errors: IO[str], variables: Mapping[str, str]) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        self._mark = f"{_MARK}={uuid4().hex}"
        self._shared: set[Path] = set()
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-c", "from flowrl.cli import main; main()"),
                *("run", str(config)),
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**kept, **variables, name: value},
        )

    def first_step(self) -> None:
        """Waits until the first step is made, for which everything is open."""
        assert self._process.stdout is not None
        assert any(" 1/" in line for line in self._process.stdout)

    def processes(self) -> dict[int, str]:
        """Returns every living process of the run, with the name of its program."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended, or is another user's
                if self._mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "comm").read_text().strip()
        return found

    def shared(self) -> set[Path]:
        """Returns what there is of it in shared memory: by name, or what its processes have open.

        Once they have ended, it is what is left of what they had when this was called before.
        """
        for pid in self.processes():
            self._shared.update(_SHARED_MEMORY.glob(f"*-{pid}-*"))
            for path in Path(f"/proc/{pid}/fd").glob("*"):
                with suppress(OSError, ValueError):  # it was closed, or is elsewhere
                    parts = path.readlink().relative_to(_SHARED_MEMORY).parts
                    self._shared.add(_SHARED_MEMORY / parts[0])
        return {path for path in self._shared if path.exists()}

    def end(self, number: signal.Signals | None) -> int:
        """Sends a signal, if any, waits for the end of all of its processes; its exit code."""
        if number is not None:
            self._process.send_signal(number)
        self._process.communicate(timeout=_DEADLINE_S)
        end = time.monotonic() + _DEADLINE_S
        for pid, name in self.processes().items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            waited = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            os.close(descriptor)
            assert waited[0], f"{name} is left"
        return self._process.returncode

    def kill(self) -> None:
        """Kills whatever is left of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()


def started(folder: Path, executor: str, ending: str, **variables: str) -> WatchedCommand:
    """Starts a run with engines and scorers in processes of their own.

    It lasts until its end is asked for, unless that is the normal one. Its standard error is the
    file `errors` of the folder.
    """
    config: dict[str, Any] = {**tiny_config(folder / "runs"), "stages": ["grpo"], "stage": {}}
    config["roles"]["actor"]["num_engines"] = 2
    config["train"] = {**config["train"], "steps": 20 if ending == "normal" else 100_000}
    config["eval"] = {**config["eval"], "every": 0}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "executor": executor}))
    with (folder / "errors").open("w") as errors:
        return WatchedCommand(path, errors, variables)
