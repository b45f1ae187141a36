"""Pins of devices of several kinds: what of them no plan can keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from flowrl.errors import PlanError, raise_all
from flowrl.plan.check.whole import number_ranges
from flowrl.plan.elsewhere import Part
from flowrl.plan.pin_errors import Near, PinError, near_devices
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.ways.tasks import TaskWork


def check_kinds(pins: PinnedTasks, parts: Sequence[Part]) -> None:
    """A task's devices are all of one kind, in nodes that hold equally many."""
    raise_all(
        [
            PinError(
                f"{name} cannot be on devices of several kinds",
                where=pins.where(name, ["devices"]),
                found=f"{pins.said(name, ['devices'])}, where {_kinds_of(numbers, parts)}",
                expected="devices of one kind, in nodes with equally many free ones",
                hint=f"leave {name} to the planner",
            ).offering(Near(pin=pins.asked[name]["devices"], values=_of_each(numbers, parts)))
            for name, numbers in pins.devices.items()
            if not any(set(numbers) <= set(part.numbering) for part in parts)
        ]
    )


def _of_each(numbers: Sequence[int], parts: Sequence[Part]) -> tuple[str, ...]:
    """Devices of one kind near those that are of several: what each kind has of them first."""
    wanted = [range(one, one + 1) for one in numbers]
    near = [near_devices(wanted, part.numbering) for part in parts]
    return tuple(value for some in zip_longest(*near) for value in some if value is not None)


def of_one_kind(task: TaskWork, pins: PinnedTasks, parts: Sequence[Part]) -> bool:
    """Whether an environment asks for the kind of devices that pins name for its rollout."""
    mine = set(pins.devices.get(task.id, ()))
    kinds = {part.kind for part in parts if mine & set(part.numbering)}
    return task.region is not None and kinds == {task.region.environment.kind}


def no_two_kinds(pins: PinnedTasks, parts: Sequence[Part]) -> PlanError:
    """Of pins that name two kinds of devices, with no plan that has both."""
    where = "; ".join(
        f"{name} on {_kinds_of(numbers, parts)}" for name, numbers in pins.devices.items()
    )
    asked = [one for name in pins.devices if (one := pins.said(name, ["devices"])) is not None]
    wheres = [pins.where(name, ["devices"]) or "plan.pins" for name in pins.devices]
    return PlanError(
        "no plan over two kinds of devices has these pins and fits",
        where=" and ".join(dict.fromkeys(wheres)) or "plan.pins",
        found=where,
        expected="on one kind what reads nothing from the rest of a step (rollouts, say, and what "
        "scores them); all else on the other",
        hint=f"leave {' or '.join(dict.fromkeys(asked))} out",
    )


def _kinds_of(numbers: Sequence[int], parts: Sequence[Part]) -> str:
    """`0-7 are H100-SXM-80GB, 8-11 are A100-SXM-80GB`."""
    found = []
    for part in parts:
        mine = set(numbers) & set(part.numbering)
        if mine:
            found.append(f"{number_ranges(mine)} are {part.group.device.name}")
    return ", ".join(found)
