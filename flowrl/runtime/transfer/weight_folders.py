"""Published weights on their way to engines.

Each version is written once, into a folder in shared memory if the system has it, so that writing
and reading it copies memory without a disk. The newest version stays, for engines that are
restarted; an older one is removed once every engine that was sent it has loaded it. Nothing is left
of them when their process ends, also where it is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from flowrl.backend.weights import Weights, WeightsKind, weights_of
from flowrl.ids import EngineId

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "flowrl-weights-"
_REMOVER = """
trap "" INT TERM HUP
exec 3<&0
{ read -r _ <&3; rm -rf -- "$1"; } </dev/null >/dev/null 2>&1 &
"""
"""Reads until the other end of its input is closed."""


class WeightFolders:
    """See the module; used by one thread, but for `written`.

        weights = folders.written(version, export)  # in the trainer's thread
        folders.add(weights)                        # the latest from now on
        folders.sent(engine, version)               # the engine received the message
        folders.loaded(engine, version)             # the engine has loaded it

    Args:
        fallback: The folder to use if the system has no shared memory.
        share: Moves weights of a folder to where the engines are; the folder is removed then.
    """

    def __init__(
        self,
        fallback: Path,
        *,
        share: Callable[[Weights], Weights] | None = None,
        shared_memory: Path = _SHARED_MEMORY,
    ) -> None:
        parent, self._kind = shared_memory, WeightsKind.SHARED_MEMORY
        if not os.access(parent, os.W_OK | os.X_OK):
            parent, self._kind = fallback, WeightsKind.FOLDER
            parent.mkdir(parents=True, exist_ok=True)
        self.root = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._lives: int | None = _removed_with_this_process(self.root)
        self.root.mkdir(mode=0o700)
        self._share = share
        self._versions: dict[int, Weights] = {}
        self._waited: dict[EngineId, list[int]] = {}
        self.latest: Weights | None = None

    def new(self, version: int) -> Path:
        """Makes an empty folder for a version."""
        folder = self._folder(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def written(self, version: int, export: Callable[[Path], None]) -> Weights:
        """Has a version written, once for all engines, and computes its checksum."""
        folder = self.new(version)
        export(folder)
        weights = weights_of(folder, version, self._kind)
        if self._share is None:
            return weights
        shared = self._share(weights)
        shutil.rmtree(folder)
        return shared

    def add(self, weights: Weights) -> None:
        """Adds a version that was written, which is the latest from now on."""
        self._versions[weights.version] = self.latest = weights
        self._retire()

    def sent(self, engine: EngineId, version: int) -> None:
        """Notes that the engine was sent a version to load."""
        self._waited.setdefault(engine, []).append(version)

    def loaded(self, engine: EngineId, version: int) -> None:
        """Notes that the engine has loaded a version."""
        waited = self._waited.get(engine, [])
        if version in waited:
            waited.remove(version)
        self._retire()

    def forget(self, engine: EngineId) -> None:
        """Notes that the engine failed, and will not load the versions sent to it."""
        self._waited.pop(engine, None)
        self._retire()

    def _folder(self, version: int) -> Path:
        return self.root / str(version)

    def _retire(self) -> None:
        wanted = {version for waited in self._waited.values() for version in waited}
        if self.latest is not None:
            wanted.add(self.latest.version)
        for version in [version for version in self._versions if version not in wanted]:
            del self._versions[version]
            shutil.rmtree(self._folder(version), ignore_errors=True)

    def close(self) -> None:
        """Removes all of them; idempotent."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._versions.clear()
        if self._lives is not None:
            os.close(self._lives)
            self._lives = None


def _removed_with_this_process(folder: Path) -> int:
    """Has a folder removed as soon as this process is gone, however that ends.

    Returns:
        A descriptor that is closed with this process, or by it once the folder is gone.
    """
    readable, lives = os.pipe()
    # No child of this process, for those may be killed with it.
    command = ["/bin/sh", "-c", _REMOVER, "flowrl-remover", str(folder)]
    try:
        subprocess.run(command, stdin=readable, start_new_session=True, check=True)
    finally:
        os.close(readable)
    return lives
