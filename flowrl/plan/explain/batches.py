"""What a plan says where a task is on fewer devices than there are for the size of the batch alone:
no number of replicas on all of them shares its samples evenly.

The nearest batches that do are found by arithmetic, and where somebody asks for it
(`plan.try_batches`) the job is planned with each: then those are told with which a sample takes
less time, or that there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import TypeAlias

from flowrl.cluster.pool import DeviceGroup
from flowrl.plan.batches import Batch, Uneven, batch_sizes, batches_near, uneven_tasks
from flowrl.plan.many import Chosen, Searched
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import Kind
from flowrl.plan.show.many import seconds_apart, seconds_text
from flowrl.wording import percent

LEAST_IDLE = 0.05
"""Of the time of a plan's devices: what idles less is not worth another batch."""

LEAST_GAIN = 0.01
"""Of the time of a sample, likewise."""

TryBatch: TypeAlias = Callable[[Batch], Chosen | None]
"""The best plan with another batch; None where there is none."""


def idle_for_batch(
    searched: Searched, request: PlanRequest, group: DeviceGroup
) -> tuple[Uneven, ...]:
    """The tasks of a plan that are on fewer devices than a group has for the batch alone; none
    where next to nothing idles, where rollouts have devices of their own all the time, or where
    devices are dear rather than time.

    Args:
        group: On which the plan's devices are, or some of them.
    """
    best = searched.best
    if request.options.objective != "step_time":
        return ()
    here = [task for task in best.posed.tasks if _stands_on(task.id, best, group)]
    used = {name: way.layout.num_devices for name, way in best.ways.items()}
    found = uneven_tasks(here, used, group, request, searched.pins.filters)
    if not found:
        return ()
    every = {best.posed.addresses[one] for some in best.numbers.values() for one in some}
    idle = not every.issuperset(group.addresses)
    if not idle and (best.kind is Kind.ASYNCHRONOUS or best.idle_share < LEAST_IDLE):
        return ()
    return found


def _stands_on(task: str, best: Chosen, group: DeviceGroup) -> bool:
    addresses = best.posed.group_of(task).addresses
    return set(addresses) <= set(group.addresses)


def uneven_words(uneven: Sequence[Uneven]) -> str:
    """`no number of replicas on all 24 devices divides the 1,024 samples of an update (...)`."""
    rows: dict[str, list[str]] = {}
    for one in uneven:
        rows.setdefault(one.rows, []).append(one.task.title)
    told = " or ".join(f"the {some} ({', '.join(names)})" for some, names in rows.items())
    return f"no number of replicas on all {uneven[0].devices} devices divides {told}"


def even_sizes(uneven: Sequence[Uneven], request: PlanRequest) -> str:
    """`504 or 516 prompts a step (train.prompts_per_step)`; empty where no near batch does."""
    near = batches_near([(one.task, one.replicas) for one in uneven], request)
    prompts, parts = batch_sizes(near, request)
    words = []
    if prompts:
        words.append(f"{prompts} prompts a step ({request.train_key}.prompts_per_step)")
    if parts:
        words.append(f"{parts} mini-batches ({request.train_key}.mini_batches)")
    return ", or ".join(words)


def uneven_note(
    searched: Searched, uneven: Sequence[Uneven], request: PlanRequest, tried: TryBatch | None
) -> Iterator[str]:
    """What is idle for the batch alone, and with which batches it would not be.

    Args:
        tried: Plans the job with another batch; None where nobody asked for it.
    """
    why = uneven_words(uneven)
    gains = [] if tried is None else list(_gains(searched.best, uneven, request, tried))
    if gains:
        yield f"devices idle, for {why}: {'; '.join(gains)}"
    elif sizes := even_sizes(uneven, request):
        yield f"devices idle, for {why}; {sizes} can be shared evenly, " + (
            "which may gain nothing: --explain plans with them and shows what they take"
            if tried is None
            else f"and with none of these a sample takes {percent(LEAST_GAIN)} less"
        )


def _gains(
    best: Chosen, uneven: Sequence[Uneven], request: PlanRequest, tried: TryBatch
) -> Iterator[str]:
    """Of each batch with which a sample takes less; of all numbers of replicas alike where the
    nearest ones that suit any of them do not help."""
    some = [(one.task, one.replicas) for one in uneven]
    every = [(one.task, (lcm(*one.replicas),)) for one in uneven]
    seen: list[Batch] = []
    for replicas in (some, every):
        told: list[str] = []
        for batch in batches_near(replicas, request):
            other = None if batch in seen else tried(batch)
            seen.append(batch)
            if other is not None:
                told += _gain(best, other, batch, uneven, request)
        yield from told
        if told:
            return


def _gain(
    best: Chosen, other: Chosen, batch: Batch, uneven: Sequence[Uneven], request: PlanRequest
) -> Iterator[str]:
    """What one batch saves; nothing where that is next to nothing."""
    now, then = _sample_s(best), _sample_s(other)
    if then > (1 - LEAST_GAIN) * now:
        return
    devices = uneven[0].devices
    used = len({one for name in other.ways for one in other.numbers[name]})
    wide = all(other.ways[one.task.id].layout.num_devices == devices for one in uneven)
    how = f"would use all {devices} devices" if wide else f"would use {used} devices"
    what = f"{batch.prompts} prompts a step ({request.train_key}.prompts_per_step)"
    if batch.mini_batches != request.mini_batches:
        what = f"{batch.mini_batches} mini-batches ({request.train_key}.mini_batches)"
    less, more = seconds_apart(then, now)
    yield (
        f"{what} {how}: {less} a sample instead of {more} "
        f"({percent(1 - then / now, 1)} less), {seconds_text(other.step_s)} a step"
    )


def _sample_s(one: Chosen) -> float:
    """Seconds of a step for each of its samples."""
    return one.step_s / max(task.samples for task in one.posed.tasks)
