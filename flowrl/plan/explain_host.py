"""How much of its host's memory a device takes, and for what."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.memory import format_bytes
from flowrl.plan.many import Chosen, host_bytes

__all__ = ["host_notes", "host_words"]


def host_notes(best: Chosen) -> Iterator[str]:
    """One line for each kind of device with something in the memory of its hosts."""
    kinds: dict[str, list[str]] = {}
    for task in best.posed.tasks:
        kinds.setdefault(best.posed.group_of(task.id).device.name, []).append(task.id)
    for name, tasks in kinds.items():
        words = host_words(best, tasks)
        if words:
            host = best.posed.made(tasks[0]).host
            of = "" if host is None else f", of {format_bytes(host)} that it may fill"
            who = f"each {name}" if len(kinds) > 1 else "a device"
            yield f"{who} fills up to {words}{of}"


def host_words(best: Chosen, tasks: list[str]) -> str:
    """`85.1 GiB of its host's memory (actor.update 85.1 GiB)`, of the fullest device of some tasks;
    empty where nothing of them is on a host."""
    numbers = {name: best.numbers[name] for name in tasks}
    ways = {name: best.ways[name] for name in tasks}
    most = host_bytes(numbers, ways)
    if not most:
        return ""
    every = sorted({number for own in numbers.values() for number in own})

    def those_on(number: int) -> list[str]:
        return [name for name in tasks if number in numbers[name] and ways[name].host]

    fullest = max(every, key=lambda number: sum(ways[name].host for name in those_on(number)))
    each = ", ".join(f"{name} {format_bytes(ways[name].host)}" for name in those_on(fullest))
    return f"{format_bytes(most)} of its host's memory ({each})"
