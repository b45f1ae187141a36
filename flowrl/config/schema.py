"""The typed tree of a run. Defaults are here; YAML files hold only what differs.

Read once, validated once, never changed after. Sizes have one meaning each:

- `train.steps`: steps of the stage; a step consumes one batch of prompts.
- `train.prompts_per_step`: prompts (for supervised stages: examples) in a step's batch.
- `train.group_size`: samples for each prompt.
- `train.mini_batches`: optimizer updates a step; each takes whole groups, so it divides
  `prompts_per_step`.
- `train.micro_batch`: samples in one forward and backward pass at most; changes memory and speed,
  never the result.
- `train.max_staleness`: weight publications that a sample may be behind when it is consumed; 0 is
  strictly on-policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from flowrl.config.data import (
    ArithmeticData,
    CurriculumConfig,
    DataConfig,
    DataSource,
    DifficultyConfig,
    JsonlData,
)
from flowrl.config.plan import PlanConfig
from flowrl.config.rewards import (
    CosineLengthTerm,
    ExactMatch,
    FormatMatch,
    Gsm8kMatch,
    NumericMatch,
    OverlongTerm,
    PythonReward,
    RepetitionTerm,
    RewardsConfig,
    RewardTerm,
    StopProperlyTerm,
)
from flowrl.config.section import Args, Float, Int, Section
from flowrl.specs import Aggregation
from flowrl.specs.attributes import MIN_TEMPERATURE

__all__ = [
    "AdvantageConfig",
    "AlgorithmConfig",
    "ArithmeticData",
    "BpeTokenizer",
    "CharTokenizer",
    "CosineLengthTerm",
    "CurriculumConfig",
    "DataConfig",
    "DataSource",
    "DifficultyConfig",
    "EvalConfig",
    "ExactMatch",
    "FormatMatch",
    "FreshModel",
    "Gsm8kMatch",
    "JsonlData",
    "NumericMatch",
    "OptimizerChanges",
    "OptimizerConfig",
    "OverlongTerm",
    "PlanConfig",
    "PythonReward",
    "RepetitionTerm",
    "RewardTerm",
    "RewardsConfig",
    "RoleConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "StageConfig",
    "StopConfig",
    "StopProperlyTerm",
    "TrainConfig",
]


class OptimizerConfig(Section):
    """AdamW; see `flowrl.specs.AdamW` for the meaning of each field."""

    learning_rate: Float = Field(default=1e-6, gt=0)
    beta1: Float = Field(default=0.9, ge=0, lt=1)
    beta2: Float = Field(default=0.95, ge=0, lt=1)
    eps: Float = Field(default=1e-8, gt=0)
    weight_decay: Float = Field(default=0.0, ge=0)
    warmup_updates: Int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: Float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: Float = Field(default=1.0, ge=0)


class OptimizerChanges(Section):
    """What a role's optimizer does otherwise than `train.optimizer` of the stage says."""

    learning_rate: Annotated[Float, Field(gt=0)] | None = None
    beta1: Annotated[Float, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[Float, Field(ge=0, lt=1)] | None = None
    eps: Annotated[Float, Field(gt=0)] | None = None
    weight_decay: Annotated[Float, Field(ge=0)] | None = None
    warmup_updates: Annotated[Int, Field(ge=0)] | None = None
    schedule: Literal["constant", "linear", "cosine"] | None = None
    final_fraction: Annotated[Float, Field(ge=0, le=1)] | None = None
    max_grad_norm: Annotated[Float, Field(ge=0)] | None = None

    def applied_to(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """The optimizer of the role."""
        return optimizer.model_copy(update=self.model_dump(exclude_none=True))


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


class FreshModel(Section):
    """A new model with random weights, as fields of a Hugging Face `config.json`.

    The vocabulary size and the special token ids come from the tokenizer.
    """

    architecture: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    hidden_size: Int = Field(default=64, ge=1, le=1 << 20)
    num_layers: Int = Field(default=2, ge=1, le=10_000)
    num_heads: Int = Field(default=4, ge=1, le=1 << 16)
    num_kv_heads: Annotated[Int, Field(ge=1, le=1 << 16)] | None = None
    intermediate_size: Int = Field(default=160, ge=1, le=1 << 24)
    max_length: Int = Field(default=512, ge=2, le=1 << 31)
    tie_embeddings: bool = True
    initializer_range: Float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> FreshModel:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} gives heads of "
                f"{self.hidden_size // self.num_heads} dimensions; rotary positions turn pairs, so "
                "the number must be even"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self


class CharTokenizer(Section):
    """One token a character of `alphabet`, then end of text."""

    kind: Literal["char"]
    alphabet: str = Field(min_length=1)

    @field_validator("alphabet")
    @classmethod
    def _differing_ascii_characters(cls, alphabet: str) -> str:
        twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if twice:
            raise ValueError(f"{', '.join(map(repr, twice))} is more than once in the alphabet")
        if foreign := sorted({character for character in alphabet if not character.isascii()}):
            raise ValueError(
                f"{', '.join(map(repr, foreign[:8]))} is no ASCII character; use tokenizer kind bpe"
            )
        return alphabet


class BpeTokenizer(Section):
    """Byte-level BPE trained once on the training data (prompts and solutions)."""

    kind: Literal["bpe"]
    vocab_size: Int = Field(default=1024, ge=300)


def _model_form(value: object) -> str:
    return "fresh" if isinstance(value, dict | FreshModel) else "folder"


ModelSource: TypeAlias = Annotated[
    Annotated[str, Tag("folder")] | Annotated[FreshModel, Tag("fresh")],
    Discriminator(_model_form),
]


class RoleConfig(Section):
    """What plays a role.

    Attributes:
        backend: Name of a plug-in (`flowrl backends`).
        model: A Hugging Face model folder, or a new model; none for scorers and for a role that
            begins as a copy of another one (`copy_of`). The path of a `config.json` alone can be
            planned and simulated, not run.
        copy_of: A role whose weights this role begins the stage with. A reference keeps them; a
            role that the workflow updates, such as a critic, goes on from them.
        tokenizer: Of a new model; a folder brings its own.
        optimizer: What differs from the stage's `train.optimizer`, such as a critic's learning
            rate.
        num_slots: Samples decoded at once.
        num_engines: Engines that draw side by side, each with `num_slots`, and with weights of its
            own where they are processes; nothing leaves it to the planner.
            More than one, or one of a stage whose `max_staleness` is above 0, are in processes of
            their own.
        dtype: Parameter type; `auto` takes bfloat16 where the device has it in hardware and
            float32 elsewhere.
        recompute: `full` keeps the input of each layer in a forward pass and computes the rest
            again in the backward pass: a fourth more work for much less memory. `auto` leaves it
            to the planner, which keeps all on a single device.
        terms: What a reward scores with; none takes `rewards.terms`.
        environment: `FILE.py:NAME` that makes the environment, of an environment role.
        options: Keyword arguments of the environment.
        timeout_s: Seconds that one call of the environment may take.
    """

    backend: str = "torch"
    model: ModelSource | None = None
    copy_of: str | None = None
    tokenizer: Annotated[CharTokenizer | BpeTokenizer, Field(discriminator="kind")] | None = None
    optimizer: OptimizerChanges | None = None
    num_slots: Int = Field(default=256, ge=1, le=1 << 20)
    num_engines: Annotated[Int, Field(ge=1, le=1024)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    recompute: Literal["auto", "none", "full"] = "auto"
    terms: tuple[RewardTerm, ...] | None = None
    environment: str | None = None
    options: Args = Field(default_factory=dict)
    timeout_s: Float = Field(default=60.0, gt=0)


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
            raise ValueError(
                "a stage is named twice",
                f"for more of it raise its steps; to run it twice, give each a name and its own "
                f"settings: stages=[{named}], stage.{first}.workflow={twice} and "
                f"stage.{first}.train",
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
