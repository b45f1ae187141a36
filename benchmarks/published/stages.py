"""Predicts stages, steps and weight syncs of published runs, without constants of a row.

Assumed for all rows that do not say otherwise, and reported with the row: full recompute, packed
micro-batches of the context's length (at least 4096 tokens), one optimizer step, a distributed
optimizer, one pass of logprobs, and engines that give 85 % of their memory to weights and KV cache.
Response lengths are lognormal with sigma `SIGMA`, cut at the longest, with the row's mean. With
`fsdp` everything is divided among data ranks, and modules are those of transformers
(`published.eager_modules`) unless the row says `compiled: true`.

On shared devices a step is its stages and a weight sync, one after the other, with offload and
reload of the trainer's state (`flowrl.cost.switching.saved_s`), unless a row says `offload: false`.
Where samples may be a > 0 publications old, rollout and training overlap on devices of their own.
With r and t seconds of the two, and s of a rollout that never empties (`Estimate.steady_s`), a step
takes `max(t, s, r / a)`, the sync, and `efficiency.BETWEEN_S`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.activations import Recompute
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.efficiency import BETWEEN_S
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths, Lengths, LognormalLengths
from flowrl.cost.memory import Workload
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import MemoryOptions, Shard, kv_capacity, offloadable_bytes
from flowrl.cost.sharding import stage_parameters
from flowrl.cost.switching import away_s, saved_s
from flowrl.cost.trainer_time import Batch
from flowrl.errors import FlowError, PlanError
from published.eager_modules import unfused_forward_s, unfused_update_s
from published.schema import Job, Parallel, Row, Run, Sizes, WeightSync

SIGMA = 1.0
"""Standard deviation of the logarithm of response lengths, which no row publishes."""

CACHE_SHARE = 0.85
"""Share of a device's memory for an engine's weights and KV cache."""

MICRO_TOKENS = 4096
"""Minimum tokens of a micro-batch."""

NEEDED = (
    *("model", "devices", "train_parallel", "rollout_parallel", "group_size", "num_sequences"),
    *("mean_prompt_tokens", "mean_response_tokens", "max_context"),
)
ASYNCHRONOUS = re.compile(r"async|(^|_)off(_|$)")
"""Names of runs whose stages overlap over steps; these must give `staleness` and their pools."""

COST = AnalyticCost()

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """Predicted and measured seconds of a stage or step; None where nothing was measured."""

    stage: str
    predicted_s: float
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """Relative error; above 0 where the prediction is too long."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run of a row.

    Attributes:
        name: Name of the row, and of the run where there are several.
        stages: The stages that were measured, without the step.
        step: The step, predicted and measured.
        missing: Why the run was not predicted.
        notes: What was assumed because the row does not say.
        flagged: What the row's source leaves out; such a run is shown and does not count.
    """

    name: str
    stages: tuple[StagePrediction, ...] = ()
    step: StagePrediction | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flagged: str = ""

    @property
    def counts(self) -> bool:
        """Whether a complete row was compared with something measured."""
        compared = [*self.stages, *([self.step] if self.step else [])]
        return not self.missing and not self.flagged and any(s.error is not None for s in compared)


def predict_row(row: Row, models: Path) -> list[Prediction]:
    """Predicts each run of a row; runs that all lack the same are one entry."""
    flagged = row.missing or "the file calls it incomplete"
    if row.complete or (row.complete is None and not row.missing):
        flagged = ""
    found = []
    for run, job in row.jobs().items():
        title = f"{row.name}/{run}" if run else row.name
        missing = tuple(_missing(job, run))
        if missing:
            found.append(Prediction(name=title, missing=missing))
            continue
        try:
            stages, step, notes = _Job(job, models).compare(row.measured[run])
        except FlowError as error:
            found.append(Prediction(name=title, missing=(" ".join(str(error).split()),)))
        else:
            found.append(
                Prediction(name=title, stages=stages, step=step, notes=notes, flagged=flagged)
            )
    if len(found) > 1 and len({item.missing for item in found}) == 1 and found[0].missing:
        return [Prediction(name=row.name, missing=found[0].missing)]
    return found


def predict_sync(row: WeightSync, models: Path) -> Prediction:
    """Predicts a weight sync."""
    try:
        train, shard = layout_of("train_parallel", row.train_parallel, row.devices.num)
        rollout, _ = layout_of("rollout_parallel", row.rollout_parallel, row.devices.num)
        seconds = COST.weight_sync(
            shape_of(row.model, None, models),
            train,
            rollout,
            Machine(spec=device_spec(row.devices.type), node_size=row.devices.node_size),
            apart=row.apart,
            shard=shard,
        ).seconds
    except FlowError as error:
        return Prediction(name=row.name, missing=(" ".join(str(error).split()),))
    step = StagePrediction(stage="sync_s", predicted_s=seconds, measured_s=row.sync_s)
    return Prediction(name=row.name, step=step)


@lru_cache
def shape_of(name: str, sizes: Sizes | None, models: Path) -> ModelShape:
    """Returns the shape of a model from its config in `models`, or from its sizes.

    Raises:
        PlanError: Neither is there.
    """
    path = models / f"{name.rsplit('/', 1)[-1].lower()}.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        return ModelShape.from_hf_config(config, where=str(path))
    if sizes is None:
        raise PlanError(f"unknown model {name!r}: no {path.name} in {models}, and no sizes given")
    return sizes.shape(name)


def layout_of(key: str, given: Parallel, num: int) -> tuple[Layout, Shard]:
    """Returns a layout whose data ranks fill the devices, and what these ranks divide.

    Raises:
        PlanError: The ranks are not as many as the devices.
    """
    inner = given.tp * given.pp * given.cp
    data = (given.dp or 1) * (given.fsdp or 1)
    if given.dp is None and num % (inner * data) == 0:
        data = num // inner
    if inner * data != num:
        raise PlanError(f"{key} is for {inner * data} devices, not for {num}")
    layout = Layout(tp=given.tp, pp=given.pp, cp=given.cp, dp=data, ep=given.ep)
    return layout, "full" if given.fsdp else "optimizer"


def _missing(job: Job, run: str) -> Iterator[str]:
    given = job.model_fields_set
    apart = {"rollout_devices", "train_devices"} <= given
    if (job.staleness or ASYNCHRONOUS.search(run.lower())) and not (apart and job.staleness):
        yield "rollout_devices and train_devices are missing: stages of this run overlap over steps"
    stands_for = {
        "num_sequences": {"prompts_per_step"},
        "mean_response_tokens": {"mean_total_tokens", "tokens_per_step"},
        "max_context": {"max_response_tokens"},
    }
    for key in NEEDED:
        if not given & {key, *stands_for.get(key, ())}:
            yield f"{key} is missing"


class _Job:
    """A job that lacks nothing, as the cost model needs it; it collects what it assumes."""

    def __init__(self, job: Job, models: Path) -> None:
        assert job.model is not None
        assert job.devices is not None
        assert job.train_parallel is not None
        assert job.rollout_parallel is not None
        assert job.mean_prompt_tokens is not None
        self.job, self.notes = job, list[str]()
        self.shape = shape_of(job.model, job.model_shape, models)
        self.machine = Machine(spec=device_spec(job.devices.type), node_size=job.devices.node_size)
        self.apart = job.rollout_devices is not None and job.train_devices is not None
        self.train_num = job.train_devices or job.devices.num
        self.rollout_num = job.rollout_devices or job.devices.num
        if self.apart and self.train_num + self.rollout_num != job.devices.num:
            raise PlanError(
                f"rollout_devices and train_devices are {self.train_num + self.rollout_num}, "
                f"not {job.devices.num}"
            )
        self.train, self.shard = layout_of("train_parallel", job.train_parallel, self.train_num)
        self.rollout, _ = layout_of("rollout_parallel", job.rollout_parallel, self.rollout_num)
        for layout in (self.train, self.rollout):
            _check_divides(self.shape, layout)
        if self.shard == "optimizer":
            self.notes.append("train_parallel: optimizer divided among data ranks")
        self.prompt = job.mean_prompt_tokens
        self.group_size = job.group_size or 1
        self.samples = job.num_sequences or (job.prompts_per_step or 1) * self.group_size
        self.response = self._mean_response()
        self.context, longest = self._longest()
        self.lengths = _lengths(self.response, longest)
        self.slots = job.engine.max_running_requests or self._default_slots()
        self.kv_tokens = self._kv_tokens()
        self.recompute: Recompute = job.recompute or "full"
        if job.recompute is None:
            self.notes.append("recompute taken for full")
        self.mini_batches = job.mini_batches or self._assumed(1, "mini_batches: one optimizer step")
        tokens = max(MICRO_TOKENS, self.context)
        self.micro_tokens = job.micro_tokens or self._assumed(
            tokens, f"micro-batches packed to {tokens} tokens"
        )
        self.offload = False if self.apart else job.offload
        if self.offload is None:
            self.offload = self._assumed(
                True, "offload: the trainer's state to the host and back each step"
            )
        self.eager = self.shard == "full" and not job.compiled
        if self.eager and job.compiled is None:
            self.notes.append("train_parallel: modules of transformers, not compiled")

    def _assumed(self, value: T, note: str) -> T:
        self.notes.append(note)
        return value

    def _mean_response(self) -> float:
        job = self.job
        if job.mean_response_tokens is not None:
            return job.mean_response_tokens
        total = job.mean_total_tokens or (job.tokens_per_step or 0) / self.samples
        if total <= self.prompt:
            raise PlanError(f"{total:g} tokens a sequence leave no room for responses")
        return total - self.prompt

    def _longest(self) -> tuple[int, float]:
        """Returns the tokens of the longest sample and of the longest response."""
        job = self.job
        response = job.max_response_tokens
        if job.max_context is not None:
            room = job.max_context - self.prompt
            return job.max_context, room if response is None else min(room, response)
        assert response is not None
        prompt = job.max_prompt_tokens or math.ceil(self.prompt)
        return response + prompt, float(response)

    def _default_slots(self) -> int:
        """Returns the default of the engine: of vLLM by device, and of SGLang's memory pool."""
        spec, slots = self.machine.spec, 256
        if self.job.engine.name == "sglang":
            slots = 2048
        elif self.job.engine.name == "vllm":
            large = spec.memory_bytes >= 70 * 2**30 and not spec.name.startswith("A100")
            slots = 1024 if large else 256
        return self._assumed(slots, f"engine.max_running_requests taken for {slots}")

    def _kv_tokens(self) -> int:
        share = self.job.engine.mem_fraction_static or self._assumed(
            CACHE_SHARE, f"engines give {CACHE_SHARE:.0%} of the memory to weights and cache"
        )
        layout = self.rollout
        stages = stage_parameters(self.shape, layout.tp, layout.pp, layout.ep)
        weights = 2 * max(stage.total for stage in stages)
        free = int(self.machine.spec.memory_bytes * share) - weights
        if free <= 0:
            raise PlanError(
                f"rollout_parallel leaves no room for a cache: {weights / 2**30:.1f} GiB of weights"
            )
        return kv_capacity(self.shape, layout, free_bytes=free)

    def compare(
        self, run: Run
    ) -> tuple[tuple[StagePrediction, ...], StagePrediction, tuple[str, ...]]:
        """Returns the predicted stages that were measured, the step, and the notes."""
        named = sum(
            seconds is not None for seconds in (run.logprob_s, run.old_logprob_s, run.ref_logprob_s)
        )
        passes = self.job.logprob_passes
        if passes is None:
            passes = self._assumed(1, "logprob_passes: one pass, or as many as were measured")
        generate, steady, logprob, train, sync, away, saved = self._seconds()
        predicted = {
            "generate_s": generate,
            "logprob_s": logprob * max(1, passes),
            "old_logprob_s": logprob,
            "ref_logprob_s": logprob,
            "train_s": train,
            "sync_s": sync,
            "refit_s": sync + away,
        }
        stages = tuple(
            StagePrediction(stage=key, predicted_s=seconds, measured_s=getattr(run, key))
            for key, seconds in predicted.items()
            if getattr(run, key) is not None
        )
        trained = logprob * max(named, passes) + train
        step = generate + trained + sync + saved
        if self.job.staleness:
            step = max(trained, steady, generate / self.job.staleness) + sync + BETWEEN_S
        measured = run.step_s
        rate = run.tok_s_per_device or run.e2e_tok_s_per_device
        if measured is None and rate is not None:
            devices = self.train_num + (self.rollout_num if self.apart else 0)
            measured = self.samples * (self.prompt + self.lengths.mean) / (rate * devices)
        whole = StagePrediction(stage="step_s", predicted_s=step, measured_s=measured)
        return stages, whole, tuple(self.notes)

    def _seconds(self) -> tuple[float, ...]:
        """Returns seconds to generate, generate steadily, of a pass of logprobs, train, sync,
        offload, and offload with reload."""
        rollout = COST.rollout(
            self.shape,
            self.rollout,
            self.machine,
            samples=self.samples,
            group_size=self.group_size,
            prompt_tokens=self.prompt,
            lengths=self.lengths,
            slots=self.slots,
            kv_tokens=self.kv_tokens,
        )
        of_trainer = (self.shape, self.train, self.machine)
        batch = Batch(
            samples=self.samples,
            prompt_tokens=self.prompt,
            lengths=self.lengths,
            micro_tokens=self.micro_tokens,
        )
        logprob = COST.forward(
            *of_trainer,
            samples=self.samples,
            prompt_tokens=self.prompt,
            lengths=self.lengths,
            shard=self.shard,
            micro_tokens=self.job.logprob_micro_tokens or self.micro_tokens,
        ).seconds
        train = COST.train(
            *of_trainer,
            samples=self.samples,
            prompt_tokens=self.prompt,
            lengths=self.lengths,
            shard=self.shard,
            mini_batches=self.mini_batches,
            micro_tokens=self.micro_tokens,
            recompute=self.recompute,
        ).seconds
        if self.eager:
            logprob += unfused_forward_s(*of_trainer, batch)
            train += unfused_update_s(*of_trainer, batch, self.recompute)
        sync = COST.weight_sync(
            self.shape, self.train, self.rollout, self.machine, apart=self.apart, shard=self.shard
        ).seconds
        state = self._state_bytes() if self.offload else 0
        steady = rollout.seconds if rollout.steady_s is None else rollout.steady_s
        away, saved = (away_s(state), saved_s(state)) if self.offload else (0.0, 0.0)
        return rollout.seconds, steady, logprob, train, sync, away, saved

    def _state_bytes(self) -> int:
        """Returns the bytes of weights and optimizer on the fullest device of the trainer."""
        trained = Workload(
            num_slots=0,
            max_length=1,
            max_prompt_tokens=1,
            max_response_tokens=1,
            micro_batch=1,
            num_samples=self.samples,
            dtype="bfloat16",
            trainable=True,
        )
        return offloadable_bytes(self.shape, self.train, trained, MemoryOptions(shard=self.shard))


def _lengths(mean: float, longest: float) -> Lengths:
    if longest <= 1 or mean > longest * 1.001:
        raise PlanError(f"the longest response is {longest:g} tokens, the mean one {mean:g}")
    if mean >= longest:
        return ConstantLengths(tokens=longest)
    return LognormalLengths(mean=mean, sigma=SIGMA, maximum=longest)


def _check_divides(shape: ModelShape, layout: Layout) -> None:
    if layout.pp > shape.num_layers:
        raise PlanError(f"pp {layout.pp} is more than the {shape.num_layers} layers")
    if shape.num_heads % layout.tp:
        raise PlanError(f"tp {layout.tp} does not divide {shape.num_heads} attention heads")
    if shape.experts is not None and shape.experts.num_experts % layout.ep:
        raise PlanError(f"ep {layout.ep} does not divide {shape.experts.num_experts} experts")
