"""What is said when nothing fits: the constraint with its numbers, and the smallest change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.layout import Layout
from flowrl.cost.memory import format_bytes
from flowrl.cost.role_memory import role_memory
from flowrl.errors import PlanError
from flowrl.plan.candidate import Candidate
from flowrl.plan.candidates import layout_rules
from flowrl.plan.check_plan import number_ranges
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.impossible_regions import no_place_for_environment
from flowrl.plan.layouts import (
    LayoutRules,
    check_size,
    possible_sizes,
    refused_combinations,
    with_possible,
)
from flowrl.plan.pin_filter import OWN, Filter
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import Posed, aligned, possible_counts
from flowrl.plan.schema import Rejection
from flowrl.plan.search import Change, ChangeKind, Infeasible
from flowrl.plan.tasks import TaskWork
from flowrl.plan.ways_out import (
    Fits,
    Trial,
    fewer_pins,
    more_devices,
    more_host,
    more_memory,
    tries_on,
    with_value,
    without_pins,
)
from flowrl.wording import counted

__all__ = ["check_places", "nothing_fits", "nothing_runs", "nowhere_to_stand"]

MOST_DEVICES = 65536


def nothing_runs(task: TaskWork, posed: Posed, pins: PinnedTasks, fits: Fits) -> PlanError:
    """Of a task that no layout lets run on any number of the devices, alone.

    Args:
        fits: Whether the job has a plan with a change.
    """
    only = pins.filters.get(task.id, Filter())
    error = (
        _size_alone(task, posed, pins, only)
        or _sizes_together(task, posed, pins, only)
        or no_place_for_environment(task, posed, pins, only, fits)
    )
    return error or _too_large(task, posed, pins, only, fits)


def nothing_fits(posed: Posed, why: Infeasible, pins: PinnedTasks, fits: Fits) -> PlanError:
    """Of tasks that fit one by one, and not together.

    Args:
        fits: Whether the job has a plan with a change.
    """
    binding = why.bindings[0]
    names = ", ".join(binding.tasks)
    changes = [_in_full(change, posed, pins) for change in why.changes]
    memory = [c for c in why.changes if c.kind is ChangeKind.MEMORY and c.value is not None]
    if memory and memory[0].value is not None:
        runtime = RUNTIME_BYTES[posed.candidates.machine.spec.type]
        changes = [_in_full(c, posed, pins) for c in why.changes if c.kind is not ChangeKind.MEMORY]
        changes.append(more_memory(memory[0].value + runtime, posed.group, fits))
    if not any(change.kind is ChangeKind.PIN for change in why.changes):
        others = (_other_pins(posed.task(name), posed, pins, fits) for name in binding.tasks)
        changes = [*filter(None, [next(filter(None, others), None)]), *changes]
    asked = dict.fromkeys(said for name in binding.tasks if (said := pins.said(name)))
    options = posed.candidates.options
    kind = f"plan.kind={options.kind}" if options.kind != "auto" else None
    wheres = [where for name in binding.tasks if (where := pins.where(name))]
    if kind is not None:
        wheres.append(options.kind_where)
    return PlanError(
        f"{names} do not fit together on {len(posed.group.addresses)} x "
        f"{posed.group.device.name}: {binding.reason}",
        where=" and ".join(dict.fromkeys(wheres)) or "cluster",
        found=" and ".join(one for one in (*asked, kind) if one) or None,
        hint="; or ".join(changes)
        or more_devices(posed.group, MOST_DEVICES, fits)
        or _without(asked, kind),
    )


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


def nowhere_to_stand(number: int, pins: PinnedTasks, fits: Fits) -> PlanError:
    """Of pinned devices that no schedule has at once.

    Args:
        number: Of schedules that were looked at.
        fits: Whether the job has a plan with a change.
    """
    placed = dict.fromkeys(
        pin
        for own in pins.asked.values()
        for field, pin in own.items()
        if field in ("devices", OWN)
    )
    said = [str(pin) for pin in placed]
    helps = [str(pin) for pin in placed if fits(Trial(pins=without_pins(pins, (pin,))))]
    return PlanError(
        f"no schedule has {' and '.join(said)}{' at once' if len(said) > 1 else ''}",
        where=" and ".join(dict.fromkeys(pin.where for pin in placed)) or "plan.pins",
        found=f"{counted(number, 'schedule')} with these numbers of devices looked at",
        expected="equal blocks, or blocks without a common device; whole nodes or parts of one",
        hint=f"leave {' or '.join(helps or said)} out",
    )


def check_places(
    pins: PinnedTasks,
    places: Mapping[str, frozenset[int]],
    group: DeviceGroup,
    numbering: Sequence[int],
) -> None:
    """Pinned devices are parts of one node, or whole nodes: for others no time is known.

    Args:
        places: Counted in the group.
        numbering: Of each device of the group, its number in the cluster.

    Raises:
        PlanError: they are neither; names the nearest that are.
    """
    size, total = group.node_size, len(group.addresses)
    for name, place in places.items():
        count = len(place)
        nodes = {number // size for number in place}
        if not aligned(count, size):
            near = {count // size * size, (count // size + 1) * size}
            fitting = sorted(one for one in near if one <= total)
            why = f"devices={count} is neither part of a node of {size} nor whole nodes"
            hint = f"take {' or '.join(str(one) for one in fitting)} devices"
        elif len(nodes) > math.ceil(count / size):
            why = f"these {count} devices lie in {len(nodes)} nodes of {size}"
            starts = _aligned_starts(min(place), count, size)
            near_by = [
                number_ranges(numbering[number] for number in range(start, start + count))
                for start in starts
                if 0 <= start <= total - count
            ]
            hint = f"nearest {' or '.join(near_by)}"
        else:
            continue
        raise PlanError(
            f"{name} cannot run so: {why}",
            where=pins.where(name, ["devices"]),
            found=pins.said(name, ["devices"]),
            hint=hint,
        )


def _aligned_starts(first: int, count: int, size: int) -> tuple[int, int]:
    """Where the nearest blocks begin that cross no node: in this one, and in the next."""
    node = first // size * size
    inside = min(first, node + size - count) if count < size else node
    return inside, node + size


def _size_alone(task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter) -> PlanError | None:
    """Of a pinned size that is impossible whatever the others are."""
    rules = layout_rules(task, posed.made(task.id).request, posed.group_of(task.id).node_size)
    for name, size in only.layout:
        problems = check_size(task.shape, rules, name, size)
        if problems:
            refused = problems[0]
            if name != "dp":
                refused = with_possible(refused, size, possible_sizes(task.shape, rules, name))
            return _refusal(task, pins, refused, [name], _near(task, rules, name, refused))
        if name != "dp" and size not in (looked_at := possible_sizes(task.shape, rules, name)):
            nearest = sorted(looked_at, key=lambda one: abs(one - size))[:2]
            unknown = Rejection(
                choice=f"{name}={size}",
                constraint="is not looked at: groups of such a size lie unevenly in nodes of "
                f"{rules.node_size}"
                if rules.node_size % size
                else f"is not looked at: sizes of {name} are powers of two",
                nearest=", ".join(str(one) for one in sorted(nearest)),
            )
            return _refusal(task, pins, unknown, [name], _near(task, rules, name, unknown))
    longest = rules.max_length
    if only.micro_tokens is not None and only.micro_tokens < longest:
        short = Rejection(
            choice=f"micro_tokens={only.micro_tokens}",
            constraint=f"holds no longest sample of {longest} tokens, and samples are not cut",
            nearest=str(longest),
        )
        return _refusal(task, pins, short, ["micro_tokens"], f"set micro_tokens to {longest}")
    return None


def _near(task: TaskWork, rules: LayoutRules, name: str, refused: Rejection) -> str | None:
    """The values that would do in the place of a refused one."""
    if name == "dp":
        near = refused.nearest.replace(", ", " or ")
        return f"set dp to {near}, or leave it out" if near else None
    sizes = [str(one) for one in possible_sizes(task.shape, rules, name)]
    return f"set {name} to {' or '.join(sizes)}" if sizes else None


def _refusal(
    task: TaskWork,
    pins: PinnedTasks,
    refused: Rejection,
    fields: Sequence[str],
    hint: str | None = None,
) -> PlanError:
    nearest = f"; nearest {refused.nearest}" if refused.nearest else ""
    return PlanError(
        f"{task.id} cannot run so: {refused.choice} {refused.constraint}{nearest}",
        where=pins.where(task.id, fields) or f"roles.{task.role.name}",
        found=pins.said(task.id, fields),
        expected=_limit(refused),
        hint=hint or "leave it out",
    )


def _limit(refused: Rejection) -> str | None:
    limit = refused.limit
    return limit if not limit or limit.startswith("at ") else f"at most {limit}"


def _sizes_together(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter
) -> PlanError | None:
    """Of pinned sizes that are possible one by one, and leave no layout on any count."""
    counts = _counts(task, posed, only)
    if next(_layouts(task, posed, only, counts), None) is not None:
        return None
    fields = [name for name, _ in only.layout]
    why, nearest = _why_none(task, posed, only, counts)
    if only.devices is not None:
        fields = ["devices", *fields]
    hints = list(_changes(task, posed, only, fields))
    choice = " and ".join(f"{name}={_size(only, name)}" for name in fields)
    if not fields:
        choice, hints = f"on {counted(counts[-1], 'device')}, no layout is possible:", []
    return _refusal(
        task,
        pins,
        Rejection(choice=choice, constraint=why, nearest=nearest),
        fields,
        ", or ".join(hints) or None,
    )


def _size(only: Filter, name: str) -> int:
    return (only.devices or 0) if name == "devices" else dict(only.layout)[name]


def _counts(task: TaskWork, posed: Posed, only: Filter) -> tuple[int, ...]:
    counts = possible_counts(posed.group_of(task.id), {task.id: only})
    if only.devices is None:
        return counts
    if task.region is not None:  # its environment may have some of them
        return tuple(count for count in counts if count <= (only.devices or 0))
    return (only.devices,)


def _layouts(task: TaskWork, posed: Posed, only: Filter, counts: Sequence[int]) -> Iterator[Layout]:
    """That pins leave, on any of some numbers of devices."""
    made = posed.made(task.id)
    for count in counts:
        yield from (one for one in made.layouts(task, count).possible if only.takes(one))


def _why_none(task: TaskWork, posed: Posed, only: Filter, counts: Sequence[int]) -> tuple[str, str]:
    """Why pinned sizes leave nothing, and the nearest numbers of devices, if those are why."""
    group = posed.group_of(task.id)
    several = len(only.layout) + (only.devices is not None) > 1
    least = math.prod(size for name, size in only.layout if name != "ep")
    if least > counts[-1]:
        return (
            f"{'need' if several else 'needs'} {counted(least, 'device')}, "
            f"and there {'is' if counts[-1] == 1 else 'are'} {counts[-1]}",
            "",
        )
    rules = layout_rules(task, posed.made(task.id).request, group.node_size)
    for count in counts:
        for layout, refused in refused_combinations(task.shape, count, rules):
            if only.takes(layout):
                leaves = "leave" if several else "leaves"
                return f"{leaves} {layout.describe()}, where {_in_words(refused)}", ""
    fixed = {name for name, _ in only.layout} >= {"tp", "pp", "cp", "dp"}
    if fixed and least not in counts:
        near = sorted(counts, key=lambda count: abs(count - least))[:2]
        numbers = ", ".join(str(count) for count in sorted(near))
        return f"need {least} devices, which are neither part of a node nor whole nodes", numbers
    divided = [count for count in counts if count % least == 0]
    some = ", ".join(str(count) for count in (divided or counts)[-4:])
    if not divided:
        verb = "divide" if several else "divides"
        return f"{verb} none of the numbers of devices that are looked at ({some})", ""
    verb = "leave" if several else "leaves"
    return f"{verb} no layout of the model on a number of devices that is divided so ({some})", ""


def _in_words(refused: Rejection) -> str:
    numbers = [text for text in (refused.found, _limit(refused)) if text]
    more = f" ({', '.join(numbers)})" if numbers else ""
    return f"{refused.choice} {refused.constraint}{more}"


def _changes(task: TaskWork, posed: Posed, only: Filter, fields: Sequence[str]) -> Iterator[str]:
    """For each pin the nearest value with which the others can be kept."""
    for name in fields:
        other = only.without(name)
        left = _layouts(task, posed, other, _counts(task, posed, other))
        values = {one.num_devices if name == "devices" else getattr(one, name) for one in left}
        if values:
            size = _size(only, name)
            nearest = min(values, key=lambda value: (abs(value - size), value))
            what = (
                f"take {counted(nearest, 'device')}"
                if name == "devices"
                else f"set {name} to {nearest}"
            )
            yield what


def _too_large(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, fits: Fits
) -> PlanError:
    """Of a task whose layouts all need more than there is."""
    made, group = posed.made(task.id), posed.group_of(task.id)
    need, layout = _least(task, posed, only)
    _, options, work = made.needs(task, layout, only)
    memory = role_memory(task.role.name, task.shape, layout, work, task.phase, options)
    runtime = RUNTIME_BYTES[made.machine.spec.type]
    pinned = pins.said(task.id)
    if need <= made.budget and made.host is not None:
        return PlanError(
            f"{task.phase} of {task.role.name} fits on {group.device.name} only with more in the "
            "memory of its host than that has",
            where=pins.where(task.id) or "cluster",
            found=f"{format_bytes(made.host)} of its host for each device",
            hint=_without_pin(task, posed, pins, only, fits) or more_host(made.host, group, fits),
        )
    return PlanError(
        f"{task.phase} of {task.role.name} does not fit on {group.device.name} in any layout"
        f"{' that pins leave' if pinned else ''}: "
        f"with {layout.describe()} it needs {format_bytes(need + runtime)} of "
        f"{format_bytes(group.budget_bytes)}: {memory.describe()}, "
        f"framework {format_bytes(runtime)}",
        where=pins.where(task.id) or f"roles.{task.role.name}",
        found=pinned,
        hint=_other_pins(task, posed, pins, fits)
        or _way_out(task, posed, need + runtime, fits, pinned=only.devices is not None),
    )


def _least(task: TaskWork, posed: Posed, only: Filter) -> tuple[int, Layout]:
    """The layout that needs least of a device, and what it needs."""
    made = posed.made(task.id)
    found = [
        (made.needs(task, layout, only)[0], layout)
        for layout in _layouts(task, posed, only, _counts(task, posed, only))
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
    for layout in _layouts(task, posed, only, _counts(task, posed, only)):
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
            named = " and ".join(str(pin) for pin in left_out)
            if any(pin.field == "devices" for pin in left_out):
                return f"leave {named} out"  # it may run on many numbers of them then
            also = f", recompute {way.recompute}" if way.recompute != "none" else ""
            also += f", {' and '.join(way.offload)} on the host" if way.offload else ""
            return f"leave {named} out: then it fits with {way.layout.describe()}{also}"
    return None


def _way_out(task: TaskWork, posed: Posed, need: int, fits: Fits, *, pinned: bool) -> str:
    """A larger pool on which the job fits, or the memory that it needs."""
    group = posed.group_of(task.id)
    memory = more_memory(need, group, fits)
    more = None if pinned else more_devices(group, MOST_DEVICES, fits)
    if more is not None:
        return f"{more}, or {memory}"
    return f"{memory}, or take a smaller model, or shorter samples (train.sampling.max_tokens)"
