"""Predicts stage times of real runs that somebody published, with no constants of a row.

`flowrl.testing.published_form` says what a row may hold. Assumed, alike for all rows, and told with
each row that does not say:

- response lengths are lognormal with sigma `SIGMA`, cut at the longest that fits the context, so
  that their mean is the row's;
- full recompute, packed micro-batches of the context's length (at least 4096 tokens), one optimizer
  step, a distributed optimizer (`fsdp`: everything divided), one pass of logprobs;
- where everything is divided, the modules of transformers, an operation a kernel
  (`flowrl.cost.eager_modules`), unless the row says `compiled: true`;
- an engine gives 85 % of its memory to weights and cache, and runs as many rows at once as vLLM or
  SGLang do if nobody says, 256 where a row names neither.

A step is its stages and a weight sync, one after the other. On shared devices a trainer's weights
and optimizer go to the host before a rollout and come back after it, as fast as these frameworks
copy (`flowrl.cost.switching.saved_s`); `offload: false` says that they stay. Where the run is
asynchronous, rollout and training have devices of their own and work at once. These frameworks
start a batch with each publication of weights, and have as many of them under way as samples may be
publications old, a. With r and t seconds of the two, and s of a rollout that never empties
(`Estimate.steady_s`), a step takes `max(t, s, r / a)`, the sync, during which engines wait, and
`efficiency.BETWEEN_S`.
(Our own scheduler lets devices go on to the next batch earlier: `flowrl.plan.search` has
`(r + t) / (a + 1)`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.eager_modules import unfused_forward_s, unfused_update_s
from flowrl.cost.efficiency import BETWEEN_S
from flowrl.cost.memory import Workload
from flowrl.cost.role_memory import MemoryOptions, offloadable_bytes
from flowrl.cost.source import Cost
from flowrl.cost.switching import away_s, saved_s
from flowrl.cost.trainer_time import Batch
from flowrl.errors import FlowError
from flowrl.testing.published_form import SIGMA, Job, read_job
from flowrl.testing.published_measured import (
    Measured,
    MeasuredRate,
    MeasuredStage,
    read_measured,
    runs_of,
    unread,
)
from flowrl.testing.published_rows import Row, Unusable
from flowrl.testing.published_words import as_bool

__all__ = ["SIGMA", "Prediction", "StagePrediction", "predict_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """One stage, or the step, predicted beside measured. `measured_s` None where nobody says."""

    stage: str
    predicted_s: float
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """Relative; above 0 where the prediction is too long."""
        if self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A row, or one run of a row.

    Attributes:
        stages: Without the step.
        missing: Why it was not predicted; then there are no stages.
        notes: What was assumed because the row does not say.
        flagged: What its file says that the row lacks, though it could be predicted; such a row is
            shown and does not count.
    """

    name: str
    stages: tuple[StagePrediction, ...] = ()
    step: StagePrediction | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flagged: str = ""

    @property
    def counts(self) -> bool:
        """Whether something was predicted beside something measured, of a complete row."""
        compared = [*self.stages, *([self.step] if self.step else [])]
        return not self.missing and not self.flagged and any(s.error is not None for s in compared)


def predict_row(row: Row, models: Path, cost: Cost | None = None) -> list[Prediction]:
    """One row: a prediction for each run that it holds, or one that says what is missing."""
    cost = cost or AnalyticCost()
    name = str(row.get("name", "a row without a name"))
    found: list[Prediction] = []
    for run, given in runs_of(row.get("measured")).items():
        title = f"{name}/{run}" if run else name
        measured = read_measured(given)
        both = any(stage.stage == "all_logprobs" for stage in measured.stages)
        passes = {"logprob_passes": 2} if both and row.get("logprob_passes") is None else {}
        try:
            job = read_job(row, {**passes, **measured.rest}, run, models)
            found.append(_compare(title, row, job, _stage_seconds(job, cost), measured))
        except Unusable as why:
            found.append(Prediction(name=title, missing=why.reasons))
        except FlowError as error:
            found.append(Prediction(name=title, missing=(" ".join(str(error).split()),)))
    if len(found) > 1 and len({item.missing for item in found}) == 1 and found[0].missing:
        return [Prediction(name=name, missing=found[0].missing)]
    return found


def _compare(
    name: str, row: Row, job: Job, seconds: Mapping[str, float], measured: Measured
) -> Prediction:
    stages = tuple(
        StagePrediction(
            stage=item.key,
            predicted_s=_stage(item, job, seconds, measured),
            measured_s=item.seconds,
        )
        for item in measured.stages
    ) + tuple(_rated(item, job, seconds) for item in measured.stage_rates)
    passed_over = unread(row.get("measured"))
    return Prediction(
        name=name,
        stages=stages,
        step=StagePrediction(
            stage="step_s",
            predicted_s=_step(job, seconds, measured),
            measured_s=_measured_step(job, measured),
        ),
        notes=(*job.notes, *measured.notes, *([passed_over] if passed_over else [])),
        flagged=_flag(row),
    )


