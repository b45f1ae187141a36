"""Compares the planner's search with an enumeration of every schedule.

    python -m tests.proofs.planner_optimality --cases 2000 --seed 0

Problems are sampled at random: chains, diamonds, PPO with a critic and graphs of any order, with 3
to 7 tasks on up to 8 devices; costs follow no rule, device counts are missing, memory is short,
weights are shared, and there are syncs, staleness, chunk limits and pins. Code that shares nothing
with the search enumerates every schedule of a problem, and the evaluator scores these and the
search's answer. A problem with more than 100,000 schedules is replaced by another. The gap of a
case is the relative difference of the objectives of the answer and of the best schedule, both to 12
digits. It is infinite where only one of the two finds a schedule that fits. Where the objectives
are equal, splits of the answer beyond those of the best schedule count as wrong too. The exit code
is 0 exactly when no case is wrong.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from benchmarks.arguments import at_least_one
from flowrl.plan.search import Evaluator, Kind, Problem, Schedule, draw, evaluate, kind_of, search
from tests.proofs.planner_cases import count_schedules, draw_problem, every_schedule

__all__ = ["Tally", "check", "compare", "main"]

MOST_SCHEDULES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The search's answer and the best of all schedules.

    Attributes:
        schedules: Number of schedules.
        ours: The search's schedule; None where the search says that nothing fits.
        best: The best of all schedules; None where nothing fits.
        gap: Relative difference of the objectives; infinite where one of the two is None.
        more_splits: Splits of `ours` beyond those of `best`, where the objectives are equal.
    """

    schedules: int
    ours: Schedule | None
    best: Schedule | None
    gap: float
    more_splits: int


@dataclass(slots=True)
class Tally:
    """Counts of what was compared."""

    cases: int = 0
    redrawn: int = 0
    schedules: int = 0
    infeasible: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)  # of the best schedules
    tasks: Counter[int] = field(default_factory=Counter)  # cases by number of tasks
    worst_gap: float = 0.0
    wrong: list[str] = field(default_factory=list)  # descriptions of the cases that are wrong

    def add(self, other: Tally) -> None:
        """Adds the counts of another tally."""
        self.cases += other.cases
        self.redrawn += other.redrawn
        self.schedules += other.schedules
        self.infeasible += other.infeasible
        self.kinds += other.kinds
        self.tasks += other.tasks
        self.worst_gap = max(self.worst_gap, other.worst_gap)
        self.wrong += other.wrong


def compare(problem: Problem) -> Comparison:
    """Compares the search with every schedule of `problem`."""
    best: Schedule | None = None
    best_key = (math.inf, 0)
    count = 0
    evaluator = Evaluator(problem)
    for schedule in every_schedule(problem):
        count += 1
        found = evaluator.measure(schedule)
        if found.fits and found.key[:2] < best_key:
            best, best_key = schedule, found.key[:2]
    if best is not None:
        evaluate(problem, best)  # also checks that `best` is a schedule of the problem
    answer = search(problem, most_kinds=1)  # all arrival profiles are kept apart
    if not answer.best or best is None:
        agreed = not answer.best and best is None
        ours = answer.best[0].schedule if answer.best else None
        gap = 0.0 if agreed else math.inf
        return Comparison(schedules=count, ours=ours, best=best, gap=gap, more_splits=0)
    ours = answer.best[0].schedule
    scored = evaluate(problem, ours)  # re-evaluated, independently of the search's own score
    gap = (scored.key[0] - best_key[0]) / best_key[0] if scored.fits else math.inf
    more = scored.num_splits - best_key[1] if gap == 0 else 0
    return Comparison(schedules=count, ours=ours, best=best, gap=gap, more_splits=more)


def check(seed: int, cases: Iterable[int], most: int = MOST_SCHEDULES) -> Tally:
    """Compares the cases of these numbers."""
    tally = Tally()
    for number in cases:
        rng = random.Random(f"{seed}/{number}")
        problem = draw_problem(rng)
        while count_schedules(problem) > most:
            tally.redrawn += 1
            problem = draw_problem(rng)
        result = compare(problem)
        tally.cases += 1
        tally.schedules += result.schedules
        tally.tasks[len(problem.tasks)] += 1
        tally.worst_gap = max(tally.worst_gap, result.gap)
        if result.best is None:
            tally.infeasible += 1
        else:
            tally.kinds[kind_of(result.best)] += 1
        if result.gap != 0 or result.more_splits != 0:
            tally.wrong.append(_description(seed, number, result))
    return tally


def _description(seed: int, number: int, result: Comparison) -> str:
    ours = draw(result.ours) if result.ours else "nothing fits"
    best = draw(result.best) if result.best else "nothing fits"
    return (
        f"case {number} of seed {seed}: gap {result.gap:.3g}, splits more {result.more_splits}\n"
        f"the search:\n{ours}\nbest of all:\n{best}\n  again: --seed {seed} --case {number}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0 exactly when the search is right in every case."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.planner_optimality",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--cases", type=at_least_one, default=200, help="number of problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument(
        "--most",
        type=at_least_one,
        default=MOST_SCHEDULES,
        help="maximum number of schedules of a case",
    )
    parser.add_argument("--jobs", type=at_least_one, default=1, help="number of processes")
    asked = parser.parse_args(arguments)
    numbers = range(asked.cases) if asked.case is None else range(asked.case, asked.case + 1)
    began = time.perf_counter()
    tally = Tally()
    if asked.jobs > 1:
        shares = [numbers[at :: asked.jobs] for at in range(asked.jobs)]
        with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
            for part in pool.map(
                check, [asked.seed] * asked.jobs, shares, [asked.most] * asked.jobs
            ):
                tally.add(part)
    else:
        tally.add(check(asked.seed, numbers, asked.most))
    for description in tally.wrong[:5]:
        print(description)
    tasks = ", ".join(f"{count} of {size} tasks" for size, count in sorted(tally.tasks.items()))
    print(f"cases       {tally.cases} ({tasks}; {tally.redrawn} were too large and drawn again)")
    print(f"schedules   {tally.schedules:,}, at most {asked.most:,} a case")
    print(f"infeasible  {tally.infeasible}")
    print("optima      " + ", ".join(f"{tally.kinds[kind]} {kind}" for kind in Kind))
    print(f"wrong       {len(tally.wrong)}")
    print(f"worst gap   {tally.worst_gap:g}")
    print(f"time        {time.perf_counter() - began:.1f} s")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
