"""What the driver itself costs: found by short real runs of the same program at two sizes.

Between the calls of engines, trainers and scorers a driver steps the scheduler, decodes text and
asks scorers, and whoever learns takes rows, builds batches and writes logs. No backend protocol
shows that time, but a run does: the first is `dispatch`, `collect` and `assemble` of its seconds,
the second what is left of a step when the seconds of every kind of work are taken off. Two sizes
tell what belongs to a step from what belongs to a sample.

One run draws in the main process. Where there are cores for it another one draws in an engine's
process: what requests and ends cost more that travel, the driver and whoever waits for the engine.

Scores of an untrained model are all alike, and a filter would leave nothing to learn from. So the
calibration's reward is a number that depends on the text: some of a group get 1, others 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.backend.protocols import ScoreContext, ScoreRequest
from flowrl.backend.registry import find
from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.cost.demand import phase_of
from flowrl.graph import Op
from flowrl.ids import SampleId
from flowrl.observe.rows import DRIVER_WORK, StepMetrics
from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.measure import repeated, timed
from flowrl.sim.of_plan import EXPORT
from flowrl.sim.profile import OpProfile, Profile
from flowrl.sim.scorers import BATCH, ScoreTimes
from flowrl.sim.step_time import LinearPrefill
from flowrl.specs import FinishReason

SMALL, LARGE = "calibrate_small", "calibrate_large"
_STEPS, _WARM_UP = 12, 3
_MAX_TOKENS, _MAX_SAMPLES = 16, 512
_SMALLER = 8
"""Times that the smaller size goes into the larger one."""

_REWARD_FILE = "calibration_reward.py"
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
        score_s: Of a reward in its process, a sample: its own time, and the way there and back.
        drawn: Seconds in which so many samples are drawn: `(samples, seconds)` of both sizes.
        steps: Median seconds of a step of the large size by kind, and the whole as `wall`.
        num_samples: Of such a step.
    """

    host: HostCost
    score_s: float
    steps: Mapping[str, float]
    num_samples: float
    drawn: tuple[tuple[float, float], tuple[float, float]]


def can_calibrate(stage: CompiledStage) -> bool:
    """Whether a step of the stage does one thing after the other, so that a rest is the driver's.

    A program that declares itself asynchronous never does.
    """
    return not stage.workflow.max_staleness


def can_calibrate_apart(stage: CompiledStage) -> bool:
    """Whether an engine's process can have a core beside the one of the trainer."""
    local = stage.local
    return local is not None and local.request.num_cores > 1 and not local.request.in_process


