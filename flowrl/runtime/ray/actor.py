"""A worker in a Ray actor, and the mailbox through which it meets the run.

    send -> mailbox -> the worker's own thread -> mailbox -> take

The actor itself only passes messages on; the worker (an engine, scorers, an environment) is a
function that gets the mailbox and runs until nothing more comes. Calls of `send` run one after the
other, in a thread of theirs, and so do those of `take`, which wait for messages.

Large `Bulk` of messages is a result of `take` of its own. Ray's store keeps it as long as the run
names it, also when the actor has died.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from io import BytesIO
from pathlib import Path
from queue import Empty, SimpleQueue
from stat import S_ISREG
from tempfile import gettempdir
from typing import Any, BinaryIO, cast

import numpy as np
import ray

from flowrl.backend.batch import Floats, SequenceBatch
from flowrl.backend.weights import Bytes
from flowrl.runtime.channels import Bulk, Mailbox, Message
from flowrl.runtime.ray import ENDED, OUTPUT
from flowrl.runtime.spans import SPANS
from flowrl.runtime.stored_tokens import StoredRows
from flowrl.runtime.transfer.weight_folders import WeightFolders
from flowrl.user_files import COPIES

VISIBLE_DEVICES = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable that limits a process to some accelerators, by Ray's name of their kind."""


# Seconds after which a `take` without messages returns, so that a run that is gone is noticed.
_TAKE_S = 10.0
_NUM_NEWEST = 256
_MAX_OUTPUT = 1 << 20


class _Mailbox:
    """See `Mailbox`; `put` and `close` are the run's side of it."""

    def __init__(self, outgoing: SimpleQueue[Message]) -> None:
        self._outgoing = outgoing
        self._incoming: deque[Message | None] = deque()
        self._readable, self._wake = os.pipe()
        self._num_folders = 0

    @cached_property
    def _folders(self) -> WeightFolders:
        return WeightFolders(Path(gettempdir()))

    def put(self, messages: tuple[Message, ...]) -> None:
        self._incoming += messages
        os.write(self._wake, b"\0")

    def close(self) -> None:
        self._incoming.append(None)
        os.write(self._wake, b"\0")

    def end(self) -> None:
        if "_folders" in self.__dict__:
            self._folders.close()

    def fileno(self) -> int:
        return self._readable

    def receive(self) -> list[Message] | None:
        os.read(self._readable, _NUM_NEWEST)
        messages: list[Message] = []
        while self._incoming:
            message = self._incoming.popleft()
            if message is None:
                return None
            messages.append(message)
        return messages

    def send(self, message: Message) -> None:
        self._outgoing.put(message)
        if (spans := SPANS.message()) is not None:
            self._outgoing.put(spans)

    @contextmanager
    def folder(self, shared: object) -> Iterator[Path]:
        """Writes the files of an object that the run has put, into shared memory of this node."""
        files: dict[str, np.ndarray] = ray.get(cast("ray.ObjectRef", shared))
        self._num_folders += 1
        folder = self._folders.new(self._num_folders)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content.tofile(path)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class InStore:
    """The handle of a part of an object in Ray's store.

    Attributes:
        reference: Of a sequence.
        place: The part's place in it.
    """

    reference: Any
    place: int


def from_store(handle: Any) -> Any:
    """Returns what a handle names, mapped; see `flowrl.runtime.groups.resolved`."""
    if isinstance(handle, InStore):
        return ray.get(handle.reference)[handle.place]
    return ray.get(handle)


@dataclass(frozen=True, slots=True)
class Placed:
    """Stands for the value of `Bulk` that is not in its message.

    Attributes:
        place: Its place among those of all messages.
    """

    place: int


def _parted(messages: list[Message], least: int) -> tuple[list[Message], list[Any]]:
    """Returns messages without their bulk, and that; together less than `least` bytes stay."""
    found = [part.value for each in messages for part in each if isinstance(part, Bulk)]
    if sum(value.nbytes for value in found) < least:
        return messages, []
    places = iter(range(len(found)))
    return [
        tuple(Bulk(Placed(next(places))) if isinstance(part, Bulk) else part for part in each)
        for each in messages
    ], found


