"""Writes what a run does, and what its workers did, into its folder about once a second.

A thread of its own does it, so that no step waits for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from flowrl.errors import FlowError
from flowrl.observe.run_status import RunStatus, WorkerStatus, write_status
from flowrl.observe.trace import WAIT, Span, TraceFile
from flowrl.runtime.spans import SPANS

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
_CLOSE_S = 5.0


class StatusWriter:
    """Writes while its block runs, and once more at its end.

        with StatusWriter(folder, look) as writer:
            ...
            writer.beat()

    Args:
        folder: Folder of the run.
        look: Returns what the run does; called in the writer's thread.
        trace_bytes: Size of the trace; 0 writes none.
    """

    def __init__(self, folder: Path, look: Callable[[], RunStatus], trace_bytes: int = 0) -> None:
        self._folder = folder
        self._trace = TraceFile(folder, trace_bytes) if trace_bytes else None
        self._look = look
        self._last: dict[str, Span] = {}  # by worker
        self._seen: RunStatus | None = None
        self._warned = False
        self._moved_s = time.time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowrl-status", daemon=True)

    def beat(self) -> None:
        """Notes that something moved."""
        self._moved_s = time.time()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._write_spans()
            if status := self._last_look():
                self._write(status)
            self._ended.wait(_EVERY_S)

    def _last_look(self) -> RunStatus | None:
        """Returns what can be seen now, or at the last look where it changes meanwhile."""
        # Whatever is read while another thread writes it can fail in any way.
        with contextlib.suppress(Exception):
            self._seen = self._look()
        return self._seen

    def _write(self, status: RunStatus) -> None:
        workers = [_worker(self._last[name]) for name in sorted(self._last)]
        now = replace(status, written_s=time.time(), moved_s=self._moved_s, workers=workers)
        self._guarded(lambda: write_status(self._folder, now))

    def _write_spans(self) -> None:
        trace, spans = self._trace, SPANS.take()
        self._last |= {span.worker: span for span in sorted(spans, key=lambda span: span.end_s)}
        if spans and trace is not None:
            self._guarded(lambda: trace.append(spans))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as reason:  # a full disk ends no run here; its own files will
            if not self._warned:
                _log.warning("no status is written: %s", reason)
            self._warned = True

    def __enter__(self) -> StatusWriter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(_CLOSE_S)
        state = "ended" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt):
            state = "stopped"
        text = f"{error}" if isinstance(error, FlowError) else f"{type(error).__name__}: {error}"
        self._write_spans()
        if self._trace is not None:
            self._trace.close()
        if status := self._last_look():
            error_text = text if state == "failed" else ""
            self._write(replace(status, state=state, error=error_text, rollouts=()))


def _worker(span: Span) -> WorkerStatus:
    did = f"waited for {span.waits_for}" if span.operation == WAIT else span.operation
    return WorkerStatus(name=span.worker, node=span.where, did=did, ended_s=span.end_s)
