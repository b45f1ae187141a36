"""Predicts stage times of real runs that somebody published, with no constants of a row.

A row names `model`, `devices: {type, num}`, `num_sequences` (or `prompts_per_step`), `group_size`,
`mean_prompt_tokens`, `mean_response_tokens`, `max_context` (or `max_prompt_tokens` and
`max_response_tokens`), `train_parallel` and `rollout_parallel` (`tp`, `pp`, `dp`, `cp`, `ep`,
`fsdp`), and what was `measured`, of one run or of several by name.

Assumed, alike for all rows:
- response lengths are lognormal with sigma `SIGMA`, cut at the longest that fits the context, so
  that their mean is the row's;
- full recompute, packed micro-batches of the context's length (at least `MICRO_TOKENS`), one
  optimizer step, a distributed optimizer (`fsdp`: everything divided), unless the row says else;
- roles share the devices, and stages follow each other; a step is its stages and a weight sync, and
  where no stages are given, generation, `logprob_passes` (1) of logprobs, training and the sync;
- an engine gives `CACHE_SHARE` of its memory to weights and cache, and runs `DEFAULT_SLOTS` rows at
  once unless the row says else (`engine`: `mem_fraction_static` or `gpu_memory_utilization`, and
  `max_running_requests`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, get_args, overload

from flowrl.cluster.hardware import Machine
from flowrl.cost.activations import Recompute
from flowrl.cost.analytic import MICRO_TOKENS, AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths, Lengths, LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard, kv_capacity
from flowrl.cost.sharding import stage_parameters
from flowrl.cost.source import Cost
from flowrl.errors import FlowError
from flowrl.testing.published_rows import Row, Unusable, is_positive, machine_of, shape_of

__all__ = ["SIGMA", "Prediction", "StagePrediction", "predict_row"]

SIGMA = 1.0
CACHE_SHARE = 0.85
DEFAULT_SLOTS = 256

_STAGES = {
    "generate_s": "generate",
    "rollout_s": "generate",
    "gen_s": "generate",
    "logprob_s": "logprobs",
    "old_logprob_s": "logprobs",
    "ref_logprob_s": "logprobs",
    "reference_s": "logprobs",
    "inference_s": "logprobs",
    "train_s": "train",
    "update_s": "train",
    "actor_s": "train",
    "sync_s": "sync",
    "weight_sync_s": "sync",
}
_RATES = ("tok_s_per_device", "e2e_tok_s_per_device")
_SIZES = {
    **{name: name for name in ("tp", "pp", "dp", "cp", "ep", "fsdp")},
    **dict.fromkeys(("ulysses", "ulysses_sp", "context_parallel"), "cp"),
}
"""Sizes of a layout; Ulysses divides sequences over the ranks that we call context ranks."""

_ASYNCHRONOUS = ("off", "async")
_OVERLAPS = "stages of this run overlap over steps, and it does not say on which devices"

T = TypeVar("T")


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
    """

    name: str
    stages: tuple[StagePrediction, ...] = ()
    step: StagePrediction | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Job:
    """A row, understood."""

    shape: ModelShape
    machine: Machine
    num_devices: int
    samples: int
    group_size: int
    prompt_tokens: float
    lengths: Lengths
    context: int
    train: Layout
    rollout: Layout
    shard: Shard
    slots: int
    kv_tokens: int
    recompute: Recompute
    mini_batches: int
    micro_tokens: int
    logprob_passes: int
    notes: list[str] = field(default_factory=list)


def predict_row(row: Row, models: Path, cost: Cost | None = None) -> list[Prediction]:
    """One row: a prediction for each run that it holds, or one that says what is missing."""
    cost = cost or AnalyticCost()
    name = str(row.get("name", "a row without a name"))
    try:
        job = _Reader(row).job(models)
        seconds = _stage_seconds(job, cost)
    except Unusable as why:
        return [Prediction(name=name, missing=why.reasons)]
    except FlowError as error:
        return [Prediction(name=name, missing=(" ".join(str(error).split()),))]
    found = []
    for run, measured in _runs(row).items():
        title = f"{name}/{run}" if run else name
        if any(word in run for word in _ASYNCHRONOUS):
            found.append(Prediction(name=title, missing=(_OVERLAPS,)))
            continue
        found.append(_compare(title, job, seconds, measured))
    return found


def _runs(row: Row) -> dict[str, Row]:
    """What was measured, by run; '' where there is only one."""
    measured = row.get("measured")
    if not isinstance(measured, Mapping):
        return {"": {}}
    runs = {str(key): value for key, value in measured.items() if isinstance(value, Mapping)}
    return runs or {"": measured}


