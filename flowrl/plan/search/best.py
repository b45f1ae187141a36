"""The search: the best schedules of a problem, exactly.

The dynamic programme (`dynamic`) finds the best schedules within a limit. The first limits are just
above the lower bound: where memory binds little, the answer lies within them. Otherwise some
schedule is found cheaply, on few of the device counts, and the limit grows towards what that one
takes, until enough schedules lie within it; of very many counts that is the next limit. Nothing
outside of a limit can be better than what lies within, so the answer does not depend on these
steps, only the time to find it does.

Arrivals are told apart in kinds, which are parted until the best schedules have their own
(`alike`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from flowrl.plan.search.alike import MOST_KINDS, Alike
from flowrl.plan.search.bounds import lower_bounds
from flowrl.plan.search.dynamic import NO_LIMIT, SLACK, Aim, Outcome, least_objective, run
from flowrl.plan.search.evaluate import evaluate
from flowrl.plan.search.explain import explain, fits, least_peak, thin
from flowrl.plan.search.problem import Kind, Problem
from flowrl.plan.search.result import Found, SearchResult
from flowrl.plan.search.schedule import Schedule, signature
from flowrl.plan.search.space import Space, compile_space, families

__all__ = ["fewest_devices", "search", "thin"]

STEPS = (0.002, 0.01, 0.04, 0.15, 0.5, 2.0)
"""By how much limits lie above the lower bound, one after the other."""

NEAR_STEPS = (0.0, 1e-4)
"""Of very many block sizes, these come before, for what is further above the bound takes long."""

SMALL_STEPS = ((10_000, 1.5), (2_000, 2.5))
"""The limit lies at most so many times further above the bound where the run before it had more
points than this: their number may grow a hundredfold from one step to the next."""

WORTH_A_STEP = 1.03
"""The ceiling is tried at once when the next limit is as near to it as this."""

NEAR = 0.01
"""Up to so far above the bound, limits are tried without asking for a ceiling."""

FEW_SIZES = 20
"""Of more block sizes, about a quarter is looked at first, for a ceiling, and so on."""

MANY_SIZES = 100
"""Of more, the best of so few is found for a ceiling, before limits lie further above the bound
than `NEAR`."""


def search(
    problem: Problem,
    *,
    top: int = 1,
    max_counts: int | None = None,
    most_kinds: int = MOST_KINDS,
    most_rounds: int | None = None,
    within: float = math.inf,
) -> SearchResult:
    """The best schedules of `problem`, in order.

    Order: the objective, then the fewest Spatial and Asynchronous nodes, then the fewest forms of
    weights, then a fixed order.

    Args:
        problem: What to place.
        top: How many distinct schedules.
        max_counts: Look at so many device counts only (`thin`); the result names the rule. None =
            all of them, which is exact.
        most_kinds: Of a task's arrivals at first; the answer does not depend on it.
        most_rounds: In which kinds of arrivals are told apart; the schedules are good ones then,
            and what they take is right. None = until they are the best.

    Returns:
        The schedules, or the reasons why there is none.

    Raises:
        PlanError: The problem is larger than the search can take.
    """
    if top < 1:
        raise ValueError(f"top must be positive, not {top}")
    looked_at, rule = problem, None
    if max_counts is not None:
        looked_at, rule = thin(problem, max_counts)
    best: list[Found] = []
    num_states = num_points = 0
    turns = _Turns(looked_at)
    for family in families(looked_at):
        own, outcome = _with_own_arrivals(
            family, top, turns, (most_kinds, most_rounds), within=within
        )
        best += own
        num_states += outcome.num_states
        num_points += outcome.num_points
    ordered = _first(best, top)
    return SearchResult(
        best=tuple(ordered),
        infeasible=None if ordered or within < math.inf else explain(looked_at),
        num_states=num_states,
        num_points=num_points,
        thinned=rule,
        turns=turns.found,
    )


def fewest_devices(problem: Problem) -> int | None:
    """The smallest allowed pool on which something fits; None where not even the whole does.

    What fits on a pool fits on a larger one, which may leave devices idle, so halving finds it.
    """
    sizes = problem.block_sizes()
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if fits(replace(problem, num_devices=sizes[middle])):
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else None


class _Turns:
    """The best schedule in which all take turns, once it was asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.found: Found | None = None

    def objective(self) -> float | None:
        """None where nothing fits."""
        if self.found is None:
            alone = replace(self._problem, kinds=frozenset({Kind.TEMPORAL}))
            in_order = _in_order(self._problem, _best_of(alone, 1).schedules)
            self.found = in_order[0] if in_order else None
        return None if self.found is None else self.found.evaluation.objective


def _with_own_arrivals(
    problem: Problem,
    top: int,
    turns: _Turns,
    most: tuple[int, int | None],
    *,
    within: float,
) -> tuple[list[Found], Outcome]:
    """The best schedules of one family, and what the last run of the search for them found.

    Args:
        most: Kinds of arrivals, and rounds, as of `search`.
        within: As of `search`.
    """
    most_kinds, most_rounds = most
    alike = Alike(problem, most_kinds)
    known: list[Found] = []
    rounds = 0
    while True:
        rounds += 1
        enough = known[top - 1].evaluation.objective if len(known) >= top else math.inf
        ceiling = min(enough, within)
        outcome = _best_of(
            alike.problem, top, turns=turns, ceiling=None if math.isinf(ceiling) else ceiling
        )
        found = _in_order(alike.problem, outcome.schedules)[:top]
        own = _in_order(problem, (alike.own(one.schedule) for one in found))
        late = [
            mine.schedule
            for one in found
            for mine in [_measured(problem, alike.own(one.schedule))]
            if mine.evaluation.key > one.evaluation.key
        ]
        if not late or rounds == most_rounds or not alike.part(late):
            return own, outcome
        known = _first([*known, *own], top)


