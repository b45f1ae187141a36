"""How much of its host's memory a device takes, and for what."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.memory import format_bytes
from flowrl.plan.many import Chosen
from flowrl.plan.names import device_names
from flowrl.plan.within_hosts import fullest_host


def host_notes(best: Chosen) -> Iterator[str]:
    """One line for each group of devices with something in the memory of its hosts."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for task in best.posed.tasks:
        groups.setdefault(best.posed.group_of(task.id).addresses, []).append(task.id)
    for addresses, tasks in groups.items():
        words = host_words(best, tasks)
        if words:
            host = best.posed.made(tasks[0]).host
            of = "" if host is None else f", of {format_bytes(host)} that it may fill"
            name = best.posed.group_of(tasks[0]).device.name
            who = f"each {name} of {device_names(addresses)}" if len(groups) > 1 else "a device"
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
