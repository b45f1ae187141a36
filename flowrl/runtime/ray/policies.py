"""The run's side of a trainer in a Ray actor, and of the engine that is in the same actor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.backend.batch import Sampler, SequenceBatch, TrainBatch
from flowrl.backend.protocols import Loaded, PolicyContext
from flowrl.config.schema import RuntimeConfig
from flowrl.errors import FlowError, WorkerDied
from flowrl.ids import RoleName, engine_id
from flowrl.runtime.channels import Bulk, Message
from flowrl.runtime.groups import Answer, DataRef, Samples, Stored, WorkerGroup
from flowrl.runtime.local.engine_fleet import RemoteEngine
from flowrl.runtime.local.engine_process import EngineProcess
from flowrl.runtime.ray import ENDED
from flowrl.runtime.ray.channel import Inbox
from flowrl.runtime.ray.clients import OpenActor, late

_CLOSE_S = 5.0


class _EngineBesideTrainer(RemoteEngine):
    """An engine that its actor gives the trainer's weights, also when it opens or is restarted."""

    def load_newest(self) -> None:
        """Does nothing: the actor has given it the newest weights."""

    def _confirm(self, loaded: Loaded) -> None:
        self._loading.pop(loaded.version, None)


class ActorGroup(WorkerGroup):
    """One trainer in an actor; opening returns at once, and calls wait for the model.

    After an error that ended the worker, every call raises it; so it does when the actor is not
    ready in time.

    Args:
        put: Puts a batch into Ray's store.
        open_channel: Starts an actor with `run_policy`.
        opening: Its first message.
        limits: How long the trainer, and an engine next to it, may take to be ready.
    """

    def __init__(
        self,
        role: RoleName,
        put: Callable[[object], Any],
        open_channel: OpenActor,
        opening: Message,
        limits: RuntimeConfig,
    ) -> None:
        self._put_object = put
        self._limits = limits
        self._role = role
        self._lock = threading.Lock()  # of the fields that the channel's thread changes
        self._waiting: dict[int, Answer] = {}
        self._number = 0
        self._error: FlowError | None = None
        self._engine: _EngineChannel | None = None
        self._timer = threading.Timer(limits.start_timeout_s, self._end_late)
        self._timer.daemon = True
        self._channel = open_channel(deliver=self._take)
        self._timer.start()
        self._channel.send(opening)

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        return self._put_object(batch)

    def put_samples(self, samples: Samples, sampler: Sampler | None) -> DataRef[SequenceBatch]:
        """See `WorkerGroup`; the actor lays out what a store has, so it does not come here."""
        rows = samples.stored(sampler)
        if rows is None:
            return super().put_samples(samples, sampler)
        sequences, logprobs = self._channel.assemble(rows)
        return DataRef(handle=sequences, lengths=samples.lengths, logprobs=Stored(logprobs))

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """See `WorkerGroup`."""
        future = Answer()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._number += 1
            number = self._number
            self._waiting[number] = future
        self._channel.send(("call", number, method, list(arguments)))
        return future

    def open_engine(self, backend: str, context: PolicyContext) -> RemoteEngine:
        """Opens the engine next to the trainer, which publishes to it in place."""
        name = engine_id(self._role, 0)
        opening = partial(
            EngineProcess,
            name,
            backend,
            context,
            start_timeout_s=self._limits.start_timeout_s,
            silence_s=self._limits.silence_s,
            open_channel=self._open_engine_channel,
            shares_weights=True,
        )
        return _EngineBesideTrainer(name, opening, folders=None)

    def _open_engine_channel(self) -> _EngineChannel:
        with self._lock:
            self._engine = _EngineChannel(self)
            if self._error is not None:
                self._engine.inbox.put([(ENDED, str(self._error))])
        return self._engine

    def send_to_engine(self, message: Message) -> None:
        """Sends a message of the engine's client."""
        self._channel.send(("engine", message))

    def close(self) -> None:
        """See `WorkerGroup`."""
        self._timer.cancel()
        self._channel.close(_CLOSE_S)

    # In the channel's thread, or the timer's

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case ("ready",):
                    self._timer.cancel()
                case ("returned", int(number), result):
                    with self._lock:
                        future = self._waiting.pop(number)
                    if isinstance(result, Bulk):
                        future.handle, result = result.handle, result.value
                    future.set_result(result)
                case ("raised", int(number), FlowError() as error):
                    with self._lock:
                        future = self._waiting.pop(number)
                    future.set_exception(error)
                case ("engine", *sent):
                    if self._engine is not None:
                        self._engine.inbox.put([tuple(sent)])
                case ("broken", FlowError() as error):
                    self._end(error, message)
                case (kind, how) if kind == ENDED:
                    where = f"roles.{self._role}"
                    died = WorkerDied("the trainer's actor died", where=where, found=str(how))
                    self._end(died, message)
                case _:
                    raise AssertionError(f"a trainer sent {message!r}")

    def _end_late(self) -> None:
        where = f"roles.{self._role}"
        error = late("the trainer's actor", where, self._limits.start_timeout_s)
        self._end(error, (ENDED, str(error)))

    def _end(self, error: FlowError, message: Message) -> None:
        self._timer.cancel()
        with self._lock:
            self._error = self._error or error
            error = self._error
            waiting, self._waiting = self._waiting, {}
            engine = self._engine
        for future in waiting.values():
            future.set_exception(error)
        if engine is not None:
            engine.inbox.put([message])


class _EngineChannel:
    """See `Channel`: the messages of the engine, through the channel of its trainer."""

    def __init__(self, group: ActorGroup) -> None:
        self.inbox = Inbox()
        self.send = group.send_to_engine
        self.fileno, self.receive = self.inbox.fileno, self.inbox.receive
        self.ended = self.inbox.ended

    def share(self, folder: Path) -> object:
        """See `Channel`; the trainer has read that folder."""
        return None

    def kill(self, grace_s: float = 0.0) -> None:
        """See `Channel`; the trainer lives on."""

    def close(self, grace_s: float) -> None:
        """See `Channel`."""
        self.inbox.close()
