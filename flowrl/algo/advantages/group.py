"""One advantage a sample, from the scores or rewards of its group and the batch. numpy only.

Scores are `[N]`; samples with equal numbers in `groups`, `[N]`, form a group, adjacent or not. All
functions centre in float64, and a group of equal scores gets exactly 0, so that round-off is never
amplified by a tiny divisor. A group of one cannot be compared with anything: `singleton` says
whether it gets 0 or keeps its score.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, check_scores, field_of
from flowrl.specs.advantage import (
    GPG,
    Centre,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    NormaliseThenSum,
    PassAtK,
    Singleton,
)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Partition:
    """N samples in G groups, with statistics of each group with and without the sample itself.

    Attributes:
        number: int `[N]`, the group of each sample, from 0 to G - 1.
        size: int `[G]`, the number of samples in each group.
    """

    number: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    @classmethod
    def of(cls, groups: npt.ArrayLike) -> Partition:
        """Makes a group of the samples with equal entries, adjacent or not."""
        _, number, size = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
        return cls(number.reshape(-1), size)

    @classmethod
    def whole(cls, count: int) -> Partition:
        """Puts all samples in one group."""
        return cls(np.zeros(count, np.int64), np.array([count]))

    @property
    def alone(self) -> npt.NDArray[np.bool_]:
        """bool `[N]`, true for samples without another member in their group."""
        return np.asarray((self.size == 1)[self.number], np.bool_)

    def sum(self, values: Array) -> Array:
        """Returns `[G]`, the sum of each group."""
        total = np.bincount(self.number, weights=values, minlength=len(self.size))
        return total.astype(np.float64)

    def mean(self, values: Array) -> Array:
        """Returns `[G]`, the mean of each group."""
        return self.sum(values) / self.size

    def extremes(self, values: Array) -> tuple[Array, Array]:
        """Returns the minimum and the maximum of each group, `[G]` each."""
        low, high = np.full(len(self.size), np.inf), np.full(len(self.size), -np.inf)
        np.minimum.at(low, self.number, values)
        np.maximum.at(high, self.number, values)
        return low, high

    def centred(self, values: Array) -> Array:
        """Returns `[N]`, value - mean of its group; exactly 0 if all values of the group are equal.

        The mean of equal numbers can differ from them in the last bit, and the quotient of two such
        round-offs can be anything.
        """
        low, high = self.extremes(values)
        equal = (low == high)[self.number]
        return np.where(equal, 0.0, values - self.mean(values)[self.number])

    def minus_others(self, values: Array) -> Array:
        """Returns `[N]`, value - mean of the group's other values; 0 in a group of one.

        It is computed as n / (n - 1) (value - mean).
        """
        size = self.size[self.number]
        return self.centred(values) * size / np.maximum(size - 1, 1)

    def variance(self, values: Array, ddof: int, about: Array | None = None) -> Array:
        """Returns `[N]`, the variance of each sample's group; 1 if it has at most `ddof` members.

        Args:
            values: `[N]`.
            ddof: The number of degrees of freedom that are subtracted.
            about: `[N]` deviations to use in place of those from the group's mean.
        """
        deviations = self.centred(values) if about is None else about
        squares = self.sum(deviations**2)
        free = self.size - ddof
        return np.where(free > 0, squares / np.maximum(free, 1), 1.0)[self.number]

    def variance_of_others(self, values: Array, ddof: int) -> Array:
        """Returns `[N]`, the variance of the group's other values; 0 if equal or too few.

        With d the deviation from the group's mean and Q the sum of d^2 over the group, the others
        have the sum of squares Q - d_i^2 n / (n - 1).
        """
        d = self.centred(values)
        size = self.size[self.number]
        squares = self.sum(d**2)[self.number] - d**2 * size / np.maximum(size - 1, 1)
        free = size - 1 - ddof
        variance = np.maximum(squares, 0.0) / np.maximum(free, 1)
        return np.where((free > 0) & ~self._others_equal(values), variance, 0.0)

    def _others_equal(self, values: Array) -> npt.NDArray[np.bool_]:
        """Returns bool `[N]`, true if the group's other values are all equal, without round-off."""
        order = np.lexsort((values, self.number))
        ranked = values[order]
        start = np.concatenate([[0], np.cumsum(self.size)])[:-1][self.number]
        last = start + self.size[self.number] - 1
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        low = ranked[np.minimum(np.where(place == start, start + 1, start), len(values) - 1)]
        high = ranked[np.maximum(np.where(place == last, last - 1, last), 0)]
        return np.asarray(low >= high, np.bool_)


