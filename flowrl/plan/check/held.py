"""Whether devices and hosts hold what a plan's file decides, and the nearest changes where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from flowrl.cost.memory import format_bytes
from flowrl.errors import PlanError
from flowrl.plan.many import Chosen
from flowrl.plan.names import cache_words, way_words
from flowrl.plan.schema import PlacementPlan, PredictedMemory
from flowrl.plan.show.many import seconds_text
from flowrl.plan.ways.candidate import RECOMPUTE, Candidate
from flowrl.plan.ways.tasks import TaskWork
from flowrl.plan.within_hosts import overfull_host
from flowrl.plan.write.held import held_memory

Again: TypeAlias = Callable[[PlacementPlan], Chosen]
"""The decisions of a plan's file, priced; raises PlanError for those that no task can have."""

_MOST_OFFERED = 3


def check_held(chosen: Chosen, plan: PlacementPlan, where: str, again: Again) -> None:
    """Every device holds what it has to, in every phase; and so do the hosts.

    Args:
        again: Prices the plan with a change, for the hint.

    Raises:
        PlanError: they do not; has the parts, whose they are, and what fits instead.
    """
    entry = _too_full(chosen, plan)
    if entry is not None:
        budget = plan.pool.device(entry.device).budget_bytes
        task = _at_fault(chosen, entry)
        number = next(i for i, one in enumerate(plan.operations) if one.node == task.id)
        raise PlanError(
            f"{task.id} does not fit as the file decides: {entry.memory.phase} of {entry.active} "
            f"needs {format_bytes(entry.memory.total)} of {format_bytes(budget)} on {entry.device}",
            where=f"{where}: operations.{number}",
            found=f"{_decisions(chosen.ways[task.id])}: {entry.memory.describe()}",
            expected=f"at most {format_bytes(budget)}",
            hint=_nearest(chosen, plan, entry, again),
        )
    over = _host_over(chosen)
    if over is not None:
        held, host = over
        each = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items())
        raise PlanError(
            "what the file puts on the hosts is more than they hold",
            where=f"{where}: operations",
            found=f"{format_bytes(sum(held.values()))} for a device: {each}",
            expected=f"at most {format_bytes(host)}",
            hint=f"take `offload` off {' or '.join(held)}",
        )


def _host_over(chosen: Chosen) -> tuple[dict[str, int], int] | None:
    """Of a device whose host does not hold its part: what each task has there, and the part."""
    return overfull_host(chosen.numbers, chosen.ways, lambda task: chosen.posed.made(task).host)


def _too_full(chosen: Chosen, plan: PlacementPlan) -> PredictedMemory | None:
    """The first phase in which a device holds more than it may."""
    budgets = {device.address: device.budget_bytes for device in plan.pool.devices}
    rows = held_memory(chosen)
    return next((one for one in rows if one.memory.total > budgets[one.device]), None)


def _at_fault(chosen: Chosen, entry: PredictedMemory) -> TaskWork:
    """The task that works when a device is full."""
    own = [task for task in chosen.posed.tasks if task.role.name == entry.active]
    here = [task for task in _tasks_on(chosen, entry.device) if task in own] or own
    same = [task for task in here if task.phase == entry.memory.phase]
    return (same or here or list(chosen.posed.tasks))[0]


def _tasks_on(chosen: Chosen, device: str) -> list[TaskWork]:
    at = chosen.posed.addresses.index(device)
    return [task for task in chosen.posed.tasks if at in chosen.numbers[task.id]]


def _decisions(way: Candidate) -> str:
    """What of a way decides its memory."""
    words = way_words(way.layout, way.recompute, way.offload)
    if way.kv_tokens:
        return f"{words}, {cache_words(way.kv_tokens, way.slots)}"
    return f"{words}, micro_tokens {way.micro_tokens:,}"


def _nearest(chosen: Chosen, plan: PlacementPlan, entry: PredictedMemory, again: Again) -> str:
    """Single changes of what is on the device with which everything fits, fastest first."""
    fits: list[tuple[float, str]] = []
    for task in _tasks_on(chosen, entry.device):
        for words, change in _changes(chosen, plan, entry, task):
            changed = tuple(
                replace(one, **change) if one.node in task.operations else one
                for one in plan.operations
            )
            other = replace(plan, operations=changed)
            try:
                new = again(other)
            except PlanError:
                continue
            if _host_over(new) is None and _too_full(new, other) is None:
                kept = any(
                    p.field in change and set(p.nodes) & {*task.operations} for p in plan.pins
                )
                pin = ", and its pin" if kept else ""
                fits.append((new.step_s, f"{words}{pin} (a step of {seconds_text(new.step_s)})"))
    if fits:
        offered = [words for _, words in sorted(fits)[:_MOST_OFFERED]]
        return f"take {' or '.join(offered)}, or undo the edit"
    return "take more devices for it, a layout that divides more, or undo the edit"


def _changes(
    chosen: Chosen, plan: PlacementPlan, entry: PredictedMemory, task: TaskWork
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be otherwise with a task so that a device holds less, in words and in fields."""
    way, longest = chosen.ways[task.id], chosen.posed.made(task.id).request.max_length
    if task.generates:
        held = [one for one in entry.memory.parts if one.name == "kv cache"]
        cache = sum(one.nbytes for one in held if one.role == task.role.name)
        room = plan.pool.device(entry.device).budget_bytes - (entry.memory.total - cache)
        tokens = int(way.kv_tokens * room / cache) if cache and room > 0 else 0
        if tokens >= longest:
            yield f"at most {tokens:,} kv_tokens of {task.id}", {"kv_tokens": tokens}
        return
    if task.updates:
        for kind in RECOMPUTE[RECOMPUTE.index(way.recompute) + 1 :]:
            yield f"{task.id}.recompute: {kind}", {"recompute": kind}
        if "optimizer" not in way.offload:
            offload = ("optimizer", *way.offload)
            yield f"{task.id}.offload: [{', '.join(offload)}]", {"offload": offload}
    if "all" not in way.offload:
        offload = (*way.offload, "all")
        yield f"{task.id}.offload: [{', '.join(offload)}]", {"offload": offload}
    if way.micro_tokens > longest:
        rows = {"micro_tokens": longest, "micro_batch": 1}
        yield f"{task.id}.micro_tokens: {longest}", rows
