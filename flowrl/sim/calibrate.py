"""What the driver itself costs: found by a short real run of the same program at two sizes.

Between the calls of engines, trainers and scorers a driver steps the scheduler, decodes text and
asks scorers, and whoever learns takes rows, builds batches and writes logs. No backend protocol
shows that time, but a run does: the first is `drive` of its seconds, the second what is left of a
step when the seconds of every kind of work are taken off. Two sizes tell what belongs to a step
from what belongs to a sample.

Scores of an untrained model are all alike, and a filter would leave nothing to learn from. So the
calibration's reward is a number that depends on the text: some of a group get 1, others 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.observe.rows import StepMetrics
from flowrl.sim.costs import HostCost
from flowrl.sim.scorers import ScoreTimes

__all__ = ["Calibration", "calibration_of", "calibration_values", "can_calibrate"]

SMALL, LARGE = "calibrate_small", "calibrate_large"
_STEPS, _WARM_UP = 10, 3
_MAX_TOKENS, _MAX_SAMPLES = 16, 512

_REWARD = '''\
"""A reward that depends on the text alone and is 1 for about half of all texts."""

import zlib


def score(prompt, response, answer, row):
    return float(zlib.crc32(response.encode()) & 1)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the run says.

    Attributes:
        score: Of a reward that costs nothing itself: the way to its process and back.
        steps: Median seconds of a step of the large size by kind, and the whole as `wall`.
        num_samples: Of such a step.
    """

    host: HostCost
    score: ScoreTimes
    steps: Mapping[str, float]
    num_samples: float


def can_calibrate(stage: CompiledStage) -> bool:
    """Whether a step of the stage does one thing after the other, so that a rest is the driver's.

    A program that declares itself asynchronous never does.
    """
    return not stage.workflow.max_staleness


def calibration_values(config: RunConfig, stage: CompiledStage, folder: Path) -> dict[str, Any]:
    """The configuration of the run: the stage's program at two sizes, from a new model.

    Args:
        folder: Where the run folder goes, and a reward.
    """
    own = config.stage_config(stage.name)
    values: dict[str, Any] = config.model_dump(mode="json")
    reward = folder / "calibration_reward.py"
    reward.write_text(_REWARD, encoding="utf-8")
    term = {"kind": "python", "function": f"{reward}:score"}
    prompts, group = own.train.prompts_per_step, max(1, stage.plan.sizes.group_size)
    large = max(own.train.mini_batches, min(prompts, max(2, _MAX_SAMPLES // group)))
    large -= large % own.train.mini_batches
    small = max(own.train.mini_batches, large // 4 - large // 4 % own.train.mini_batches)
    train = own.train.model_dump(mode="json")
    train |= {"steps": _STEPS, "max_staleness": 0}
    train["sampling"]["max_tokens"] = min(_MAX_TOKENS, own.train.sampling.max_tokens)
    of_stage = {
        "workflow": own.workflow or stage.name,
        "args": dict(own.args),
        "bind": dict(own.bind),
        "stop": None,
    }
    values |= {
        "name": "calibration",
        "executor": "local",
        "stages": [SMALL, LARGE],
        "stage": {SMALL: {**of_stage, "train": {**train, "prompts_per_step": small}}},
        **of_stage,
        "train": {**train, "prompts_per_step": large},
        "rewards": {**values["rewards"], "terms": [term], "max_failures": 1_000_000},
        "eval": {"every": 0, "num": 1, "metric": "score"},
    }
    values["data"]["eval"] = None
    values["runtime"] |= {"runs": str(folder), "checkpoint_every": 0, "log_samples": 1}
    for role in values["roles"].values():
        role["terms"] = None
    return values


def calibration_of(steps: Sequence[StepMetrics]) -> Calibration:
    """What the rows of the run's metrics say."""
    small, large = (_typical(steps, name) for name in (SMALL, LARGE))
    drive_s, sample_s = _line(small, large, "drive")
    rest_s, row_s = _line(small, large, "rest")
    latency_s, waited_s = _line(small, large, "score")
    return Calibration(
        host=HostCost(
            step_s=_short(drive_s + rest_s), sample_s=_short(sample_s), row_s=_short(row_s)
        ),
        score=ScoreTimes(sample_s=_short(waited_s), latency_s=_short(latency_s)),
        steps={k: v for k, v in large.items() if k not in ("samples", "rest")},
        num_samples=large["samples"],
    )


def _line(small: Mapping[str, float], large: Mapping[str, float], kind: str) -> tuple[float, float]:
    """Seconds of a step, and of each of its samples, by two sizes of steps."""
    more = max(1.0, large["samples"] - small["samples"])
    slope = max(0.0, (large[kind] - small[kind]) / more)
    return max(0.0, large[kind] - slope * large["samples"]), slope


def _typical(steps: Sequence[StepMetrics], stage: str) -> dict[str, float]:
    rows = [row for row in steps if row.stage == stage and row.step > _WARM_UP]
    kinds = dict.fromkeys(kind for row in rows for kind in row.seconds)
    found = {kind: median(row.seconds.get(kind, 0.0) for row in rows) for kind in kinds}
    drawn = [row.num_tokens / row.length_mean if row.length_mean else 0.0 for row in rows]
    return {
        "score": 0.0,
        "drive": 0.0,
        **found,
        "wall": median(row.wall_s for row in rows),
        "rest": median(max(0.0, row.wall_s - sum(row.seconds.values())) for row in rows),
        "samples": median(drawn),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
