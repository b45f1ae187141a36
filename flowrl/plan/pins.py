"""Decisions that somebody made before the planner: what they mean, and whether all can be kept.

    rollout.tp=2            every node that generates has tp=2
    actor.devices=0-31      training nodes of the role `actor` are on the first 32 devices
    actor.update.dp=16      one node

    rollout.environment=apart   the environment of episodes has devices of its own (or: together)
    game.devices=48-63      and it has these, of those of its rollout or of its own kind

A subject is a node (`actor.update`), an operation (`update`, `logprobs`), `rollout` (all that
generate), or a role: its own nodes, without its rollout where it has others. An environment has
`devices` and `environment`; a rollout's devices are those of its environment too, unless that is on
another kind of them. Devices are numbered in the cluster's order: its accelerators, or its CPUs
where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.errors import PlanError, raise_all
from flowrl.plan.check.whole import number_ranges
from flowrl.plan.many_form import PinnedDecision
from flowrl.plan.options import Pin, PlanOptions, pins_text
from flowrl.plan.pin_errors import Near, PinError, contradiction, near_devices
from flowrl.plan.ways.candidate import RECOMPUTE
from flowrl.plan.ways.pin_filter import OWN, Filter
from flowrl.plan.ways.tasks import TaskWork
from flowrl.wording import counted, listing, one_of_them

LAYOUT_FIELDS = ("tp", "pp", "dp", "cp", "ep")
FIELDS = (*LAYOUT_FIELDS, "devices", "environment", "micro_tokens", "offload", "recompute")

OFFLOAD = ("none", "optimizer", "all", "optimizer+all")
"""What of a task is on the host, with ever less on the device."""

MOST_DIGITS = 12
"""Of a number in a pin: more is no size of anything."""

_WORDS: Mapping[str, tuple[str, ...]] = {
    "environment": ("together", "apart"),
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTasks:
    """What pins say, by task.

    Attributes:
        filters: What is left of each task's candidates.
        devices: Of tasks that have theirs given, the numbers in the cluster.
        environments: Likewise of the environments of tasks.
        decisions: As the plan keeps them.
        asked: Who said what of each task, by field.
    """

    filters: Mapping[str, Filter]
    devices: Mapping[str, tuple[int, ...]]
    environments: Mapping[str, tuple[int, ...]]
    decisions: tuple[PinnedDecision, ...]
    asked: Mapping[str, Mapping[str, Pin]]

    def places(self, numbering: Sequence[int]) -> dict[str, frozenset[int]]:
        """Each pinned task's devices, counted in a group of them.

        Args:
            numbering: Of each device of the group, its number in the cluster.

        Raises:
            KeyError: the group does not have all of them.
        """
        places = {number: place for place, number in enumerate(numbering)}
        return {
            name: frozenset(places[number] for number in numbers)
            for name, numbers in self.devices.items()
        }

    def environments_in(
        self, numbering: Sequence[int], without: Collection[str] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Likewise the devices of environments, by the task that they play with.

        Args:
            without: Tasks whose environments have devices of another kind.
        """
        places = {number: place for place, number in enumerate(numbering)}
        return {
            name: tuple(places[number] for number in numbers)
            for name, numbers in self.environments.items()
            if name not in without
        }

    def of_tasks(self, names: Collection[str]) -> PinnedTasks:
        """What they say of some tasks alone."""
        return replace(
            self,
            filters={name: one for name, one in self.filters.items() if name in names},
            devices={name: one for name, one in self.devices.items() if name in names},
            environments={name: one for name, one in self.environments.items() if name in names},
            asked={name: one for name, one in self.asked.items() if name in names},
        )

    def where(self, task: str, fields: Collection[str] = (*FIELDS, OWN)) -> str | None:
        """Where a task's pins of some fields are written."""
        own = self.asked.get(task, {})
        wheres = dict.fromkeys(pin.where for field, pin in own.items() if field in fields)
        return " and ".join(wheres) or None

    def said(self, task: str, fields: Collection[str] = (*FIELDS, OWN)) -> str | None:
        """A task's pins of some fields, as they are written."""
        own = self.asked.get(task, {})
        return pins_text(pin for field, pin in own.items() if field in fields) or None


