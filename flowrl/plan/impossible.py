"""What is said when nothing fits: the constraint with its numbers, and the smallest change."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.layout import Layout
from flowrl.cost.memory import format_bytes
from flowrl.cost.role_memory import role_memory
from flowrl.errors import PlanError
from flowrl.plan.candidates import Filter, layout_rules
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.impossible_regions import no_place_for_environment
from flowrl.plan.layouts import possible_sizes
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import Posed, device_counts
from flowrl.plan.schema import Rejection
from flowrl.plan.search import ChangeKind, Infeasible
from flowrl.plan.tasks import TaskWork

__all__ = ["nothing_fits", "nothing_runs"]

MOST_DEVICES = 65536


def nothing_runs(task: TaskWork, posed: Posed, pins: PinnedTasks) -> PlanError:
    """Of a task that no layout lets run on any number of the devices, alone."""
    only = pins.filters.get(task.id, Filter())
    refused = list(_refused(task, posed, only))
    if refused:
        first = refused[0]
        nearest = f"; nearest {first.nearest}" if first.nearest else ""
        asked = [p for p in pins.decisions if task.id in p.nodes]
        return PlanError(
            f"{task.id} cannot run so: {first.choice} {first.constraint}{nearest}",
            where="plan.pins" if asked else f"roles.{task.role.name}",
            found=", ".join(f"{p.subject}.{p.field}={p.value}" for p in asked) or None,
            expected=f"at most {first.limit}" if first.limit else None,
            hint=_allowed(task, posed, first) or "leave a pin out",
        )
    environment = no_place_for_environment(task, posed, only)
    if environment is not None:
        return environment
    need, layout = _least(task, posed, only)
    work = posed.candidates.work(task, layout)
    _, options, _ = posed.candidates.needs(task, layout)
    memory = role_memory(task.role.name, task.shape, layout, work, task.phase, options)
    runtime = RUNTIME_BYTES[posed.candidates.machine.spec.type]
    group = posed.group
    return PlanError(
        f"{task.phase} of {task.role.name} does not fit on {group.device.name} in any layout: "
        f"with {layout.describe()} it needs {format_bytes(need + runtime)} of "
        f"{format_bytes(group.budget_bytes)}: {memory.describe()}, "
        f"framework {format_bytes(runtime)}",
        where=f"roles.{task.role.name}",
        hint=_way_out(task, posed, only, need + runtime),
    )


def nothing_fits(posed: Posed, why: Infeasible, pins: PinnedTasks) -> PlanError:
    """Of tasks that fit one by one, and not together."""
    binding = why.bindings[0]
    names = ", ".join(binding.tasks)
    changes = [change.text for change in why.changes]
    memory = [c for c in why.changes if c.kind is ChangeKind.MEMORY and c.value is not None]
    if memory and memory[0].value is not None:
        runtime = RUNTIME_BYTES[posed.candidates.machine.spec.type]
        needed = format_bytes(memory[0].value + runtime)
        changes = [c.text for c in why.changes if c.kind is not ChangeKind.MEMORY]
        changes.append(f"take devices of {needed}")
    asked = [str(f"{p.subject}.{p.field}={p.value}") for p in pins.decisions]
    return PlanError(
        f"{names} do not fit together on {len(posed.group.addresses)} x "
        f"{posed.group.device.name}: {binding.reason}",
        where="plan.pins" if asked else "cluster",
        found=", ".join(asked) or None,
        hint="; or ".join(changes) or None,
    )


def _refused(task: TaskWork, posed: Posed, only: Filter) -> Iterator[Rejection]:
    """What rules a layout out before memory does."""
    made, counts = (
        posed.candidates,
        device_counts(len(posed.group.addresses), posed.group.node_size),
    )
    pinned = Layout(**{name: size for name, size in only.layout if name != "ep"})
    yield from made.refused_pins(task, pinned)
    wanted = [only.devices] if only.devices is not None else list(counts)
    if only.devices is not None and only.devices not in counts:
        near = sorted(counts, key=lambda count: abs(count - (only.devices or 0)))[:2]
        yield Rejection(
            choice=f"devices={only.devices}",
            constraint="is neither a divisor of a node nor whole nodes",
            nearest=", ".join(str(count) for count in sorted(near)),
        )
    if not any(
        only.takes(layout) for count in wanted for layout in made.layouts(task, count).possible
    ):
        for count in wanted:
            yield from made.layouts(task, count).refused


def _allowed(task: TaskWork, posed: Posed, refused: Rejection) -> str | None:
    """The values that would do in the place of a refused one."""
    name = refused.choice.partition("=")[0]
    sizes: tuple[int, ...] = ()
    if name in ("tp", "pp", "cp", "ep"):
        rules = layout_rules(task, posed.candidates.request, posed.group.node_size)
        sizes = possible_sizes(task.shape, rules, name)
    values = [str(size) for size in sizes] or refused.nearest.split(", ")
    return f"set {name} to {' or '.join(values)}" if values[0] else None


def _least(task: TaskWork, posed: Posed, only: Filter) -> tuple[int, Layout]:
    """The layout that needs least of a device, and what it needs."""
    made = posed.candidates
    counts = device_counts(len(posed.group.addresses), posed.group.node_size)
    found = [
        (made.needs(task, layout)[0], layout)
        for count in counts
        if only.devices in (None, count)
        for layout in made.layouts(task, count).possible
        if only.takes(layout)
    ]
    return min(found, key=lambda item: (item[0], item[1].num_devices))


def _way_out(task: TaskWork, posed: Posed, only: Filter, need: int) -> str:
    """The smallest larger pool on which the task fits, or the memory that it needs."""
    made, size = posed.candidates, posed.group.node_size
    devices = len(posed.group.addresses)
    while devices * 2 <= MOST_DEVICES and only.devices is None:
        devices *= 2
        for layout in made.layouts(task, devices).possible:
            if only.takes(layout) and made.needs(task, layout)[0] <= made.budget:
                return (
                    f"take {devices} devices ({devices // size} nodes), where it fits with "
                    f"{layout.describe()}, or devices of {format_bytes(need)}"
                )
    return (
        f"take devices of at least {format_bytes(need)}, a smaller model, or shorter samples "
        "(train.sampling.max_tokens)"
    )
