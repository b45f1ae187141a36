"""An engine that can be opened anew, for all who hold it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrl.backend.protocols import Finished, GenerateBackend, GenerateRequest, Progress
from flowrl.ids import SampleId

__all__ = ["RestartableEngine"]


class RestartableEngine:
    """A `GenerateBackend` that does what the engine in it does.

    Several drivers hold an engine, one after the other; when it broke under one of them and was
    opened anew, the others find the new one in its place.

    Args:
        open_engine: Opens an engine.
        serve: Has a new engine serve the weights that the one before it served.
    """

    def __init__(
        self,
        open_engine: Callable[[], GenerateBackend],
        serve: Callable[[GenerateBackend], None],
    ) -> None:
        self._open = open_engine
        self._serve = serve
        self.engine = open_engine()

    def restart(self) -> None:
        """Closes what is left of the engine and opens another in its place."""
        with contextlib.suppress(Exception):  # it broke, so it may break in this too
            self.engine.close()
        self.engine = self._open()
        self._serve(self.engine)

    @property
    def num_slots(self) -> int:
        """See `GenerateBackend`."""
        return self.engine.num_slots

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """See `GenerateBackend`."""
        self.engine.submit(requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `GenerateBackend`."""
        self.engine.abort(samples)

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        """See `GenerateBackend`."""
        return self.engine.poll(timeout_s)

    def publish(self, version: int, weights: Path | None) -> None:
        """See `GenerateBackend`."""
        self.engine.publish(version, weights)

    def sleep(self) -> None:
        """See `GenerateBackend`."""
        self.engine.sleep()

    def wake(self) -> None:
        """See `GenerateBackend`."""
        self.engine.wake()

    def close(self) -> None:
        """See `GenerateBackend`."""
        self.engine.close()