def read_pins(
    options: PlanOptions,
    tasks: Sequence[TaskWork],
    numbering: Sequence[int],
    roles: Sequence[str] = (),
) -> PinnedTasks:
    """What pins and roles' own settings mean for tasks.

    Args:
        numbering: Of each device that may be used, its number in the cluster.
        roles: All roles, those too that have no task: they run on hosts, in no layout.

    Raises:
        PlanError: nothing is called so, a value that cannot be, or two that contradict each other,
            of which it names both; one error for all of them.
    """
    chosen: dict[str, dict[str, tuple[Pin, str]]] = {}
    decisions = []
    known, problems = pins_of(options, tasks, numbering, roles)
    for pin, value, nodes in known:
        for task in nodes:
            if always_so(pin, value, task):
                continue
            own = chosen.setdefault(task.id, {})
            field = _field(pin, task)
            before = own.setdefault(field, (pin, value))
            if before[1] != value:
                why = f"for {task.id} they say two things"
                near = (
                    Near(pin=before[0], values=(value,)),
                    Near(pin=pin, values=(before[1],)),
                )
                problems.append(contradiction([before[0], pin], why, near=near))
        decisions.append(
            PinnedDecision(
                subject=pin.subject,
                field=pin.field,
                value=value,
                nodes=tuple(str(node) for task in nodes for node in _pinned_nodes(pin, task)),
            )
        )
    filters = {name: _filter(own) for name, own in chosen.items()}
    devices = {
        name: tuple(_numbers(own["devices"][1])) for name, own in chosen.items() if "devices" in own
    }
    environments = {
        name: tuple(_numbers(own[OWN][1])) for name, own in chosen.items() if OWN in own
    }
    problems += filter(None, (_product(name, own, filters[name]) for name, own in chosen.items()))
    raise_all(problems)
    found = PinnedTasks(
        filters=filters,
        devices=devices,
        environments=environments,
        decisions=tuple(decisions),
        asked={
            name: {field: pin for field, (pin, _) in own.items()} for name, own in chosen.items()
        },
    )
    check_environments(found, [task for task in tasks if _beside_its_policy(task)])
    return found


def _beside_its_policy(task: TaskWork) -> bool:
    """Whether the environment of a task has devices of the kind of its policy, whatever that is."""
    region = task.region
    return region is not None and region.environment.accelerated and not region.environment.kind


def check_environments(pins: PinnedTasks, tasks: Sequence[TaskWork]) -> None:
    """Devices of environments are some of those that pins name for their rollouts.

    Args:
        tasks: Whose environments are on devices of the same kind as they.

    Raises:
        PlanError: they are not; names both pins of each.
    """
    problems = []
    for task in tasks:
        alone, all_of_it = pins.environments.get(task.id), pins.devices.get(task.id)
        if task.region is None or alone is None or all_of_it is None:
            continue
        beyond = sorted({*alone} - {*all_of_it})
        if beyond:
            asked = pins.asked[task.id]
            both = number_ranges(sorted({*alone, *all_of_it}))
            error = contradiction(
                [asked["devices"], asked[OWN]],
                f"devices of environment {task.region.role} are among those of its rollout, which "
                f"{number_ranges(beyond)} {'is' if len(beyond) == 1 else 'are'} not",
                hint=f"name some of {number_ranges(all_of_it)} in {asked[OWN].subject}.devices, "
                f"or set {asked['devices'].subject}.devices={both}",
            )
            problems.append(error)
    raise_all(problems)


def pins_of(
    options: PlanOptions,
    tasks: Sequence[TaskWork],
    numbering: Sequence[int],
    roles: Sequence[str] = (),
) -> tuple[list[tuple[Pin, str, list[TaskWork]]], list[PlanError]]:
    """Each pin with its value as plans keep it, and the tasks that it is about; and what is wrong
    with others."""
    known: list[tuple[Pin, str, list[TaskWork]]] = []
    problems = []
    for pin in options.pins:
        try:
            known.append(_known(pin, tasks, numbering, roles))
        except PlanError as error:
            problems.append(error)
    return [*known, *_settings(options, tasks)], problems


def _known(
    pin: Pin, tasks: Sequence[TaskWork], numbering: Sequence[int], roles: Sequence[str]
) -> tuple[Pin, str, list[TaskWork]]:
    meant = _tasks(pin, tasks, roles)
    value = _value(pin, numbering)
    nodes = [task for task in meant if _senseless(pin, value, task) is None] or [
        task for task in meant if always_so(pin, value, task)
    ]
    if not nodes:
        error = PinError(
            f"{meant[0].id} {_senseless(pin, value, meant[0])}",
            where=pin.where,
            found=str(pin),
            hint=_others_hint(pin, value, tasks),
        )
        others = tuple(
            word
            for word in _WORDS.get(pin.field, ())
            if any(_senseless(pin, word, one) is None or always_so(pin, word, one) for one in meant)
        )
        raise error.offering(Near(pin=pin, values=others))
    return pin, value, nodes


def _settings(
    options: PlanOptions, tasks: Sequence[TaskWork]
) -> Iterator[tuple[Pin, str, list[TaskWork]]]:
    """What roles say of their own."""
    for pin in options.settings:
        # A role may have work in other stages only, or none that its setting is about.
        nodes = [
            task
            for task in tasks
            if (task.role.name == pin.subject or pin.subject in task.nodes)
            and _senseless(pin, pin.value, task) is None
        ]
        if nodes:
            yield pin, pin.value, nodes


