"""Random fixtures of the published form against every schedule there is, by another way.

The model is written here anew, from the text of the file of fixtures: no code of the search or of
`planner_fixtures` is used. Of a set of stages on so many devices all (total, warm, pace) are kept
that some schedule has, or on larger pools all that no other one equals or beats.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from flowrl.plan.search import Kind
from flowrl.testing.planner_fixture_file import Fixture
from flowrl.testing.planner_fixtures import answer

Part = tuple[float, float, float]
"""Seconds of the whole batch, of the first prompt, and from prompt to prompt."""

KINDS = {Kind.TEMPORAL: (True, False), Kind.SPATIAL: (False, True), Kind.HYBRID: (True, True)}
"""Whether stages may take turns, and whether they may stand apart."""

PAIR = [("rollout", "actor")]
CHAIN = [("rollout", "a"), ("a", "actor")]
LONG = [("rollout", "a"), ("a", "b"), ("b", "actor")]
FAN = [("rollout", "actor"), ("rollout", "critic")]
DIAMOND = [("rollout", "a"), ("rollout", "b"), ("a", "actor"), ("b", "actor")]
FORK = [("rollout", "a"), ("a", "actor"), ("a", "critic"), ("rollout", "critic")]
PPO = [
    *[("rollout", judge) for judge in ("reference", "reward", "values")],
    *[(judge, "actor") for judge in ("reference", "reward", "values")],
    *[(judge, "critic") for judge in ("reward", "values")],
]


def drawn(rng: random.Random, graph: list[tuple[str, str]], devices: int) -> Fixture:
    names = sorted({name for edge in graph for name in edge})
    digits = rng.choice([0, 1, 3])
    row = {
        "name": "drawn",
        "devices": devices,
        "batch": rng.choice([1, 2, 4, 16, 64, 512]),
        "group_size": rng.choice([1, 4, 8]),
        "graph": graph,
        "tp": {name: rng.choice([1, 2, 3]) for name in names if rng.random() < 0.3},
        "whole_pool_cost_s": {
            name: round(rng.choice([3, 30, 300]) * rng.uniform(0.2, 1.2), digits) for name in names
        },
    }
    if rng.random() < 0.6:
        row["max_running_requests"] = rng.choice([1, 2, 8, 32, 128])
    if rng.random() < 0.4:
        row["num_minibatches"] = rng.choice([1, 2, 4])
    return Fixture.model_validate(row)


def stage_seconds(fixture: Fixture, name: str, given: int) -> float | None:
    """c s / (1 + clamp(s / 10, 0.1, 0.9)); a rollout's c where all requests run at once."""
    seconds, share = fixture.whole_pool_cost_s[name], fixture.devices / given
    replicas, left = divmod(given, fixture.tp.get(name, 1))
    if given == fixture.devices:
        return seconds
    if left:
        return None
    samples = (fixture.batch or 1) * fixture.group_size
    if name == "rollout":
        running = fixture.max_running_requests
        all_run = running is not None and replicas * math.ceil(0.9 * running) >= samples
        return seconds if all_run else seconds * share
    if fixture.num_minibatches and samples / fixture.num_minibatches % (
        replicas * fixture.group_size
    ):
        return None
    return seconds * share / (1 + min(max(share / 10, 0.1), 0.9))