def group_relative(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: GroupRelative
) -> npt.NDArray[np.float32]:
    """Computes group-relative advantages.

    For sample i of group g, with mean and standard deviation over the group (`std="group"`) or the
    standard deviation over the whole batch (`std="batch"`)::

        A_i = (r_i - mean_g) / (std + eps)    GRPO: Shao et al., DeepSeekMath, 2024, section 4.1.2
        A_i =  r_i - mean_g                   `std="none"`: Liu et al., Dr.GRPO, 2025, section 3.2

    The paper writes no eps; it is added outside the root, as TRL and verl do. A group of one has no
    standard deviation: it gets 0, or with `singleton="raw"` its score divided by 1 + eps (by 1
    where nothing is divided; by the batch's standard deviation for `std="batch"`), which is mean 0
    and deviation 1 as in verl.

    The other options set the subtracted number (`mean`), the reference point of deviations
    (`std_about`), the lower bound of the variance (`variance_floor`, in verl's vectorised form),
    and the treatment of a deviation of 0 (`zero_std`). NeMo-RL's default is `mean="group_others",
    std="group_others"`: n - 1 scores give the mean and the deviation.

    Raises:
        RewardError: A score is not finite.
    """
    return standardise(check_scores(scores, groups), groups, spec).astype(np.float32)


def standardise(scores: Array, groups: npt.ArrayLike, spec: GroupRelative) -> Array:
    """Computes `group_relative` in float64, without checks, as a step of other formulas."""
    r = scores
    if not len(r):
        return np.zeros(0)
    group, batch = Partition.of(groups), Partition.whole(len(r))
    centred = centre_scores(r, groups, spec.mean, spec.singleton)
    about = centred if spec.std_about == "centre" else None
    match spec.std:
        case "none":
            return centred
        case "group":
            variance = group.variance(r, spec.ddof, about)
            if about is None:
                variance = np.where(group.alone, 1.0, variance)
        case "group_others":
            variance = group.variance_of_others(r, spec.ddof)
        case "batch":
            variance = batch.variance(r, spec.ddof, about)
    std = np.sqrt(np.maximum(variance, spec.variance_floor))
    divisor = np.where((std == 0) & (spec.zero_std == "keep"), 1.0, std + spec.eps)
    # With eps = 0 equal scores would divide 0 by 0.
    return np.divide(centred, divisor, out=np.zeros(len(r)), where=divisor > 0)


def centre_scores(
    scores: Array, groups: npt.ArrayLike, mean: Centre, singleton: Singleton = "zero"
) -> Array:
    """Returns scores minus the mean that `mean` names; float64 `[N]`.

    `group_others` is the leave-one-out mean: r_i - (sum of the others) / (n - 1). `singleton` is
    the result for a group of one, if `mean` is a group's.
    """
    group, batch = Partition.of(groups), Partition.whole(len(scores))
    match mean:
        case "none":
            return scores
        case "group":
            centred, alone = group.centred(scores), group.alone
        case "group_others":
            centred, alone = group.minus_others(scores), group.alone
        case "batch":
            return batch.centred(scores)
        case "batch_others":
            centred, alone = batch.minus_others(scores), batch.alone
    return np.where(alone, scores, centred) if singleton == "raw" else centred


def leave_one_out(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: LeaveOneOut
) -> npt.NDArray[np.float32]:
    """RLOO (Kool et al., 2019; Ahmadian et al., "Back to Basics", 2024, section 3.2)::

        A_i = r_i - mean of r_j, j != i, over the group = n / (n - 1) (r_i - mean_g)

    With `batch_std`, the result is standardised over the batch: (A - mean) / (std + eps), ddof 1.
    """
    r = check_scores(scores, groups)
    advantages = centre_scores(r, groups, "group_others", spec.singleton)
    if spec.batch_std:
        whole = GroupRelative(std="batch", mean="batch", eps=spec.eps)
        advantages = standardise(advantages, groups, whole)
    return advantages.astype(np.float32)


def pass_at_k(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: PassAtK
) -> npt.NDArray[np.float32]:
    """Gives the best sample of a group its lead over the second best, and 0 to the others::

        A_i = (r_i - second best of the group) / (std_g + eps)    for the best sample
        A_i = 0                                                   for the others

    This is the leave-one-out gradient of the expected maximum of a group (Tang et al., "Optimizing
    Language Models for Inference Time Objectives using Reinforcement Learning", 2025), in which the
    baseline of a sample is the maximum of the others. `std="none"` does not divide.
    """
    r = check_scores(scores, groups)
    group = Partition.of(groups)
    advantages = np.zeros(len(r))
    order = np.lexsort((r, group.number))
    ends = np.cumsum(group.size) - 1
    several = group.size > 1
    best, second = order[ends[several]], order[ends[several] - 1]
    advantages[best] = r[best] - r[second]
    if spec.std == "group":
        divisor = np.sqrt(group.variance(r, spec.ddof)) + spec.eps
        np.divide(advantages, divisor, out=advantages, where=divisor > 0)
    if spec.singleton == "raw":
        advantages = np.where(group.alone, r, advantages)
    return advantages.astype(np.float32)