def _senseless(pin: Pin, value: str, task: TaskWork) -> str | None:
    """Why a pin says nothing of a task; None where it says something."""
    field = pin.field
    if field == "environment" and task.region is None:
        return "has no environment"
    if of_environment(pin, task):
        return (
            None
            if field in ("devices", "environment")
            else "has an environment with devices and a place, and nothing else"
        )
    if field == "recompute" and not task.updates:
        return "has no backward pass, for which anything would be computed again"
    if field == "micro_tokens" and task.generates:
        return "cuts no batch into micro-batches: it decodes its samples in slots"
    if field == "offload" and task.generates:
        return (
            "moves nothing to the host: its engine releases weights and cache and loads them again"
        )
    if field == "offload" and "optimizer" in value and not task.updates:
        return "has no optimizer"
    return None


def always_so(pin: Pin, value: str, task: TaskWork) -> bool:
    """Whether a pin says what no plan of a task has otherwise, so that it leaves out nothing."""
    if of_environment(pin, task):
        return False
    computes_again = pin.field == "recompute" and task.updates
    moves = pin.field == "offload" and not task.generates
    return (
        pin.field in ("recompute", "offload") and value == "none" and not (computes_again or moves)
    )


def _others_hint(pin: Pin, value: str, tasks: Sequence[TaskWork]) -> str:
    others = [
        str(task.id)
        for task in tasks
        if not of_environment(pin, task) and _senseless(pin, value, task) is None
    ]
    if not others:
        return "leave it out"
    return f"leave it out, or pin {pin.field} of {' or '.join(others)}"


def of_environment(pin: Pin, task: TaskWork) -> bool:
    """Whether a pin is about the environment of a task."""
    region = task.region
    return region is not None and pin.subject in (region.role, region.node)


def _field(pin: Pin, task: TaskWork) -> str:
    """What a pin decides of a task."""
    return OWN if of_environment(pin, task) and pin.field == "devices" else pin.field


def _pinned_nodes(pin: Pin, task: TaskWork) -> tuple[str, ...]:
    """The operations that show what a pin decides: of a trainer, all its updates."""
    shows = of_environment(pin, task) or pin.field == "environment"
    if task.region is not None and shows:
        return (task.region.node,)
    return task.operations


def _tasks(pin: Pin, tasks: Sequence[TaskWork], roles: Sequence[str]) -> list[TaskWork]:
    exact = [task for task in tasks if pin.subject in task.nodes]
    if exact:
        return exact
    draws = [task for task in tasks if task.generates]
    if pin.subject == "rollout" and draws:
        return draws
    by_op = [task for task in tasks if _operation_name(task) == pin.subject]
    of_role = [
        task
        for task in tasks
        if task.role.name == pin.subject or (task.region and task.region.role == pin.subject)
    ]
    found = by_op or [task for task in of_role if not task.generates] or of_role
    if not found:
        names = [*["rollout"][: len(draws)], *dict.fromkeys(task.role.name for task in tasks)]
        names += [task.region.role for task in tasks if task.region is not None]
        names += [str(task.id) for task in tasks]
        if pin.subject in roles:
            raise PlanError(
                f"{pin.subject} has nothing to pin: it runs on the CPUs of hosts, in no layout",
                where=pin.where,
                found=str(pin),
                expected=f"one of {listing(names)}",
                hint="leave it out; rewards.workers says how many processes score",
            )
        raise PlanError(
            f"nothing in the plan is called {pin.subject!r}",
            where=pin.where,
            found=str(pin),
            expected=f"one of {listing(names)}",
            hint=one_of_them(pin.subject, names),
        )
    return found


def _operation_name(task: TaskWork) -> str:
    """`update` of `actor.update`, and of what is numbered because a role has several of them."""
    return task.id.removeprefix(f"{task.role.name}.").partition(".")[0]


def _value(pin: Pin, numbering: Sequence[int]) -> str:
    if pin.field not in FIELDS:
        raise PlanError(
            f"{pin.field!r} cannot be pinned",
            where=pin.where,
            found=str(pin),
            expected=f"one of {listing(FIELDS)}",
            hint=one_of_them(pin.field, FIELDS),
        )
    if pin.field in _WORDS:
        if pin.value not in _WORDS[pin.field]:
            raise PlanError(
                f"there is no such way of {pin.field}",
                where=pin.where,
                found=str(pin),
                expected=f"one of {listing(_WORDS[pin.field])}",
                hint=one_of_them(pin.value, _WORDS[pin.field]),
            )
        return pin.value
    if pin.field == "devices":
        return _device_numbers(pin, numbering)
    too_long = pin.value.isdecimal() and len(pin.value) > MOST_DIGITS
    if not pin.value.isdecimal() or too_long or int(pin.value) < 1:
        most = f", of at most {MOST_DIGITS} digits" if too_long else ""
        error = PinError(
            f"{pin.field} is a whole number from 1 up{most}",
            where=pin.where,
            found=str(pin),
            hint="leave the pin out",
        )
        raise error.offering(*([] if too_long else [Near(pin=pin, values=("1",))]))
    return str(int(pin.value))


