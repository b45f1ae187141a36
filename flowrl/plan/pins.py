"""Decisions that somebody made before the planner: what they mean, and whether all can be kept.

    rollout.tp=2            every node that generates has tp=2
    actor.devices=0-31      training nodes of the role `actor` are on the first 32 devices
    actor.update.dp=16      one node

    rollout.environment=apart   the environment of episodes has devices of its own (or: together)
    game.devices=48-63      and it has these, of those of its rollout

A subject is a node (`actor.update`), an operation (`update`, `logprobs`), `rollout` (all that
generate), or a role: its own nodes, without its rollout where it has others. An environment has
`devices` and `environment`; a rollout's devices are those of its environment too. Devices are
numbered in the cluster's order: its accelerators, or its CPUs where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.config.nearest import listing, suggestion
from flowrl.errors import PlanError
from flowrl.plan.candidates import Filter
from flowrl.plan.check_plan import number_ranges
from flowrl.plan.many_form import PinnedDecision
from flowrl.plan.options import Pin
from flowrl.plan.tasks import TaskWork

__all__ = ["PinnedTasks", "read_pins"]

LAYOUT_FIELDS = ("tp", "pp", "dp", "cp", "ep")
FIELDS = (*LAYOUT_FIELDS, "devices", "environment", "micro_tokens", "offload", "recompute")

OWN = "devices of its environment"
"""How a task's pins keep those of an environment apart from its own `devices`."""

