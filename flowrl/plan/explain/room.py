"""Why a task has fewer devices than stand idle beside it while it works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from flowrl.cluster.pool import DeviceGroup
from flowrl.plan.batches import uneven_tasks
from flowrl.plan.explain.beside import lost
from flowrl.plan.many import Chosen
from flowrl.plan.names import way_words
from flowrl.plan.schema import Rejection
from flowrl.plan.search import Asynchronous, Leaf, Schedule, Spatial, Temporal, block
from flowrl.plan.show.many import seconds_text
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.layouts import why_none
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.task_rules import layout_rules
from flowrl.plan.ways.tasks import TaskWork
from flowrl.wording import counted


def why_not_all(
    task: TaskWork, best: Chosen, only: Filter, whole: DeviceGroup | None = None
) -> Iterator[Rejection]:
    """Why a task is not on all devices of its part of the schedule, and not on all that there are
    where no number of replicas shares its samples evenly there; nothing where it is, where pins say
    how many it has, or where some of them may be its environment's.

    Args:
        only: What pins leave.
        whole: The group that the plan's devices are a share of, where they are one.
    """
    way, posed = best.ways[task.id], best.posed
    sizes = posed.problem.block_sizes()
    every = posed.problem.num_devices if isinstance(best.schedule, Leaf | Temporal) else 0
    room = dict(_rooms(best.schedule, every or block(best.schedule, sizes), sizes))[task.id]
    if task.region is not None or only.devices is not None:
        return
    if room > way.devices:
        yield Rejection(
            choice=counted(room, "device"), constraint=_why_not(task, way, room, best, only)
        )
    group, request = whole or posed.group_of(task.id), posed.made(task.id).request
    there = len(group.addresses)
    if there > max(room, way.devices):
        used: dict[str, int] = {task.id: way.devices}
        if uneven_tasks((task,), used, group, request, {task.id: only}):
            rules = layout_rules(task, request, group.node_size)
            left = why_none(task.shape, there, rules, only.takes)
            yield Rejection(choice=counted(there, "device"), constraint=f"leave {left}")


def _rooms(schedule: Schedule, room: int, sizes: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """The devices that each task could have where it stands: those that it takes turns on."""
    match schedule:
        case Leaf():
            yield schedule.task, room
        case Temporal():
            yield from _rooms(schedule.first, room, sizes)
            yield from _rooms(schedule.second, room, sizes)
        case Spatial() | Asynchronous():
            for part in (schedule.first, schedule.second):
                yield from _rooms(part, block(part, sizes), sizes)
        case _:
            assert_never(schedule)


def _why_not(task: TaskWork, way: Candidate, room: int, best: Chosen, only: Filter) -> str:
    made = best.posed.made(task.id)
    ways = [one for one in best.posed.ways[task.id] if one.devices == room]
    if ways:
        other = min(ways, key=lambda one: one.seconds)
        words = way_words(other.layout, other.recompute, other.offload)
        took = f"{words}: {seconds_text(other.seconds)}"
        if other.seconds >= way.seconds:
            return f"no faster ({took}, of {seconds_text(way.seconds)})"
        return f"faster alone ({took}), but {lost(task, other, best).words}"
    if not any(only.takes(layout) for layout in made.layouts(task, room).possible):
        group = best.posed.group_of(task.id)
        rules = layout_rules(task, made.request, group.node_size)
        left = why_none(task.shape, room, rules, only.takes)
        return f"leave {left}" if left is not None else "nothing divides the model over so many"
    part = best.posed.parts.get(task.id, best.posed)
    if room not in part.problem.block_sizes():
        return "not a number of devices that is looked at"
    return f"no layout of so many{'' if only == Filter() else ' that pins leave'} fits a device"
