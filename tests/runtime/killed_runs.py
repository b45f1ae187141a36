"""Runs in a process of their own that is killed, as a run is that nobody can stop in time."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl import api
from flowrl.observe.rows import StepMetrics
from tests.runtime.tiny_runs import WatchedDisplay
from tests.warm_processes import WarmProcesses

__all__ = ["main", "run_until_killed"]


def run_until_killed(warm: WarmProcesses, config: Mapping[str, Any], stage: str, step: int) -> Path:
    """Runs a config that is plain data, and kills it once that step is recorded; its folder."""
    ended = warm.run(__name__, json.dumps(config), stage, str(step))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return Path(config["runtime"]["runs"]) / str(config["name"])


class _Killed(WatchedDisplay):
    def __init__(self, stage: str, step: int) -> None:
        super().__init__()
        self._moment = (stage, step)

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        if (metrics.stage, metrics.step) == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Runs until it is killed: CONFIG STAGE STEP."""
    config, stage, step = arguments
    api.run(None, json.loads(config), display=_Killed(stage, int(step)))
