"""Checkpoints that are whole or do not count.

    checkpoints/0003-grpo-step120/
        actor/ ...          what each worker saved, one folder a role; of the torch backend,
                            actor/model is a Hugging Face folder
        unused-samples/ ... samples that were generated and not used, one folder a rollout
        state.json          the driver's own state: data cursor, scheduler, counters
        MANIFEST.json       written last: format, position, size and SHA-256 of every file

A checkpoint is built in a temporary folder, every file is synced, the folder is renamed, and only
then is MANIFEST.json written, itself by a rename. A folder without one is incomplete: it is named
in a warning, never read, and removed after the next checkpoint succeeds. If the process is killed
at any moment, `latest` is the checkpoint before or the new one.

A complete checkpoint whose files cannot be read, or no longer match their checksums, is damaged. A
warning names the file, and the older checkpoint that takes its place; where there is none, it is an
error. The manifest of a damaged one that was skipped becomes MANIFEST.damaged: it is not kept.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flowrl.config.schema import RuntimeConfig
from flowrl.errors import CheckpointError
from flowrl.files import remove_leftovers, sha256_file, sync_folder, sync_tree, write_json_atomic
from flowrl.wording import counted

FileEntries: TypeAlias = dict[str, dict[str, object]]
"""Size and SHA-256 of files, by their paths below a folder, with forward slashes."""


_log = logging.getLogger(__name__)

FORMAT = 1
"""Format version of the manifest; raised when an older reader would misread a checkpoint."""

_MANIFEST = "MANIFEST.json"
_DAMAGED = "MANIFEST.damaged"
_STATE = "state.json"
_NAME = re.compile(r"(\d+)-.+")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """A place in a run: `step` steps of the stage were made. Positions order as the run goes."""

    stage_index: int
    step: int
    stage: str

    def __str__(self) -> str:
        return f"{self.stage} step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint whose files match their checksums.

    Attributes:
        path: Its folder, with the files of the workers below it.
        state: The state that was passed to `CheckpointStore.save`.
    """

    path: Path
    position: Position
    state: Mapping[str, object]


