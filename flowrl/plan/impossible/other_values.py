"""Values near those of a task's pins with which a job fits: what is offered where memory is short.

Each is tried with the whole job, the nearest first. Before that the task alone is asked, which
takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from flowrl.plan.impossible.pins import Alone, Ground, Suits, other_devices, other_sizes
from flowrl.plan.impossible.ways_out import Trial, tries_on, with_setting, with_value
from flowrl.plan.options import Pin
from flowrl.plan.pin_errors import MOST_OFFERED, MOST_TRIES
from flowrl.plan.pins import LAYOUT_FIELDS, OFFLOAD, PinnedTasks
from flowrl.plan.problem_of import Posed
from flowrl.plan.ways.candidate import RECOMPUTE
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.tasks import TaskWork

_WORDS = {"recompute": RECOMPUTE, "offload": OFFLOAD}


def other_values(
    task: TaskWork, posed: Posed, pins: PinnedTasks, ground: Ground, alone: Alone
) -> Iterator[str]:
    """`set actor.devices to 0-7`, for each pin of a task that another value would do for."""
    only = pins.filters.get(task.id, Filter())
    most = min(MOST_TRIES, tries_on(len(posed.group.addresses)))
    for field, pin in pins.asked.get(task.id, {}).items():
        if field == "devices":

            def suits(count: int) -> bool:
                return alone(replace(only, devices=count))

            change = _devices(task, pin, pins, ground, suits, most)
        elif field in LAYOUT_FIELDS:
            change = other_sizes(task, posed, pins, only, field, ground, alone, most)
        elif field in _WORDS:
            change = _words(pin, pins, only, ground, alone, most)
        else:
            change = None
        if change is not None:
            yield change


def _devices(
    task: TaskWork, pin: Pin, pins: PinnedTasks, ground: Ground, suits: Suits, most: int
) -> str | None:
    if not set(pins.devices[task.id]) <= set(ground.numbering):
        return None
    place = frozenset(ground.numbering.index(one) for one in pins.devices[task.id])
    return other_devices(pin, place, pins, ground, suits, most)


def _words(
    pin: Pin, pins: PinnedTasks, only: Filter, ground: Ground, alone: Alone, most: int
) -> str | None:
    near = [word for word in words_near(pin) if alone(with_setting(only, pin.field, word))]
    fitting = (one for one in near[:most] if ground.fits(Trial(pins=with_value(pins, pin, one))))
    offered = list(islice(fitting, MOST_OFFERED))
    return f"set {pin.subject}.{pin.field} to {' or '.join(offered)}" if offered else None


def words_near(pin: Pin) -> Sequence[str]:
    """Other words that a pin may have, the nearest first."""
    words = _WORDS[pin.field]
    at = words.index(pin.value)
    return sorted(
        (one for one in words if one != pin.value), key=lambda one: _apart(words, one, at)
    )


def _apart(words: Sequence[str], word: str, at: int) -> tuple[int, int]:
    number = words.index(word)
    return abs(number - at), -number  # of two that are as near, what needs less memory
