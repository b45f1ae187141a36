"""What a loss does about the gap between the policy that drew the tokens and the trainer's.

Three policies may differ: *behaviour* (the engine's, which drew the tokens), *old* (the trainer's
at the start of the step, recomputed), and the one that is trained. A policy loss compares the
trained policy with its *anchor*, one of the first two. With the old policy as anchor, a correction
weighs each token by old / behaviour, and a rejection removes tokens or samples where they are too
far apart. Both are factors without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Anchor",
    "Correction",
    "Divergence",
    "Estimator",
    "Outside",
    "Rejection",
    "RejectionLevel",
    "WeightLevel",
    "mask_outside",
    "reject",
    "truncate",
]

Anchor: TypeAlias = Literal["behaviour", "old"]
"""What the trained policy is compared with. `behaviour` needs no further correction; `old` is the
proximal policy of decoupled PPO (Hilton et al., "Batch size-invariance for policy optimization",
arXiv 2110.00641; AReaL, arXiv 2505.24298)."""

WeightLevel: TypeAlias = Literal["none", "token", "sequence", "geometric"]
"""Of old / behaviour: the token's ratio, the product over a sample, or its geometric mean."""

Outside: TypeAlias = Literal["truncate", "zero"]
"""What becomes of a weight outside its bounds: the bound (TIS), or 0 (IcePop, MIS)."""

RejectionLevel: TypeAlias = Literal[
    "none", "token", "sequence-mean", "sequence-sum", "sequence-max"
]
"""What is judged: each token by itself, or each sample by a statistic of its tokens."""

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Of the divergence at a token, in nats, with d = log old - log behaviour: k1 = -d, k2 = d^2 / 2,
k3 = exp(d) - 1 - d; of the divergence the other way round, the same with -d in place of d."""

Divergence: TypeAlias = Literal["behaviour-old", "old-behaviour"]
"""Which divergence an estimator is of.

- `behaviour-old` (default): KL(behaviour || old), which samples of the behaviour policy estimate
  without bias (verl).
- `old-behaviour`: the formula of KL(old || behaviour) at the same samples (AReaL).

k2 is the same for both.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance weights old / behaviour; made by `truncate` and `mask_outside`."""

    level: WeightLevel
    outside: Outside
    low: float
    high: float | None
    normalise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Bounds on the gap between old and behaviour policy; made by `reject`."""

    level: RejectionLevel
    estimator: Estimator
    divergence: Divergence
    low: float | None
    high: float | None


def truncate(
    high: float | None = 2.0,
    *,
    low: float = 0.0,
    level: WeightLevel = "token",
    normalise: bool = False,
) -> Correction:
    """Truncated importance sampling (TIS; Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025).

    Args:
        high: Largest weight; None truncates nothing above.
        low: Smallest weight.
        level: What a weight is the ratio of.
        normalise: Divide the weights by their mean over the mini-batch's response tokens.
    """
    return Correction(level=level, outside="truncate", low=low, high=high, normalise=normalise)


def mask_outside(
    low: float = 0.5,
    high: float | None = 2.0,
    *,
    level: WeightLevel = "token",
    normalise: bool = False,
) -> Correction:
    """Importance weights that are 0 outside `[low, high]` (IcePop, Ling team, 2025,
    for tokens)."""
    return Correction(level=level, outside="zero", low=low, high=high, normalise=normalise)


def reject(
    *,
    low: float | None = None,
    high: float | None = None,
    level: RejectionLevel = "token",
    estimator: Estimator = "k3",
    divergence: Divergence = "behaviour-old",
) -> Rejection:
    """Removes what lies outside `[low, high]`, in nats; denominators still count it.

    A geometric-mean ratio old / behaviour within [a, b] is `level="sequence-mean", estimator="k1"`
    with the bounds -log b and -log a, or with `divergence="old-behaviour"` log a and log b.
    """
    return Rejection(level=level, estimator=estimator, divergence=divergence, low=low, high=high)
