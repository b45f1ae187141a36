"""Pins of one task that no layout, or no block of devices, has; and what would do in their place.

What is offered in the place of a pin is tried with the whole job, the values nearest to what was
asked first. Where none of them does, the pin is to be left out; where the job has no plan then
either, what stands in its way besides is told first (`Refused`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.layout import Layout
from flowrl.errors import PlanError
from flowrl.plan.batches import batch_keys, batches_near
from flowrl.plan.check.whole import number_ranges
from flowrl.plan.elsewhere import Part
from flowrl.plan.impossible.ways_out import (
    Fits,
    Trial,
    fewer_pins,
    with_devices,
    with_setting,
    with_value,
    without_pins,
)
from flowrl.plan.options import Pin, pins_text
from flowrl.plan.pin_errors import MOST_OFFERED, MOST_TRIES
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import Posed, aligned, possible_counts
from flowrl.plan.schema import Rejection
from flowrl.plan.ways.layouts import (
    check_size,
    layouts,
    limit_words,
    possible_sizes,
    uneven_replicas,
    why_none,
)
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.task_rules import layout_rules
from flowrl.plan.ways.tasks import TaskWork
from flowrl.wording import counted

Alone: TypeAlias = Callable[[Filter], bool]
"""Whether a task has a way to run that some pins leave, whatever the others need."""

Suits: TypeAlias = Callable[[int], bool]
"""Whether a task has one on so many devices."""

NextError: TypeAlias = Callable[[PinnedTasks], PlanError | None]
"""What stands in the way of the job under other pins; None where nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What a job may be placed on besides the devices that are looked at.

    Attributes:
        groups: All groups of equal devices, these among them.
        parts: What of them is tried besides: other groups, and shares of their nodes.
        fits: Whether the job has a plan on the others, or on two groups, with a change.
    """

    groups: tuple[DeviceGroup, ...]
    fits: Fits
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The devices that a job is placed on, and those that it might be placed on besides.

    Attributes:
        group: These.
        numbering: Of each of them, its number in the cluster.
        groups: All groups of equal devices of the pool.
        fits: Whether the job has a plan with a change.
        next_error: What stands in its way with other pins.
        parts: What may take the job besides, with the numbers of its devices.
    """

    group: DeviceGroup
    numbering: Sequence[int]
    groups: Sequence[DeviceGroup]
    fits: Fits
    next_error: NextError
    parts: Sequence[Part] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Pins of a task that cannot be kept.

    Attributes:
        why: In words, and where they are written.
        pins: They.
    """

    why: PlanError
    pins: tuple[Pin, ...]

    def error(
        self, task: str, pins: PinnedTasks, ground: Ground, changes: Sequence[str]
    ) -> PlanError:
        """What is said: with what to do about it, or with what else is in the way.

        Args:
            changes: Other values that do.
        """
        ways = [*changes]
        least = _fewest(task, pins, self.pins, ground.fits)
        if least:
            ways.append(f"leave {pins_text(least)} out")
        if not ways and self.pins:
            beyond = ground.next_error(without_pins(pins, self.pins))
            if beyond is not None:
                return self._behind(beyond)
        self.why.hint = ", or ".join(ways) or self.why.hint
        return self.why

    def _behind(self, other: PlanError) -> PlanError:
        """What stands in the way without these pins, and that they are in it too."""
        out = f"leave {pins_text(self.pins)} out too, for {self.why.what}"
        return PlanError(
            other.what,
            where=other.where,
            found=other.found,
            expected=other.expected,
            hint=f"{other.hint}; and {out}" if other.hint else out,
        )


def _fewest(task: str, pins: PinnedTasks, refused: Sequence[Pin], fits: Fits) -> tuple[Pin, ...]:
    """The fewest of a task's pins, one of those that are refused among them, without which there
    is a plan; empty where none of those that are tried are enough."""
    some = (left for left in fewer_pins(pins, task) if set(left) & set(refused))
    for left_out in islice(some, MOST_TRIES):
        if fits(Trial(pins=without_pins(pins, left_out))):
            return left_out
    return ()


def refused_pins(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, ground: Ground
) -> PlanError | None:
    """Of sizes that are pinned and leave a task no layout; None where there is one."""
    return _size_alone(task, posed, pins, only, ground) or _sizes_together(
        task, posed, pins, only, ground
    )


def misplaced(
    pins: PinnedTasks, places: Mapping[str, frozenset[int]], ground: Ground
) -> PlanError | None:
    """Of pinned devices that are neither part of one node nor whole nodes: no time is known for
    such. None where there are no such.

    Args:
        places: Counted in the group.
    """
    for name, place in places.items():
        why = uneven(place, ground.group.node_size)
        if why is not None:
            pin = pins.asked[name]["devices"]
            refused = Refused(
                why=PlanError(
                    f"{name} cannot run so: {why}",
                    where=pins.where(name, ["devices"]),
                    found=pins.said(name, ["devices"]),
                    hint=f"leave {pin} out",
                ),
                pins=(pin,),
            )
            change = other_devices(pin, place, pins, ground)
            return refused.error(name, pins, ground, [change] if change else [])
    return None


def uneven(place: frozenset[int], node_size: int) -> str | None:
    """Why devices are no block; None where they are one."""
    count, nodes = len(place), {number // node_size for number in place}
    if not aligned(count, node_size):
        return f"devices={count} is neither part of a node of {node_size} nor whole nodes"
    if len(nodes) > math.ceil(count / node_size):
        return f"these {count} devices lie in {len(nodes)} nodes of {node_size}"
    return None


def other_devices(
    pin: Pin,
    place: frozenset[int],
    pins: PinnedTasks,
    ground: Ground,
    suits: Suits | None = None,
    most: int = MOST_TRIES,
) -> str | None:
    """Blocks of devices in the place of those of a pin, with which there is a plan.

    Args:
        suits: Whether a task can be on so many devices; None where that is not known.
        most: Of them, how many are tried.
    """

    def offered(blocks: Iterator[range], numbering: Sequence[int]) -> list[str]:
        suitable = (block for block in blocks if suits is None or suits(len(block)))
        some = (tuple(numbering[one] for one in block) for block in islice(suitable, most))
        fitting = (
            number_ranges(numbers)
            for numbers in some
            if _keeps_environments(pins, pin, numbers)
            and ground.fits(Trial(pins=with_devices(pins, pin, numbers)))
        )
        return list(islice(fitting, MOST_OFFERED))

    first = ground.numbering[min(place)]
    found = offered(_blocks_near(place, ground.group), ground.numbering)
    for part in ground.parts:
        if not found:
            begin = bisect_left(part.numbering, first)
            near = frozenset(range(begin, begin + len(place)))
            found = offered(_blocks_near(near, part.group, itself=True), part.numbering)
    return f"set {pin.subject}.devices to {' or '.join(found)}" if found else None


def _keeps_environments(pins: PinnedTasks, pin: Pin, numbers: Sequence[int]) -> bool:
    """Whether pinned devices of environments stay among those of their rollouts."""
    return all(
        set(own) <= set(numbers) or not set(own) <= set(pins.devices.get(name, ()))
        for name, own in pins.environments.items()
        if pins.asked[name].get("devices") == pin
    )


def _blocks_near(
    place: frozenset[int], group: DeviceGroup, *, itself: bool = False
) -> Iterator[range]:
    """Blocks that could be in the place of some devices: of the nearest sizes first, the nearest
    first of each.

    Args:
        itself: This place too, where it is a block.
    """
    size, total = group.node_size, len(group.addresses)
    count, first = len(place), min(place)
    counts = possible_counts(group, {})
    if aligned(count, size):
        counts = tuple({*counts, count})
    for other in sorted(counts, key=lambda one: (abs(one - count), one)):
        node = first // size * size
        inside = min(first, node + size - other) if other < size else node
        last = (total - other) // size * size  # where the pool ends before the block does
        for start in dict.fromkeys((inside, node + size, min(node, last))):
            block = range(start, start + other)
            if block.stop <= total and (itself or frozenset(block) != place):
                yield block


def _size_alone(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, ground: Ground
) -> PlanError | None:
    """Of a pinned size that is impossible whatever the others are."""
    rules = layout_rules(task, posed.made(task.id).request, posed.group_of(task.id).node_size)
    for name, size in only.layout:
        problems = check_size(task.shape, rules, name, size)
        known = name == "dp" or size in possible_sizes(task.shape, rules, name)
        if not problems and known:
            continue
        uneven_sizes = bool(rules.node_size % size)
        unknown = Rejection(
            choice=f"{name}={size}",
            constraint="is not looked at: groups of such a size lie unevenly in nodes of "
            f"{rules.node_size}"
            if uneven_sizes
            else f"is not looked at: sizes of {name} are powers of two",
        )
        refused = _refused(task, pins, problems[0] if problems else unknown, [name])
        changes = list(_changes(task, posed, pins, only, [name], ground))
        if name == "dp" and rules.rows is not None and rules.rows % size:
            changes += _even_batches(task, posed, [size], ground)
        return refused.error(task.id, pins, ground, changes)
    longest = rules.max_length
    if only.micro_tokens is not None and only.micro_tokens < longest:
        short = Rejection(
            choice=f"micro_tokens={only.micro_tokens}",
            constraint=f"holds no longest sample of {longest} tokens, and samples are not cut",
        )
        refused = _refused(task, pins, short, ["micro_tokens"])
        pin = pins.asked[task.id]["micro_tokens"]
        change = _set(pin, [longest], pins, ground.fits)
        return refused.error(task.id, pins, ground, [change] if change else [])
    return None


def _refused(task: TaskWork, pins: PinnedTasks, why: Rejection, fields: Sequence[str]) -> Refused:
    """Nearest values are told where they are offered: only those that were tried are."""
    own = pins.asked.get(task.id, {})
    asked = tuple(dict.fromkeys(own[name] for name in fields if name in own))
    return Refused(
        why=PlanError(
            f"{task.id} cannot run so: {why.choice} {why.constraint}",
            where=pins.where(task.id, fields) or f"roles.{task.role.name}",
            found=pins.said(task.id, fields),
            expected=limit_words(why),
            hint=f"leave {pins_text(asked)} out"
            if asked
            else "take another model, or other devices",
        ),
        pins=asked,
    )


def _sizes_together(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, ground: Ground
) -> PlanError | None:
    """Of pinned sizes that are possible one by one, and leave no layout on any count."""
    counts = counts_of(task, posed, only)
    if next(layouts_of(task, posed, only, counts), None) is not None:
        return None
    fields = [name for name, _ in only.layout]
    why = _why_none(task, posed, only, counts, ground.groups)
    if only.devices is not None:
        fields = ["devices", *fields]
    if not fields:
        choice = f"on {counted(counts[-1], 'device')}, no layout is possible:"
        return _refused(task, pins, Rejection(choice=choice, constraint=why), fields).error(
            task.id, pins, ground, []
        )
    choice = " and ".join(f"{name}={_size(only, name)}" for name in fields)
    refused = _refused(task, pins, Rejection(choice=choice, constraint=why), fields)
    changes = list(_changes(task, posed, pins, only, fields, ground))
    group = posed.group_of(task.id)
    rules = layout_rules(task, posed.made(task.id).request, group.node_size)
    uneven = (uneven_replicas(task.shape, count, rules, only.takes) for count in counts)
    replicas = sorted({one for some in uneven for one in some})
    changes += _even_batches(task, posed, replicas, ground)
    return refused.error(task.id, pins, ground, changes)


def _even_batches(
    task: TaskWork, posed: Posed, replicas: Sequence[int], ground: Ground
) -> list[str]:
    """The nearest batches that so many replicas share evenly, with which there is a plan.

    Args:
        replicas: Numbers that pins leave; empty where it is not that none divides the samples.
    """
    if not replicas:
        return []
    request = posed.made(task.id).request
    near = batches_near([(task, replicas)], request)
    fitting = [one for one in near if ground.fits(Trial(batch=one))]
    return [f"set {key}" for key in batch_keys(fitting, request)]


def _size(only: Filter, name: str) -> int:
    return (only.devices or 0) if name == "devices" else dict(only.layout)[name]


def counts_of(task: TaskWork, posed: Posed, only: Filter) -> tuple[int, ...]:
    """Numbers of devices that pins leave a task."""
    counts = possible_counts(posed.group_of(task.id), {task.id: only})
    if only.devices is None:
        return counts
    if task.region is not None:  # its environment may have some of them
        return tuple(count for count in counts if count <= (only.devices or 0))
    return (only.devices,)


def layouts_of(
    task: TaskWork, posed: Posed, only: Filter, counts: Sequence[int]
) -> Iterator[Layout]:
    """That pins leave, on any of some numbers of devices."""
    made = posed.made(task.id)
    for count in counts:
        yield from (one for one in made.layouts(task, count).possible if only.takes(one))


def _why_none(
    task: TaskWork,
    posed: Posed,
    only: Filter,
    counts: Sequence[int],
    groups: Sequence[DeviceGroup],
) -> str:
    """Why pinned sizes leave nothing."""
    group = posed.group_of(task.id)
    several = len(only.layout) + (only.devices is not None) > 1
    least = math.prod(size for name, size in only.layout if name != "ep")
    if least > counts[-1]:
        need = "need" if several else "needs"
        if len(groups) > 1 and only.devices is None:
            there = " and ".join(f"{len(one.addresses)} x {one.device.name}" for one in groups)
            return f"{need} {counted(least, 'device')} of one kind, and there are {there}"
        verb = "is" if counts[-1] == 1 else "are"
        return f"{need} {counted(least, 'device')}, and there {verb} {counts[-1]}"
    rules = layout_rules(task, posed.made(task.id).request, group.node_size)
    for count in counts:
        left = why_none(task.shape, count, rules, only.takes)
        if left is not None:
            return f"{'leave' if several else 'leaves'} {left}"
    fixed = {name for name, _ in only.layout} >= {"tp", "pp", "cp", "dp"}
    if fixed and least not in counts:
        return f"need {least} devices, which are neither part of a node nor whole nodes"
    divided = [count for count in counts if count % least == 0]
    some = ", ".join(str(count) for count in (divided or counts)[-4:])
    if not divided:
        verb = "divide" if several else "divides"
        return f"{verb} none of the numbers of devices that are looked at ({some})"
    verb = "leave" if several else "leaves"
    return f"{verb} no layout of the model on a number of devices that is divided so ({some})"


def _changes(
    task: TaskWork,
    posed: Posed,
    pins: PinnedTasks,
    only: Filter,
    fields: Sequence[str],
    ground: Ground,
) -> Iterator[str]:
    """For each pin the nearest values with which the others can be kept."""
    for name in fields:
        pin = pins.asked[task.id][name]
        if name == "devices":
            place = frozenset(ground.numbering.index(one) for one in pins.devices[task.id])
            change = other_devices(pin, place, pins, ground)
        else:
            change = other_sizes(task, posed, pins, only, name, ground)
        if change is not None:
            yield change


def other_sizes(
    task: TaskWork,
    posed: Posed,
    pins: PinnedTasks,
    only: Filter,
    name: str,
    ground: Ground,
    alone: Alone | None = None,
    most: int = MOST_TRIES,
) -> str | None:
    """Other sizes of one dimension, with which there is a plan.

    Args:
        alone: Whether the task has a way to run; None where it has with each of them.
        most: Of them, how many are tried.
    """
    size = _size(only, name)
    values = _values(task, posed, only, name, ground.groups) - {size}
    near = sorted(values, key=lambda value: (abs(value - size), value))
    if alone is not None:
        near = [value for value in near if alone(with_setting(only, name, value))]
    return _set(pins.asked[task.id][name], near[:most], pins, ground.fits)


def _values(
    task: TaskWork, posed: Posed, only: Filter, name: str, groups: Sequence[DeviceGroup]
) -> set[int]:
    """Of one size in layouts that the other pins leave, on any devices of the pool."""
    other, request = only.without(name), posed.made(task.id).request
    found: set[int] = set()
    for group in groups:
        rules = layout_rules(task, request, group.node_size)
        asked = other.devices
        counts = possible_counts(group, {task.id: other}) if asked is None else (asked,)
        for count in counts:
            possible = layouts(task.shape, count, rules).possible
            found |= {getattr(one, name) for one in possible if other.takes(one)}
    return found


def _set(pin: Pin, values: Sequence[int], pins: PinnedTasks, fits: Fits) -> str | None:
    """The first of some sizes in the place of a pinned one with which there is a plan."""
    offered: list[int] = []
    for value in values[:MOST_TRIES]:
        if fits(Trial(pins=with_value(pins, pin, value))):
            offered.append(value)
        if len(offered) == MOST_OFFERED:
            break
    numbers = " or ".join(str(value) for value in sorted(offered))
    return f"set {pin.setting or pin.field} to {numbers}" if offered else None
