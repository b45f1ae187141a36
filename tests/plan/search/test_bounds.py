"""Lower bounds, and what they leave to look at, beside the same sums over every split."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul

import numpy as np

from flowrl.plan.search.bounds import limits, lower_bounds
from flowrl.plan.search.space import Cut, Floats, Space, compile_space, families
from flowrl.plan.search.streams import Stream
from tests.proofs.planner_cases import draw_problem

SEEDS = range(40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    number: int
    chunks: int
    block: int
    first: int
    second: int
    seconds: float


def spaces() -> Iterator[Space]:
    for seed in SEEDS:
        for family in families(draw_problem(random.Random(seed))):
            yield compile_space(family)


def splits_of(space: Space, at: int, bounds: Floats) -> Iterator[Split]:
    """Every split of a set in which both sides run at once, whatever it takes."""
    for number, cut in enumerate(space.cuts[at]):
        for stream in () if cut.runs_ahead else cut.streams:
            extra = max(stream.chunks - 1, 0)
            u1, u2 = (
                bounds[part] + (extra * space.chunk_s[part] if extra else 0.0)
                for part in (cut.first, cut.second)
            )
            for block, size in enumerate(space.sizes):
                for first, own in enumerate(space.sizes):
                    second = space.fitting[size - own] if size > own else -1
                    possible = second >= 0 and np.isfinite(u1[first] + u2[second])
                    if possible:
                        taken = [max(a * u1[first] + b * u2[second] for a, b in stream.lines)]
                        if stream.turns:
                            sides = float(u1[first]), float(u2[second])
                            taken.append(from_turns(space, (cut, stream), bounds, first, sides))
                        yield Split(
                            number=number,
                            chunks=stream.chunks,
                            block=block,
                            first=first,
                            second=int(second),
                            seconds=min(taken),
                        )


def from_turns(
    space: Space,
    way: tuple[Cut, Stream],
    bounds: Floats,
    block: int,
    sides: tuple[float, float],
) -> float:
    """Seconds of a stream whose first part takes turns on such a block, at least."""
    (cut, stream), (u1, u2) = way, sides
    drawn = [
        float(leaves.seconds[leaves.size <= block].min())
        for task, leaves in enumerate(space.leaves)
        if space.sets[cut.first] & space.in_one & 1 << task
    ]
    over = (stream.chunks - 1) * float(space.chunk_s[cut.first])
    read = u1 - over
    if space.sets[cut.first] & space.unread:
        read = ready(space, bounds, cut.first, block)
    numbers = (max(drawn, default=0.0), read, over, u2)
    lines: list[float] = [sum(map(mul, line, numbers)) for _, *line in stream.turns]
    return max(u1, u2, *lines)


def ready(space: Space, bounds: Floats, at: int, block: int) -> float:
    """Seconds until all of a set is over that somebody reads, at least."""
    if not space.sets[at] & ~space.unread:
        return 0.0
    turns = [
        ready(space, bounds, cut.first, block) + ready(space, bounds, cut.second, block)
        for cut in space.cuts[at]
        if cut.turns
    ]
    return min([float(bounds[at, block]), *turns])


def ahead(space: Space, at: int) -> bool:
    return any(cut.runs_ahead for cut in space.cuts[at])


def test_a_bound_is_the_least_over_all_options_orders_and_splits() -> None:
    compared = 0
    for space in spaces():
        bounds = lower_bounds(space).seconds
        for at, task in enumerate(space.alone):
            if ahead(space, at):
                continue
            best = np.full(len(space.sizes), np.inf)
            if task >= 0:
                rows = space.rows[at]
                for number, option in enumerate(space.leaves[task].options):
                    if rows is None or rows[number]:
                        size = space.leaves[task].size[number]
                        best[size] = min(best[size], option.seconds)
            for cut in space.cuts[at]:
                if cut.turns:
                    best = np.minimum(best, bounds[cut.first] + bounds[cut.second])
            for one in splits_of(space, at, bounds):
                best[one.block] = min(best[one.block], one.seconds)
            np.testing.assert_allclose(bounds[at], np.minimum.accumulate(best), rtol=1e-12)
            compared += 1
    assert compared > 400


def test_every_split_within_the_limit_is_left_and_no_other() -> None:
    compared = 0
    for space in spaces():
        lower = lower_bounds(space)
        bounds, root = lower.seconds, len(space.sets) - 1
        if ahead(space, root) or not np.isfinite(bounds[root]).any():
            continue
        limit = np.where(np.isfinite(bounds[root]), 1.3 * bounds[root], -np.inf)
        most, splits = limits(space, lower, limit)
        for at in range(root, -1, -1):
            wanted = [
                one for one in splits_of(space, at, bounds) if one.seconds <= most[at][one.block]
            ]
            for number in range(len(space.cuts[at])):
                mine = [one for one in wanted if one.number == number]
                left = splits[at][number]
                assert (left is None) == (not mine)
                if left is not None:
                    columns = (left.chunks, left.block, left.first, left.second)
                    assert sorted(
                        zip(*(column.tolist() for column in columns), strict=True)
                    ) == sorted((one.chunks, one.block, one.first, one.second) for one in mine)
                    compared += len(mine)
    assert compared > 1000
