"""The executor of programs that run line by line."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.config.rewards import RewardsConfig
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.scoring.in_process import open_inline_scoring


class EagerExecutor(LocalExecutor):
    """Opens everything as the local executor does, but rewards in this process.

    So breakpoints in rewards work, and nothing limits their time.
    """

    @property
    def description(self) -> str:
        """See `Executor`."""
        return "eager, in one process of this machine"

    def open_scorers(
        self,
        backend: str,
        role: str,
        terms: tuple[Mapping[str, object], ...],
        rewards: RewardsConfig,
        *,
        workers: int,
    ) -> Scorers:
        """See `Executor`."""
        return open_inline_scoring(backend, role, terms)
