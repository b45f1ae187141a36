"""The gap between the policy that sampled the tokens and the trainer's: weights and masks.

Everything here is `[R]`, one number a response token, and carries no gradient: importance weights
and masks are constant factors of a loss. A mask makes a token's loss 0. Denominators still count
the token, so that they depend on the batch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowrl.specs.loss.policy import (
    Divergence,
    Estimator,
    Outside,
    RejectionLevel,
    WeightLevel,
)


def importance_weights(
    old: torch.Tensor,
    behaviour: torch.Tensor,
    segments: Segments,
    *,
    level: WeightLevel,
    outside: Outside = "truncate",
    low: float = 0.0,
    high: float | None = None,
) -> torch.Tensor:
    """Returns importance weights old / behaviour.

    With d = old - behaviour logprob::

        token      w_t = exp(d_t)
        sequence   w_t = exp(sum of d over the sample)
        geometric  w_t = exp(mean of d over the sample)

    then `truncate`: min(max(w, low), high) (truncated importance sampling; Ionides, 2008; Yao et
    al., 2025), or `zero`: w where low <= w <= high, else 0 (IcePop, 2025, for tokens).
    """
    with torch.no_grad():
        gap = old - behaviour
        if level == "sequence":
            gap = segments.sums(gap)
        elif level == "geometric":
            gap = segments.means(gap)
        weights = torch.ones_like(gap) if level == "none" else gap.exp()
        return within(weights, low, high, outside)


def within(
    weights: torch.Tensor, low: float | None, high: float | None, outside: Outside
) -> torch.Tensor:
    """Returns weights where those outside the bounds are set to the bound, or to 0."""
    if low is None and high is None:
        return weights
    if outside == "truncate":
        return weights.clamp(low, high)
    keep = _inside(weights, low, high)
    return torch.where(keep, weights, torch.zeros_like(weights))


def gap_statistic(
    old: torch.Tensor,
    behaviour: torch.Tensor,
    segments: Segments,
    *,
    level: RejectionLevel,
    estimator: Estimator,
    divergence: Divergence = "behaviour-old",
) -> torch.Tensor:
    """Returns the gap between the old policy and the behaviour policy, in nats.

    With d = old - behaviour logprob, at each token::

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

    (Schulman, 2020: estimators of KL(behaviour || old)); with `divergence="old-behaviour"`, the
    same with d = behaviour - old logprob. `sequence-mean`, `-sum` and `-max` return that reduction
    of the statistic over the sample.
    """
    with torch.no_grad():
        d = old - behaviour if divergence == "behaviour-old" else behaviour - old
        statistic = {"k1": -d, "k2": 0.5 * d.square(), "k3": torch.expm1(d) - d}[estimator]
        if level == "sequence-mean":
            return segments.means(statistic)
        if level == "sequence-sum":
            return segments.sums(statistic)
        if level == "sequence-max":
            return segments.maxima(statistic)
        return statistic


def rejection_mask(
    old: torch.Tensor,
    behaviour: torch.Tensor,
    segments: Segments,
    *,
    level: RejectionLevel,
    estimator: Estimator,
    divergence: Divergence = "behaviour-old",
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor:
    """Returns bool `[R]`, true at tokens that are kept: `low <= gap_statistic <= high`."""
    if level == "none":
        return torch.ones_like(old, dtype=torch.bool)
    statistic = gap_statistic(
        old, behaviour, segments, level=level, estimator=estimator, divergence=divergence
    )
    return _inside(statistic, low, high)


def sequence_mask(
    logprobs: torch.Tensor,
    anchor: torch.Tensor,
    advantages: torch.Tensor,
    segments: Segments,
    limit: float,
) -> torch.Tensor:
    """Returns the off-policy sequence mask: bool `[R]`, true at tokens that are kept.

    A token is removed if its advantage is negative and the mean over its sample of
    anchor - logprob is more than `limit` (DeepSeek-V3.2, 2025, equations 8 and 9).
    """
    with torch.no_grad():
        moved = segments.means(anchor - logprobs) > limit
        return ~(moved & (advantages < 0))


def _inside(values: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    keep = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values <= high
    return keep


@dataclass(frozen=True, slots=True)
class Segments:
    """The assignment of tokens to samples, with sums and means over the tokens of each sample.

    Attributes:
        of_token: int64 `[R]`, the sample of each token, 0 <= of_token < S.
        counts: `[S]`, the number of tokens of each sample.
    """

    of_token: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, samples: torch.Tensor) -> Segments:
        """Returns the segments of integers `[R]` that are equal for tokens of one sample."""
        _, of_token, counts = torch.unique(samples, return_inverse=True, return_counts=True)
        return cls(of_token, counts)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `[R]`: at each token the sum over its sample."""
        return self.totals(values)[self.of_token]

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `[S]`, the sum over each sample."""
        return values.new_zeros(len(self.counts)).index_add(0, self.of_token, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `[R]`: at each token the mean over its sample."""
        return self.averages(values)[self.of_token]

    def averages(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `[S]`, the mean over each sample."""
        return self.totals(values) / self.counts.to(values.dtype)

    def maxima(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `[R]`: at each token the maximum over its sample."""
        lowest = values.new_full((len(self.counts),), -torch.inf)
        return lowest.scatter_reduce(0, self.of_token, values, "amax")[self.of_token]

    def lengths(self, like: torch.Tensor) -> torch.Tensor:
        """Returns `[R]`: at each token the length of its sample, in the dtype of `like`."""
        return self.counts[self.of_token].to(like.dtype)