class CheckpointInterval:
    """Decides after which steps inside a stage a run writes a checkpoint.

    Time is measured from the last checkpoint, or from the beginning of the run; what a checkpoint
    holds does not depend on when it is written.

    >>> now = iter([0.0, 500.0, 700.0])
    >>> interval = CheckpointInterval(RuntimeConfig(), clock=lambda: next(now))
    >>> interval.is_due(1), interval.is_due(2)
    (False, True)

    Args:
        clock: Returns seconds that only grow.
    """

    def __init__(
        self, runtime: RuntimeConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = runtime.checkpoint_every
        self._minutes = runtime.checkpoint_minutes
        self._clock = clock
        self._since = clock()

    def __str__(self) -> str:
        always = "at the end of each stage and at Ctrl-C"
        spans = [counted(self._steps, "step")] if self._steps else []
        if self._minutes:
            spans.append(counted(self._minutes, "minute"))
        if not spans:
            return f"{always} only; a run that is killed loses its stage"
        first = ", whichever comes first" if len(spans) > 1 else ""
        return f"every {' or '.join(spans)}{first}, {always}"

    def restart(self) -> None:
        """Measures from now: a checkpoint was written, or the steps begin."""
        self._since = self._clock()

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is to be written after `step` steps of a stage."""
        if self._steps and step % self._steps == 0:
            return True
        return bool(self._minutes) and self._clock() - self._since >= 60 * self._minutes


class CheckpointStore:
    """The checkpoints of one run.

    >>> import tempfile
    >>> store = CheckpointStore(Path(tempfile.mkdtemp()), keep=2)
    >>> place = Position(stage="grpo", stage_index=0, step=10)
    >>> path = store.save(place, lambda folder: {}, {"cursor": 640})
    >>> path.name, store.latest().state["cursor"]
    ('0001-grpo-step10', 640)

    Args:
        folder: The folder of all checkpoints; made when the first is saved. One process writes to
            it at a time (the run folder's lock).
        keep: Complete checkpoints that stay; the newest always does.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: the newest checkpoint always stays")
        self.folder = folder
        self.keep = keep

    def save(
        self,
        position: Position,
        write: Callable[[Path], FileEntries],
        state: Mapping[str, object],
    ) -> Path:
        """Makes a checkpoint and removes those past `keep`.

        Args:
            write: Fills a folder with what the workers save, usually one subfolder a role, and
                returns what they say of their files; others are read here for their checksums. The
                names state.json and MANIFEST.json are taken.
            state: The driver's state, JSON values. A float that is not finite comes back as a
                string that `float` reads.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints
                are as they were. Whatever `write` raises passes through.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            path = self.folder / self._next_name(position)
            building = self.folder / f".{path.name}.writing-{os.getpid()}"
            building.mkdir()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        try:
            described = write(building)
            write_json_atomic(building / _STATE, state)
            files = _describe_files(building, described)
            sync_tree(building)
            building.replace(path)
            sync_folder(self.folder)
            manifest = {
                "format": FORMAT,
                "stage": position.stage,
                "stage_index": position.stage_index,
                "step": position.step,
                "files": files,
            }
            write_json_atomic(path / _MANIFEST, manifest)
        except OSError as error:
            shutil.rmtree(building, ignore_errors=True)
            raise _cannot_write(path, error) from error
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        self._retire(newest=path)
        return path

    def latest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, verified; None if there is none.

        Raises:
            CheckpointError: every complete one is damaged, or the newest of another format.
        """
        complete: list[Path] = []
        for path in self._folders():
            if (path / _MANIFEST).exists():
                complete.append(path)
            elif not (path / _DAMAGED).exists():  # of which a warning was given
                _log.warning("%s: ignored, this checkpoint was never finished", path)
        damaged: list[tuple[Path, _Damaged]] = []
        for path in reversed(complete):
            try:
                found = _load(path)
            except _Damaged as reason:
                damaged.append((path, reason))
                continue
            for newer, damage in damaged:
                _log.warning("%s is used, as a newer one cannot be: %s", path, damage)
                if not isinstance(damage, _Unreadable):
                    try:
                        (newer / _MANIFEST).rename(newer / _DAMAGED)
                    except OSError as error:
                        _log.warning("%s: it cannot be marked as damaged: %s", newer, error)
            return found
        if damaged:
            newest = damaged[0][1]
            newest.hint = "put the file back, or start a new run: no older checkpoint is whole"
            raise newest
        return None

    def _folders(self) -> list[Path]:
        """Returns all checkpoint folders, complete or not, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [
            (int(match[1]), path)
            for path in self.folder.iterdir()
            if path.is_dir() and (match := _NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]

    def _next_name(self, position: Position) -> str:
        # Numbered in the order they are made, because a run that went back to an older checkpoint
        # comes to the same position again and must not overwrite what it may still need.
        folders = self._folders()
        match = _NAME.fullmatch(folders[-1].name) if folders else None
        number = int(match[1]) + 1 if match else 1
        stage = re.sub(r"[^\w.-]", "_", position.stage)
        return f"{number:04d}-{stage}-step{position.step}"

    def _retire(self, newest: Path) -> None:
        older = [path for path in self._folders() if path != newest]
        complete = [path for path in older if (path / _MANIFEST).exists()]
        kept = complete[::-1][: self.keep - 1]
        for path in older:
            if path in kept:
                continue
            try:
                # First the manifest: from then on the folder is incomplete, not damaged.
                (path / _MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)
            except OSError as error:
                _log.warning("%s: this old checkpoint cannot be removed: %s", path, error)


def describe_files(folder: Path) -> FileEntries:
    """Returns the entries of every file below `folder`, where whoever wrote them runs."""
    return _describe_files(folder, {})


def _describe_files(folder: Path, described: FileEntries) -> FileEntries:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        name: described.get(name) or {"nbytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in files
        for name in [path.relative_to(folder).as_posix()]
    }


class _Damaged(CheckpointError):
    """A checkpoint that is not as it was written; an older one may be."""


class _Unreadable(_Damaged):
    """A checkpoint that the disk does not give back now; it may do so later."""


def _damage(error: Exception) -> type[_Damaged]:
    gone = FileNotFoundError | NotADirectoryError
    return _Unreadable if isinstance(error, OSError) and not isinstance(error, gone) else _Damaged


def _load(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        found = manifest["format"]
        if found == FORMAT:
            position = Position(
                stage=str(manifest["stage"]),
                stage_index=int(manifest["stage_index"]),
                step=int(manifest["step"]),
            )
            files = {
                str(name): (int(entry["nbytes"]), str(entry["sha256"]))
                for name, entry in manifest["files"].items()
            }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damage(error)(
            "this checkpoint is damaged: its manifest cannot be read",
            where=str(path / _MANIFEST),
            found=str(error),
        ) from error
    if found != FORMAT:
        raise CheckpointError(
            "this checkpoint has another format",
            where=str(path),
            found=f"format {found!r}",
            expected=f"format {FORMAT}",
            hint="resume it with the version of flowrl that wrote it",
        )
    if _STATE not in files:
        raise _Damaged(
            "this checkpoint is damaged: its manifest does not list the driver's state",
            where=str(path / _MANIFEST),
            expected=f"an entry for {_STATE}",
        )
    try:
        for name, (nbytes, sha256) in files.items():
            _verify(path / name, nbytes, sha256)
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _damage(error)(
            "this checkpoint is damaged: one of its files cannot be read",
            where=str(error.filename or path),
            found=error.strerror or str(error),
        ) from error
    return Checkpoint(path=path, position=position, state=state)


def _verify(path: Path, nbytes: int, sha256: str) -> None:
    if not path.is_file():
        found, expected = "no such file", f"{nbytes:,} bytes"
    elif path.stat().st_size != nbytes:
        found, expected = f"{path.stat().st_size:,} bytes", f"{nbytes:,} bytes"
    else:
        digest = sha256_file(path)
        if digest == sha256:
            return
        found, expected = f"sha256 {digest[:12]}...", f"sha256 {sha256[:12]}..."
    raise _Damaged("this checkpoint is damaged", where=str(path), found=found, expected=expected)


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "cannot write a checkpoint",
        where=str(path),
        found=error.strerror or str(error),
        hint="free disk space or give write permission, then resume; older checkpoints are intact",
    )
