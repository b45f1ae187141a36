"""How much of its host's memory a device takes, and for what."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.memory import format_bytes
from flowrl.plan.many import Chosen
from flowrl.plan.within_hosts import fullest_host

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
    held = fullest_host(numbers, ways)
    if not held:
        return ""
    each = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items())
    return f"{format_bytes(sum(held.values()))} of its host's memory ({each})"
