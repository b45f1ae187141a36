"""Selections: which samples of each group are kept. numpy only.

A selection gives row numbers. Groups keep their order, and rows of a group stand together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import check_scores
from flowrl.specs.select import BestAndWorst, RandomK, SelectSpec, Threshold, Top

__all__ = ["best_and_worst", "random_k", "threshold", "top"]

Rows = npt.NDArray[np.int64]


def top(scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: SelectSpec) -> Rows:
    """The k best of each group, in the order of the batch; of equal scores the first.

    A group of fewer than k is kept whole.

    Args:
        scores: `[N]`, finite.
        groups: `[N]`; samples with equal numbers form a group.
        ids: N names of samples; read by `random_k` alone.

    Returns:
        int64 `[K]`, row numbers.
    """
    assert isinstance(spec, Top)
    r = check_scores(scores, groups)
    return _first(_members(groups), -r, spec.k)


def threshold(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: SelectSpec
) -> Rows:
    """The samples with score >= at_least: rejection sampling by a fixed bar.

    A policy that imitates them improves itself as in ReST (Gulcehre et al., 2023,
    arXiv:2308.08998); RAFT (Dong et al., 2023, arXiv:2304.06767) imitates the best of each group.

    Args and returns as `top`; a group may lose all of its samples.
    """
    assert isinstance(spec, Threshold)
    r = check_scores(scores, groups)
    chosen = [rows[r[rows] >= spec.at_least] for rows in _members(groups)]
    return np.concatenate(chosen).astype(np.int64) if chosen else np.zeros(0, np.int64)


def random_k(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: SelectSpec
) -> Rows:
    """k of each group, as if drawn: those whose ids have the smallest hashes with the seed.

    The draw depends on ids and seed alone, so a resumed run makes it again, whatever the batch.

    Args and returns as `top`.
    """
    assert isinstance(spec, RandomK)
    check_scores(scores, groups)
    drawn = [
        hashlib.blake2b(f"{spec.seed}/{each}".encode(), digest_size=6).digest() for each in ids
    ]
    ranks = np.array([int.from_bytes(each, "big") for each in drawn], np.float64)
    if len(ranks) != len(np.asarray(groups)):
        raise ValueError(f"{len(ranks)} ids, but {len(np.asarray(groups))} samples")
    return _first(_members(groups), ranks, spec.k)


def best_and_worst(
    scores: npt.ArrayLike, groups: npt.ArrayLike, ids: Sequence[str], spec: SelectSpec
) -> Rows:
    """Best, worst, best, worst, ... of each group whose scores differ; of equal ones the first.

    Pairs of a policy's own samples for preference losses (online DPO; Guo et al., "Direct Language
    Model Alignment from Online AI Feedback", 2024, with a score in place of the annotator).

    Args and returns as `top`.
    """
    assert isinstance(spec, BestAndWorst)
    r = check_scores(scores, groups)
    pairs = []
    for members in _members(groups):
        best, worst = members[np.argmax(r[members])], members[np.argmin(r[members])]
        if r[best] - r[worst] > spec.tolerance:
            pairs += [best, worst]
    return np.array(pairs, np.int64)


def _members(groups: npt.ArrayLike) -> list[Rows]:
    """Rows of each group, groups in order of their first row."""
    _, first, number = np.unique(np.asarray(groups), return_index=True, return_inverse=True)
    rows = np.arange(len(number))
    return [rows[number == g] for g in np.argsort(first)]


def _first(groups: Sequence[Rows], rank: npt.NDArray[np.float64], k: int) -> Rows:
    chosen = [np.sort(rows[np.argsort(rank[rows], kind="stable")[:k]]) for rows in groups]
    return np.concatenate(chosen).astype(np.int64) if chosen else np.zeros(0, np.int64)
