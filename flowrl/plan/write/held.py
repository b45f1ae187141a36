"""What each device holds while each task works, by named parts: the proof of a plan over many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.memory import MemoryPart, PhaseMemory
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.many import Chosen
from flowrl.plan.schema import PredictedMemory
from flowrl.plan.ways.tasks import TaskWork

PLAYS = "environment of "

_WEIGHTS = ("parameters", "engine weights")
_MOVABLE = ("parameters", "optimizer", "master weights", "engine weights")
_RESIDENT = (*_MOVABLE, "kv cache", "captured graphs", "workspace", "communication")


def sharing_sets(chosen: Chosen) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Tasks that share devices, with the devices, numbered in the group.

    Devices that the environment of a task has alone name it with `PLAYS` before it.
    """
    stand: list[tuple[str, tuple[int, ...]]] = []
    for task in chosen.posed.tasks:
        stand.append((task.id, chosen.numbers[task.id]))
        stand.append((PLAYS + task.id, chosen.played.get(task.id, ())))
    on = np.zeros(1 + max(max(numbers, default=0) for _, numbers in stand), np.int64)
    for bit, (_, numbers) in enumerate(stand):
        on[list(numbers)] |= 1 << bit
    masks, first = np.unique(on, return_index=True)
    return {
        tuple(name for bit, (name, _) in enumerate(stand) if mask >> bit & 1): tuple(
            np.flatnonzero(on == mask).tolist()
        )
        for mask in masks[first.argsort()].tolist()
        if mask
    }


def held_memory(chosen: Chosen) -> tuple[PredictedMemory, ...]:
    """One entry for each set of devices that hold the same, and each task that works there."""
    posed = chosen.posed
    found = []
    for tasks, numbers in sharing_sets(chosen).items():
        for active in tasks:
            name = active.removeprefix(PLAYS)
            task = chosen.posed.task(name)
            plays = task.region is not None and name != active
            found.append(
                PredictedMemory(
                    device=posed.addresses[numbers[0]],
                    active=task.region.role if plays and task.region else task.role.name,
                    memory=_held(chosen, tasks, active),
                    num_devices=len(numbers),
                )
            )
    return tuple(found)


def most_held(chosen: Chosen, task: str) -> PhaseMemory:
    """What the fullest of a task's devices holds while it works, all roles added up."""
    found = [_held(chosen, tasks, task) for tasks in sharing_sets(chosen) if task in tasks]
    return max(found, key=lambda one: one.total)


def full_phases(chosen: Chosen, task: str) -> list[tuple[str, dict[str, int]]]:
    """What the fullest of a task's devices holds while each of the tasks on them works, and whose
    bytes these are; the fullest first."""
    found: dict[str, dict[str, int]] = {}
    for tasks in sharing_sets(chosen):
        for active in tasks if task in tasks else ():
            held: dict[str, int] = {}
            for name, part in _by_task(chosen, tasks, active):
                own = name.removeprefix(PLAYS)
                held[own] = held.get(own, 0) + part.nbytes
            works = active.removeprefix(PLAYS)
            if sum(held.values()) > sum(found.get(works, {}).values()):
                found[works] = held
    return sorted(found.items(), key=lambda one: -sum(one[1].values()))


def _held(chosen: Chosen, tasks: tuple[str, ...], active: str) -> PhaseMemory:
    """What a device of some tasks holds while one of them works."""
    kind = _group_of(chosen, active).device.type
    runtime = MemoryPart(role="", name="runtime", nbytes=RUNTIME_BYTES[kind])
    parts = (part for _, part in _by_task(chosen, tasks, active))
    phase = chosen.posed.task(active.removeprefix(PLAYS)).phase
    return PhaseMemory(phase=phase, parts=(runtime, *parts))


def _group_of(chosen: Chosen, name: str) -> DeviceGroup:
    """The devices of a task, or of its environment alone."""
    task = name.removeprefix(PLAYS)
    if name != task and task in chosen.posed.outside:
        return chosen.posed.outside[task]
    return chosen.posed.group_of(task)


def _by_task(
    chosen: Chosen, tasks: tuple[str, ...], active: str
) -> Iterator[tuple[str, MemoryPart]]:
    """Parts of the task that works and of those that wait; what is held once is counted once."""
    seen: set[tuple[str, str]] = set()
    for name in (active, *(other for other in tasks if other != active)):
        for part in _environment(chosen, name):
            yield name, part
        if name.startswith(PLAYS):
            continue
        task, way = chosen.posed.task(name), chosen.ways[name]
        memory = chosen.posed.made(name).memory(task, way)
        shared = _holding(chosen, name)
        again = shared in seen and bool(way.weight_bytes)
        seen.add(shared)
        called = _called(chosen, tasks, task)
        for part in memory.parts:
            if again and part.name in _WEIGHTS:
                continue
            if name == active or (part.name in _RESIDENT and _stays(task, chosen, part.name)):
                other = called.get(part.name)
                yield name, replace(part, name=other) if other else part


def _holding(chosen: Chosen, name: str) -> tuple[str, str]:
    """Whose weights a task holds, and how they are divided: what is equal is held once."""
    return chosen.posed.task(name).weights or name, chosen.ways[name].form


def _called(chosen: Chosen, tasks: tuple[str, ...], task: TaskWork) -> dict[str, str]:
    """Other names for what a task holds of its own beside its role's trainer."""
    if task.generates and not task.library.in_place:
        return {"parameters": "engine weights", "communication": "engine communication"}
    here = (chosen.posed.task(name) for name in tasks if not name.startswith(PLAYS))
    trainers = [other.id for other in here if other.updates and other.role == task.role]
    if not trainers or _holding(chosen, task.id) == _holding(chosen, trainers[0]):
        return {}
    return {
        "parameters": f"copy for {task.phase}",
        "communication": f"communication for {task.phase}",
    }


def _environment(chosen: Chosen, name: str) -> Iterator[MemoryPart]:
    """What an environment takes of a device that it is on, whoever works."""
    task = name.removeprefix(PLAYS)
    played, region = chosen.ways[task].played, chosen.posed.task(task).region
    if played is None or region is None or not played.split.nbytes:
        return
    if name.startswith(PLAYS) == bool(played.split.own or played.split.elsewhere):
        yield MemoryPart(role=region.role, name="environment", nbytes=played.split.nbytes)


def _stays(task: TaskWork, chosen: Chosen, part: str) -> bool:
    """Whether a resident part is on the device while others work."""
    if task.generates and task.library.in_place:
        return not task.library.sleeps or part != "kv cache"
    if task.generates:
        return not task.library.sleeps or part not in (*_MOVABLE, "kv cache")
    return "all" not in chosen.ways[task.id].offload or part not in _MOVABLE
