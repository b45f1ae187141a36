"""The input of the passes: settings of the configuration, and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from flowrl.cost import ModelShape, Workload
from flowrl.specs import AdvantageSpec, GroupRelative, LossSpec, PolicyClip, Sampling

Truncated: TypeAlias = Literal["refuse", "ignore", "repeat"]
"""The treatment of rollouts that are sampled from another distribution than their logprobs are of;
`flowrl.config.schema.TrainConfig.truncated` explains each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCost:
    """The inputs of the cost of a role's nodes.

    Attributes:
        shape: The shape of its model.
        work: The sizes of the work that it does at once.
    """

    shape: ModelShape
    work: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The settings that a graph may have left open.

    Attributes:
        group_size: Samples for each prompt, where `generate` does not say.
        prompts_per_step: Prompts (or examples) of a step.
        mini_batches: Optimizer updates of a step.
        sampling: Sampling options, where `generate` gives none.
        advantage: The advantage of an update that is given rewards.
        loss: The loss of an update on a rollout that names none.
        max_staleness: Weight publications that a sample may be behind; 0 is strictly on-policy.
        truncated: What is done about truncated rollouts.
        trust_rollout_logprobs: Whether the engine's logprobs may replace the old policy's.
        shares_weights: Roles whose generation reads the trainer's parameters in place.
        repeats_truncation: For each role, the options of a truncated rollout that its engine and
            its trainer can include in logprobs.
        copies: For a role that begins as an exact copy of another (same backend and parameter
            type), that other one.
        train_key: Where the configuration holds sizes and sampling, for messages.
        costs: Of the roles with a model, by name; without any, costs are not annotated.
    """

    group_size: int = 8
    prompts_per_step: int = 64
    mini_batches: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    advantage: AdvantageSpec = field(default_factory=GroupRelative)
    loss: LossSpec = field(default_factory=PolicyClip)
    max_staleness: int = 0
    truncated: Truncated = "refuse"
    trust_rollout_logprobs: bool = False
    shares_weights: Mapping[str, bool] = field(default_factory=dict)
    repeats_truncation: Mapping[str, frozenset[str]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    train_key: str = "train"
    costs: Mapping[str, RoleCost] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice of a pass.

    Attributes:
        subject: The subject of the decision: `actor.update.old_logprobs`.
        choice: The option taken.
        why: The reason for it.
        rejected: Other choices, each with the reason against it.
    """

    subject: str
    choice: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
