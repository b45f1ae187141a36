"""Why a way to run a task that is faster alone is not the plan's: what it does beside the others.

The plan's schedule is measured once more with this way in place of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from flowrl.cost.memory import format_bytes
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.many import Chosen
from flowrl.plan.names import way_words
from flowrl.plan.own_syncs import own_syncs
from flowrl.plan.search import Leaf, Objective, leaves
from flowrl.plan.search.evaluate import Evaluation, Evaluator, rounded
from flowrl.plan.search_options import option_of
from flowrl.plan.show.many import device_seconds, seconds_text
from flowrl.plan.ways.candidate import Candidate, pareto
from flowrl.plan.ways.plain_ways import with_option
from flowrl.plan.ways.tasks import TaskWork
from flowrl.plan.within_hosts import overfull_host
from flowrl.plan.write.held import full_phases


class Cause(StrEnum):
    """What keeps a way that is faster alone out of a plan; what such ways do, in words."""

    ROOM = "do not fit with the other operations"
    HOST = "put more on their hosts than these can hold"
    STEP = "make the step no better"
    SYNC = "need a longer weight sync"
    PLAIN = "are more complex"
    RIVAL = "have rivals that are as fast in no more memory"
    UNKNOWN = "are more complex or take more memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Why a way is not the plan's.

    Attributes:
        words: With the numbers; they follow a `but`.
    """

    cause: Cause
    words: str


def lost(task: TaskWork, other: Candidate, best: Chosen) -> Lost:
    """Why a task is not run in another way, on as many devices or on more that it could have."""
    if _stands_alike(other, best.ways[task.id]):
        tried = replace(best, ways={**best.ways, task.id: other})
        found = _too_full(task, tried) or _host_full(tried)
        if found is not None:
            return found
    return _by_step(task, other, best)


def _too_full(task: TaskWork, tried: Chosen) -> Lost | None:
    """None where all that is on the task's devices fits them."""
    group = tried.posed.group_of(task.id)
    runtime = RUNTIME_BYTES[group.device.type]
    (active, held), *others = full_phases(tried, task.id)
    total = runtime + sum(held.values())
    if total <= group.budget_bytes:
        return None
    parts = [f"{format_bytes(held.pop(task.id, 0))} its own"]
    parts += [f"{format_bytes(nbytes)} of {name}" for name, nbytes in held.items() if nbytes]
    over = [
        f"{format_bytes(runtime + sum(more.values()))} while {_works(other, task)}"
        for other, more in others
        if runtime + sum(more.values()) > group.budget_bytes
    ]
    words = (
        f"it does not fit with the other operations: {format_bytes(total)} of "
        f"{format_bytes(group.budget_bytes)} while {_works(active, task)}, {', '.join(parts)}, "
        f"{format_bytes(runtime)} runtime" + (f"; also {' and '.join(over)}" if over else "")
    )
    return Lost(cause=Cause.ROOM, words=words)


def _works(active: str, task: TaskWork) -> str:
    return f"{'it' if active == task.id else active} runs"


def _host_full(tried: Chosen) -> Lost | None:
    """None where the hosts hold what is put on them."""
    over = overfull_host(tried.numbers, tried.ways, lambda one: tried.posed.made(one).host)
    if over is None:
        return None
    held, host = over
    put = format_bytes(sum(held.values()))
    words = f"the hosts would hold {put} for each device, of {format_bytes(host)}"
    return Lost(cause=Cause.HOST, words=words)


def faster_ones(causes: Iterable[Cause]) -> str:
    """What all faster ways have against them: `faster ones are more complex`."""
    found = set(causes)
    kinds = [Cause.UNKNOWN] if Cause.UNKNOWN in found else [one for one in Cause if one in found]
    *most, last = kinds
    return f"faster ones {', '.join(most)}{' or ' if most else ''}{last}"


