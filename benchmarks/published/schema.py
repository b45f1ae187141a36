"""The files of published figures: stage times, engine steps and weight syncs.

A file of stage times has `rows`; `defaults` hold for all of them. An example:

    rows:
    - name: some_run
      model: Qwen2.5-7B                  # its sizes are configs/models/qwen2.5-7b.json
      devices: {type: H100-SXM-80GB, num: 64}
      prompts_per_step: 128              # or num_sequences
      group_size: 16
      mean_prompt_tokens: 100
      mean_response_tokens: 10426        # or mean_total_tokens, or tokens_per_step
      max_context: 28672                 # or max_prompt_tokens and max_response_tokens
      train_parallel: {fsdp: 16, cp: 4}  # fsdp divides everything; dp that is missing is filled
      rollout_parallel: {tp: 2}
      engine: {name: sglang, max_running_requests: 256}
      measured: {generate_s: 325.1, logprob_s: 42.3, train_s: 73.0, step_s: 447.4}

`measured` holds one run, or several runs by name. A run may also replace keys of its row. A row may
lack keys: then it is not predicted, and the report lists what is missing. A key that is not in
these classes is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flowrl.cost.activations import Recompute
from flowrl.cost.models import Experts, ModelShape
from flowrl.errors import ConfigError

Count = Annotated[int, Field(ge=1, le=10_000_000)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Form(BaseModel):
    """A part of a file that accepts no other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Devices(Form):
    """Devices by their name in configs/hardware, and how many form a node."""

    type: str
    num: Count
    node_size: Count = 8


class Parallel(Form):
    """Sizes of the ranks that a model is divided over."""

    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    ep: Count = 1
    dp: Count | None = None
    fsdp: Count | None = None


class Engine(Form):
    """Settings of the inference engine; `mem_fraction_static` is for weights and KV cache."""

    name: Literal["vllm", "sglang"] | None = None
    max_running_requests: Count | None = None
    mem_fraction_static: Annotated[float, Field(gt=0, le=1)] | None = None


class Sizes(Form):
    """Sizes of a model that has no file in configs/models; all its layers are dense or experts."""

    vocab: Count
    hidden: Count
    intermediate: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    tied_embeddings: bool
    num_experts: Count | None = None
    experts_per_token: Count = 1
    params_B: float | None = None  # noqa: N815  (this and the next two are not read)
    active_params_B: float | None = None  # noqa: N815
    kv_bytes_per_token: int | None = None

    def shape(self, name: str) -> ModelShape:
        """Returns the model's shape for the cost model."""
        experts = None
        if self.num_experts is not None:
            experts = Experts(
                num_experts=self.num_experts,
                num_active=self.experts_per_token,
                expert_size=self.intermediate,
            )
        return ModelShape(
            family=name,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            tied=self.tied_embeddings,
            experts=experts,
        )


class Job(Form):
    """What a prediction needs. Keys that are None are missing in the file."""

    model: str | None = None
    model_shape: Sizes | None = None
    devices: Devices | None = None
    rollout_devices: Count | None = None  # with train_devices: each has devices of its own
    train_devices: Count | None = None
    staleness: Annotated[int, Field(ge=0)] = 0  # publications; above 0 stages overlap over steps
    num_sequences: Count | None = None
    prompts_per_step: Count | None = None
    group_size: Count | None = None
    mean_prompt_tokens: Positive | None = None
    mean_response_tokens: Positive | None = None
    mean_total_tokens: Positive | None = None
    tokens_per_step: Positive | None = None
    max_context: Count | None = None
    max_prompt_tokens: Count | None = None
    max_response_tokens: Count | None = None
    train_parallel: Parallel | None = None
    rollout_parallel: Parallel | None = None
    engine: Engine = Engine()
    micro_tokens: Count | None = None
    logprob_micro_tokens: Count | None = None
    mini_batches: Count | None = None
    logprob_passes: Annotated[int, Field(ge=0)] | None = None
    recompute: Recompute | None = None
    offload: bool | None = None  # of the trainer's weights and optimizer, during a rollout
    compiled: bool | None = None  # whether a trainer with fsdp fuses its modules