def calibration_values(
    config: RunConfig, stage: CompiledStage, folder: Path, *, apart: bool = False
) -> dict[str, Any]:
    """The configuration of a run: the stage's program at two sizes, from a new model.

    Args:
        folder: Where the run folder goes, and a reward.
        apart: Draws in a process of its own.
    """
    own = config.stage_config(stage.name)
    values: dict[str, Any] = config.model_dump(mode="json")
    (folder / _REWARD_FILE).write_text(_REWARD, encoding="utf-8")
    term = _term(folder)
    prompts, group = own.train.prompts_per_step, max(1, stage.plan.sizes.group_size)
    large = max(own.train.mini_batches, min(prompts, max(2, _MAX_SAMPLES // group)))
    large -= large % own.train.mini_batches
    small = max(own.train.mini_batches, large // _SMALLER)
    small -= small % own.train.mini_batches
    train = own.train.model_dump(mode="json")
    train |= {"steps": _STEPS, "max_staleness": 0, "policies": {}}
    train["sampling"]["max_tokens"] = min(_MAX_TOKENS, own.train.sampling.max_tokens)
    of_stage = {
        "workflow": own.workflow or stage.name,
        "args": dict(own.args),
        "bind": dict(own.bind),
        "stop": None,
    }
    values |= {
        "name": "calibration apart" if apart else "calibration",
        "executor": "local",
        "stages": [SMALL, LARGE],
        "stage": {SMALL: {**of_stage, "train": {**train, "prompts_per_step": small}}},
        **of_stage,
        "train": {**train, "prompts_per_step": large},
        "rewards": {**values["rewards"], "terms": [term], "max_failures": 1_000_000},
        "eval": {"every": 0, "num": 1, "metric": "score"},
    }
    values["data"]["eval"] = None
    values["plan"] |= {"kind": "spatial" if apart else "temporal", "pins": {}}
    values["runtime"] |= {"runs": str(folder), "log_samples": 1}
    values["runtime"] |= {"checkpoint_every": 0, "checkpoint_minutes": 0}
    for role in values["roles"].values():
        role["terms"] = None
        if not apart and role["num_engines"] is not None:
            role["num_engines"] = 1
        elif apart:
            role["num_engines"] = None
    return values


def calibration_of(steps: Sequence[StepMetrics]) -> Calibration:
    """What the rows of the run's metrics say."""
    small, large = (_typical(steps, name) for name in (SMALL, LARGE))
    offers_s, offer_s = _line(small, large, "dispatch")
    drive_s, sample_s = _line(small, large, "collect")
    answers_s, answer_s = _line(small, large, "assemble")
    rest_s, row_s = _line(small, large, "rest")
    host = HostCost(
        step_s=_short(offers_s + drive_s + answers_s + rest_s),
        offer_s=_short(offer_s),
        sample_s=_short(sample_s),
        answer_s=_short(answer_s),
        row_s=_short(row_s),
    )
    return Calibration(
        host=host,
        score_s=_short(_batch_s(large, answer_s)),
        steps={k: v for k, v in large.items() if k not in ("samples", "rest")},
        num_samples=large["samples"],
        drawn=((small["samples"], small["generate"]), (large["samples"], large["generate"])),
    )


def calibrated(
    profile: Profile, here: Calibration, apart: Calibration | None, *, reward_s: float = 0.0
) -> Profile:
    """A profile with what runs say of the driver.

    Args:
        here: Drawn in the main process.
        apart: Drawn in a process of its own; None where there is no core for one.
        reward_s: What the runs' reward takes itself, for a sample.
    """
    way_s = max(0.0, here.score_s - reward_s)
    scorers = tuple(
        replace(scorer, times=ScoreTimes(sample_s=_short(scorer.times.sample_s + way_s)))
        for scorer in profile.scorers
    )
    profile = replace(profile, host=here.host, scorers=scorers)
    if apart is None:
        return profile
    longer = _longer(here.drawn, apart.drawn)
    return replace(
        profile,
        # What a step and a row cost is the trainer's, wherever samples are drawn.
        host_apart=replace(apart.host, step_s=here.host.step_s, row_s=here.host.row_s),
        engines=tuple(replace(engine, apart=longer) for engine in profile.engines),
        ops=tuple(_published(profile.ops, apart.steps.get("sync", 0.0))),
    )


def _published(ops: Sequence[OpProfile], sync_s: float) -> Iterator[OpProfile]:
    """Operations, with all that it takes to publish in the place of writing the weights alone.

    Args:
        sync_s: Of a step of a run whose engines are in processes of their own.
    """
    single = sum(op.op == EXPORT for op in ops) == 1
    for op in ops:
        if op.op == EXPORT and single and sync_s > op.cost.call_s:
            yield replace(op, cost=LinearCost(call_s=_short(sync_s)))
        else:
            yield op


def calibration_reward_s(config: RunConfig, stage: CompiledStage, folder: Path) -> float:
    """Seconds of a sample that the reward of a run takes itself.

    Args:
        folder: That `calibration_values` wrote the reward into.
    """
    roles = {node.role for node in stage.graph.of_op(Op.SCORE) if phase_of(node) is None}
    role = next(iter(sorted(role for role in roles if role)), None)
    if role is None:
        return 0.0
    options = config.roles[role].options
    context = ScoreContext(role=role, terms=(_term(folder),), key="score", options=options)
    requests = [
        ScoreRequest(
            sample=SampleId(f"0/{number}/0"),
            prompt="1 + 1 =",
            response=str(number),
            answer="2",
            row={},
            finish=FinishReason.STOP,
            num_tokens=2,
        )
        for number in range(BATCH)
    ]
    scorer = find(config.roles[role].backend).open_score(context)
    try:
        return (
            repeated(lambda: timed(time.perf_counter, lambda: list(map(scorer.score, requests))))
            / BATCH
        )
    finally:
        scorer.close()


def _term(folder: Path) -> dict[str, Any]:
    return {"kind": "python", "function": f"{folder / _REWARD_FILE}:score"}


def _longer(
    here: Sequence[tuple[float, float]], apart: Sequence[tuple[float, float]]
) -> LinearPrefill:
    """What drawing takes longer in a process of its own, by its rows."""
    (few, least), (many, most) = (
        (samples, max(0.0, there_s - here_s))
        for (samples, here_s), (_, there_s) in zip(here, apart, strict=True)
    )
    row_s = max(0.0, (most - least) / max(1.0, many - few))
    return LinearPrefill(call_s=_short(max(0.0, most - row_s * many)), row_s=_short(row_s))


def _batch_s(row: Mapping[str, float], answer_s: float) -> float:
    """Seconds of a batch of rewards, for each of its samples, by what the driver waited.

    It waits for a first batch, and for each one behind it so long as that takes longer than the
    answers of the one before: w = B + k max(0, B - a), with B seconds of a batch and a of its
    answers.
    """
    size = min(row["samples"], float(BATCH))
    if not size:
        return 0.0
    others = row["samples"] / size - 1
    waited_s, taken_s = row["score"], answer_s * size
    if waited_s > taken_s:
        waited_s = (waited_s + others * taken_s) / (1 + others)
    return waited_s / size


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
        **dict.fromkeys(("generate", "score", *DRIVER_WORK), 0.0),
        **found,
        "wall": median(row.wall_s for row in rows),
        "rest": median(max(0.0, row.wall_s - sum(row.seconds.values())) for row in rows),
        "samples": median(drawn),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
