"""KL penalties by name: what `actor.update(..., kl=...)` adds to the loss, or a reward loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import Spec, option

__all__ = ["KL", "AdaptiveKL", "Estimator", "k1", "k2", "k3", "kl_abs"]

Estimator: TypeAlias = Literal["k1", "abs", "k2", "k3"]
"""Per-token estimators of KL(policy || reference), d = logprob - reference logprob
(Schulman, "Approximating KL divergence", 2020): k1 = d, abs = |d|, k2 = d^2 / 2,
k3 = exp(-d) - 1 + d. Libraries call k2 also `mse`, and k3 `low_var_kl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KL(Spec):
    """`coefficient` times the estimator, aggregated like the loss it is added to.

    Attributes:
        estimator: Of the divergence.
        coefficient: Its factor.
        clamp_input: d is clamped to plus and minus this; None: not at all, as in the papers.
        clamp_output: So is the result. Where a clamp acts, the gradient is 0.
    """

    family: ClassVar[str] = "kl"
    kind: ClassVar[str] = "kl"

    estimator: Estimator
    coefficient: float
    clamp_input: float | None = option(None)
    clamp_output: float | None = option(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL(Spec):
    """A coefficient that follows the measured KL towards a target.

    Attributes:
        initial: The coefficient at the beginning.
        target: KL per sample to hold.
        horizon: Samples over which a relative error of `clip` changes the coefficient by `clip`.
        clip: Bound of the relative error.
    """

    family: ClassVar[str] = "kl_coefficient"
    kind: ClassVar[str] = "adaptive"

    initial: float
    target: float
    horizon: int = 10_000
    clip: float = option(0.2)


def k1(coefficient: float) -> KL:
    """The plain log-ratio."""
    return KL(estimator="k1", coefficient=coefficient)


def kl_abs(coefficient: float) -> KL:
    """The absolute log-ratio."""
    return KL(estimator="abs", coefficient=coefficient)


def k2(coefficient: float) -> KL:
    """Half the squared log-ratio."""
    return KL(estimator="k2", coefficient=coefficient)


def k3(
    coefficient: float, *, clamp_input: float | None = None, clamp_output: float | None = None
) -> KL:
    """The low-variance, non-negative estimator of GRPO."""
    return KL(
        estimator="k3",
        coefficient=coefficient,
        clamp_input=clamp_input,
        clamp_output=clamp_output,
    )
