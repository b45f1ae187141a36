"""Writes what a run does into its folder, about once a second, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from flowrl.observe.run_status import RunStatus, write_status

__all__ = ["StatusWriter"]

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
    """

    def __init__(self, folder: Path, look: Callable[[], RunStatus]) -> None:
        self._folder = folder
        self._look = look
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
        now = replace(status, written_s=time.time(), moved_s=self._moved_s)
        try:
            write_status(self._folder, now)
        except OSError as reason:  # a full disk ends no run here; its own files will
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
        text = "" if state != "failed" else f"{error}" or type(error).__name__
        if status := self._last_look():
            self._write(replace(status, state=state, error=text, rollouts=()))
