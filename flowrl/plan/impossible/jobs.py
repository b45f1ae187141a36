"""What is said when nothing fits: the constraint with its numbers, and the smallest change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, islice

from flowrl.cost.layout import Layout
from flowrl.cost.memory import format_bytes
from flowrl.cost.role_memory import role_memory
from flowrl.errors import PlanError
from flowrl.plan.fit import RUNTIME_BYTES, DoesNotFit
from flowrl.plan.impossible.other_values import other_values
from flowrl.plan.impossible.pins import Ground, counts_of, layouts_of, refused_pins
from flowrl.plan.impossible.regions import no_place_for_environment
from flowrl.plan.impossible.ways_out import (
    Fits,
    Trial,
    fewer_pins,
    host_enough,
    more_devices,
    more_memory,
    tries_on,
    with_value,
    without_pins,
)
from flowrl.plan.names import way_words
from flowrl.plan.options import Pin, pins_text
from flowrl.plan.pin_errors import MOST_TRIES
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import Posed
from flowrl.plan.search import Change, ChangeKind, Infeasible
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.pin_filter import OWN, Filter
from flowrl.plan.ways.tasks import TaskWork
from flowrl.wording import counted

MOST_DEVICES = 65536
"""Of a larger pool that is suggested."""


def nothing_runs(task: TaskWork, posed: Posed, pins: PinnedTasks, ground: Ground) -> PlanError:
    """Of a task that no layout lets run on any number of the devices, alone."""
    only = pins.filters.get(task.id, Filter())
    error = refused_pins(task, posed, pins, only, ground)
    error = error or no_place_for_environment(task, posed, pins, only, ground.fits)
    return error or _too_large(task, posed, pins, only, ground)


def nothing_fits(posed: Posed, why: Infeasible, pins: PinnedTasks, ground: Ground) -> PlanError:
    """Of tasks that fit one by one, and not together."""
    fits = ground.fits
    binding = why.bindings[0]
    names = ", ".join(binding.tasks)
    over = math.inf
    helps = [change for change in why.changes if _helps(change, pins, fits)]
    changes = [_in_full(change, posed, pins) for change in helps]
    memory = [c for c in helps if c.kind is ChangeKind.MEMORY and c.value is not None]
    if memory and memory[0].value is not None:
        runtime = RUNTIME_BYTES[posed.candidates.machine.spec.type]
        changes = [_in_full(c, posed, pins) for c in helps if c.kind is not ChangeKind.MEMORY]
        over = (memory[0].value + runtime) / posed.group.budget_bytes
        changes.append(more_memory(memory[0].value + runtime, posed.group, fits))
    if not any(change.kind is ChangeKind.PIN for change in why.changes):
        others = (_other_pins(posed.task(name), posed, pins, fits) for name in binding.tasks)
        changes = [*filter(None, [next(filter(None, others), None)]), *changes]
    changes = [*_values(binding.tasks, posed, pins, ground), *changes]
    asked = dict.fromkeys(said for name in binding.tasks if (said := pins.said(name)))
    options = posed.candidates.options
    kind = f"plan.kind={options.kind}" if options.kind != "auto" else None
    wheres = [where for name in binding.tasks if (where := pins.where(name))]
    if kind is not None:
        wheres.append(options.kind_where)
    return DoesNotFit(
        f"{names} do not fit together on {len(posed.group.addresses)} x "
        f"{posed.group.device.name}: {binding.reason}",
        where=" and ".join(dict.fromkeys(wheres)) or "cluster",
        found=" and ".join(one for one in (*asked, kind) if one) or None,
        hint="; or ".join(changes)
        or more_devices(posed.group, MOST_DEVICES, fits, posed.candidates.host)
        or _without(asked, kind),
    ).by(over)


def _values(
    names: Iterable[str], posed: Posed, pins: PinnedTasks, ground: Ground
) -> tuple[str, ...]:
    """Other values for the pins of the first of some tasks with which there is a plan."""
    for name in dict.fromkeys(names):
        task = posed.task(name)

        def alone(only: Filter, task: TaskWork = task) -> bool:
            return task.region is not None or _way(task, posed, only) is not None

        found = tuple(other_values(task, posed, pins, ground, alone))
        if found:
            return found
    return ()


def _helps(change: Change, pins: PinnedTasks, fits: Fits) -> bool:
    """Whether there is a plan without pins that the search would do without."""
    if change.kind is not ChangeKind.PIN:
        return True
    asked = [pins.asked.get(name, {}).get("devices") for name in change.tasks]
    return fits(Trial(pins=without_pins(pins, [pin for pin in asked if pin is not None])))


def _in_full(change: Change, posed: Posed, pins: PinnedTasks) -> str:
    """What to do for a change to be so."""
    options = posed.candidates.options
    if change.kind is ChangeKind.PIN and all(pins.said(name, ["devices"]) for name in change.tasks):
        said = dict.fromkeys(str(pins.said(name, ["devices"])) for name in change.tasks)
        return f"leave {' and '.join(said)} out"
    if change.kind is ChangeKind.KINDS and options.kind != "auto":
        return f"leave plan.kind={options.kind} out"
    return change.text


def _other_pins(task: TaskWork, posed: Posed, pins: PinnedTasks, fits: Fits) -> str | None:
    """Other or fewer pins of a task with which the job fits here."""
    only = pins.filters.get(task.id, Filter())
    return _smaller_micro(task, posed, pins, only, fits) or _without_pin(
        task, posed, pins, only, fits
    )


def _without(asked: Iterable[str], kind: str | None) -> str:
    """What to do where the search knows no change that is enough alone."""
    kept = [one for one in (*asked, kind) if one]
    more = "take more devices, or devices with more memory"
    return f"leave {' or '.join(kept)} out, or {more}" if kept else more


def fewest_left_out(some: Sequence[Pin], pins: PinnedTasks, fits: Fits) -> list[str]:
    """The smallest choices of some pins without which there is a plan, in words."""
    for number in range(1, len(some) + 1):
        tried = islice(combinations(some, number), MOST_TRIES)
        enough = [one for one in tried if fits(Trial(pins=without_pins(pins, one)))]
        if enough:
            return [pins_text(one) for one in enough]
    return []


def nowhere_to_stand(number: int, posed: Posed, pins: PinnedTasks, ground: Ground) -> PlanError:
    """Of pinned devices that no schedule has at once.

    Args:
        number: Of schedules that were looked at.
    """
    placed = dict.fromkeys(
        pin
        for own in pins.asked.values()
        for field, pin in own.items()
        if field in ("devices", OWN)
    )
    said = pins_text(placed)
    helps = fewest_left_out(list(placed), pins, ground.fits)
    values = _values(pins.devices, posed, pins, ground)
    return PlanError(
        f"no schedule has {said}{' at once' if len(placed) > 1 else ''}",
        where=" and ".join(dict.fromkeys(pin.where for pin in placed)) or "plan.pins",
        found=f"{counted(number, 'schedule')} with these numbers of devices looked at",
        expected="equal blocks, or blocks without a common device; whole nodes or parts of one",
        hint=_either(values, f"leave {' or '.join(helps or [said])} out"),
    )


def _too_large(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, ground: Ground
) -> PlanError:
    """Of a task whose layouts all need more than there is."""
    fits, values = ground.fits, _values([task.id], posed, pins, ground)
    made, group = posed.made(task.id), posed.group_of(task.id)
    need, layout = _least(task, posed, only)
    _, options, work = made.needs(task, layout, only)
    memory = role_memory(task.role.name, task.shape, layout, work, task.phase, options)
    runtime = RUNTIME_BYTES[made.machine.spec.type]
    pinned = pins.said(task.id)
    if need <= made.budget and made.host is not None:
        return DoesNotFit(
            f"{task.phase} of {task.role.name} fits on {group.device.name} only with more in the "
            "memory of its host than that has",
            where=pins.where(task.id) or "cluster",
            found=f"{format_bytes(made.host)} of its host for each device",
            hint=_either(values, _without_pin(task, posed, pins, only, fits))
            or host_enough(made.host, group, fits)
            or _way_out(task, posed, need + runtime, fits, pinned=only.devices is not None),
        ).by(1.0)
    return DoesNotFit(
        f"{task.phase} of {task.role.name} does not fit on {group.device.name} in any layout"
        f"{' that pins leave' if pinned else ''}: "
        f"with {layout.describe()} it needs {format_bytes(need + runtime)} of "
        f"{format_bytes(group.budget_bytes)}: {memory.describe()}, "
        f"runtime {format_bytes(runtime)}",
        where=pins.where(task.id) or f"roles.{task.role.name}",
        found=pinned,
        hint=_either(values, _other_pins(task, posed, pins, fits))
        or _way_out(task, posed, need + runtime, fits, pinned=only.devices is not None),
    ).by((need + runtime) / group.budget_bytes)


def _either(values: Sequence[str], other: str | None) -> str:
    """Other values of pins, or something else."""
    return ", or ".join([*values, *([] if other is None else [other])])


def _least(task: TaskWork, posed: Posed, only: Filter) -> tuple[int, Layout]:
    """The layout that needs least of a device, and what it needs."""
    made = posed.made(task.id)
    found = [
        (made.needs(task, layout, only)[0], layout)
        for layout in layouts_of(task, posed, only, counts_of(task, posed, only))
    ]
    return min(found, key=lambda item: (item[0], item[1].num_devices))


def _smaller_micro(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, fits: Fits
) -> str | None:
    """The largest micro-batch that fits, where the one that is asked for is all that does not."""
    pin, asked = pins.asked.get(task.id, {}).get("micro_tokens"), only.micro_tokens
    longest = posed.made(task.id).request.max_length
    if pin is None or asked is None or asked <= longest:
        return None
    # Sizes are whole longest samples, as the planner's own; what fits grows with nothing else.
    low, high = 0, math.ceil(asked / longest)
    while high - low > 1:
        middle = (low + high) // 2
        if _way(task, posed, replace(only, micro_tokens=middle * longest)) is not None:
            low = middle
        else:
            high = middle
    found, top = 0, low + 1  # alone it fits with so many; beside others maybe not
    for _ in range(tries_on(len(posed.group.addresses))):
        if low == found:
            break
        if fits(Trial(pins=with_value(pins, pin, low * longest))):
            found = low
        else:
            top = low
        low = (found + top) // 2
    if not found:
        return None
    samples = counted(found, "longest sample")
    return f"set micro_tokens to {found * longest} ({samples}), or leave {pin} out"


def _way(task: TaskWork, posed: Posed, only: Filter) -> Candidate | None:
    """Some way to run a task alone that pins leave."""
    made = posed.made(task.id)
    for layout in layouts_of(task, posed, only, counts_of(task, posed, only)):
        if made.needs(task, layout, only)[0] <= made.budget:
            way = next(iter(made.of_layout(task, layout, only)), None)
            if way is not None:
                return way
    return None


def _without_pin(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, fits: Fits
) -> str | None:
    """The fewest pins without which the job fits here, and how its task runs then."""
    tried = tries_on(len(posed.group.addresses)) // 2
    for left_out in fewer_pins(pins, task.id):
        other = only
        for pin in left_out:
            other = other.without(pin.field)
        way = _way(task, posed, other)
        if way is None or not tried:
            continue
        tried -= 1
        if fits(Trial(pins=without_pins(pins, left_out))):
            named = pins_text(left_out)
            if any(pin.field == "devices" for pin in left_out):
                return f"leave {named} out"  # it may run on many numbers of them then
            how = way_words(way.layout, way.recompute, way.offload)
            return f"leave {named} out: then it fits with {how}"
    return None


def _way_out(task: TaskWork, posed: Posed, need: int, fits: Fits, *, pinned: bool) -> str:
    """A larger pool on which the job fits, or the memory that it needs."""
    group = posed.group_of(task.id)
    memory = more_memory(need, group, fits)
    host = posed.candidates.host
    more = None if pinned else more_devices(group, MOST_DEVICES, fits, host)
    if more is not None:
        return f"{more}, or {memory}"
    return f"{memory}, or take a smaller model, or shorter samples (train.sampling.max_tokens)"
