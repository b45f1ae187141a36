"""The executor of programs that run line by line."""

from __future__ import annotations

from flowrl.backend.protocols import ScoreContext
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
        return "eager, in one process of this machine"

    def open_scorers(
        self, backend: str, context: ScoreContext, rewards: RewardsConfig, *, workers: int
    ) -> Scorers:
        return open_inline_scoring(backend, context)
