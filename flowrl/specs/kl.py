"""KL penalties by name: what `actor.update(..., kl=...)` adds to the loss, or a reward loses."""

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

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

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
    """`coefficient` times the estimator, aggregated like the loss it is added to.

    Attributes:
        estimator: Of the divergence. `full` estimates nothing: it reads the reference's whole
            distribution at each response token.
        coefficient: Its factor; where there is a target, in the first step.
        clamp_input: d is clamped to plus and minus this; None: not at all, as in the papers.
        clamp_output: So is the result. Where a clamp acts, the gradient is 0. `full` has no
            clamps.
        target: Mean of the estimate over response tokens that the coefficient is steered towards,
            from step to step; None keeps the coefficient.
        horizon: Of the steering: samples over which a relative error e changes it by e.
        step_clip: Bound of the relative error.
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
    """What every penalty takes beside its coefficient; `KL` explains each."""

    clamp_input: float | None
    clamp_output: float | None
    target: float | None
    horizon: int
    step_clip: float


def k1(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """The plain log-ratio."""
    return _kl("k1", coefficient, options)


def kl_abs(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """The absolute log-ratio."""
    return _kl("abs", coefficient, options)


def k2(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """Half the squared log-ratio."""
    return _kl("k2", coefficient, options)


def k3(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """The low-variance, non-negative estimator of GRPO."""
    return _kl("k3", coefficient, options)


def full(coefficient: float, **options: Unpack[KLOptions]) -> KL:
    """KL(policy || reference) of the whole distributions: exact, and so is its gradient.

    The reference's distributions are held for a whole batch: 4 bytes times response tokens times
    vocabulary (for 1,000 tokens of a vocabulary of 150,000: 0.6 GB). It is for small vocabularies
    and small batches.
    """
    clamps = sorted(name for name in options if name.startswith("clamp"))
    if clamps:
        raise TraceError(
            "the full divergence is not clamped: it is finite and of no single token",
            where=caller(),
            found=", ".join(clamps),
            hint="leave the clamp out, or use fl.kl.k3",
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
        # The coefficient is steered by factors, and no factor moves it away from 0.
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise TraceError(
                f"an adaptive KL penalty needs a {name} above 0",
                where=caller(),
                found=f"{name}={value!r}",
                hint="leave target out for a fixed coefficient" if name == "coefficient" else None,
            )
    return penalty