def _device_numbers(pin: Pin, numbering: Sequence[int]) -> str:
    try:
        ranges = _ranges(pin.value)
    except ValueError:
        error = PinError(
            "devices are numbers and ranges of them",
            where=pin.where,
            found=str(pin),
            expected=f"of {number_ranges(numbering)}, for example 0-31 or 0-7,16-23",
            hint="leave the pin out",
        )
        every = [range(max(numbering, default=-1) + 1)]
        raise error.offering(Near(pin=pin, values=tuple(near_devices(every, numbering)))) from None
    problem = _wrong_number(pin, ranges, numbering)
    if problem is not None:
        raise problem.offering(Near(pin=pin, values=tuple(near_devices(ranges, numbering))))
    return number_ranges(number for one in ranges for number in one)


def _wrong_number(pin: Pin, ranges: Sequence[range], numbering: Sequence[int]) -> PinError | None:
    usable, last = set(numbering), max(numbering, default=-1)
    for one in ranges:
        if one[-1] > last:  # a range of any length ends there
            return _no_device(pin, one[-1], numbering)
        for number in one:
            if number not in usable:
                return _no_device(pin, number, numbering)
    if len({number for one in ranges for number in one}) == sum(map(len, ranges)):
        return None
    return PinError(
        "a device is named twice", where=pin.where, found=str(pin), hint="name each device once"
    )


def _no_device(pin: Pin, number: int, numbering: Sequence[int]) -> PinError:
    beyond = number > max(numbering, default=-1)
    why = "it is not there" if beyond else "it is reserved, or of another kind"
    hint = None
    if beyond and pin.value.isdecimal() and number <= len(numbering):
        hint = f"devices are numbers from 0: {number} of them are 0-{number - 1}"
    return PinError(
        f"there is no device {number} to be used: {why}",
        where=pin.where,
        found=str(pin),
        expected=f"of {number_ranges(numbering)}",
        hint=hint or f"leave {pin} out",
    )


def _ranges(text: str) -> list[range]:
    found: list[range] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        begin = int(first)
        end = int(last) if dash else begin
        if end < begin:
            raise ValueError(text)
        found.append(range(begin, end + 1))
    return found


def _numbers(text: str) -> list[int]:
    return sorted(number for one in _ranges(text) for number in one)


def _filter(own: Mapping[str, tuple[Pin, str]]) -> Filter:
    devices = own.get("devices")
    micro, alone = own.get("micro_tokens"), own.get(OWN)
    recompute = own["recompute"][1] if "recompute" in own else None
    return Filter(
        layout=tuple((name, int(own[name][1])) for name in LAYOUT_FIELDS if name in own),
        devices=None if devices is None else len(_numbers(devices[1])),
        recompute=next((one for one in RECOMPUTE if one == recompute), None),
        offload=own["offload"][1] if "offload" in own else None,
        micro_tokens=None if micro is None else int(micro[1]),
        environment=own["environment"][1] if "environment" in own else None,
        own=None if alone is None else len(_numbers(alone[1])),
    )


def _product(task: str, own: Mapping[str, tuple[Pin, str]], made: Filter) -> PlanError | None:
    """Of sizes of a layout and a number of devices that cannot go together; None where they can."""
    product = math.prod(size for name, size in made.layout if name != "ep")
    if made.devices is None or not made.devices % product:
        return None
    pins = [own[name][0] for name in ("devices", *LAYOUT_FIELDS) if name in own]
    told = [pin for pin in pins if pin.field != "ep"]
    return contradiction(
        told,
        f"{counted(made.devices, f'device of {task} is', f'devices of {task} are')} no "
        f"multiple of {product}",
        near=[_beside_others(pin, made, product) for pin in told],
    )


def _beside_others(pin: Pin, made: Filter, product: int) -> Near:
    """What a pin of devices or of a size might say so that a layout of these sizes has them."""
    assert made.devices is not None
    if pin.field == "devices":
        first = _numbers(pin.value)[0]
        some = {made.devices // product * product, -(-made.devices // product) * product} - {0}
        return Near(
            pin=pin,
            values=tuple(number_ranges(range(first, first + size)) for size in sorted(some)),
        )
    asked = dict(made.layout)[pin.field]
    rest = product // asked
    sizes = [one for one in range(1, made.devices + 1) if made.devices % (one * rest) == 0]
    sizes.sort(key=lambda one: (abs(one - asked), one))
    return Near(pin=pin, values=tuple(map(str, sizes)))
