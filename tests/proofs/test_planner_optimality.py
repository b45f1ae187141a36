"""The search against every schedule; and faults planted in the search, which must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flowrl.plan.search import Alike, Kind, dynamic, explain, joins, space
from tests.proofs import planner_optimality
from tests.proofs.planner_optimality import check, main
from tests.proofs.scheduler_fuzz import main as fuzz
from tests.sizes import every


def test_the_search_finds_the_best_schedule_of_small_problems(capsys) -> None:
    assert main(["--cases", "60", "--seed", "11", "--most", "1500"]) == 0
    printed = capsys.readouterr().out
    assert "cases       60" in printed
    assert "worst gap   0\n" in printed


def test_the_cases_reach_every_kind_and_what_cannot_be_placed() -> None:
    tally = check(3, range(60), most=800)
    assert tally.wrong == []
    assert tally.worst_gap == 0
    assert tally.infeasible > 0
    assert {Kind.TEMPORAL, Kind.HYBRID, Kind.ASYNCHRONOUS} <= set(tally.kinds)
    assert len(tally.tasks) >= 3


def without_a_cut(tasks, reads, original=space.downward_closed):
    return original(tasks, reads)[1:]


def without_shared_weights(problem, usable, index, original=space._number_tokens):
    tokens, weights, nbytes, syncs = original(problem, usable, index)
    return tokens, weights, np.zeros_like(nbytes), syncs


def without_syncs(problem, first, second):
    return ()


def with_bounds_too_tight(one, bounds, at_root, original=dynamic.limits):
    most, splits = original(one, bounds, at_root)
    return most, [[None for _ in cut] for cut in splits]


def without_memory(join, *args, original=joins._made):
    return original(replace(join, memory_bytes=np.inf), *args)


def without_one_chunk_count(*args, original=space.streams_between):
    streams = original(*args)
    return streams[:-1] if len(streams) > 1 else streams


def with_turns_that_hand_on_evenly(join, chunks, rows, sides, seconds):
    return None


def with_rollouts_that_turns_do_not_wait_for(problem, names, original=space.numbers):
    return 0 if names == problem.in_one() else original(problem, names)


def with_even_arrivals(problem):
    return tuple(() for _ in problem.tasks)


def with_the_earliest_arrivals_of_a_kind(alike, schedules):
    return False


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    every(
        3,
        [
            (space, "downward_closed", without_a_cut),
            (space, "_number_tokens", without_shared_weights),
            (space, "crossing", without_syncs),
            (space, "streams_between", without_one_chunk_count),
            (joins, "_from_turns", with_turns_that_hand_on_evenly),
            (space, "numbers", with_rollouts_that_turns_do_not_wait_for),
            (space, "_arrivals", with_even_arrivals),
            (Alike, "part", with_the_earliest_arrivals_of_a_kind),
            (dynamic, "limits", with_bounds_too_tight),
            (joins, "_made", without_memory),
        ],
    ),
)
def test_a_fault_in_the_search_is_found(monkeypatch, capsys, module, name, fault) -> None:
    monkeypatch.setattr(module, name, fault)
    assert main(["--cases", "60", "--seed", "1", "--most", "600"]) == 1
    printed = capsys.readouterr().out
    assert "gap" in printed
    assert "best of all:" in printed


def test_a_search_that_says_that_nothing_fits_is_found(monkeypatch) -> None:
    monkeypatch.setattr(explain, "UNLIMITED", 0)
    monkeypatch.setattr(planner_optimality, "search", lambda problem, **_: _nothing())
    tally = check(0, range(10), most=300)
    assert tally.worst_gap == np.inf
    assert tally.wrong


def _nothing():
    class Nothing:
        best = ()

    return Nothing()


@pytest.mark.parametrize("checks", [main, fuzz])
@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_check_of_nothing_is_refused(
    checks: Callable[[list[str]], int], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--jobs", "--cases" if checks is main else "--events"):
        with pytest.raises(SystemExit) as end:
            checks([option, number])
        assert end.value.code == 2
        assert f"argument {option}: {number} is less than 1" in capsys.readouterr().err
