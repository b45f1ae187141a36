"""KL penalties by name: what `actor.update(..., kl=...)` adds to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import Spec

__all__ = ["KL", "Estimator", "k1", "k2", "k3"]

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Per-token estimators of KL(policy || reference), d = logprob - reference logprob
(Schulman, "Approximating KL divergence", 2020): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KL(Spec):
    """`coefficient` times the estimator, aggregated like the loss it is added to."""

    family: ClassVar[str] = "kl"
    kind: ClassVar[str] = "kl"

    estimator: Estimator
    coefficient: float


def k1(coefficient: float) -> KL:
    """The plain log-ratio."""
    return KL(estimator="k1", coefficient=coefficient)


def k2(coefficient: float) -> KL:
    """Half the squared log-ratio."""
    return KL(estimator="k2", coefficient=coefficient)


def k3(coefficient: float) -> KL:
    """The low-variance, non-negative estimator of GRPO."""
    return KL(estimator="k3", coefficient=coefficient)
