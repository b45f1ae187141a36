"""The output of worker processes: a file for each in logs/ of the run folder, and standard error.

    with logs.output("actor.generate[0]") as (name, descriptor):
        ...                                        # starts a process that prints there

The second worker of a name writes `NAME#2.log`. A file is bounded: when it is full it becomes
`NAME.earlier.log` and another one is begun. What comes before the run has a folder is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flowrl.runtime.local.processes import standard_error

_log = logging.getLogger(__name__)

_FOLDER = "logs"
_MAX_BYTES = 16 << 20
_MAX_EARLY_BYTES = 1 << 16
_JOIN_S = 1.0


class WorkerLogs:
    """See the module; may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._early: dict[str, bytes] = {}
        self._numbers: Counter[str] = Counter()
        self._readers: list[threading.Thread] = []
        self._warned = False

    def begin(self, run_folder: Path) -> None:
        """Writes into the run's folder from now on."""
        with self._lock:
            self._folder = run_folder / _FOLDER
            early, self._early = self._early, {}
        for name, data in early.items():
            self.write(name, data)

    def name(self, worker: str) -> str:
        """Returns the name of a worker that is started now, `WORKER#2` for the second one."""
        with self._lock:
            self._numbers[worker] += 1
            number = self._numbers[worker]
        return worker if number == 1 else f"{worker}#{number}"

    @contextlib.contextmanager
    def output(self, worker: str) -> Iterator[int]:
        """Returns where a process prints that is started in the block."""
        name = self.name(worker)
        readable, writable = os.pipe()
        reader = threading.Thread(
            target=self._read, args=(name, readable), name=f"flowrl-log-{name}", daemon=True
        )
        reader.start()
        self._readers = [one for one in self._readers if one.is_alive()] + [reader]
        try:
            yield writable
        finally:
            os.close(writable)

    def _read(self, name: str, readable: int) -> None:
        with open(readable, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                if (shown := standard_error()) >= 0:
                    with contextlib.suppress(OSError):
                        os.write(shown, data)
                self.write(name, data)

    def write(self, name: str, data: bytes) -> None:
        """Adds to the log of the worker with a name that `name` gave."""
        with self._lock:
            if self._folder is None:
                self._early[name] = (self._early.get(name, b"") + data)[-_MAX_EARLY_BYTES:]
                return
            try:
                _append(self._folder / f"{name}.log", data)
            except OSError as reason:  # a full disk ends no run here; its own files will
                if not self._warned:
                    _log.warning("the output of workers is not written: %s", reason)
                self._warned = True

    def close(self) -> None:
        """Waits for what processes that have ended have printed."""
        for reader in self._readers:
            reader.join(_JOIN_S)


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.exists() and path.stat().st_size > _MAX_BYTES // 2:
        path.replace(path.with_suffix(".earlier.log"))
    with path.open("ab") as file:
        file.write(data)