class Run(Job):
    """Times that were measured in one run, and keys that replace those of its row.

    `logprob_s` is for all passes of a step, `old_logprob_s` and `ref_logprob_s` for one pass each.
    `refit_s` is a weight sync with the offload of the trainer's weights and optimizer before it.
    """

    generate_s: Positive | None = None
    logprob_s: Positive | None = None
    old_logprob_s: Positive | None = None
    ref_logprob_s: Positive | None = None
    train_s: Positive | None = None
    sync_s: Positive | None = None
    refit_s: Positive | None = None
    step_s: Positive | None = None
    tok_s_per_device: Positive | None = None  # of a whole step, prompts included
    e2e_tok_s_per_device: Positive | None = None  # the same, as other sources call it


class Row(Job):
    """A published job with its runs; `complete` and `missing` say what its source leaves out."""

    name: str
    source: str | None = None
    framework: str | None = None
    caution: str | None = None
    from_figure: bool = False
    complete: bool | None = None
    missing: str | None = None
    measured: dict[str, Run]

    @model_validator(mode="before")
    @classmethod
    def _one_run_has_no_name(cls, given: Any) -> Any:
        measured = given.get("measured") if isinstance(given, Mapping) else None
        if isinstance(measured, Mapping):
            several = measured and all(isinstance(v, Mapping) for v in measured.values())
            given = {**given, "measured": measured if several else {"": measured}}
        return given

    def jobs(self) -> dict[str, Job]:
        """Returns the job of each run, with the run's keys in place of the row's."""
        return {
            name: Job.model_validate(_replace(_given(self), _given(run)))
            for name, run in self.measured.items()
        }


class StageTimes(Form):
    """A file of stage times. `defaults` hold where a row does not say otherwise."""

    defaults: dict[str, Any] = {}
    rows: list[Row]

    @model_validator(mode="before")
    @classmethod
    def _rows_with_defaults(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("defaults"), Mapping):
            rows = [_replace(given["defaults"], row) for row in given.get("rows", ())]
            given = {**given, "rows": rows}
        return given


class EngineStep(Form):
    """The time of a decode step or of a prefill, of kernels alone, in bfloat16.

    Experts are divided by tensor ranks (`moe_tp`), or whole experts are on ranks (`moe_ep`).
    """

    system: str
    model: str
    tp: Count
    moe: dict[Literal["moe_tp", "moe_ep"], Count] | None = None
    batch: Count
    backend: str | None = None
    mode: str | None = None
    formula_share: float | None = None


class DecodeStep(EngineStep):
    """One step of `batch` sequences with `context` tokens each."""

    context: Count
    step_ms: Positive


class Prefill(EngineStep):
    """One pass over `batch` prompts of `input_len` tokens."""

    input_len: Count
    prefill_ms: Positive


class EngineSteps(Form):
    """A file of engine steps; the keys of type Any are for other readers."""

    source: str | None = None
    note: str | None = None
    fields: Any = None
    model_shapes: dict[str, Sizes] = {}
    memory: Any = None
    decode: list[DecodeStep] = []
    prefill: list[Prefill] = []


class WeightSync(Form):
    """Seconds from the end of training until engines `apart`, or in place, have the weights."""

    name: str
    model: str
    devices: Devices
    train_parallel: Parallel
    rollout_parallel: Parallel
    apart: bool
    sync_s: Positive
    caution: str | None = None


class WeightSyncs(Form):
    """A file of weight syncs."""

    weight_syncs: list[WeightSync]


ALTERNATIVES = (
    {"mean_response_tokens", "mean_total_tokens", "tokens_per_step"},
    {"num_sequences", "prompts_per_step"},
)
"""Keys of which a job has one: where a run has one of them, the others of its row do not hold."""


def _given(job: Job) -> dict[str, Any]:
    return {key: getattr(job, key) for key in job.model_fields_set & Job.model_fields.keys()}


def _replace(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    replaced = {key for keys in ALTERNATIVES if keys & inner.keys() for key in keys}
    return {**{key: outer[key] for key in outer if key not in replaced}, **inner}


def read(path: Path) -> StageTimes | EngineSteps | WeightSyncs:
    """Reads a file of published figures, YAML or JSON.

    Raises:
        ConfigError: The file cannot be read, or has unknown keys or values.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the file cannot be read: {error}", where=str(path)) from error
    keys = found.keys() if isinstance(found, dict) else ()
    form: type[StageTimes | EngineSteps | WeightSyncs] = StageTimes
    if "decode" in keys or "prefill" in keys:
        form = EngineSteps
    elif "weight_syncs" in keys:
        form = WeightSyncs
    try:
        return form.model_validate(found)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(
            f"{len(wrong)} keys or values are not in the form of benchmarks/published/schema.py",
            where=str(path),
            found="\n  ".join(["", *wrong]),
        ) from error
