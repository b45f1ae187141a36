"""Folders from which engine processes load published weights.

They are in shared memory if the system has it, so that writing and reading a version copies memory
without a disk. The newest version stays, for engines that are restarted; an older one is removed
once every engine that was sent it has loaded it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from flowrl.ids import EngineId

__all__ = ["WeightFolders"]


_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "flowrl-weights-"
_LOCK = "lock"


class WeightFolders:
    """See the module; used by one thread, but for `new`.

        folder = folders.new(version)     # is filled, in the trainer's thread
        folders.add(version, folder)      # is whole: the latest from now on
        folders.sent(engine, version)     # the engine received the message
        folders.loaded(engine, version)   # the engine has loaded it

    Args:
        fallback: The folder to use if the system has no shared memory.
    """

    def __init__(self, fallback: Path, *, shared_memory: Path = _SHARED_MEMORY) -> None:
        parent = shared_memory
        if not os.access(parent, os.W_OK | os.X_OK):
            parent = fallback
            parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        self.root, self._lock = _new_root(parent)
        self._folders: dict[int, Path] = {}
        self._waited: dict[EngineId, list[int]] = {}
        self.latest: int | None = None

    def new(self, version: int) -> Path:
        """Makes an empty folder for a version."""
        folder = self.root / str(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def add(self, version: int, folder: Path) -> None:
        """Adds a filled folder, whose version is the latest from now on."""
        self._folders[version] = folder
        self.latest = version
        self._retire()

    def folder(self, version: int) -> Path:
        """Returns the folder of a version that is still there."""
        return self._folders[version]

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

    def _retire(self) -> None:
        wanted = {version for waited in self._waited.values() for version in waited}
        for version in [v for v in self._folders if v != self.latest and v not in wanted]:
            shutil.rmtree(self._folders.pop(version), ignore_errors=True)

    def close(self) -> None:
        """Removes all of them; idempotent."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._folders.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _new_root(parent: Path) -> tuple[Path, int | None]:
    """Makes a new folder with a lock file, which this process keeps locked as long as it lives.

    The lock shows others whether the folder is abandoned. A process that looks before it is locked
    may remove the folder; then another one is made.
    """
    while True:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = _locked(root / _LOCK)
        except FileNotFoundError:
            continue
        if lock is not None and (root / _LOCK).exists():
            return root, lock
        if lock is not None:
            os.close(lock)


def _locked(path: Path) -> int | None:
    """Locks a file until this process ends; returns None if another process has the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Removes folders of killed runs: those of ours that no process has locked."""
    for root in parent.glob(f"{_PREFIX}*"):
        # Another run may be making or removing its own at this moment.
        with contextlib.suppress(OSError):
            if root.stat().st_uid != os.getuid() or not (root / _LOCK).exists():
                continue
            lock = _locked(root / _LOCK)
            if lock is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(lock)
