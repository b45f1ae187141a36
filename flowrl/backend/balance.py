"""The division of a batch's samples over data-parallel ranks, so that each has as many tokens.

A step ends when its slowest rank does, so what counts is the largest part.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from flowrl.backend.batch import Ints, SequenceBatch

__all__ = ["balanced", "rows_of_ranks"]


def balanced(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divides items into `num_parts` parts of nearly equal cost; returns ascending item numbers.

    Takes the best of three heuristics: longest first, and largest differencing (Karmarkar
    and Karp, 1982, in its form for several parts) over single items and over runs of `num_parts`
    items of similar cost. Parts have different numbers of items, and none if there are too few.
    """
    candidates = (
        _longest_first(costs, num_parts),
        _differencing(costs, num_parts, 1),
        _differencing(costs, num_parts, num_parts),
    )
    best = min(candidates, key=lambda parts: max(sum(costs[i] for i in part) for part in parts))
    return [sorted(part) for part in best]


def _differencing(costs: Sequence[int], num_parts: int, run: int) -> list[list[int]]:
    """Joins the two partial divisions that differ most, the largest parts with the smallest.

    Args:
        run: Items of each division that is begun with, each in a part of its own.
    """
    order = sorted(range(len(costs)), key=lambda item: costs[item])
    counter = itertools.count()  # decides between equal differences, so that results are the same
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []

    def push(parts: list[tuple[int, list[int]]]) -> None:
        parts.sort()
        heapq.heappush(heap, (parts[0][0] - parts[-1][0], next(counter), parts))

    for begin in range(0, len(order), run):
        items = [(costs[item], [item]) for item in order[begin : begin + run]]
        push([(0, [])] * (num_parts - len(items)) + items)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        push([(a[0] + b[0], a[1] + b[1]) for a, b in pairs])
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def _longest_first(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Puts each item, from the largest on, into the part that is smallest so far."""
    heap: list[tuple[int, int, list[int]]] = [(0, part, []) for part in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        total, part, items = heap[0]
        heapq.heapreplace(heap, (total + costs[item], part, [*items, item]))
    return [items for _, _, items in sorted(heap, key=lambda entry: entry[1])]


def rows_of_ranks(
    batch: SequenceBatch, rows: Ints, num_ranks: int, *, whole_groups: bool = False
) -> list[Ints]:
    """Divides `rows` of a batch over ranks, by tokens; each rank's rows are ascending.

    Groups stay on one rank where that is no slower, because the tokens that a group shares are
    computed once a rank.

    Args:
        whole_groups: True if groups must not be divided.
    """
    _, group = np.unique(batch.groups[rows], return_inverse=True)
    lengths, responses = batch.lengths[rows], batch.response_lengths[rows]
    num_groups = int(group.max(initial=-1)) + 1
    shared = np.zeros(num_groups, np.int64)
    np.maximum.at(shared, group, lengths - responses)
    of_groups = np.bincount(group, responses, num_groups).astype(np.int64) + shared

    def slowest(costs: Ints, parts: list[list[int]]) -> int:
        return max(int(costs[part].sum()) for part in parts)

    by_group = balanced(of_groups.tolist(), num_ranks)
    by_row = balanced(lengths.tolist(), num_ranks)
    if whole_groups or slowest(of_groups, by_group) <= slowest(lengths, by_row):
        return [np.sort(rows[np.isin(group, part)]) for part in by_group]
    return [np.sort(rows[part]) for part in by_row]