def _by_step(task: TaskWork, other: Candidate, best: Chosen) -> Lost:
    """By what the search measures of the schedule with it."""
    posed, way = best.posed, best.ways[task.id]
    now, then = _measured(task, other, best)
    runtime = RUNTIME_BYTES[posed.group_of(task.id).device.type]
    # Over two kinds of devices each has a memory of its own, and one peak says nothing.
    if not posed.parts and then.peak > posed.problem.memory_bytes:
        words = (
            "it does not fit with the other operations: up to "
            f"{format_bytes(then.peak + runtime)} of "
            f"{format_bytes(posed.problem.memory_bytes + runtime)}"
        )
        return Lost(cause=Cause.ROOM, words=words)
    # The search takes one price of a sync for all layouts.
    more_s = _sync_s(task, other, best) - _sync_s(task, way, best)
    own = replace(then, objective=then.objective + _of_step(more_s, then))
    if rounded(own.objective) >= rounded(now.objective):
        if rounded(then.objective) >= rounded(now.objective):
            return Lost(cause=Cause.STEP, words=_no_better(now, own, best))
        words = f"weight sync takes {seconds_text(more_s)} longer with it"
        return Lost(cause=Cause.SYNC, words=words)
    if other.plainness > way.plainness:
        return Lost(cause=Cause.PLAIN, words=f"more complex{_better(now, own, best)}")
    rival = _rival(task, other, best)
    if rival is not None:
        told = way_words(rival.layout, rival.recompute, rival.offload)
        return Lost(cause=Cause.RIVAL, words=f"{told} is as fast in about as much memory or less")
    words = "more complex, or it takes too much memory with the other operations"
    return Lost(cause=Cause.UNKNOWN, words=words)


def _no_better(now: Evaluation, then: Evaluation, best: Chosen) -> str:
    """What a schedule takes more with another way, in what the best has least of."""
    more = then.objective - now.objective
    by_time = best.posed.problem.objective is Objective.STEP_TIME
    more = max(0.0, more if by_time else more / _samples(best))
    if seconds_text(more) == seconds_text(0.0):
        same = "the step is no shorter with it"
        return same if by_time else "the step takes no less device time with it"
    if by_time:
        return f"the step takes {seconds_text(more)} longer with it"
    return f"it costs {device_seconds(more)} more"


def _better(now: Evaluation, then: Evaluation, best: Chosen) -> str:
    """What a schedule takes less with another way, likewise; empty where that is nothing."""
    by_time = best.posed.problem.objective is Objective.STEP_TIME
    less = (now.objective - then.objective) / (1 if by_time else _samples(best))
    if seconds_text(less) == seconds_text(0.0):
        return ""
    if by_time:
        return f", and a step is only {seconds_text(less)} shorter"
    return f", and it saves only {device_seconds(less)}"


def _sync_s(task: TaskWork, way: Candidate, best: Chosen) -> float:
    """What a task's own syncs take where it is run in some way."""
    posed = best.posed
    own = {pair: every for pair, every in posed.travels.items() if task.id in pair}
    layouts = {name: one.layout for name, one in best.ways.items()} | {task.id: way.layout}
    apart = {pair: best.numbers[pair[0]] != best.numbers[pair[1]] for pair in own}
    return sum(own_syncs(posed, own, layouts, apart).values())


def _of_step(seconds: float, found: Evaluation) -> float:
    """What further seconds of a step add to what the best has least of."""
    return seconds * found.objective / found.step_s if found.step_s else 0.0


def _samples(best: Chosen) -> int:
    return max(task.samples for task in best.posed.tasks)


def _rival(task: TaskWork, other: Candidate, best: Chosen) -> Candidate | None:
    """The way that the search has in place of one that it has not."""
    ways, made = best.posed.ways[task.id], best.posed.made(task.id)
    if other in ways:
        return None
    return next(
        (
            one
            for one in ways
            if one.devices == other.devices
            and one.seconds <= other.seconds
            and other not in pareto((one, other), made.budget, shared=False)
        ),
        None,
    )


def _measured(task: TaskWork, other: Candidate, best: Chosen) -> tuple[Evaluation, Evaluation]:
    """The plan's schedule as it is, and with another way to run a task; syncs as the search has
    them, which are the same."""
    posed = best.posed
    shared = posed.problem.task(task.id).weights is not None
    leaf: Leaf = next(leaf for leaf in leaves(best.schedule) if leaf.task == task.id)
    option = option_of(
        task, other, posed.made(task.id).request, shared=shared, label=leaf.option.label
    )
    evaluator = Evaluator(posed.problem)
    changed = with_option(best.schedule, task.id, option)
    return evaluator.measure(best.schedule), evaluator.measure(changed)


def _stands_alike(other: Candidate, way: Candidate) -> bool:
    """Whether it takes the same devices, and so does its environment."""
    splits = [None if one.played is None else one.played.split for one in (other, way)]
    alike = splits[0] == splits[1]
    return other.layout.num_devices == way.layout.num_devices and alike
