"""The typed tree of a run. Defaults are here; YAML files hold only what differs.

It is read once, validated once and never changed after. Each size has one meaning:

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

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator

from flowrl.config.data import DataConfig
from flowrl.config.rewards import RewardsConfig, RewardTerm
from flowrl.config.roles import OptimizerConfig, RoleConfig
from flowrl.config.section import Args, Float, Int, Refusal, Section
from flowrl.errors import ConfigError
from flowrl.specs import Aggregation
from flowrl.specs.attributes import MIN_TEMPERATURE

__all__ = [
    "MOST_ALTERNATIVES",
    "AdvantageConfig",
    "AlgorithmConfig",
    "EnvironmentTimesConfig",
    "EvalConfig",
    "PlanConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "StageConfig",
    "StopConfig",
    "TrainConfig",
]


def _greedy_or_warm(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(
            f"logits divided by so little lose their digits; 0 takes the likeliest token, and "
            f"{MIN_TEMPERATURE:g} is the least above it"
        )
    return value


Temperature: TypeAlias = Annotated[Float, AfterValidator(_greedy_or_warm)]


class SamplingConfig(Section):
    """How rollouts are drawn; see `flowrl.specs.Sampling`."""

    temperature: Temperature = Field(default=1.0, ge=0)
    top_p: Float = Field(default=1.0, gt=0, le=1)
    top_k: Int = Field(default=0, ge=0)
    min_p: Float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Float = Field(default=1.0, gt=0)
    min_tokens: Int = Field(default=0, ge=0)
    max_tokens: Int = Field(default=256, ge=1, le=1 << 24)


class TrainConfig(Section):
    """A stage's schedule; the module says what each size means.

    Attributes:
        policies: Rules of the rollout scheduler by name, each as the kind of a policy or as its
            options; `flowrl.compiler.scheduling` says which there are, docs/scheduling.md what they
            do.
        refill: Draws further prompts in the place of groups that a filter took out, so that a step
            has exactly `prompts_per_step` groups (dynamic sampling). Otherwise a step learns from
            those of its prompts that are left.
        refill_limit: With `refill`, prompts that a step may cost, as a multiple of
            `prompts_per_step`; a run that needs more stops.
        truncated: What is done where rollouts are drawn with options that change the distribution
            (top_p, top_k, min_p, repetition_penalty, min_tokens), so that their logprobs are not
            those of what drew them: `refuse` says so at compile time, `ignore` trains with that
            bias, `repeat` has the trainer repeat the transformation, where its backend can.
    """

    steps: Int = Field(default=100, ge=0)
    prompts_per_step: Int = Field(default=64, ge=1, le=1 << 20)
    group_size: Int = Field(default=8, ge=1, le=1 << 16)
    mini_batches: Int = Field(default=1, ge=1, le=1 << 20)
    micro_batch: Int = Field(default=32, ge=1, le=1 << 20)
    max_staleness: Int = Field(default=0, ge=0)
    policies: dict[str, str | Args] = Field(default_factory=dict)
    refill: bool = False
    refill_limit: Int = Field(default=10, ge=1)
    truncated: Literal["refuse", "ignore", "repeat"] = "refuse"
    optimizer: OptimizerConfig = OptimizerConfig()
    sampling: SamplingConfig = SamplingConfig()


class StopConfig(Section):
    """Ends a stage early, once a held-out metric is reached.

    Attributes:
        metric: A name that evaluation reports: `accuracy`, `format`, `score`, or a reward term's.
        at_least: The stage ends at the first check that measures this much.
        check_every: Steps between checks.
        num: Held-out prompts of a check, one sample each.
    """

    metric: str = "accuracy"
    at_least: Float
    check_every: Int = Field(default=20, ge=1)
    num: Int = Field(default=256, ge=1)


class StageConfig(Section):
    """One workflow of the run.

    Attributes:
        workflow: A registered name (`sft`, `grpo`), `FILE.py` or `FILE.py:NAME`; by
            default the stage's own name.
        args: Keyword arguments of the workflow function that are not roles.
        bind: Roles that play parts of other names: `{actor: teacher}` runs the workflow with the
            role `teacher` as its `actor`.
    """

    workflow: str | None = None
    train: TrainConfig = TrainConfig()
    stop: StopConfig | None = None
    args: Args = Field(default_factory=dict)
    bind: dict[str, str] = Field(default_factory=dict)


class AdvantageConfig(Section):
    """The advantage of workflows that name none: group-relative (GRPO)."""

    std: Literal["group", "batch", "none"] = "group"


class AlgorithmConfig(Section):
    """What `actor.update(rollout, rewards)` means where the program does not say.

    Attributes:
        trust_rollout_logprobs: Takes the engine's logprobs for those of the trainer at the start
            of a step wherever a loss asks for the latter, which saves a forward pass. Only right
            where engine and trainer agree; the mismatch that a run reports says how far they do.
    """

    advantage: AdvantageConfig = AdvantageConfig()
    clip_low: Float = Field(default=0.2, gt=0)
    clip_high: Float = Field(default=0.2, gt=0)
    aggregation: Aggregation = "token-mean"
    trust_rollout_logprobs: bool = False


class EvalConfig(Section):
    """How held-out data is measured: before the last stage, after it, and between.

    Attributes:
        every: Steps between evaluations inside the last stage; 0 measures only before and after.
        num: Held-out prompts; 0 takes all.
        temperature: 1 samples from the model as it is; 0 is greedy.
        metric: The number of the last line: `accuracy`, `format`, or another term's name.
    """

    every: Int = Field(default=0, ge=0)
    num: Int = Field(default=512, ge=0)
    temperature: Temperature = Field(default=1.0, ge=0)
    metric: str = "accuracy"


class RuntimeConfig(Section):
    """How a run behaves on its machine.

    Attributes:
        runs: Folder that run folders are made in.
        stall_timeout_s: Seconds without any event after which the run stops and says who waits
            for whom.
        checkpoint_every: Steps between checkpoints; 0 counts no steps. Whatever is set, there is a
            checkpoint at the end of each stage and at Ctrl-C.
        checkpoint_minutes: Minutes after the last checkpoint from which on the end of a step writes
            the next one, also where `checkpoint_every` would not yet; 0 measures no time.
        keep_checkpoints: Older ones are removed.
        log_samples: Samples of each step written to samples.jsonl; 0 writes all.
        journal_mb: Megabytes of the journal that each rollout may keep, which `flowrl why` reads;
            the oldest part goes first. 0 writes none.
        num_threads: CPU threads of a worker, at most 1024; 1 is best for small models, 0 leaves
            the number to the library.
    """

    runs: Path = Path("runs")
    stall_timeout_s: Float = Field(default=300.0, gt=0)
    checkpoint_every: Int = Field(default=0, ge=0)
    checkpoint_minutes: Float = Field(default=10.0, ge=0)
    keep_checkpoints: Int = Field(default=2, ge=1)
    log_samples: Int = Field(default=0, ge=0)
    journal_mb: Int = Field(default=128, ge=0)
    num_threads: Int = Field(default=1, ge=0, le=1024)


MOST_ALTERNATIVES = 50
"""The most plans that are shown besides the best one."""


class EnvironmentTimesConfig(Section):
    """What an environment takes, of a plan for many devices.

    Attributes:
        step_s: Seconds of whoever serves a call, to answer a turn.
        reset_s: Likewise, to begin an episode; none takes `step_s`.
        wait_s: Seconds that an answer is late beside, while others are served.
        device: What it computes on: the `cpu` of hosts, an `accelerator` of the kind that its
            policy is on, or accelerators of a kind, by their name in the cluster.
        concurrency: Calls that it serves at once, on each accelerator (none: 1) or on the cores of
            each node (none: one a core).
        memory_gib: Of each accelerator that it is on, or of each node's host.
    """

    step_s: Float = Field(ge=0, le=86_400)
    reset_s: Annotated[Float, Field(ge=0, le=86_400)] | None = None
    wait_s: Float = Field(default=0.0, ge=0, le=86_400)
    device: str = "cpu"
    concurrency: Annotated[Int, Field(ge=1, le=1 << 20)] | None = None
    memory_gib: Float = Field(default=0.0, ge=0, le=1_000_000)


class PlanConfig(Section):
    """How a plan for many devices is made; a plan for one device needs none of it.

    Attributes:
        mean_prompt_tokens: Mean length of prompts.
        mean_response_tokens: Mean length of responses, after the cut at the longest; of episodes
            with what is said in them.
        sigma: Of the logarithm of lengths: how long their tail is; 0 makes all equal. At
            most 5, where one of forty lengths is 18,000 times the median: more is a mistake.
        mean_turns: Turns of an episode on average.
        mean_observation_tokens: Tokens that an environment says before each turn, on average.
        environments: What environments take, by role.
        lengths: A file of lengths, one JSON value a line (a number, or an object with
            `num_tokens`, as samples.jsonl of a run has), or a run's folder; takes the place of
            mean and sigma.
        engine_times: Where estimates of an engine's steps come from: `analytic`, or
            `aiconfigurator`, measured kernels of the package of that name.
        profile: Times that `flowrl profile` measured; they replace estimates point by point.
        trainer: What trains where the role's backend declares no layouts itself: `megatron` (tp,
            pp, cp, ep; optimizer split over replicas) or `fsdp` (parameters split over replicas).
        engine: What generates there: `sglang` or `vllm`.
        objective: What is made small: the `step_time`, or the `device_time` of a sample.
        kind: Of the plan: `temporal`, `spatial` or `asynchronous`; `auto` takes what is predicted
            to be fastest, a `hybrid` of the first two among them. On this machine it is how samples
            are drawn (`flowrl.plan.local`), and `auto` goes by the times that `flowrl profile`
            measured; where nothing was, the main process draws (or, where samples may be drawn
            ahead, a process beside it).
        memory_share: Of an accelerator's memory, as software finds it, what a plan may fill.
        alternatives: Next best plans that are told; the best of each other kind is told anyway.
        try_batches: Other sizes of a step are planned for where no number of replicas on all
            devices divides its samples, to tell what they take; `flowrl plan --explain` does so.
        pins: Decisions that are kept, by what they are about: `{rollout: {tp: 2}}`.
    """

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
    """A whole run.

    Attributes:
        stages: Names of the workflows that run in order. `train`, `args` and `stop` at the top
            belong to the last; `stage.NAME` holds those of the others.
        executor: `local` runs the compiled plan on this machine; `eager` runs the program line by
            line on real tensors, for breakpoints and notebooks, with the same results.
        cluster: `auto` finds this machine's devices; a path names a YAML that describes others;
            `ray`, or `ray:ADDRESS`, lists those of a running Ray cluster, to plan for them.
    """

    name: str = "run"
    seed: Int = Field(default=0, ge=0)
    stages: tuple[str, ...] = Field(min_length=1)
    stage: dict[str, StageConfig] = Field(default_factory=dict)
    workflow: str | None = None
    train: TrainConfig = TrainConfig()
    args: Args = Field(default_factory=dict)
    bind: dict[str, str] = Field(default_factory=dict)
    stop: StopConfig | None = None
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    data: DataConfig
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    eval: EvalConfig = EvalConfig()
    executor: Literal["local", "eager"] = "local"
    cluster: str = "auto"
    plan: PlanConfig = PlanConfig()
    runtime: RuntimeConfig = RuntimeConfig()

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
                    hint="for more of it raise its steps; to run it twice, give each a name and "
                    f"its own settings: stages=[{named}], stage.{first}.workflow={twice} and "
                    f"stage.{first}.train",
                )
            )
        return stages

    def stage_config(self, name: str) -> StageConfig:
        """What stage `name` runs; the last stage's comes from the keys at the top."""
        if name != self.stages[-1]:
            return self.stage.get(name, StageConfig())
        return StageConfig(
            workflow=self.workflow,
            train=self.train,
            stop=self.stop,
            args=self.args,
            bind=self.bind,
        )

    def terms_of(self, role: str) -> tuple[tuple[RewardTerm, ...], str]:
        """The reward terms that `role` scores with, and the key that they stand under."""
        own = self.roles[role].terms if role in self.roles else None
        return (
            (self.rewards.terms, "rewards.terms") if own is None else (own, f"roles.{role}.terms")
        )

    def optimizer_of(self, role: str, train: TrainConfig) -> OptimizerConfig:
        """How `role` learns in a stage with the settings `train`."""
        own = self.roles[role].optimizer if role in self.roles else None
        return train.optimizer if own is None else own.applied_to(train.optimizer)
