"""Whose kernels' efficiencies were taken of a device that does not tell its generation."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cluster.hardware import DeviceSpec
from flowrl.cost.efficiency import ASSUMED
from flowrl.plan.many import Chosen


def efficiency_notes(best: Chosen) -> Iterator[str]:
    """One line for each kind of device that tasks are on and of which nothing tells it."""
    specs = [best.posed.group_of(task.id).machine.spec for task in best.posed.tasks]
    for spec in {one.name: one for one in specs}.values():
        yield from efficiency_note(spec)


def efficiency_note(spec: DeviceSpec) -> Iterator[str]:
    """What is taken for granted of a device, and the key that says otherwise."""
    if assumed_efficiencies(spec):
        yield (
            f"assumed: kernels on {spec.name} reach what they reach on {ASSUMED.capitalize()}, for "
            "its name shows no generation; efficiencies: ampere (or hopper) of the device in the "
            "cluster file says whose hold"
        )


def assumed_efficiencies(spec: DeviceSpec) -> str:
    """`hopper's efficiencies`, where nothing tells whose hold; else empty."""
    known = spec.type == "cpu" or spec.generation is not None
    return "" if known else f"{ASSUMED}'s efficiencies"
