"""Losses by name: what `actor.update(..., loss=...)` minimises.

Functions are spelled as a program reads (`loss.policy_clip(0.2)`); the classes are what graphs,
plans and configs hold. Formulas, with paper and equation, stand at their implementations in
`flowrl.algo.losses`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import Spec

__all__ = ["Aggregation", "CrossEntropy", "LossSpec", "PolicyClip", "cross_entropy", "policy_clip"]

Aggregation: TypeAlias = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"
]
"""How per-token losses become one number for a mini-batch.

- `token-mean`: sum over response tokens / number of response tokens (DAPO).
- `sequence-mean-token-mean`: mean over samples of each sample's token mean (GRPO as published).
- `sequence-mean-token-sum`: mean over samples of each sample's token sum.
- `constant`: sum over response tokens / (number of samples x max_tokens of the rollout) (Dr.GRPO).

Every denominator counts the whole mini-batch, so the result does not depend on micro-batches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(Spec):
    """Base of losses.

    Attributes:
        needs: Fields of the update's batch that the loss reads, beside tokens and response_mask.
        corrects_behaviour: Whether the loss corrects for samples of an older policy.
    """

    family: ClassVar[str] = "loss"
    needs: ClassVar[tuple[str, ...]] = ()
    corrects_behaviour: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyClip(LossSpec):
    """The clipped policy-gradient objective of PPO with separate bounds (DAPO's clip-higher)."""

    kind: ClassVar[str] = "policy_clip"
    needs: ClassVar[tuple[str, ...]] = ("advantages", "behaviour_logprobs")
    corrects_behaviour: ClassVar[bool] = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(LossSpec):
    """Negative log-likelihood of the response tokens: supervised fine-tuning."""

    kind: ClassVar[str] = "cross_entropy"
    aggregation: Aggregation = "token-mean"


def policy_clip(
    clip_low: float = 0.2,
    clip_high: float | None = None,
    *,
    aggregation: Aggregation = "token-mean",
) -> PolicyClip:
    """The clipped objective; `clip_high` is `clip_low` where it is not given."""
    high = clip_low if clip_high is None else clip_high
    return PolicyClip(clip_low=clip_low, clip_high=high, aggregation=aggregation)


def cross_entropy(*, aggregation: Aggregation = "token-mean") -> CrossEntropy:
    """Negative log-likelihood of the response tokens."""
    return CrossEntropy(aggregation=aggregation)
