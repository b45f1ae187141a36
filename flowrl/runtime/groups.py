"""Groups of workers that do a role's work together, and batches that calls name instead of holding.

    ref = group.put(batch)                       # once, however many calls name it
    future = group.call("logprobs", ref, 1.0, dispatch=Dispatch.ROWS)
    future.result()

Each worker makes its calls in the order of sending. Calls of this process are made at once, so
their futures are done. Calls of actors (`flowrl.runtime.ray`) go on while the caller does.

What a store keeps already is not put again: samples are named by where their tokens are, and fields
of a `TrainBatch` by `Stored`. A worker resolves the names of a call before it makes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from flowrl.backend.batch import Ints, Sampler, SequenceBatch, TrainBatch
from flowrl.runtime.checkpoint.store import describe_files
from flowrl.runtime.spans import SPANS
from flowrl.runtime.stored_tokens import StoredRows

T = TypeVar("T")


class Dispatch(StrEnum):
    """Which workers of a group make a call, and with which rows of the batches that it names."""

    ONE = "one"
    """The first worker alone."""

    ALL = "all"
    """Every worker, with the same arguments; the result is the first one's."""

    ROWS = "rows"
    """Every worker, with its share of the rows; the results, one a row or token, are joined."""


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
    """See the module.

    Args:
        size: Workers. Each is a data-parallel rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size

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

    def call(self, method: str, *arguments: object, dispatch: Dispatch) -> Future[Any]:
        """Has workers call a method; returns at once."""
        if self.size == 1 or dispatch is Dispatch.ONE:
            return self._ask(0, method, arguments)
        if dispatch is Dispatch.ALL:
            return _first([self._ask(rank, method, arguments) for rank in range(self.size)])
        return _joined(
            [
                self._ask(rank, method, [self._share(each, rank) for each in arguments])
                for rank in range(self.size)
            ]
        )

    def _share(self, argument: object, rank: int) -> object:
        if not isinstance(argument, DataRef):
            return argument
        return argument.select(np.array_split(np.arange(len(argument)), self.size)[rank].tolist())

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        raise NotImplementedError

    def _ask(self, rank: int, method: str, arguments: Sequence[object]) -> Future[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the workers; idempotent."""
        raise NotImplementedError


class LocalGroup(WorkerGroup):
    """Workers that are objects of this process; a call's error is raised by the call."""

    def __init__(self, name: str, workers: Sequence[Any]) -> None:
        super().__init__(len(workers))
        self._name = name
        self._workers = workers

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        return batch if isinstance(batch, SequenceBatch) else _with_arrays(batch, lambda h: h)

    def _ask(self, rank: int, method: str, arguments: Sequence[object]) -> Future[Any]:
        found = [resolved(argument, lambda handle: handle) for argument in arguments]
        future: Future[Any] = Future()
        with SPANS.of(self._name if self.size == 1 else f"{self._name}[{rank}]", method):
            future.set_result(performed(self._workers[rank], method, found))
        return future

    def close(self) -> None:
        """See `WorkerGroup`."""
        for worker in self._workers:
            worker.close()


def _first(futures: Sequence[Future[Any]]) -> Future[Any]:
    return _gathered(futures, lambda results: results[0])


def _joined(futures: Sequence[Future[Any]]) -> Future[Any]:
    return _gathered(futures, np.concatenate)


def _gathered(futures: Sequence[Future[Any]], join: Callable[[list[Any]], object]) -> Future[Any]:
    """Returns a future of all results, or of the error of the first worker that raised one."""
    gathered: Future[Any] = Future()
    lock = threading.Lock()  # the last two may be done at the same time, in threads of their own
    num_waited = len(futures)

    def done(_: Future[Any]) -> None:
        nonlocal num_waited
        with lock:
            num_waited -= 1
            if num_waited:
                return
        try:
            gathered.set_result(join([future.result() for future in futures]))
        except BaseException as error:
            gathered.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return gathered
