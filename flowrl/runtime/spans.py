"""The spans of this process: noted where something is done, and taken by who writes or sends them.

    with SPANS.of("actor.train", "update"):
        ...

A process of a worker sends them along with its messages (`SocketMailbox`, `WorkerActor`); the
process of the run adds them to its own, which `StatusWriter` writes once a second, in its thread.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

from flowrl.observe.trace import WAIT, Span
from flowrl.runtime.channels import Message

_GAP_S = 0.005
"""Calls of one operation that follow each other within this time become one span."""
_MOST = 20_000
"""Spans that are kept while nobody takes them."""
_KIND = "spans"


class Spans:
    """See the module; may be called by several threads."""

    def __init__(self) -> None:
        self._where = socket.gethostname()
        self._lock = threading.Lock()
        self._ended: list[Span] = []
        self._last: dict[str, Span] = {}  # of each worker, which its next call may extend

    @staticmethod
    def now() -> float:
        """Returns the time as `add` takes it."""
        return time.time()

    def add(
        self, worker: str, operation: str, begin_s: float, end_s: float, waits_for: str = ""
    ) -> None:
        """Notes a call that is over."""
        span = Span(
            where=self._where,
            worker=worker,
            operation=operation,
            begin_s=begin_s,
            end_s=end_s,
            waits_for=waits_for,
        )
        with self._lock:
            self._add(span)

    def _add(self, span: Span) -> None:
        last = self._last.get(span.worker)
        if last is not None:
            if _is_one(last, span):
                calls = last.calls + span.calls
                span = replace(span, begin_s=last.begin_s, calls=calls)
            elif len(self._ended) < _MOST:
                self._ended.append(last)
        self._last[span.worker] = span

    @contextmanager
    def of(self, worker: str, operation: str, waits_for: str = "") -> Iterator[None]:
        """Notes what the block does."""
        began = time.time()
        try:
            yield
        finally:
            self.add(worker, operation, began, time.time(), waits_for)

    def waiting(self, worker: str, waits_for: str) -> AbstractContextManager[None]:
        """Notes that a worker waits in the block."""
        return self.of(worker, WAIT, waits_for)

    def waiting_for(
        self, future: Future[Any], worker: str, waits_for: str
    ) -> AbstractContextManager[None]:
        """Notes that a worker waits for a result in the block, unless that is there already."""
        return nullcontext() if future.done() else self.waiting(worker, waits_for)

    def take(self) -> list[Span]:
        """Returns the spans since the last call."""
        with self._lock:
            taken = [*self._ended, *self._last.values()]
            self._ended.clear()
            self._last.clear()
        return taken

    def message(self) -> Message | None:
        """Returns the spans since the last call as a message to the process of the run."""
        spans = self.take()
        return (_KIND, spans) if spans else None

    def without(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the other messages of a worker, and takes up its spans."""
        others = []
        for message in messages:
            match message:
                case (kind, list(spans)) if kind == _KIND:
                    with self._lock:
                        for span in spans:
                            self._add(cast(Span, span))
                case _:
                    others.append(message)
        return others


def _is_one(last: Span, span: Span) -> bool:
    """True if a span goes on where the last one of its worker ended."""
    return (
        span.begin_s - last.end_s < _GAP_S
        and span.operation == last.operation
        and span.waits_for == last.waits_for
        and span.where == last.where
    )


SPANS = Spans()
"""Those of this process."""

DRIVER = "driver"
"""The thread of a run that trains: its steps, what they wait for, evaluations and checkpoints."""
