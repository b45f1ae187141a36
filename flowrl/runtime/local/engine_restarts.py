"""Engines that fail during a rollout: how a failure is reported, and how often one is restarted.

    call -> WorkerDied, or an unexpected exception -> broken -> lost -> restart -> joined
         -> another FlowError: a mistake of the user's, so it ends the run

An engine that failed `MAX_FAILURES` times without having finished a sample in between is given up.
A sample that breaks engines is given up before that, by the scheduler's limit on its attempts.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from flowrl.backend.protocols import (
    Finished,
    GenerateBackend,
    GenerateRequest,
    Loaded,
    Progress,
    Weights,
    WeightsKind,
)
from flowrl.errors import BackendError, FlowError, WorkerDied
from flowrl.ids import EngineId, SampleId
from flowrl.runtime.transfer.weight_folders import WeightFolders

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILURES = 3
"""Failures of an engine, without a finished sample between them, after which it is given up."""

_MAX_TEXT = 200


@runtime_checkable
class Restartable(Protocol):
    """An engine that can be restarted, without samples, with the newest published weights."""

    def restart(self) -> None:
        """Closes what is left of it and opens another in its place."""
        ...

    def end(self) -> None:
        """Closes it, as it was given up; another driver may restart it."""
        ...


@runtime_checkable
class Monitored(Protocol):
    """An engine that sends messages while it works."""

    def silent_s(self) -> float:
        """Seconds without a message while it had requests."""
        ...


class EngineFailures:
    """The failures of the engines of one driver.

    Attributes:
        broken: Engines that failed and were not restarted or given up yet, with their errors.
        given_up: Engines that failed too often.
    """

    def __init__(self, engines: Mapping[EngineId, GenerateBackend]) -> None:
        self._engines = engines
        self._failures: Counter[EngineId] = Counter()
        self.given_up: set[EngineId] = set()
        self._silent: set[EngineId] = set()
        self.broken: dict[EngineId, Exception] = {}

    def is_alive(self, engine: EngineId) -> bool:
        """True if the engine is neither broken nor given up."""
        return engine not in self.broken and engine not in self.given_up

    def call(self, engine: EngineId, act: Callable[[], T], otherwise: T) -> T:
        """Returns the result of `act`, or `otherwise` if the engine fails in it or is broken."""
        if not self.is_alive(engine):
            return otherwise
        try:
            return act()
        except FlowError as error:
            if not isinstance(error, WorkerDied):
                raise
            self.broken[engine] = error
        except Exception as error:  # whatever a plug-in's library raises
            self.broken[engine] = error
        return otherwise

    def fallen_silent(self, longest_s: float) -> list[EngineId]:
        """Returns engines silent for `longest_s`, each once until it sends a message again."""
        found = []
        for name, engine in self._engines.items():
            alive = self.is_alive(name)
            silent_s = engine.silent_s() if isinstance(engine, Monitored) and alive else 0.0
            if silent_s > longest_s:
                if name not in self._silent:
                    found.append(name)
                self._silent.add(name)
            else:
                self._silent.discard(name)
        return found

    def give_up(self, engine: EngineId, why: str) -> None:
        """Marks the engine as broken, to be closed and restarted."""
        error = WorkerDied("the engine was given up", where=str(engine), found=why)
        self.broken.setdefault(engine, error)

    def forget(self, engine: EngineId) -> None:
        """Forgets an engine that is gone for good."""
        self.broken.pop(engine, None)
        self._failures.pop(engine, None)
        self._silent.discard(engine)

    def ended_some(self, engine: EngineId) -> None:
        """Notes that the engine has finished samples, which clears its failures."""
        self._failures[engine] = 0

    def restart(self, engine: EngineId) -> bool:
        """Restarts a broken engine; returns False if it is given up and others continue.

        Raises:
            WorkerDied: it is given up, and was the last.
            FlowError: the error of opening it.
        """
        error = self.broken.pop(engine)
        self._failures[engine] += 1
        reason = error_text(error)
        worker = self._engines[engine]
        if self._failures[engine] < MAX_FAILURES and isinstance(worker, Restartable):
            _log.warning("%s failed and is restarted: %s", engine, reason)
            worker.restart()
            return True
        self.given_up.add(engine)
        if len(self.given_up) < len(self._engines):
            if isinstance(worker, Restartable):
                worker.end()
            _log.warning("%s broke and is given up; the others go on: %s", engine, reason)
            return False
        if not isinstance(worker, Restartable):
            raise error
        raise WorkerDied(
            f"the engine broke {self._failures[engine]} times without ending a sample",
            where=str(engine),
            found=reason,
            hint="see what it prints on standard error; is there memory enough?",
        ) from error


def error_text(error: Exception) -> str:
    """Returns the error of an engine in one line."""
    if isinstance(error, FlowError):
        return f"{error.what}: {error.found}" if error.found else error.what
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]


class RestartableEngine:
    """A `GenerateBackend` that does what the engine in it does.

    Several drivers use an engine, one after the other; when it failed under one of them and was
    restarted, the others find the new one in its place.

    Args:
        open_engine: Opens an engine.
        folders: The weights that it loads, of which a new engine loads the newest; None if it has
            those of its trainer.
    """

    def __init__(
        self,
        name: EngineId,
        open_engine: Callable[[], GenerateBackend],
        *,
        folders: WeightFolders | None,
    ) -> None:
        self.name = name
        self._open = open_engine
        self._folders = folders
        self._loading: dict[int, Weights] = {}
        self._last: Weights | None = None
        self.engine = open_engine()

    def restart(self) -> None:
        """Closes what is left of the engine and opens another in its place."""
        self.end()
        self.engine = self._open()
        self.load_newest()

    def end(self) -> None:
        """Closes an engine that was given up, and frees what it was sent."""
        with contextlib.suppress(Exception):  # it broke, so it may break in this too
            self.engine.close()
        self.forget()

    def forget(self) -> None:
        """Notes that the engine will not load what it was sent, or it would stay in memory."""
        self._loading.clear()
        if self._folders is not None:
            self._folders.forget(self.name)

    @property
    def num_slots(self) -> int:
        return self.engine.num_slots

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.engine.submit(requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        self.engine.abort(samples)

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        """See `GenerateBackend`.

        Raises:
            BackendError: it has loaded other bytes than were written.
        """
        outputs = self.engine.poll(timeout_s)
        for output in outputs:
            if isinstance(output, Loaded):
                self._confirm(output)
        return outputs

    def _confirm(self, loaded: Loaded) -> None:
        weights = self._loading.pop(loaded.version)
        if weights.kind is not WeightsKind.IN_PLACE and loaded.checksum != weights.checksum:
            raise BackendError(
                f"the engine has loaded other weights than version {loaded.version}",
                where=str(self.name),
                found=f"checksum {loaded.checksum}",
                expected=f"checksum {weights.checksum}, by {weights.kind}",
                hint="resume the run; where it happens again, test the memory of that node",
            )
        if self._folders is not None:
            self._folders.loaded(self.name, loaded.version)

    def load(self, weights: Weights) -> None:
        self._send(weights)

    def _send(self, weights: Weights) -> None:
        self._loading[weights.version] = self._last = weights
        if self._folders is not None:
            self._folders.sent(self.name, weights.version)
        self.engine.load(weights)

    def load_newest(self) -> None:
        """Has the engine load the newest weights, if there are any yet."""
        newest = self._last if self._folders is None else self._folders.latest
        if newest is not None:
            self._send(newest)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()
