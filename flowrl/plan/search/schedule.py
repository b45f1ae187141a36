"""Schedules: trees that say which tasks share devices and which have their own.

    Spatial(chunks=8)
    |-- generate on 80 devices
    `-- Temporal
        |-- logprobs on 48 devices
        `-- update on 48 devices

Every node stands on a block of devices, whose size is the smallest allowed one that holds it
(`flowrl.plan.search.evaluate.block`). The children of a Temporal stand on the same block, those of
a Spatial or Asynchronous on disjoint blocks inside their parent's. `second` never feeds `first`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from flowrl.plan.search.problem import Kind, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One task, run with one option."""

    task: str
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporal:
    """One after the other on the same devices; both stay resident."""

    first: Schedule
    second: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Spatial:
    """At once on disjoint devices.

    Attributes:
        first: What feeds, where one feeds the other.
        second: What reads.
        chunks: Pieces in which the batch passes from `first` to `second`; 1 where nothing passes.
    """

    first: Schedule
    second: Schedule
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """`first` works on later steps than `second`, on disjoint devices. Only at the root."""

    first: Schedule
    second: Schedule


Schedule = Leaf | Temporal | Spatial | Asynchronous


def leaves(schedule: Schedule) -> Iterator[Leaf]:
    """The leaves in order, first before second."""
    match schedule:
        case Leaf():
            yield schedule
        case Temporal() | Spatial() | Asynchronous():
            yield from leaves(schedule.first)
            yield from leaves(schedule.second)
        case _:
            assert_never(schedule)


def num_splits(schedule: Schedule) -> int:
    """Spatial and Asynchronous nodes: the moving parts of a schedule."""
    match schedule:
        case Leaf():
            return 0
        case Temporal():
            return num_splits(schedule.first) + num_splits(schedule.second)
        case Spatial() | Asynchronous():
            return num_splits(schedule.first) + num_splits(schedule.second) + 1
        case _:
            assert_never(schedule)


def kind_of(schedule: Schedule) -> Kind:
    """The narrowest kind that a schedule is of; a single leaf is temporal."""
    if isinstance(schedule, Asynchronous):
        return Kind.ASYNCHRONOUS
    splits = num_splits(schedule)
    if splits == 0:
        return Kind.TEMPORAL
    inner = sum(1 for _ in leaves(schedule)) - 1
    return Kind.SPATIAL if splits == inner else Kind.HYBRID


Signature = tuple[object, ...]


def signature(schedule: Schedule) -> Signature:
    """Equal for schedules that differ only in how turns are nested or independent parts ordered.

    Temporal(a, Temporal(b, c)) and Temporal(Temporal(a, b), c) run the same. Which of two
    independent parts of a Temporal or an unstreamed Spatial is called first changes nothing either.
    """
    match schedule:
        case Leaf():
            option = schedule.option
            return (
                "leaf",
                schedule.task,
                option.devices,
                option.form,
                option.label,
                option.seconds,
                option.period_s,
                option.dense_s,
                option.chunk_s,
                option.resident,
                option.peak,
            )
        case Temporal():
            return ("temporal", *sorted(_turns(schedule), key=repr))
        case Spatial():
            parts = sorted((signature(schedule.first), signature(schedule.second)), key=repr)
            return ("spatial", schedule.chunks, *parts)
        case Asynchronous():
            return ("asynchronous", signature(schedule.first), signature(schedule.second))
        case _:
            assert_never(schedule)


def _turns(schedule: Schedule) -> Iterator[Signature]:
    if isinstance(schedule, Temporal):
        yield from _turns(schedule.first)
        yield from _turns(schedule.second)
    else:
        yield signature(schedule)


def draw(schedule: Schedule) -> str:
    """The tree as text, one node a line."""
    return "\n".join(_lines(schedule))


def _lines(schedule: Schedule) -> list[str]:
    match schedule:
        case Leaf():
            option = schedule.option
            plural = "" if option.devices == 1 else "s"
            form = f", {option.form}" if option.form else ""
            return [
                f"{schedule.task} on {option.devices} device{plural}, {option.seconds:.4g} s{form}"
            ]
        case Temporal():
            head = "Temporal"
        case Spatial():
            head = "Spatial" if schedule.chunks == 1 else f"Spatial, {schedule.chunks} chunks"
        case Asynchronous():
            head = "Asynchronous"
        case _:
            assert_never(schedule)
    first, second = _lines(schedule.first), _lines(schedule.second)
    return [
        head,
        *(f"{'|-- ' if at == 0 else '|   '}{line}" for at, line in enumerate(first)),
        *(f"{'`-- ' if at == 0 else '    '}{line}" for at, line in enumerate(second)),
    ]
