"""The journal of a run's rollouts: every event of every scheduler, in files of bounded size.

    journal/STAGE/ROLLOUT/000001.jsonl
    journal/STAGE/ROLLOUT/000002.jsonl      begins with the whole state, so each file is complete
    ...

The events of a step are written at its end with one call, so a file holds whole steps; only a run
that ended with an error has a partial step at its end. When a file is full the next one begins;
when there are too many the oldest is removed. A resumed run begins a new file with the state from
which it continues; later events in the files before are void.

`SampleFiles.of_sample` reads the files that concern one sample.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import SchedulerError
from flowrl.ids import NodeId, SampleId
from flowrl.rollout.events import Event
from flowrl.rollout.journal import Journal, JournalWriter, read_journal
from flowrl.rollout.scheduler import RolloutScheduler

JOURNALS = "journal"
"""The folder of a run that holds them."""

NUM_FILES = 16
"""Files of a journal; the oldest one is removed when another is begun."""


class RolloutJournal:
    """The journal of one rollout of a stage.

        note (before each step of the scheduler) ... flush (at the end of a step) ... close

    Args:
        folder: The folder of its files.
        max_bytes: Approximate size of the events in all of its files together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = max_bytes // NUM_FILES
        self._text = io.StringIO()
        self._writer = JournalWriter(self._text)
        self._descriptor: int | None = None
        self._size = 0  # of the events in the file
        self._head = 0  # characters of the head, while it is not written
        self._scheduler: RolloutScheduler | None = None

    def begin(self, scheduler: RolloutScheduler) -> None:
        """Begins a file; the scheduler has made no step that is not in its state."""
        self._scheduler = scheduler
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.stem) for path in self._files()]
        path = self._folder / f"{max(numbers, default=0) + 1:06d}.jsonl"
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = 0
        for old in self._files()[:-NUM_FILES]:
            old.unlink(missing_ok=True)
        self._writer.begin(scheduler if scheduler.last_event_id >= 0 else scheduler.settings)
        # Not counted, or files of a rollout with a large state would hold nothing else.
        self._head = self._text.tell()

    def note(self, event: Event) -> None:
        """Notes an event before the scheduler steps it."""
        self._writer.event(event)

    def flush(self) -> None:
        """Writes a step's events, and begins another file if this one is full."""
        text = self._text.getvalue()
        if not text or self._descriptor is None:
            return
        self._text.seek(0)
        self._text.truncate()
        data = memoryview(text.encode())
        self._size += len(data) - self._head
        self._head = 0
        while data:
            data = data[os.write(self._descriptor, data) :]
        if self._size > self._file_bytes:
            assert self._scheduler is not None
            self.begin(self._scheduler)

    def close(self) -> None:
        """Writes what is left; idempotent."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _files(self) -> list[Path]:
        return _files(self._folder)


@dataclass(slots=True, kw_only=True)
class RolloutJournals:
    """The journals of a run.

    Attributes:
        folder: Folder of the run.
        max_bytes: Size of one rollout's files; 0 writes none.
    """

    folder: Path
    max_bytes: int

    def open(self, stage: str, rollout: NodeId) -> RolloutJournal | None:
        """Opens the journal of a rollout; None if none is written."""
        if not self.max_bytes:
            return None
        return RolloutJournal(self.folder / JOURNALS / stage / rollout, self.max_bytes)


# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFiles:
    """The journal files of one rollout.

    Attributes:
        stage: Name of the stage.
        rollout: The node that generates.
        files: The files, oldest first.
    """

    stage: str
    rollout: str
    files: Sequence[Path]

    def of_sample(self, sample: SampleId) -> Journal | None:
        """Returns the journal from the offer of a sample's group to the sample's last event.

        Returns None if no file mentions the sample. Other files are not read.
        """
        group = sample.rpartition("/")[0]
        words = (f'"{group}"'.encode(), f'"{sample}"'.encode())
        numbers = [number for number, path in enumerate(self.files) if _mentions(path, words)]
        return _joined(self.files[numbers[0] : numbers[-1] + 1]) if numbers else None

    def groups(self) -> dict[str, int]:
        """Groups that were offered, with the number of members that they began with."""
        found: dict[str, int] = {}
        for path in self.files:
            with path.open(encoding="utf-8") as file:
                head = read_journal([file.readline()])
                members = head.open().settings.num_members
                for line in file:
                    # Most lines are of other events, and there may be a million.
                    if '"PromptsOffered"' in line and line.endswith("\n"):
                        for group in json.loads(line)["groups"]:
                            found[group] = members
        return found


def rollout_journals(folder: Path) -> list[SampleFiles]:
    """Returns the journals in a run's folder."""
    found = []
    for path in sorted((folder / JOURNALS).glob("*/*")):
        files = _written(path)
        if files:
            found.append(SampleFiles(stage=path.parent.name, rollout=path.name, files=files))
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdecimal())


def _written(folder: Path) -> list[Path]:
    """Files that hold something; the last one may have just been begun."""
    return [path for path in _files(folder) if path.stat().st_size]


def _mentions(path: Path, words: Sequence[bytes]) -> bool:
    data = path.read_bytes()
    return any(word in data for word in words)


def _joined(files: Sequence[Path]) -> Journal:
    """Files that follow each other, as one journal.

    Raises:
        SchedulerError: a file that cannot be read; names it.
    """
    head: dict[str, object] = {}
    events: list[Event] = []
    torn = False
    for path in files:
        try:
            with path.open(encoding="utf-8") as file:
                part = read_journal(file)
        except SchedulerError as error:
            error.where = f"{path}: {error.where}" if error.where else str(path)
            raise
        state = part.head.get("state")
        last = -1 if state is None else int(state["last_event_id"])
        while events and events[-1].id > last:
            events.pop()  # of a process that was stopped later than what it left behind
        if not events:
            head = part.head
        events += part.events
        torn = part.torn
    return Journal(head=head, events=tuple(events), rewinds=0, torn=torn)