def gpg(scores: npt.ArrayLike, groups: npt.ArrayLike, spec: GPG) -> npt.NDArray[np.float32]:
    """Group policy gradient (Chu et al., GPG, 2025, section 3)::

        A_i = alpha (r_i - mean_g) / norm,    alpha = B / number of samples whose score is not 0

    alpha compensates for samples without gradient; B is the number of samples in the batch.
    """
    r = check_scores(scores, groups)
    alpha = len(r) / max(int(np.count_nonzero(r)), 1)
    advantages = alpha * centre_scores(r, groups, "group", spec.singleton) / spec.norm
    return advantages.astype(np.float32)


def max_rl(scores: npt.ArrayLike, groups: npt.ArrayLike, spec: MaxRL) -> npt.NDArray[np.float32]:
    """Maximum-likelihood reinforcement learning (Tajwar et al., MaxRL, 2026, arXiv 2602.02710)::

        A_i = (r_i - mean_g) / (mean_g + eps)

    For scores of 0 and 1 it is the gradient of the log of the solve rate instead of the rate, so
    rare successes weigh more. A negative mean is used as the divisor without change.
    """
    r = check_scores(scores, groups)
    group = Partition.of(groups)
    divisor = group.mean(r)[group.number] + spec.eps
    centred = group.centred(r)
    advantages = np.divide(centred, divisor, out=np.zeros(len(r)), where=divisor != 0)
    if spec.singleton == "raw":
        advantages = np.where(group.alone, r, advantages)
    return advantages.astype(np.float32)


def length_weighted(batch: AdvantageBatch, spec: LengthWeighted) -> AdvantageResult:
    """OPO (Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025, section 3)::

        A_i = r_i - sum_j l_j r_j / sum_j l_j    over the group, l = response tokens

    A group without any response token has the baseline 0.
    """
    r = check_scores(batch.scores, batch.groups)
    length = (field_of(batch, "mask", spec.kind) > 0).sum(1).astype(np.float64)
    group = Partition.of(batch.groups)
    total = group.sum(length)
    # Weighted means of deviations, so that equal scores give exactly 0.
    centred = group.centred(r)
    shift = np.divide(group.sum(length * centred), total, out=np.zeros_like(total), where=total > 0)
    advantages = centred - shift[group.number]
    advantages = np.where((total == 0)[group.number], r, advantages)
    advantages = np.where(group.alone, r if spec.singleton == "raw" else 0.0, advantages)
    return AdvantageResult(advantages=advantages.astype(np.float32))


def weighted_sum(rewards: npt.ArrayLike, weights: npt.ArrayLike) -> Array:
    """Returns the sum of weight times reward, over the rewards that apply to a sample.

    Args:
        rewards: `[N, K]`; NaN if a reward does not apply to a sample.
        weights: `[K]`.

    Returns:
        float64 `[N]`; NaN for a sample without any reward.
    """
    r, w = np.asarray(rewards, np.float64), np.asarray(weights, np.float64)
    if r.ndim != 2 or w.shape != r.shape[1:]:
        raise ValueError(f"rewards {r.shape} must be [N, K] and weights {w.shape} [K]")
    none = np.isnan(r).all(1)
    return np.where(none, np.nan, np.nansum(r * w, axis=1))


def normalise_then_sum(batch: AdvantageBatch, spec: NormaliseThenSum) -> AdvantageResult:
    """GDPO (Liu et al., "Group reward-Decoupled Normalization Policy Optimization", 2026)::

        A_ik = (r_ik - mean_g r_k) / (std_g r_k + eps)      each reward by itself
        S_i  = sum_k w_k A_ik
        A_i  = (S_i - mean S) / (std S + batch_eps)         over the batch

    A reward that does not apply to a sample (NaN) is excluded from the mean and deviation of its
    group and from the sample's sum; a sample without any reward is also excluded from the mean and
    deviation of the batch, and gets 0. By default, all weights are 1.

    Raises:
        ValueError: The numbers of weights and rewards differ.
    """
    rewards = field_of(batch, "rewards", spec.kind)
    weights = np.array(spec.weights or (1.0,) * rewards.shape[1])
    groups = np.asarray(batch.groups)
    each = GroupRelative(
        std=spec.std,
        ddof=spec.ddof,
        eps=spec.eps,
        mean=spec.mean,
        singleton=spec.singleton,
        zero_std=spec.zero_std,
    )
    parts = np.full(rewards.shape, np.nan)
    for k in range(rewards.shape[1]):
        has = ~np.isnan(rewards[:, k])
        parts[has, k] = standardise(rewards[has, k], groups[has], each)
    total = weighted_sum(parts, weights)
    has = ~np.isnan(total)
    whole = GroupRelative(mean="batch", std="batch", ddof=spec.ddof, eps=spec.batch_eps)
    advantages = np.zeros(len(rewards))
    advantages[has] = standardise(total[has], groups[has], whole)
    return AdvantageResult(advantages=advantages.astype(np.float32))
