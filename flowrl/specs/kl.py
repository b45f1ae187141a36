"""KL penalties by name, which `actor.update(..., kl=...)` adds to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypedDict, Unpack

from flowrl.errors import TraceError
from flowrl.specs.base import Spec, option
from flowrl.specs.function import caller
from flowrl.specs.names import argument_hint, raise_missing

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

    def __getattr__(name: str) -> object:
        raise_missing(__name__, name, __all__)


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
    coefficient: float
    clamp_input: float | None = option(None)
    clamp_output: float | None = option(None)
    target: float | None = option(None)
    horizon: int = option(10_000)
    step_clip: float = option(0.2)


class KLOptions(TypedDict, total=False):
    """The options of every penalty besides its coefficient; `KL` documents them."""

    clamp_input: float | None
    clamp_output: float | None
    target: float | None
    horizon: int
    step_clip: float


def k1(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of the plain log-ratio."""
    return _kl("k1", coefficient, options)


def kl_abs(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of the absolute log-ratio."""
    return _kl("abs", coefficient, options)


def k2(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of half the squared log-ratio."""
    return _kl("k2", coefficient, options)


def k3(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of GRPO's low-variance, non-negative estimator."""
    return _kl("k3", coefficient, options)


def full(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Returns a penalty of the exact KL(policy || reference), which has an exact gradient.

    The reference's distributions are kept in memory for a whole batch: 4 bytes times response
    tokens times vocabulary (0.6 GB for 1,000 tokens of a vocabulary of 150,000). It is for small
    vocabularies and small batches.
    """
    clamps = sorted(name for name in options if name.startswith("clamp"))
    if clamps:
        raise TraceError(
            "the full divergence has no clamp: it is finite, and not the log-ratio of one token",
            where=caller(),
            found=", ".join(clamps),
            hint="omit the clamp, or use fl.kl.k3",
        )
    return _kl("full", coefficient, options)


def _kl(estimator: Divergence, coefficient: float, options: KLOptions) -> KL:
    for name in options:
        if name not in KLOptions.__annotations__:
            raise TraceError(
                f"no KL penalty has the option '{name}'",
                where=caller(),
                expected=", ".join(["coefficient", *KLOptions.__annotations__]),
                hint=argument_hint(estimator, name, ["coefficient", *KLOptions.__annotations__]),
            )
    penalty = KL(estimator=estimator, coefficient=coefficient, **options)
    if penalty.target is None:
        return penalty
    for name in ("coefficient", "target", "horizon"):
        value = getattr(penalty, name)
        # The coefficient is adapted by factors, and no factor moves it away from 0.
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise TraceError(
                f"an adaptive KL penalty needs a {name} above 0",
                where=caller(),
                found=f"{name}={value!r}",
                hint="omit target for a fixed coefficient" if name == "coefficient" else None,
            )
    return penalty