def _measured(problem: Problem, schedule: Schedule) -> Found:
    return Found(schedule=schedule, evaluation=evaluate(problem, schedule))


def _best_of(
    problem: Problem,
    top: int,
    like: Space | None = None,
    turns: _Turns | None = None,
    ceiling: float | None = None,
) -> Outcome:
    """The best schedules of one family.

    Args:
        ceiling: An objective within which there are enough, or above which none is of use.
    """
    space = compile_space(problem, like)
    bounds = lower_bounds(space)
    aim = Aim(objective=problem.objective, memory_bytes=problem.memory_bytes, keep=top)
    least = least_objective(space, bounds, aim)
    if math.isinf(least) or (ceiling is not None and least > ceiling * (1 + SLACK)):
        return NOTHING
    num_sizes = len(problem.block_sizes())
    many = num_sizes > MANY_SIZES
    if ceiling is None and num_sizes > FEW_SIZES and top == 1 and Kind.HYBRID in problem.kinds:
        # One of them, found in a smaller space.
        ceiling = (turns or _Turns(problem)).objective()
    num_points = 0
    step = _next_step(None, num_points, many=many)
    while step is not None:
        limit = least * (1 + step)
        if ceiling is None and step > NEAR:
            ceiling = _ceiling(problem, top, space)
            if ceiling is None:
                return NOTHING
        if ceiling is not None and _is_near(limit, ceiling, num_points, many=many):
            break
        if ceiling is not None and many and step > NEAR:
            ceiling = _lower_ceiling(problem, top, space, ceiling)
            break
        outcome = run(space, bounds, limit, aim)
        if _num_distinct(outcome) >= top:
            return outcome
        num_points = outcome.num_points
        step = _next_step(step, num_points, many=many)
    assert ceiling is not None
    return run(space, bounds, ceiling, aim)


def _next_step(step: float | None, num_points: int, *, many: bool) -> float | None:
    """How far above the lower bound the next limit lies; None after the last one.

    Args:
        step: The one before it; None at first.
        num_points: What that one had.
        many: There are very many block sizes, so that the way to a limit takes long by itself.
    """
    steps = (*NEAR_STEPS, *STEPS) if many else STEPS
    if step is None:
        return steps[0]
    larger = next((one for one in steps if one > step), None)
    if larger is None or many:
        return larger
    factor = next((factor for most, factor in SMALL_STEPS if num_points > most), math.inf)
    return min(larger, step * factor)


def _is_near(limit: float, ceiling: float, num_points: int, *, many: bool) -> bool:
    """Whether the ceiling is to be tried rather than a limit below it."""
    few = 0 < num_points <= SMALL_STEPS[-1][0]
    return limit * (WORTH_A_STEP if few or many else 1.0) >= ceiling


NOTHING = Outcome(schedules=(), num_states=0, num_points=0)


def _num_distinct(outcome: Outcome) -> int:
    return len({signature(schedule) for schedule in outcome.schedules})


def _ceiling(problem: Problem, top: int, space: Space) -> float | None:
    """An objective within which `top` schedules lie, or all there are; None where nothing fits.

    Few block sizes are searched whatever it takes.
    """
    if len(problem.block_sizes()) <= FEW_SIZES:
        return NO_LIMIT
    fewer, _ = thin(problem, max(FEW_SIZES, len(problem.block_sizes()) // 4))
    if len(fewer.block_sizes()) < len(problem.block_sizes()):
        found = _in_order(problem, _best_of(fewer, top, space).schedules)
        if len(found) >= top:
            return found[top - 1].evaluation.objective
    smallest = least_peak(problem, problem.memory_bytes)
    if smallest is None:
        return None
    return evaluate(problem, smallest).objective if top == 1 else NO_LIMIT


def _lower_ceiling(problem: Problem, top: int, space: Space, ceiling: float) -> float:
    """An objective within which `top` schedules of few block sizes lie, if that is lower."""
    fewer, _ = thin(problem, MANY_SIZES)
    if len(fewer.block_sizes()) >= len(problem.block_sizes()):
        return ceiling
    found = _in_order(problem, _best_of(fewer, top, space, ceiling=ceiling).schedules)
    return min(ceiling, found[top - 1].evaluation.objective) if len(found) >= top else ceiling


def _in_order(problem: Problem, schedules: Iterable[Schedule]) -> list[Found]:
    """Distinct schedules, best first."""
    return _first([_measured(problem, schedule) for schedule in schedules])


def _first(found: Iterable[Found], most: int | None = None) -> list[Found]:
    """The best of distinct schedules in order."""
    best: dict[object, Found] = {}
    for new in found:
        name = signature(new.schedule)
        if name not in best or new.evaluation.key < best[name].evaluation.key:
            best[name] = new
    named = sorted(best.items(), key=lambda item: (item[1].evaluation.key, repr(item[0])))
    return [one for _, one in named[:most]]
