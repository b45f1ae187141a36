"""KL penalties by name, which `actor.update(..., kl=...)` adds to the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypedDict, Unpack

from flowrl.specs.base import Count, FiniteFromZero, Positive, Spec, Wrong, option
from flowrl.specs.names import operation, refusing_others

__all__ = [
    "KL",
    "Divergence",
    "Estimator",
    "KLOptions",
    "full",
    "k1",
    "k2",
    "k3",
    "kl_abs",
]

if not TYPE_CHECKING:  # a type checker should report unknown names
    __getattr__ = refusing_others(__name__, __all__)


Estimator: TypeAlias = Literal["k1", "abs", "k2", "k3"]
"""Per-token estimators of KL(policy || reference), d = logprob - reference logprob
(Schulman, "Approximating KL divergence", 2020): k1 = d, abs = |d|, k2 = d^2 / 2,
k3 = exp(-d) - 1 + d. Libraries call k2 also `mse`, and k3 `low_var_kl`."""

Divergence: TypeAlias = Literal["k1", "abs", "k2", "k3", "full"]
"""An estimator, or `full`: the divergence itself, a sum over the vocabulary at each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KL(Spec):
    """A penalty of `coefficient` times the estimator, aggregated like the loss it is added to.

    Attributes:
        estimator: The estimator of the divergence. `full` is exact: it reads the reference's whole
            distribution at each response token.
        coefficient: The factor of the penalty; if there is a target, its value in the first step.
        clamp_input: The bound to which |d| is clamped; None for no clamp, as in the papers.
        clamp_output: The bound to which the result is clamped. If a clamp acts, the gradient is 0.
            `full` has no clamps.
        target: The mean of the estimate over response tokens that the coefficient is adapted to
            reach, from step to step; None keeps the coefficient.
        horizon: The number of samples over which a relative error e changes the coefficient by e.
        step_clip: The bound of the relative error.
    """

    family: ClassVar[str] = "kl"
    kind: ClassVar[str] = "kl"

    estimator: Divergence
    coefficient: FiniteFromZero
    clamp_input: Positive | None = option(None)
    clamp_output: Positive | None = option(None)
    target: Positive | None = option(None)
    horizon: Count = option(10_000)
    step_clip: Positive = option(0.2)

    def conflicts(self) -> Iterator[Wrong]:
        """Yields an adapted coefficient of 0, which no factor changes, and clamps of `full`."""
        if self.target is not None and self.coefficient == 0:
            yield "coefficient", self.coefficient, "a number above 0, as there is a target"
        for name in ("clamp_input", "clamp_output"):
            value = getattr(self, name)
            if self.estimator == "full" and value is not None:
                yield name, value, "None: the full divergence is finite without a clamp"


class KLOptions(TypedDict, total=False):
    """The options of every penalty besides its coefficient; `KL` documents them."""

    clamp_input: float | None
    clamp_output: float | None
    target: float | None
    horizon: int
    step_clip: float


@operation
def k1(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of the plain log-ratio."""
    return KL(estimator="k1", coefficient=coefficient, **options)


@operation
def kl_abs(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of the absolute log-ratio."""
    return KL(estimator="abs", coefficient=coefficient, **options)


@operation
def k2(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of half the squared log-ratio."""
    return KL(estimator="k2", coefficient=coefficient, **options)


@operation
def k3(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of GRPO's low-variance, non-negative estimator."""
    return KL(estimator="k3", coefficient=coefficient, **options)


@operation
def full(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of the exact KL(policy || reference), which has an exact gradient.

    The reference's distributions are kept in memory for a whole batch: 4 bytes times response
    tokens times vocabulary (0.6 GB for 1,000 tokens of a vocabulary of 150,000). It is for small
    vocabularies and small batches.
    """
    return KL(estimator="full", coefficient=coefficient, **options)