def _compare(name: str, job: _Job, seconds: Mapping[str, float], measured: Row) -> Prediction:
    stages = [
        StagePrediction(stage=key, predicted_s=seconds[stage], measured_s=float(measured[key]))
        for key, stage in _STAGES.items()
        if is_positive(measured.get(key))
    ]
    given = {_STAGES[stage.stage] for stage in stages}
    step = sum(stage.predicted_s for stage in stages)
    turns = {"generate": 1, "logprobs": job.logprob_passes, "train": 1, "sync": 1}
    step += sum(seconds[name] * times for name, times in turns.items() if name not in given)
    return Prediction(
        name=name,
        stages=tuple(stages),
        step=StagePrediction(stage="step_s", predicted_s=step, measured_s=_step_s(job, measured)),
        notes=tuple(job.notes),
    )


def _step_s(job: _Job, measured: Row) -> float | None:
    step = measured.get("step_s")
    if is_positive(step):
        return float(step)
    rate = next((measured[key] for key in _RATES if is_positive(measured.get(key))), None)
    if rate is None:
        return None
    tokens = job.samples * (job.prompt_tokens + job.lengths.mean)
    return tokens / (float(rate) * job.num_devices)


def _stage_seconds(job: _Job, cost: Cost) -> dict[str, float]:
    shape, machine = job.shape, job.machine
    return {
        "generate": cost.rollout(
            shape,
            job.rollout,
            machine,
            samples=job.samples,
            group_size=job.group_size,
            prompt_tokens=job.prompt_tokens,
            lengths=job.lengths,
            slots=job.slots,
            kv_tokens=job.kv_tokens,
        ).seconds,
        "logprobs": cost.forward(
            shape,
            job.train,
            machine,
            samples=job.samples,
            prompt_tokens=job.prompt_tokens,
            lengths=job.lengths,
            micro_tokens=job.micro_tokens,
            shard=job.shard,
        ).seconds,
        "train": cost.train(
            shape,
            job.train,
            machine,
            samples=job.samples,
            prompt_tokens=job.prompt_tokens,
            lengths=job.lengths,
            mini_batches=job.mini_batches,
            micro_tokens=job.micro_tokens,
            recompute=job.recompute,
            shard=job.shard,
        ).seconds,
        "sync": cost.weight_sync(
            shape, job.train, job.rollout, machine, apart=False, shard=job.shard
        ).seconds,
    }


