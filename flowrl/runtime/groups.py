"""The ranks of a role's trainer, called as one, and batches that calls name instead of holding.

    ref = group.put(batch)                       # once, however many calls name it
    future = group.call("logprobs", ref, 1.0)
    future.result()

Calls are made in the order of sending; ranks divide a batch themselves. Calls of this process are
made at once, so their futures are done. Calls of actors (`flowrl.runtime.ray`) go on while the
caller does.

What a store keeps already is not put again: samples are named by where their tokens are, and fields
of a `TrainBatch` by `Stored`. A worker resolves the names of a call before it makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy.typing as npt

from flowrl.backend.batch import Ints, Sampler, SequenceBatch, TrainBatch
from flowrl.runtime.checkpoint.store import describe_files
from flowrl.runtime.spans import SPANS
from flowrl.runtime.stored_tokens import StoredRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """A field of a `TrainBatch` that a store keeps.

    Attributes:
        handle: What workers find it by.
        here: The array as this process maps it, which workers are not sent.
    """

    handle: object
    here: npt.NDArray[Any] | None = None

    def __reduce__(self) -> tuple[type[Stored], tuple[object]]:
        return Stored, (self.handle,)


@dataclass(frozen=True, slots=True)
class PerSample:
    """A field of a `TrainBatch` with one value `[N]` a sample, which workers repeat over tokens."""

    values: npt.NDArray[Any]


class Answer(Future[Any]):
    """The result of a call.

    Attributes:
        handle: What other workers find it by, if it is an array that a store keeps; set before it
            is done.
    """

    handle: object | None = None


class Samples(Protocol):
    """The samples of a step that workers are to find."""

    @property
    def lengths(self) -> Ints:
        """int64 `[N]`, tokens of each."""
        ...

    @property
    def sequences(self) -> SequenceBatch:
        """Their tokens, in the memory of this process."""
        ...

    def stored(self, sampler: Sampler | None) -> StoredRows | None:
        """Returns them by name; None where no store has tokens of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRef(Generic[T]):
    """A batch that was put where workers find it.

    Attributes:
        handle: The batch itself in this process, or a reference to it in a store, as Ray has.
        lengths: int64 `[N]`, tokens of each sample.
        rows: The samples that are meant, in order; None for all of them.
        logprobs: Behaviour logprobs of all of them, where the store has those too.
    """

    handle: object
    lengths: Ints
    rows: tuple[int, ...] | None = None
    logprobs: Stored | None = None

    def __len__(self) -> int:
        return len(self.lengths) if self.rows is None else len(self.rows)

    def select(self, rows: Sequence[int]) -> DataRef[T]:
        """Names some of the samples; nothing is copied."""
        named = rows if self.rows is None else [self.rows[row] for row in rows]
        return replace(self, rows=tuple(named))


def resolved(argument: object, get: Callable[[object], object]) -> object:
    """Returns the argument of a call with the batches that it names.

    Args:
        get: Returns the batch of a handle.
    """
    if isinstance(argument, list | tuple):
        return [resolved(each, get) for each in argument]
    if not isinstance(argument, DataRef):
        return argument
    batch = get(argument.handle)
    if isinstance(batch, TrainBatch):
        batch = _with_arrays(batch, get)
    if argument.rows is None:
        return batch
    assert isinstance(batch, SequenceBatch | TrainBatch)
    return batch.select(argument.rows)


def _with_arrays(batch: TrainBatch, get: Callable[[object], object]) -> TrainBatch:
    """Returns a batch with the sequences and the arrays that it names."""
    sequences = cast(SequenceBatch, resolved(batch.sequences, get))
    arrays: dict[str, Any] = {}
    for field in fields(batch):
        match getattr(batch, field.name):
            case Stored(handle, here):
                arrays[field.name] = get(handle) if here is None else here
            case PerSample(values):
                arrays[field.name] = sequences.over_tokens(values)
    return replace(batch, sequences=sequences, **arrays)


def performed(worker: object, method: str, arguments: Sequence[object]) -> object:
    """Returns the result of a worker's method; of `save`, the entries of the files it has written.

    So checksums are computed where files are written, and not by the driver.
    """
    result: object = getattr(worker, method)(*arguments)
    if method != "save":
        return result
    (folder,) = arguments
    assert isinstance(folder, Path)
    return describe_files(folder)


class WorkerGroup:
    """See the module."""

    def put(self, batch: SequenceBatch | TrainBatch) -> DataRef[Any]:
        """Puts a batch where every worker finds it.

        The sequences of a `TrainBatch` may be the reference to sequences that were put before, and
        its arrays may be `Stored` or `PerSample`.
        """
        sequences: SequenceBatch | DataRef[Any] = (
            batch if isinstance(batch, SequenceBatch) else batch.sequences
        )
        return DataRef(handle=self._put(batch), lengths=sequences.lengths)

    def put_samples(self, samples: Samples, sampler: Sampler | None) -> DataRef[SequenceBatch]:
        """Puts the tokens of samples where every worker finds them.

        Args:
            sampler: What their logprobs are to repeat.
        """
        sequences = samples.sequences
        return self.put(sequences if sampler is None else replace(sequences, sampler=sampler))

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Has the ranks call a method of `TrainBackend`; returns at once."""
        raise NotImplementedError

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the workers; idempotent."""
        raise NotImplementedError


class LocalGroup(WorkerGroup):
    """A trainer of this process; a call's error is raised by the call."""

    def __init__(self, name: str, worker: Any) -> None:
        self._name = name
        self._worker = worker

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """See `WorkerGroup`."""
        found = [resolved(argument, lambda handle: handle) for argument in arguments]
        future: Future[Any] = Future()
        with SPANS.of(self._name, method):
            future.set_result(performed(self._worker, method, found))
        return future

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        return batch if isinstance(batch, SequenceBatch) else _with_arrays(batch, lambda h: h)

    def close(self) -> None:
        """See `WorkerGroup`."""
        self._worker.close()
