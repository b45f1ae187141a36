"""A clock that a test puts forward, so that what waits for seconds to pass need not wait."""

from __future__ import annotations

import time

import pytest

from flowrl.runtime.environments import loop, pool

__all__ = ["ShiftedClock"]


class ShiftedClock:
    """The monotonic clock of environments, with `ahead_s` seconds more than have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        for module in (pool, loop):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def rules(self, environments: pool.EnvironmentPool) -> None:
        """Limits of calls under way run by this clock too, from the next order on."""
        environments._loop._loop.time = self.monotonic  # type: ignore[method-assign]