class _Reader:
    """Reads a row and collects what it lacks."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._missing: list[str] = []
        self._notes: list[str] = []

    def job(self, models: Path) -> _Job:
        """The job; Unusable with all that is missing."""
        row = self._row
        devices = self._section(row, "devices")
        num = int(self._number(devices, "num", "devices.num"))
        group = int(self._number(row, "group_size"))
        samples = self._samples(group)
        prompt = self._number(row, "mean_prompt_tokens")
        response = self._number(row, "mean_response_tokens")
        context, longest = self._longest(prompt)
        shape = self._try(lambda: shape_of(row.get("model"), row.get("model_shape"), models))
        machine = self._try(
            lambda: machine_of(devices.get("type"), node_size=devices.get("node_size"))
        )
        train, shard = self._layout("train_parallel", num)
        rollout, _ = self._layout("rollout_parallel", num)
        lengths = None if self._missing else self._try(lambda: _lengths(response, longest))
        recompute, slots = self._recompute(), self._slots()
        mini_batches = self._optional(row, "mini_batches", 0)
        mini_batches = mini_batches or self._optional(row, "num_minibatches", 1)
        micro_tokens = self._optional(row, "micro_tokens", max(MICRO_TOKENS, context))
        logprob_passes = self._optional(row, "logprob_passes", 1)
        deepest = max(layout.pp for layout in (train, rollout, Layout()) if layout is not None)
        if shape is not None and deepest > shape.num_layers:
            self._missing.append(f"pp {deepest} is more than the {shape.num_layers} layers")
        if self._missing or not (shape and machine and train and rollout and lengths):
            raise Unusable(*self._missing)
        return _Job(
            shape=shape,
            machine=machine,
            num_devices=num,
            samples=samples,
            group_size=group,
            prompt_tokens=prompt,
            lengths=lengths,
            context=context,
            train=train,
            rollout=rollout,
            shard=shard,
            slots=slots,
            kv_tokens=_kv_tokens(shape, rollout, machine, self._cache_share()),
            recompute=recompute,
            mini_batches=mini_batches,
            micro_tokens=micro_tokens,
            logprob_passes=logprob_passes,
            notes=self._notes,
        )

    def _samples(self, group: int) -> int:
        row = self._row
        if row.get("num_sequences") is None and row.get("prompts_per_step") is not None:
            return int(self._number(row, "prompts_per_step")) * group
        return int(self._number(row, "num_sequences"))

    def _longest(self, prompt: float) -> tuple[int, float]:
        """Tokens of the longest sample, and of the longest response."""
        row = self._row
        response = self._optional(row, "max_response_tokens", None)
        if row.get("max_context") is not None:
            context = int(self._number(row, "max_context"))
            room = context - prompt
            return context, room if response is None else min(room, response)
        if response is not None:
            longest = self._optional(row, "max_prompt_tokens", None) or math.ceil(prompt)
            return response + longest, response
        self._missing.append("max_context is missing")
        return 1, 1.0

    def _layout(self, key: str, num: int) -> tuple[Layout | None, Shard]:
        given = self._section(self._row, key)
        sizes = self._sizes(key, given)
        shard: Shard = "full" if "fsdp" in sizes or given.get("zero") == 3 else "optimizer"
        if given.get("zero") == 0:
            shard = "none"
        inner = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
        data = sizes.get("dp", 1) * sizes.get("fsdp", 1)
        # What is not said fills the devices: replicas, of whole models or of sharded ones.
        if "dp" not in sizes and num % (inner * data) == 0:
            data = num // inner
        if given and inner * data != num:
            self._missing.append(f"{key} is for {inner * data} devices, not for {num}")
            return None, shard
        layout = self._try(
            lambda: Layout(
                tp=sizes.get("tp", 1),
                pp=sizes.get("pp", 1),
                cp=sizes.get("cp", 1),
                dp=data,
                ep=sizes.get("ep", 1),
            )
        )
        return layout, shard

    def _sizes(self, key: str, given: Row) -> dict[str, int]:
        """Sizes of a layout by our names."""
        sizes: dict[str, int] = {}
        ignored = []
        for name, value in given.items():
            known = _SIZES.get(str(name))
            if known is None:
                ignored.append(str(name))
            elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                sizes[known] = sizes.get(known, 1) * value
            elif value is not None:
                self._missing.append(f"{key}.{name} is no whole number above 0: {value!r}")
        told = [name for name in ignored if name != "zero"]
        if told:
            self._notes.append(f"{key}: {', '.join(told)} ignored")
        return sizes

    def _recompute(self) -> Recompute:
        found = self._row.get("recompute", "full")
        if found not in get_args(Recompute):
            self._missing.append(f"recompute is one of {', '.join(get_args(Recompute))}: {found!r}")
            return "full"
        return found  # type: ignore[no-any-return]

    def _slots(self) -> int:
        found = self._optional(self._engine(), "max_running_requests", None)
        if found is None:
            self._notes.append(f"engine.max_running_requests taken for {DEFAULT_SLOTS}")
        return found or DEFAULT_SLOTS

    def _engine(self) -> Row:
        engine = self._row.get("engine")
        return engine if isinstance(engine, Mapping) else {}

    def _cache_share(self) -> float:
        """Of the device's memory, for weights and cache."""
        for name in ("gpu_memory_utilization", "mem_fraction_static"):
            share = self._engine().get(name)
            if is_positive(share) and share <= 1:
                return float(share)
        return CACHE_SHARE

    @overload
    def _optional(self, row: Row, key: str, absent: int) -> int: ...
    @overload
    def _optional(self, row: Row, key: str, absent: None) -> int | None: ...
    def _optional(self, row: Row, key: str, absent: int | None) -> int | None:
        """A whole number above 0, where the row has one."""
        value = row.get(key)
        if value is None:
            return absent
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._missing.append(f"{key} is no whole number above 0: {value!r}")
            return absent
        return value

    def _section(self, row: Row, key: str) -> Row:
        found = row.get(key)
        if isinstance(found, Mapping) and found:
            return found
        self._missing.append(f"{key} is missing")
        return {}

    def _number(self, row: Row, key: str, name: str | None = None) -> float:
        value = row.get(key)
        if is_positive(value):
            return float(value)
        if value is not None:
            self._missing.append(f"{name or key} is no number above 0: {value!r}")
        elif name is None or row:
            self._missing.append(f"{name or key} is missing")
        return 1.0

    def _try(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except Unusable as why:
            self._missing.extend(why.reasons)
        except FlowError as error:
            self._missing.append(" ".join(str(error).split()))
        return None


def _lengths(mean: float, longest: float) -> Lengths:
    if longest <= 1:
        raise Unusable("the longest response has no room beside the prompt")
    if mean >= longest:
        if mean > longest * 1.001:
            raise Unusable(
                f"the mean response of {mean:g} tokens is above the longest, {longest:g}"
            )
        return ConstantLengths(tokens=longest)
    return LognormalLengths(mean=mean, sigma=SIGMA, maximum=longest)


def _kv_tokens(shape: ModelShape, rollout: Layout, machine: Machine, share: float) -> int:
    stages = stage_parameters(shape, rollout.tp, rollout.pp, rollout.ep)
    weights = 2 * max(stage.total for stage in stages)
    free = int(machine.spec.memory_bytes * share) - weights
    if free <= 0:
        gib = weights / 2**30
        raise Unusable(
            f"rollout_parallel leaves no room for a cache: {gib:.1f} GiB of weights a device"
        )
    return kv_capacity(shape, rollout, free_bytes=free)
