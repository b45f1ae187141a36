"""The channel to a worker in a Ray actor: calls of the actor, and objects of Ray's store."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from flowrl.runtime.channels import Bulk, Message
from flowrl.runtime.ray import ENDED, OUTPUT
from flowrl.runtime.ray.actor import InStore, Placed
from flowrl.runtime.ray.own_node import OwnNode
from flowrl.runtime.spans import SPANS
from flowrl.runtime.stored_tokens import StoredRows

_log = logging.getLogger(__name__)

_NUM_WAKES = 4096
_MAX_TEXT = 200
_REAP_S = 10.0
_SILENT_S = 180.0
"""Seconds after which a worker counts as ended; it answers every ten, but for its start."""


class Inbox:
    """Messages that one thread puts in and another one takes, which can wait for them."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._ended: str | None = None
        self._closed = False
        self._lock = threading.Lock()  # held while the pipe is closed or written
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        """See `Channel`."""
        return self._readable

    def put(self, messages: Sequence[Message]) -> None:
        """Adds messages; `(ENDED, how)` is the last one."""
        self._messages += messages
        with self._lock:
            if not self._closed:
                os.write(self._writable, b"\0")

    def receive(self, timeout_s: float) -> list[Message]:
        """See `Channel`."""
        poller = select.poll()
        poller.register(self._readable, select.POLLIN)
        if poller.poll(1000.0 * timeout_s):
            os.read(self._readable, _NUM_WAKES)
        messages: list[Message] = []
        while self._messages:
            message = self._messages.popleft()
            if message[0] == ENDED:
                self._ended = str(message[1])
            else:
                messages.append(message)
        return messages

    def ended(self) -> str | None:
        """See `Channel`."""
        return self._ended

    def close(self) -> None:
        """Closes the descriptors; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._readable)
                os.close(self._writable)


class ActorChannel:
    """See `Channel`. A thread of its own takes the actor's messages.

    Args:
        actor: Handle of a `WorkerActor`.
        node: The node of this process, into whose store large messages go.
        put: Puts the files of a folder into Ray's store.
        log: Gets what the actor prints.
        deliver: Gets the messages in that thread, `(ENDED, how)` as the last one; by default they
            wait for `receive`.
    """

    def __init__(
        self,
        actor: Any,
        node: OwnNode,
        put: Callable[[Path], Any],
        log: Callable[[bytes], None],
        deliver: Callable[[list[Message]], None] | None = None,
    ) -> None:
        self._actor = actor
        self._node = node
        self._send = actor.send.options(concurrency_group="inbox")
        self._close = actor.close.options(concurrency_group="inbox")
        self._assemble = actor.assemble.options(concurrency_group="inbox")
        self._take = actor.take.options(concurrency_group="outbox", num_returns=2)
        self._put = put
        self._log = log
        self._inbox = Inbox()
        self._deliver = self._inbox.put if deliver is None else deliver
        self._over = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="flowrl-ray-channel", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """See `Channel`."""
        return self._inbox.fileno()

    def send(self, message: Message) -> None:
        """See `Channel`.

        Raises:
            WorkerDied: the node of this process has died.
        """
        if not self._over.is_set():
            self._node.require_alive()
            self._send.remote(message)

    def assemble(self, rows: StoredRows) -> tuple[InStore, InStore]:
        """Has the actor make a batch of samples; returns its handle, and that of its logprobs.

        Raises:
            WorkerDied: the node of this process has died.
        """
        self._node.require_alive()
        made = self._assemble.remote(rows)
        return InStore(made, 0), InStore(made, 1)

    def receive(self, timeout_s: float) -> list[Message]:
        """See `Channel`."""
        return self._inbox.receive(timeout_s)

    def share(self, folder: Path) -> object:
        """See `Channel`: an object with the folder's files."""
        return self._put(folder)

    def ended(self) -> str | None:
        """See `Channel`."""
        return self._inbox.ended()

    def kill(self, grace_s: float = 0.0) -> None:
        """See `Channel`."""
        self._over.wait(grace_s)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
        # Its thread must be done with Ray before somebody leaves the cluster.
        self._over.wait(_REAP_S)

    def close(self, grace_s: float) -> None:
        """See `Channel`."""
        if self._closed:
            return
        if grace_s and not self._over.is_set():
            self._close.remote()
        self.kill(grace_s)
        self._closed = True
        self._inbox.close()

    # In the channel's thread

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                messages = self._taken()
            except ray.exceptions.GetTimeoutError:
                messages = [(ENDED, f"its process gave no sign of life for {_SILENT_S:g} s")]
            except Exception as reason:  # the actor died, or the cluster is gone
                messages = [(ENDED, _described(reason))]
            if any(message[0] == ENDED for message in messages):
                self._over.set()
            try:
                if messages := self._without_output(SPANS.without(messages)):
                    self._deliver(messages)
            except Exception as reason:
                _log.exception("a worker's message cannot be taken")
                self._over.set()
                self._deliver([(ENDED, _described(reason))])

    def _taken(self) -> list[Message]:
        """Returns the actor's messages, whose bulk is mapped from the store of this node.

        So the bulk of what was told is here, also when the actor's node has died.
        """
        sent, stored = self._take.remote()
        messages: list[Message] = ray.get(sent, timeout=_SILENT_S)
        bulk: list[Any] | None = None
        for number, message in enumerate(messages):
            if any(isinstance(part, Bulk) and isinstance(part.value, Placed) for part in message):
                bulk = ray.get(stored, timeout=_SILENT_S) if bulk is None else bulk
                messages[number] = tuple(_mapped(part, stored, bulk) for part in message)
        return messages

    def _without_output(self, messages: Sequence[Message]) -> list[Message]:
        others = []
        for message in messages:
            match message:
                case (kind, bytes(output)) if kind == OUTPUT:
                    self._log(output)
                case _:
                    others.append(message)
        return others


def _mapped(part: object, stored: Any, bulk: Sequence[Any]) -> object:
    match part:
        case Bulk(Placed(place)):
            return Bulk(bulk[place], InStore(stored, place))
        case _:
            return part


def _described(reason: Exception) -> str:
    """Returns Ray's account of an actor's end in one line."""
    text = " ".join(str(reason).split())
    _, found, cause = text.partition("The actor is dead because ")
    return (cause if found else f"{type(reason).__name__}: {text}")[:_MAX_TEXT]
