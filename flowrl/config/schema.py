"""The typed tree of a run. Defaults are here; YAML files hold only what differs.

It is read once, validated once and never changed after. docs/config-guide.md says what each key
means ("Every key"); a test compares its table with this tree. Each size has one meaning:

- `train.steps`: steps of the stage; a step consumes one batch of prompts.
- `train.prompts_per_step`: prompts (in supervised stages: examples) of a step's batch.
- `train.group_size`: samples of each prompt.
- `train.mini_batches`: optimizer updates of a step; each takes whole groups, so it divides
  `prompts_per_step`.
- `train.micro_batch`: at most so many samples in one forward and backward pass; it changes memory
  and speed, never the result.
- `train.max_staleness`: weight publications that a sample may be behind when it is consumed; 0 is
  strictly on-policy.

Sections of their own modules: `flowrl.config.roles`, `flowrl.config.data`, `flowrl.config.rewards`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from flowrl.config.data import DataConfig, DataSource, OneSource, single_sources
from flowrl.config.executors import ExecutorName
from flowrl.config.rewards import RewardsConfig, RewardTerm
from flowrl.config.roles import OptimizerConfig, RoleConfig
from flowrl.config.section import Args, Bind, Float, Int, Refusal, Section
from flowrl.errors import ConfigError
from flowrl.specs.attributes import MIN_TEMPERATURE
from flowrl.specs.loss import Aggregation


def _greedy_or_warm(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(
            f"logits divided by so little lose their digits; 0 takes the likeliest token, and "
            f"{MIN_TEMPERATURE:g} is the least above it"
        )
    return value


Temperature: TypeAlias = Annotated[Float, AfterValidator(_greedy_or_warm)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopText: TypeAlias = Annotated[str, Field(min_length=1)]


class SamplingConfig(Section):
    """Options of sampling; see `flowrl.specs.Sampling`."""

    temperature: Temperature = Field(default=1.0, ge=0)
    top_p: Float = Field(default=1.0, gt=0, le=1)
    top_k: Int = Field(default=0, ge=0)
    min_p: Float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Float = Field(default=1.0, gt=0)
    min_tokens: Int = Field(default=0, ge=0)
    max_tokens: Int = Field(default=256, ge=1, le=1 << 24)
    stop: Annotated[tuple[StopText, ...], BeforeValidator(_listed)] = ()

    @model_validator(mode="after")
    def _a_response_can_stop(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}, so that no "
                "response could ever stop"
            )
        return self


class TrainConfig(Section):
    """A stage's schedule; the module says what each size means."""

    steps: Int = Field(default=100, ge=0)
    epochs: Annotated[Float, Field(gt=0)] | None = None
    prompts_per_step: Int = Field(default=64, ge=1, le=1 << 20)
    group_size: Int = Field(default=8, ge=1, le=1 << 16)
    mini_batches: Int = Field(default=1, ge=1, le=1 << 20)
    micro_batch: Int = Field(default=32, ge=1, le=1 << 20)
    max_staleness: Int = Field(default=0, ge=0)
    policies: dict[str, str | Args] = Field(default_factory=dict)
    refill: bool = False
    refill_limit: Int = Field(default=10, ge=1)
    truncated: Literal["refuse", "ignore", "repeat"] = "refuse"
    mismatch_limit: Float = Field(default=0.1, gt=0)
    mismatch_every: Int = Field(default=1, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingConfig = SamplingConfig()


class StopConfig(Section):
    """Ends a stage early, once a held-out metric reaches a value."""

    metric: str = "accuracy"
    at_least: Float
    check_every: Int = Field(default=20, ge=1)
    num: Int = Field(default=256, ge=1)


class StageConfig(Section):
    """One workflow of the run."""

    workflow: str | None = None
    train: TrainConfig = TrainConfig()
    stop: StopConfig | None = None
    args: Args = Field(default_factory=dict)
    bind: Bind = Field(default_factory=dict)


class AdvantageConfig(Section):
    """The advantage of workflows without one of their own: group-relative (GRPO)."""

    std: Literal["group", "batch", "none"] = "group"


class AlgorithmConfig(Section):
    """Defaults of `actor.update(rollout, rewards)` for what the program leaves open."""

    advantage: AdvantageConfig = AdvantageConfig()
    clip_low: Float = Field(default=0.2, gt=0)
    clip_high: Float = Field(default=0.2, gt=0)
    aggregation: Aggregation = "token-mean"
    trust_rollout_logprobs: bool = False


class HeldOutConfig(Section):
    """A further held-out set, or the same one with other sampling.

    Attributes:
        data: Source of its prompts; by default `data.eval`.
        num: Number of its prompts; 0 takes all. By default `eval.num`.
        samples: Samples of each prompt; by default `eval.samples`.
        temperature: By default `eval.temperature`.
    """

    data: DataSource | None = None
    num: Annotated[Int, Field(ge=0)] | None = None
    samples: Annotated[Int, Field(ge=1)] | None = None
    temperature: Annotated[Temperature, Field(ge=0)] | None = None


PAIR_ACCURACY = "pair_accuracy"
REWARD_MARGIN = "reward_margin"
"""Metrics of pairs, those that a step trains on and held-out ones."""


class EvalConfig(Section):
    """Evaluations on held-out data: before the last stage, after it, and between."""

    every: Int = Field(default=0, ge=0)
    num: Int = Field(default=512, ge=0)
    samples: Int = Field(default=1, ge=1)
    temperature: Temperature = Field(default=1.0, ge=0)
    metric: str = "accuracy"
    score: str | None = None
    sets: dict[str, HeldOutConfig] = Field(default_factory=dict)
    keep_best: bool = False

    @property
    def metric_temperature(self) -> float:
        """The sampling temperature of the set that `metric` is measured on."""
        own = self.sets.get(self.metric.partition("/")[0])
        if own is None or own.temperature is None:
            return self.temperature
        return own.temperature

    @field_validator("sets")
    @classmethod
    def _sets_have_names(cls, sets: dict[str, HeldOutConfig]) -> dict[str, HeldOutConfig]:
        for name in sets:
            if not name or "/" in name:
                raise ValueError(f"{name!r} names no set: its metrics are called NAME/METRIC")
        return sets


TRACKERS = "flowrl.trackers"
"""The entry points by which packages add trackers; `flowrl.observe.trackers` says what they are."""


class TrackingConfig(Section):
    """Programs that show the numbers of a run."""

    to: tuple[str, ...] = ()
    names: Literal["flowrl", "verl", "mindspeed_rl"] = "flowrl"
    options: dict[str, dict[str, object]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_are_of_trackers(self) -> Self:
        for name in self.options:
            if name not in self.to:
                raise ValueError(f"options.{name} are of no tracker in `to`; add it there")
        return self


class RuntimeConfig(Section):
    """Folders, limits and logs of a run on its machine."""

    runs: Path = Path("runs")
    stall_timeout_s: Float = Field(default=300.0, gt=0)
    start_timeout_s: Float = Field(default=120.0, gt=0)
    place_timeout_s: Float = Field(default=10.0, gt=0)
    checkpoint_every: Int = Field(default=0, ge=0)
    checkpoint_minutes: Float = Field(default=10.0, ge=0)
    keep_checkpoints: Int = Field(default=2, ge=1)
    log_samples: Int = Field(default=0, ge=0)
    journal_mb: Int = Field(default=128, ge=0)
    trace_mb: Int = Field(default=64, ge=0)
    num_threads: Int = Field(default=1, ge=0, le=1024)

    @property
    def silence_s(self) -> float:
        """Seconds without a message after which an engine with requests is restarted.

        The run itself gives up after twice that time.
        """
        return self.stall_timeout_s / 2


MOST_ALTERNATIVES = 50
"""The most plans that are shown besides the best one."""


class EnvironmentTimesConfig(Section):
    """Times and devices of an environment, for plans on many devices.

    Attributes:
        step_s: Seconds of computing to answer a turn.
        reset_s: Seconds of computing to begin an episode; by default `step_s`.
        wait_s: Seconds of latency of each answer, in which other calls are served.
        device: The devices of the environment: the `cpu` of hosts, an `accelerator` of the kind
            that its policy uses, or accelerators of a kind, by their name in the cluster.
        concurrency: Calls that are served at the same time, on each accelerator (by default 1) or
            on the cores of each node (by default one per core).
        memory_gib: Memory on each accelerator of the environment, or on each node's host.
    """

    step_s: Float = Field(ge=0, le=86_400)
    reset_s: Annotated[Float, Field(ge=0, le=86_400)] | None = None
    wait_s: Float = Field(default=0.0, ge=0, le=86_400)
    device: str = "cpu"
    concurrency: Annotated[Int, Field(ge=1, le=1 << 20)] | None = None
    memory_gib: Float = Field(default=0.0, ge=0, le=1_000_000)


class PlanConfig(Section):
    """Assumptions, objective and fixed decisions of plans for many devices."""

    mean_prompt_tokens: Annotated[Float, Field(gt=0)] | None = None
    mean_response_tokens: Annotated[Float, Field(gt=0)] | None = None
    sigma: Annotated[Float, Field(ge=0, le=5)] | None = None
    mean_turns: Annotated[Float, Field(ge=1)] | None = None
    mean_observation_tokens: Annotated[Float, Field(ge=0)] | None = None
    environments: dict[str, EnvironmentTimesConfig] = Field(default_factory=dict)
    lengths: Path | None = None
    engine_times: Literal["analytic", "aiconfigurator"] = "analytic"
    profile: Path | None = None
    trainer: Literal["megatron", "fsdp"] = "megatron"
    engine: Literal["sglang", "vllm"] = "sglang"
    objective: Literal["step_time", "device_time"] = "step_time"
    kind: Literal["auto", "temporal", "spatial", "asynchronous"] = "auto"
    memory_share: Annotated[Float, Field(gt=0, le=1)] = 0.9
    alternatives: Int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    try_batches: bool = False
    pins: dict[str, object] = Field(default_factory=dict)


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    seed: Int = Field(default=0, ge=0)
    stages: tuple[str, ...] = Field(min_length=1)
    stage: dict[str, StageConfig] = Field(default_factory=dict)
    workflow: str | None = None
    train: TrainConfig = TrainConfig()
    args: Args = Field(default_factory=dict)
    bind: Bind = Field(default_factory=dict)
    stop: StopConfig | None = None
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    data: DataConfig
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    eval: EvalConfig = EvalConfig()
    executor: ExecutorName = "local"
    cluster: str = "auto"
    plan: PlanConfig = PlanConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tracking: TrackingConfig = TrackingConfig()

    def data_sources(self) -> Iterator[tuple[str, OneSource]]:
        """Yields every source of training and held-out data with its dotted key."""
        yield from single_sources("data.train", self.data.train)
        yield from single_sources("data.eval", self.data.eval)
        for name, own in self.eval.sets.items():
            yield from single_sources(f"eval.sets.{name}.data", own.data)

    @field_validator("stages")
    @classmethod
    def _stages_have_names(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        for name in stages:
            if not name or "/" in name or "\0" in name:
                raise ValueError(
                    f"{name!r} names no stage, for it becomes part of file names; "
                    "give the stage a short name, and the file as its `workflow`"
                )
        twice = next((name for name in stages if stages.count(name) > 1), None)
        if twice is not None:
            place, first = stages.index(twice), f"{twice}_1"
            named = ", ".join([*stages[:place], first, *stages[place + 1 :]])
            raise Refusal(
                ConfigError(
                    "a stage is named twice",
                    found=f"[{', '.join(stages)}]",
                    hint="for more of it raise its steps; to run it twice, give each a name and "
                    f"its own settings: stages=[{named}], stage.{first}.workflow={twice} and "
                    f"stage.{first}.train",
                )
            )
        return stages

    def stage_config(self, name: str) -> StageConfig:
        """Returns the section of a stage; that of the last stage comes from the keys at the top."""
        if name != self.stages[-1]:
            return self.stage.get(name, StageConfig())
        return StageConfig(
            workflow=self.workflow,
            train=self.train,
            stop=self.stop,
            args=self.args,
            bind=self.bind,
        )

    def with_steps(self, steps: Mapping[str, int]) -> RunConfig:
        """Returns the configuration with numbers of steps in place of epochs, by stage."""

        def changed(train: TrainConfig, name: str) -> TrainConfig:
            return train.model_copy(update={"steps": steps[name], "epochs": None})

        earlier = {
            name: stage.model_copy(update={"train": changed(stage.train, name)})
            for name, stage in self.stage.items()
            if name in steps
        }
        last = self.stages[-1]
        train = changed(self.train, last) if last in steps else self.train
        return self.model_copy(update={"train": train, "stage": {**self.stage, **earlier}})

    def terms_of(self, role: str) -> tuple[tuple[RewardTerm, ...], str]:
        """Returns the reward terms that `role` scores with, and their key."""
        own = self.roles[role].terms if role in self.roles else None
        return (
            (self.rewards.terms, "rewards.terms") if own is None else (own, f"roles.{role}.terms")
        )

    def optimizer_of(self, role: str, train: TrainConfig) -> OptimizerConfig:
        """Returns the optimizer of `role` in a stage with the settings `train`."""
        own = self.roles[role].optimizer if role in self.roles else None
        return train.optimizer if own is None else own.applied_to(train.optimizer)