def _flag(row: Row) -> str:
    """Why a row does not count though it can be predicted: only a complete one does, and one that
    says nothing of that or of what is missing."""
    said = row.get("complete")
    missing = row.get("missing")
    if as_bool(said) or (said is None and not missing):
        return ""
    told = ", ".join(map(str, missing)) if isinstance(missing, list) else str(missing or "")
    return told or f"its file says of it: complete {said}"


def _stage(
    item: MeasuredStage, job: Job, seconds: Mapping[str, float], measured: Measured
) -> float:
    """Seconds of what its row calls so."""
    if item.stage == "refit":
        return seconds["sync"] + seconds["away"]
    if item.stage == "all_logprobs" or (item.joint and _named(measured) == 1):
        return seconds["logprobs"] * max(1, job.logprob_passes)
    return seconds[item.stage]


def _named(measured: Measured) -> int:
    return sum(item.stage == "logprobs" for item in measured.stages)


def _step(job: Job, seconds: Mapping[str, float], measured: Measured) -> float:
    """Seconds of a step; passes of logprobs that were measured one by one count as often."""
    turns = {"generate": 1, "logprobs": job.logprob_passes, "train": 1, "sync": 1}
    turns["logprobs"] = max(_named(measured), job.logprob_passes)
    spent = {stage: seconds[stage] * times for stage, times in turns.items()}
    if job.staleness:
        trained = spent["logprobs"] + spent["train"]
        drawn = max(seconds["steady"], spent["generate"] / job.staleness)
        return max(trained, drawn) + spent["sync"] + BETWEEN_S
    return sum(spent.values()) + seconds["saved"]


def _rated(item: MeasuredRate, job: Job, seconds: Mapping[str, float]) -> StagePrediction:
    """A stage whose rate was measured."""
    assert item.stage is not None
    return StagePrediction(
        stage=item.key, predicted_s=seconds[item.stage], measured_s=_seconds_at(item, job)
    )


def _measured_step(job: Job, measured: Measured) -> float | None:
    if measured.step_s is not None or measured.rate is None:
        return measured.step_s
    return _seconds_at(measured.rate, job)


def _seconds_at(item: MeasuredRate, job: Job) -> float:
    """Of a whole batch at a rate: of generation its responses, of all else prompts too."""
    devices, tokens = job.num_devices, job.prompt_tokens + job.lengths.mean
    if item.stage == "generate":
        devices, tokens = job.rollout.num, job.lengths.mean
    elif item.stage is not None:
        devices = job.train.num
    done = job.samples * (1.0 if item.samples else tokens)
    return done / (item.rate * (devices if item.per_device else 1))


def _stage_seconds(job: Job, cost: Cost) -> dict[str, float]:
    shape, train, rollout = job.shape, job.train, job.rollout
    generated = cost.rollout(
        shape,
        rollout.layout,
        rollout.machine,
        samples=job.samples,
        group_size=job.group_size,
        prompt_tokens=job.prompt_tokens,
        lengths=job.lengths,
        slots=job.slots,
        kv_tokens=job.kv_tokens,
    )
    steady, state = generated.steady_s, _state_bytes(job)
    unfused, unfused_update = _unfused(job)
    return {
        "generate": generated.seconds,
        "steady": generated.seconds if steady is None else steady,
        "logprobs": cost.forward(
            shape,
            train.layout,
            train.machine,
            samples=job.samples,
            prompt_tokens=job.prompt_tokens,
            lengths=job.lengths,
            micro_tokens=job.logprob_micro_tokens,
            shard=train.shard,
        ).seconds
        + unfused,
        "train": cost.train(
            shape,
            train.layout,
            train.machine,
            samples=job.samples,
            prompt_tokens=job.prompt_tokens,
            lengths=job.lengths,
            mini_batches=job.mini_batches,
            micro_tokens=job.micro_tokens,
            recompute=job.recompute,
            shard=train.shard,
        ).seconds
        + unfused_update,
        "sync": cost.weight_sync(
            shape, train.layout, rollout.layout, train.machine, apart=job.apart, shard=train.shard
        ).seconds,
        "away": away_s(state) if job.offload else 0.0,
        "saved": saved_s(state) if job.offload else 0.0,
    }


def _unfused(job: Job) -> tuple[float, float]:
    """Seconds of a pass of logprobs and of the update that fused modules do not take."""
    if not job.eager:
        return 0.0, 0.0
    batch = Batch(
        samples=job.samples,
        prompt_tokens=job.prompt_tokens,
        lengths=job.lengths,
        micro_tokens=job.micro_tokens,
    )
    layout, machine = job.train.layout, job.train.machine
    forward = unfused_forward_s(job.shape, layout, machine, batch)
    return forward, unfused_update_s(job.shape, layout, machine, batch, job.recompute)


def _state_bytes(job: Job) -> int:
    """Weights and optimizer on the fullest device of the trainer."""
    trained = Workload(
        num_slots=0,
        max_length=1,
        max_prompt_tokens=1,
        max_response_tokens=1,
        micro_batch=1,
        num_samples=job.samples,
        dtype="bfloat16",
        trainable=True,
    )
    return offloadable_bytes(
        job.shape, job.train.layout, trained, MemoryOptions(shard=job.train.shard)
    )