class Every:
    """All schedules of a fixture."""

    def __init__(self, fixture: Fixture, kind: Kind, *, all_of_them: bool) -> None:
        self.fixture, self.all_of_them = fixture, all_of_them
        self.turns, self.apart = KINDS[kind]
        self.edges = set(fixture.graph)
        self.batch = fixture.batch or 1
        self.known: dict[frozenset[str], dict[int, set[Part]]] = {}

    def least(self) -> float | None:
        whole = self.parts(frozenset(self.fixture.whole_pool_cost_s))
        return min((part[0] for some in whole.values() for part in some), default=None)

    def parts(self, stages: frozenset[str]) -> dict[int, set[Part]]:
        """What schedules of some stages take, by the devices that they use."""
        if stages not in self.known:
            found = {count: set[Part]() for count in range(1, self.fixture.devices + 1)}
            for count, part in self.alone(stages) if len(stages) == 1 else self.joined(stages):
                if count <= self.fixture.devices:
                    found[count].add(part)
            if not self.all_of_them:
                found = {count: unbeaten(some) for count, some in found.items()}
            self.known[stages] = found
        return self.known[stages]

    def alone(self, stages: frozenset[str]) -> Iterator[tuple[int, Part]]:
        (name,) = stages
        for count in range(1, self.fixture.devices + 1):
            seconds = stage_seconds(self.fixture, name, count)
            if seconds is not None:
                yield count, (seconds, seconds / self.batch, seconds / self.batch)

    def joined(self, stages: frozenset[str]) -> Iterator[tuple[int, Part]]:
        for size in range(1, len(stages)):
            for some in combinations(sorted(stages), size):
                first, second = frozenset(some), stages - frozenset(some)
                if any((late, early) in self.edges for early in first for late in second):
                    continue
                feeds = any((early, late) in self.edges for early in first for late in second)
                for count1, parts1 in self.parts(first).items():
                    for count2, parts2 in self.parts(second).items():
                        for one in parts1:
                            for two in parts2:
                                if self.turns:
                                    yield max(count1, count2), in_turns(one, two)
                                if self.apart:
                                    yield count1 + count2, self.at_once(one, two, feeds=feeds)

    def at_once(self, one: Part, two: Part, *, feeds: bool) -> Part:
        total, warm, pace = (max(pair) for pair in zip(one, two, strict=True))
        if not feeds:
            return total, warm, pace
        warm = one[1] + two[1]
        return warm + pace * (self.batch - 1), warm, pace


def in_turns(one: Part, two: Part) -> Part:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def unbeaten(parts: set[Part]) -> set[Part]:
    kept: list[Part] = []
    for part in sorted(parts):
        if not any(other[1] <= part[1] and other[2] <= part[2] for other in kept):
            kept.append(part)
    return set(kept)


def check(fixture: Fixture, *, all_of_them: bool) -> None:
    ours = answer(fixture).ours
    for kind in KINDS:
        least = Every(fixture, kind, all_of_them=all_of_them).least()
        assert (least is None) == (kind not in ours), fixture
        if least is not None:
            assert ours[kind][0] == pytest.approx(least, rel=1e-12), (kind, fixture)


def test_no_schedule_of_small_fixtures_takes_less() -> None:
    rng = random.Random(0)
    for number in range(36):
        graph = (PAIR, CHAIN, LONG, FAN, DIAMOND, FORK)[number % 6]
        check(drawn(rng, graph, rng.choice([1, 2, 3, 4])), all_of_them=True)


def test_no_schedule_of_larger_fixtures_takes_less() -> None:
    rng = random.Random(1)
    for number in range(16):
        graph = (LONG, DIAMOND, FORK, PPO)[number % 4]
        check(drawn(rng, graph, rng.choice([6, 8, 9])), all_of_them=False)


def test_where_pipelines_are_nested_the_searchs_own_best_ones_are_not_taken_for_the_best() -> None:
    """Of the 128 that the search prefers the best takes 3.6 % more."""
    seconds = {"rollout": 130.0, "reference": 119.0, "reward": 0.8, "values": 0.7}
    row = {
        "name": "nested",
        "devices": 16,
        "batch": 4,
        "group_size": 8,
        "graph": PPO,
        "tp": {"critic": 2},
        "whole_pool_cost_s": seconds | {"actor": 39.0, "critic": 110.0},
    }
    fixture = Fixture.model_validate(row)
    least = Every(fixture, Kind.SPATIAL, all_of_them=False).least()
    assert answer(fixture).ours[Kind.SPATIAL][0] == pytest.approx(least, rel=1e-12)
