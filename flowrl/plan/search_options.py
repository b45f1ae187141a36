"""Ways to run tasks as the options of the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import Option, Task
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.stream_arrivals import arrivals_of_ways
from flowrl.plan.ways.tasks import TaskWork

CHUNK_S = 0.05
"""Seconds that a further chunk costs its sender and its reader: messages, a shorter last batch and
launches. An estimate; nothing measures it yet. What leaves the device between its turns takes its
way to the host and back besides, with every chunk: in a stream, those that take turns alternate."""


def shared_weights(tasks: Sequence[TaskWork]) -> frozenset[str]:
    """The weights that several tasks hold."""
    held = Counter(task.weights for task in tasks if task.weights is not None)
    return frozenset(name for name, times in held.items() if times > 1)


def option_tasks(
    tasks: Sequence[TaskWork],
    ways: Mapping[str, tuple[Candidate, ...]],
    request: PlanRequest,
    beside: Mapping[str, tuple[Candidate, ...]] | None = None,
) -> tuple[Task, ...]:
    """Tasks as the search has them.

    Args:
        beside: See `Posed`.
    """
    here, shares = frozenset(ways), shared_weights(tasks)
    more = beside or {}
    return tuple(
        _option_task(task, ways[task.id], more.get(task.id, ()), here, shares, request)
        for task in tasks
    )


def _option_task(
    task: TaskWork,
    ways: tuple[Candidate, ...],
    beside: tuple[Candidate, ...],
    here: frozenset[str],
    shares: frozenset[str],
    request: PlanRequest,
) -> Task:
    weights = task.weights if task.weights in shares else None
    shared = weights is not None
    options = tuple(
        option_of(task, way, request, shared=shared, label=label)
        for label, way in enumerate((*ways, *beside))
    )
    return Task(
        id=task.id,
        after=tuple(before for before in task.after if before in here),
        options=options[: len(ways)],
        weights=weights,
        max_chunks=task.pieces,
        in_one=task.generates,
        beside=options[len(ways) :],
    )


def option_of(
    task: TaskWork, way: Candidate, request: PlanRequest, *, shared: bool, label: int
) -> Option:
    """A way to run a task as the search has it.

    Args:
        shared: Other tasks hold the task's weights too.
        label: Its place among the task's ways.
    """
    (arrives,) = arrivals_of_ways(task, (way,), request)
    return Option(
        devices=way.devices,
        seconds=way.seconds / task.every,
        steady_s=way.period_s / task.every,
        dense_s=_dense_s(task, way, request) / task.every,
        chunk_s=CHUNK_S + way.move_s,
        resident=way.resident,
        peak=way.peak,
        weight_bytes=way.weight_bytes if shared else 0,
        form=way.form,
        label=label,
        arrivals=arrives,
    )


def _dense_s(task: TaskWork, way: Candidate, request: PlanRequest) -> float:
    """What of a batch's period brings no other batch on.

    Over several periods others progress in it as far as its engines' steps go. Where a batch is
    within two (staleness 1), its last tokens fall into the first seconds of the next one, when its
    engines are full, and they are the fuller the more of a batch's time these are: so much of the
    rest of the period is counted too. (Such batches may even fall into pairs that are drawn
    together, which takes longer.)

    Within more, samples may wait for slots, though each batch by itself has enough: see
    `_waits_s`. A batch is through later by this, as if so much more were its own.
    """
    seconds, dense, period = way.seconds, way.dense_s, way.period_s
    if not way.slots or not request.max_staleness or dense >= period:
        return dense
    if request.max_staleness == 1:
        return min(period, dense + (period - dense) * period / seconds)
    # What ages leave where the trainer takes all of a period.
    apart = max(period, dense + (seconds - dense) / request.max_staleness)
    waits = _waits_s(way, task.samples / way.layout.dp, apart)
    if not waits:
        return dense
    through = (seconds - dense) * apart / (apart - dense) + waits
    return min(period, apart * (through - seconds) / (through - apart))


def _waits_s(way: Candidate, samples: float, apart: float) -> float:
    """How much longer the last sample of a batch waits for a slot than if its batch were alone.

    With S(t) the share of n samples that run after t seconds, sum over j of n S(j T) are there when
    a batch is T seconds behind others, its own included. By Little's law the mean over T is
    slots s1 / T, s1 being the period of full engines, and the sum is n / 2 more (Euler-Maclaurin).
    Of its own, n - slots wait in any case; the slots get free one by one, n of them in s1 (rather
    later: few rows end just after a batch has begun).

    Args:
        samples: n, of a replica.
        apart: T.
    """
    slots = way.slots * (1 if way.played is None else GIVEN_PER_SLOT)
    others = slots * way.period_s / apart - samples / 2
    return way.period_s / samples * max(0.0, others - max(0.0, slots - samples))