@dataclass(frozen=True, slots=True)
class StoredBuckets:
    """Buckets of weights in Ray's store, each mapped when it is its turn."""

    references: Sequence[Any]

    def __iter__(self) -> Iterator[Bytes]:
        for reference in self.references:
            yield ray.get(reference)


def file_bytes(folder: Path) -> dict[str, np.ndarray]:
    """Returns the content of each file in a folder, by its name relative to the folder."""
    return {
        str(path.relative_to(folder)): np.asarray(np.memmap(path, np.uint8, mode="r"))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _printed() -> BinaryIO:
    """Returns what this process prints from now on; Ray has it print into a file of the node."""
    with suppress(OSError):
        if S_ISREG(os.fstat(2).st_mode):
            file = open("/proc/self/fd/2", "rb")  # noqa: PTH123, SIM115
            file.seek(0, os.SEEK_END)
            return file
    return BytesIO()


class WorkerActor:
    """See the module.

    Args:
        target: The worker as `module:function`; the function takes a `Mailbox`.
        folder: Working folder of the run, which relative paths of the user's files are of.
        path: Folders in which the run finds modules.
        copied: True if the working folder, in which Ray starts this process, has the user's files.
        stored_bytes: Bulk of so many bytes is not in its message.
    """

    def __init__(
        self, target: str, folder: str, path: Sequence[str], copied: bool, stored_bytes: int
    ) -> None:
        # Before any library is there that looks for accelerators.
        for kind, ids in ray.get_runtime_context().get_accelerator_ids().items():
            if ids and kind in VISIBLE_DEVICES:
                os.environ[VISIBLE_DEVICES[kind]] = ",".join(ids)
        places = [folder]
        if copied:
            os.environ[COPIES] = here = os.getcwd()  # noqa: PTH109
            copies = [str(Path(here, *Path(entry).parts[1:])) for entry in (folder, *path)]
            places, path = [folder, copies[0]], [*path, *filter(os.path.isdir, copies)]
        sys.path += [entry for entry in path if entry not in sys.path]
        # On a node without the run's folder, whoever needs another file of it says so.
        if (place := next(filter(os.path.isdir, places), None)) is not None:
            os.chdir(place)
        # What libraries print reaches the run's standard error: its output is the command's.
        os.dup2(2, 1)
        self._printed = _printed()
        self._stored_bytes = stored_bytes
        self._outgoing: SimpleQueue[Message] = SimpleQueue()
        self._mailbox = _Mailbox(self._outgoing)
        module, _, name = target.partition(":")
        work = cast("Callable[[Mailbox], None]", getattr(import_module(module), name))
        # Linux kills the children of a worker with the thread that started them, so it is one that
        # lives as long as the worker.
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def send(self, *messages: Message) -> None:
        """Puts messages into the mailbox."""
        self._mailbox.put(messages)

    def close(self) -> None:
        """Shows the worker that nothing more comes."""
        self._mailbox.close()

    def assemble(self, rows: StoredRows) -> tuple[SequenceBatch, Floats]:
        """Returns the batch of samples, and its behaviour logprobs."""
        return rows.batch(from_store)

    def take(self) -> tuple[list[Message], list[Any]]:
        """Returns the worker's new messages, and their bulk if it is large.

        Waits for the first message, but not for ever.
        """
        messages: list[Message] = []
        with suppress(Empty):
            messages.append(self._outgoing.get(timeout=_TAKE_S))
            while not self._outgoing.empty():
                messages.append(self._outgoing.get())
        if output := self._printed.read(_MAX_OUTPUT):
            messages.insert(0, (OUTPUT, output))  # the end of the worker comes last
        return _parted(messages, self._stored_bytes)

    def _run(self, work: Callable[[Mailbox], None]) -> None:
        how = "exit code 0"
        try:
            work(self._mailbox)
        except BaseException as reason:
            traceback.print_exc()
            sys.stderr.flush()
            how = " ".join(traceback.format_exception_only(reason)[-1].split())
        finally:
            self._mailbox.end()
        self._outgoing.put((ENDED, how))
