"""What taking turns inside a stream costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flowrl.cost.analytic import AnalyticCost
from flowrl.graph import Graph
from flowrl.plan.groups import host_share
from flowrl.plan.problem_of import Posed, pose
from flowrl.plan.search import (
    Alike,
    Kind,
    Leaf,
    Objective,
    Option,
    Spatial,
    Temporal,
    evaluate,
    search,
)
from flowrl.plan.search_options import CHUNK_S
from tests.plan.many_cases import h100, request
from tests.plan.test_mixed import cluster, over_two


@pytest.fixture
def posed(grpo: Graph) -> Posed:
    pool = h100(8)
    (group,) = pool.groups()
    return pose(grpo, request(), group, AnalyticCost(), host=host_share(pool, group))


def way(posed: Posed, task: str, *, moved: bool) -> Option:
    """The fastest on 4 devices whose parameters go to the host between its turns, or do not."""
    return next(
        option
        for option in posed.problem.task(task).options
        if option.devices == 4 and ("all" in posed.candidate(task, option).offload) == moved
    )


def test_what_takes_turns_in_a_stream_comes_from_the_host_with_every_chunk(posed: Posed) -> None:
    generate = Leaf(task="actor.generate", option=way(posed, "actor.generate", moved=False))
    reference = Leaf(
        task="reference.logprobs", option=way(posed, "reference.logprobs", moved=False)
    )
    update = Leaf(task="actor.update", option=way(posed, "actor.update", moved=True))
    chunks = 4
    turns = Temporal(first=reference, second=update)
    stream = Spatial(first=generate, second=turns, chunks=chunks)

    move_s = posed.candidate(update.task, update.option).move_s
    assert move_s > 0
    first = generate.option.seconds + (chunks - 1) * CHUNK_S
    second = reference.option.seconds + update.option.seconds
    second += (chunks - 1) * (2 * CHUNK_S + move_s)
    arrivals = generate.option.arrivals
    assert arrivals is not None
    expected = max(a * first + b * second for a, b in arrivals.chunk_lines(chunks))
    found = evaluate(posed.problem, stream)
    assert found.step_s - found.sync_s == pytest.approx(expected)


EVERY = 10**6
"""More kinds of arrivals than layouts."""


@pytest.mark.parametrize("objective", list(Objective))
def test_a_stream_takes_what_its_own_layouts_arrivals_make_of_it(
    posed: Posed, objective: Objective
) -> None:
    spatial = frozenset({Kind.SPATIAL})
    problem = replace(posed.problem, kinds=spatial, objective=objective)
    found = search(problem, top=8).best
    exact = search(problem, top=8, most_kinds=EVERY).best
    assert [one.evaluation for one in found] == [one.evaluation for one in exact]
    for one in found:
        assert one.evaluation == evaluate(problem, one.schedule)
    early = search(Alike(problem).problem, top=8, most_kinds=EVERY).best
    assert early[0].evaluation.objective < found[0].evaluation.objective


@pytest.mark.parametrize("changes", [{}, {"objective": "device_time"}])
def test_parting_kinds_of_arrivals_finds_the_best_steps_over_two_kinds_of_devices(
    grpo: Graph, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(most: int) -> list[tuple[float, ...]]:
        monkeypatch.setattr("flowrl.plan.mixed.Alike", partial(Alike, most=most))
        searches = over_two(grpo, request(**changes), cluster(8, 4))
        return [tuple(one.objective for one in each.best(each.limit)) for each in searches]

    assert told(1) == told(EVERY)
