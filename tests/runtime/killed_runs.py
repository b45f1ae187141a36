"""Runs in a process of their own that is killed, as a run is that nobody can stop in time.

python -m tests.runtime.killed_runs CONFIG STAGE STEP
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl import api
from flowrl.observe.rows import StepMetrics
from tests.runtime.tiny_runs import WatchedDisplay

__all__ = ["run_until_killed"]

_DEADLINE_S = 240.0


def run_until_killed(config: Mapping[str, Any], stage: str, step: int) -> Path:
    """Runs a config that is plain data, and kills it once that step is recorded; its folder."""
    ended = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(config), stage, str(step)],
        cwd=Path(__file__).parents[2],
        timeout=_DEADLINE_S,
    )
    assert ended.returncode == -signal.SIGKILL
    return Path(config["runtime"]["runs"]) / str(config["name"])


class _Killed(WatchedDisplay):
    def __init__(self, stage: str, step: int) -> None:
        super().__init__()
        self._moment = (stage, step)

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        if (metrics.stage, metrics.step) == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    api.run(None, json.loads(sys.argv[1]), display=_Killed(sys.argv[2], int(sys.argv[3])))