_WORDS = {
    "environment": ("together", "apart"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "all", "optimizer+all"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTasks:
    """What pins say, by task.

    Attributes:
        filters: What is left of each task's candidates.
        devices: Numbers of the devices of tasks that have theirs given.
        environments: Likewise of the environments of tasks.
        decisions: As the plan keeps them.
    """

    filters: Mapping[str, Filter]
    devices: Mapping[str, tuple[int, ...]]
    environments: Mapping[str, tuple[int, ...]]
    decisions: tuple[PinnedDecision, ...]


def read_pins(
    pins: Sequence[Pin], tasks: Sequence[TaskWork], numbering: Sequence[int]
) -> PinnedTasks:
    """What pins mean for tasks.

    Args:
        numbering: Of each device that may be used, its number in the cluster.

    Raises:
        PlanError: nothing is called so, a value that cannot be, or two that contradict each other;
            it names both.
    """
    chosen: dict[str, dict[str, tuple[Pin, str]]] = {}
    decisions = []
    for pin in pins:
        value = _value(pin, numbering)
        nodes = _tasks(pin, tasks)
        for task in nodes:
            own = chosen.setdefault(task.id, {})
            field = _field(pin, task)
            before = own.get(field)
            if before is not None and before[1] != value:
                raise _contradiction(before[0], pin, f"for {task.id} they say two things")
            own[field] = (pin, value)
        decisions.append(
            PinnedDecision(
                subject=pin.subject,
                field=pin.field,
                value=value,
                nodes=tuple(str(_pinned_node(pin, task)) for task in nodes),
            )
        )
    filters = {name: _filter(own) for name, own in chosen.items()}
    places = {number: place for place, number in enumerate(numbering)}
    devices = {
        name: tuple(places[number] for number in _numbers(own["devices"][1]))
        for name, own in chosen.items()
        if "devices" in own
    }
    environments = {
        name: tuple(places[number] for number in _numbers(own[OWN][1]))
        for name, own in chosen.items()
        if OWN in own
    }
    for name, own in chosen.items():
        _check_product(name, own, filters[name])
    return PinnedTasks(
        filters=filters,
        devices=devices,
        environments=environments,
        decisions=tuple(decisions),
    )


def _of_environment(pin: Pin, task: TaskWork) -> bool:
    """Whether a pin is about the environment of a task."""
    region = task.region
    return region is not None and pin.subject in (region.role, region.node)


def _field(pin: Pin, task: TaskWork) -> str:
    """What a pin decides of a task.

    Raises:
        PlanError: a task or an environment that has no such thing.
    """
    if _of_environment(pin, task):
        if pin.field not in ("devices", "environment"):
            raise PlanError(
                "environments have devices, and a place",
                where=pin.where,
                found=str(pin),
                expected="devices or environment",
            )
        return OWN if pin.field == "devices" else pin.field
    if pin.field == "environment" and task.region is None:
        raise PlanError(
            f"no environment plays with {task.id}",
            where=pin.where,
            found=str(pin),
            hint="leave it out",
        )
    return pin.field


def _pinned_node(pin: Pin, task: TaskWork) -> str:
    """The operation that shows what a pin decides."""
    shows = _of_environment(pin, task) or pin.field == "environment"
    return task.region.node if task.region is not None and shows else task.id


def _tasks(pin: Pin, tasks: Sequence[TaskWork]) -> list[TaskWork]:
    exact = [task for task in tasks if pin.subject in task.nodes]
    if exact:
        return exact
    if pin.subject == "rollout":
        return [task for task in tasks if task.generates]
    by_op = [task for task in tasks if task.id.rpartition(".")[2] == pin.subject]
    of_role = [
        task
        for task in tasks
        if task.role.name == pin.subject or (task.region and task.region.role == pin.subject)
    ]
    found = by_op or [task for task in of_role if not task.generates] or of_role
    if not found:
        names = ["rollout", *dict.fromkeys(task.role.name for task in tasks)]
        names += [task.region.role for task in tasks if task.region is not None]
        names += [str(task.id) for task in tasks]
        raise PlanError(
            f"nothing in the plan is called {pin.subject!r}",
            where=pin.where,
            found=str(pin),
            expected=f"one of {listing(names)}",
            hint=suggestion(pin.subject, names),
        )
    return found


def _value(pin: Pin, numbering: Sequence[int]) -> str:
    if pin.field not in FIELDS:
        raise PlanError(
            f"{pin.field!r} cannot be pinned",
            where=pin.where,
            found=str(pin),
            expected=f"one of {listing(FIELDS)}",
            hint=suggestion(pin.field, FIELDS),
        )
    if pin.field in _WORDS:
        if pin.value not in _WORDS[pin.field]:
            raise PlanError(
                f"there is no such way of {pin.field}",
                where=pin.where,
                found=str(pin),
                expected=f"one of {listing(_WORDS[pin.field])}",
                hint=suggestion(pin.value, _WORDS[pin.field]),
            )
        return pin.value
    if pin.field == "devices":
        return _device_numbers(pin, numbering)
    if not pin.value.isdecimal() or int(pin.value) < 1:
        raise PlanError(
            f"{pin.field} is a whole number of at least 1", where=pin.where, found=str(pin)
        )
    return str(int(pin.value))


def _device_numbers(pin: Pin, numbering: Sequence[int]) -> str:
    try:
        numbers = _numbers(pin.value)
    except ValueError:
        raise PlanError(
            "devices are numbers and ranges of them",
            where=pin.where,
            found=str(pin),
            expected="for example 0-31 or 0-7,16-23",
        ) from None
    if len(set(numbers)) != len(numbers):
        raise PlanError("a device is named twice", where=pin.where, found=str(pin))
    missing = sorted(set(numbers) - set(numbering))
    if missing:
        raise PlanError(
            f"there is no device {missing[-1]} to be used: it is reserved, of another kind, or not "
            "there",
            where=pin.where,
            found=str(pin),
            expected=f"of {number_ranges(numbering)}",
        )
    return number_ranges(numbers)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin = int(first)
        end = int(last) if dash else begin
        if end < begin:
            raise ValueError(text)
        found += range(begin, end + 1)
    return sorted(found)


def _filter(own: Mapping[str, tuple[Pin, str]]) -> Filter:
    devices = own.get("devices")
    micro, alone = own.get("micro_tokens"), own.get(OWN)
    return Filter(
        layout=tuple((name, int(own[name][1])) for name in LAYOUT_FIELDS if name in own),
        devices=None if devices is None else len(_numbers(devices[1])),
        recompute=own["recompute"][1] if "recompute" in own else None,
        offload=own["offload"][1] if "offload" in own else None,
        micro_tokens=None if micro is None else int(micro[1]),
        environment=own["environment"][1] if "environment" in own else None,
        own=None if alone is None else len(_numbers(alone[1])),
    )


def _check_product(task: str, own: Mapping[str, tuple[Pin, str]], made: Filter) -> None:
    """Sizes of a layout and a number of devices that cannot go together."""
    if made.devices is None:
        return
    product = 1
    for name, size in made.layout:
        if name == "ep":
            continue
        product *= size
        if made.devices % product:
            raise _contradiction(
                own["devices"][0],
                own[name][0],
                f"{made.devices} devices of {task} are no multiple of {product}",
            )


def _contradiction(first: Pin, second: Pin, why: str) -> PlanError:
    wheres = dict.fromkeys((first.where, second.where))
    return PlanError(
        f"{first} and {second} contradict each other: {why}",
        where=" and ".join(wheres),
        hint="take one of them out",
    )
