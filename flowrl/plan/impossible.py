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
from flowrl.plan.candidates import layout_rules
from flowrl.plan.check_plan import number_ranges
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.impossible_regions import no_place_for_environment
from flowrl.plan.layouts import LayoutRules, check_size, possible_sizes, refused_combinations
from flowrl.plan.pin_filter import Filter
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import Posed, aligned, possible_counts
from flowrl.plan.schema import Rejection
from flowrl.plan.search import ChangeKind, Infeasible
from flowrl.plan.tasks import TaskWork
from flowrl.wording import counted

__all__ = ["check_places", "nothing_fits", "nothing_runs", "nowhere_to_stand"]

MOST_DEVICES = 65536


def nothing_runs(task: TaskWork, posed: Posed, pins: PinnedTasks) -> PlanError:
    """Of a task that no layout lets run on any number of the devices, alone."""
    only = pins.filters.get(task.id, Filter())
    error = (
        _size_alone(task, posed, pins, only)
        or _sizes_together(task, posed, pins, only)
        or no_place_for_environment(task, posed, pins, only)
    )
    return error or _too_large(task, posed, pins, only)


def nothing_fits(posed: Posed, why: Infeasible, pins: PinnedTasks) -> PlanError:
    """Of tasks that fit one by one, and not together."""
    binding = why.bindings[0]
    names = ", ".join(binding.tasks)
    changes = [change.text for change in why.changes]
    memory = [c for c in why.changes if c.kind is ChangeKind.MEMORY and c.value is not None]
    if memory and memory[0].value is not None:
        runtime = RUNTIME_BYTES[posed.candidates.machine.spec.type]
        changes = [c.text for c in why.changes if c.kind is not ChangeKind.MEMORY]
        changes.append(_with_memory(memory[0].value + runtime, posed.group))
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
        hint="; or ".join(changes) or _without(asked, kind),
    )


def _without(asked: Iterable[str], kind: str | None) -> str:
    """What to do where the search knows no change that is enough alone."""
    kept = [one for one in (*asked, kind) if one]
    more = "take more devices, or devices with more memory"
    return f"leave {' or '.join(kept)} out, or {more}" if kept else more


def nowhere_to_stand(number: int, pins: PinnedTasks) -> PlanError:
    """Of pinned devices that no schedule has at once.

    Args:
        number: Of schedules that were looked at.
    """
    said = " and ".join(dict.fromkeys(pins.said(name, ["devices"]) or "" for name in pins.devices))
    return PlanError(
        f"no schedule has {said} at once",
        where=" and ".join(
            dict.fromkeys(pins.where(name, ["devices"]) or "plan.pins" for name in pins.devices)
        ),
        found=f"{counted(number, 'schedule')} with these numbers of devices looked at",
        expected="equal blocks, or blocks without a common device; whole nodes or parts of one",
        hint="leave one of them to the planner",
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
            refused = _with_possible(task, rules, name, size, problems[0])
            return _refusal(task, pins, refused, [name], _near(task, rules, name, size))
    longest = rules.max_length
    if only.micro_tokens is not None and only.micro_tokens < longest:
        short = Rejection(
            choice=f"micro_tokens={only.micro_tokens}",
            constraint=f"holds no longest sample of {longest} tokens, and samples are not cut",
            nearest=str(longest),
        )
        return _refusal(task, pins, short, ["micro_tokens"], f"set micro_tokens to {longest}")
    return None


def _with_possible(
    task: TaskWork, rules: LayoutRules, name: str, size: int, refused: Rejection
) -> Rejection:
    """The same with a nearest value that no other constraint rules out, where it names none."""
    possible = () if name == "dp" else possible_sizes(task.shape, rules, name)
    if not possible or {*refused.nearest.split(", ")} & {str(one) for one in possible}:
        return refused
    nearest = min(possible, key=lambda one: abs(one - size))
    return replace(refused, nearest=str(nearest))


def _near(task: TaskWork, rules: LayoutRules, name: str, size: int) -> str | None:
    """The values that would do in the place of a refused one."""
    if name == "dp":
        return None
    sizes = [one for one in possible_sizes(task.shape, rules, name) if one != size]
    return f"set {name} to {' or '.join(str(one) for one in sizes)}" if sizes else None


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
    some = ", ".join(str(count) for count in counts[-4:])
    verb = "divide" if several else "divides"
    return f"{verb} none of the numbers of devices ({some}) into what the model allows", ""


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


def _too_large(task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter) -> PlanError:
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
            hint="take hosts with more memory (memory_gib), or more devices",
        )
    return PlanError(
        f"{task.phase} of {task.role.name} does not fit on {group.device.name} in any layout"
        f"{' that pins leave' if pinned else ''}: "
        f"with {layout.describe()} it needs {format_bytes(need + runtime)} of "
        f"{format_bytes(group.budget_bytes)}: {memory.describe()}, "
        f"framework {format_bytes(runtime)}",
        where=pins.where(task.id) or f"roles.{task.role.name}",
        found=pinned,
        hint=_without_pin(task, posed, pins, only) or _way_out(task, posed, only, need + runtime),
    )


def _least(task: TaskWork, posed: Posed, only: Filter) -> tuple[int, Layout]:
    """The layout that needs least of a device, and what it needs."""
    made = posed.made(task.id)
    found = [
        (made.needs(task, layout, only)[0], layout)
        for layout in _layouts(task, posed, only, _counts(task, posed, only))
    ]
    return min(found, key=lambda item: (item[0], item[1].num_devices))


def _without_pin(task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter) -> str | None:
    """A single pin without which the task fits here, and how."""
    made = posed.made(task.id)
    for field, pin in pins.asked.get(task.id, {}).items():
        other = only.without(field)
        for layout in _layouts(task, posed, other, _counts(task, posed, other)):
            way = next(iter(made.of_layout(task, layout, other)), None)
            if way is not None:
                also = f", recompute {way.recompute}" if way.recompute != "none" else ""
                also += f", {' and '.join(way.offload)} on the host" if way.offload else ""
                return f"leave {pin} out: then it fits with {layout.describe()}{also}"
    return None


def _way_out(task: TaskWork, posed: Posed, only: Filter, need: int) -> str:
    """The smallest larger pool on which the task fits, or the memory that it needs."""
    made, group = posed.made(task.id), posed.group_of(task.id)
    size, devices = group.node_size, len(group.addresses)
    while devices * 2 <= MOST_DEVICES and only.devices is None:
        devices *= 2
        for layout in made.layouts(task, devices).possible:
            if only.takes(layout) and made.needs(task, layout, only)[0] <= made.budget:
                nodes = devices // size
                return (
                    f"take {devices} devices ({counted(nodes, 'node')}), where it fits with "
                    f"{layout.describe()}, or {_with_memory(need, group)}"
                )
    return (
        f"{_with_memory(need, group)}, or take a smaller model, or shorter samples "
        "(train.sampling.max_tokens)"
    )


def _with_memory(need: int, group: DeviceGroup) -> str:
    """How a plan may fill so many bytes of a device: a share of this one's, or larger ones."""
    device = group.device
    if device.type != "cpu" and need <= device.free_bytes:
        return f"set plan.memory_share to {math.ceil(100 * need / device.free_bytes) / 100:g}"
    share = 1.0 if device.type == "cpu" else device.share
    tenth = (1 << 30) / 10  # rounded up, so that it is enough as it is written
    return f"take devices of {format_bytes(round(math.ceil(need / share / tenth) * tenth))}"
