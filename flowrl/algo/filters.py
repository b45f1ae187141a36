"""Filters and selections: which groups and samples reach the update. numpy only.

A filter returns a mask of samples. A selection returns row numbers: groups keep their order, and
the rows of a group are adjacent; it may remove whole groups. Scores are `[N]`, one a sample, and
samples with equal numbers in `groups` `[N]` form a group, adjacent or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import check_scores
from flowrl.algo.advantages.group import Partition
from flowrl.specs.filters import (
    BestAndWorst,
    Difficulty,
    RandomK,
    SelectSpec,
    Threshold,
    Top,
    ZeroVariance,
)


def zero_variance(
    scores: npt.ArrayLike,
    groups: npt.ArrayLike,
    spec: ZeroVariance,
    live: npt.ArrayLike | None = None,
) -> npt.NDArray[np.bool_]:
    """Keeps the samples of groups whose scores differ (dynamic sampling: DAPO, 2025, section 3.2).

    A group is kept if max - min > tolerance, or with `measure="std"` if the standard deviation is
    above the tolerance. DAPO's condition, 0 < number correct < group size, is the same for scores
    of 0 and 1. A group of equal scores has exactly the deviation 0. A group of one has no spread
    and is removed, unless `singleton="keep"`. With `live`, bool `[N]`, only the scores of these
    samples are compared, and a group with at most one of them counts as a group of one.
    """
    r, g = _pair(scores, groups)
    number = Partition.of(g).number
    counted = np.ones(len(r), np.bool_) if live is None else np.asarray(live, np.bool_)
    part, chosen = Partition.of(number[counted]), r[counted]
    if spec.measure == "spread":
        low, high = part.extremes(chosen)
        differs = (high - low > spec.tolerance)[part.number]
    else:
        differs = np.sqrt(part.variance(chosen, spec.ddof)) > spec.tolerance
    stays = np.full(number.max(initial=-1) + 1, spec.singleton == "keep")
    stays[number[counted][~part.alone]] = differs[~part.alone]
    return np.asarray(stays[number], np.bool_)


def difficulty(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: Difficulty
) -> npt.NDArray[np.bool_]:
    """Keeps the samples of groups with low < mean score < high: of a solve rate, for 0 and 1."""
    r, g = _pair(scores, groups)
    part = Partition.of(g)
    low, high = part.extremes(r)
    # The mean of equal scores is that score, without the rounding of their sum.
    mean = np.where(low == high, low, part.mean(r))
    return np.asarray(((spec.low < mean) & (mean < spec.high))[part.number], np.bool_)


def _pair(
    scores: npt.ArrayLike, groups: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.generic]]:
    r, g = np.asarray(scores, np.float64), np.asarray(groups)
    if r.ndim != 1 or r.shape != g.shape:
        raise ValueError(f"scores {r.shape} and groups {g.shape} must both be [N]")
    return r, g


Rows = npt.NDArray[np.int64]


def top(scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: Top) -> Rows:
    """Returns the k best samples of each group in batch order, the first ones of equal scores."""
    return _first(groups, -check_scores(scores, groups), spec.k)


def threshold(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: Threshold
) -> Rows:
    """Returns the samples with score >= at_least: rejection sampling with a fixed threshold.

    A policy that imitates them improves itself as in ReST (Gulcehre et al., 2023,
    arXiv:2308.08998); RAFT (Dong et al., 2023, arXiv:2304.06767) imitates the best of each group.
    """
    return _of_groups(groups, check_scores(scores, groups) >= spec.at_least)


def parsed(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: SelectSpec
) -> Rows:
    """Returns the samples whose score is a number: NaN marks a response without one."""
    return _of_groups(groups, np.isfinite(np.asarray(scores, np.float64)))


def random_k(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: RandomK
) -> Rows:
    """Returns k random samples of each group: those with the smallest hashes of id and seed.

    The choice depends on ids and seed alone, so a resumed run repeats it in any batch.
    """
    check_scores(scores, groups)
    digests = [hashlib.blake2b(f"{spec.seed}/{i}".encode(), digest_size=6).digest() for i in ids]
    ranks = np.array([int.from_bytes(digest, "big") for digest in digests], np.float64)
    if len(ranks) != len(np.asarray(groups)):
        raise ValueError(f"{len(ranks)} ids, but {len(np.asarray(groups))} samples")
    return _first(groups, ranks, spec.k)


def best_and_worst(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: BestAndWorst
) -> Rows:
    """Returns the best and the worst sample of each group with different scores, alternating.

    Of equal scores, the first counts. These are pairs of a policy's own samples for preference
    losses (online DPO; Guo et al., "Direct Language Model Alignment from Online AI Feedback", 2024,
    with a score in place of the annotator).
    """
    r = check_scores(scores, groups)
    pairs = []
    for members in _members(groups):
        best, worst = members[np.argmax(r[members])], members[np.argmin(r[members])]
        if r[best] - r[worst] > spec.tolerance:
            pairs += [best, worst]
    return np.array(pairs, np.int64)


def _members(groups: npt.ArrayLike) -> list[Rows]:
    """Returns the rows of each group, groups in order of their first row."""
    _, first, number = np.unique(np.asarray(groups), return_index=True, return_inverse=True)
    rows = np.arange(len(number))
    return [rows[number == g] for g in np.argsort(first)]


def _of_groups(groups: npt.ArrayLike, kept: npt.NDArray[np.bool_]) -> Rows:
    """Returns the rows that are kept, those of each group together."""
    return np.array([row for rows in _members(groups) for row in rows[kept[rows]]], np.int64)


def _first(groups: npt.ArrayLike, rank: npt.NDArray[np.float64], k: int) -> Rows:
    """Returns the k rows of lowest rank of each group, in batch order."""
    kept = np.zeros(len(rank), np.bool_)
    for rows in _members(groups):
        kept[rows[np.argsort(rank[rows], kind="stable")[:k]]] = True
    return _of_groups(groups, kept)
