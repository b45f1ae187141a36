"""What one plan does otherwise than another, for people."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.memory import format_bytes
from flowrl.graph.types import Op
from flowrl.plan.host import MAIN_PROCESS
from flowrl.plan.many_form import EnvironmentUse
from flowrl.plan.names import device_names
from flowrl.plan.plan_fields import differences, field_text
from flowrl.plan.render_many import seconds_text
from flowrl.plan.schema import Operation, PlacementPlan
from flowrl.wording import counted

__all__ = ["diff_plans"]


def diff_plans(old: PlacementPlan, new: PlacementPlan) -> tuple[str, ...]:
    """One line for each thing that differs, as `what: old -> new`; nothing where none does.

    Predictions are told last, in words. Where plans differ and no word says in what, their fields
    are told by their keys; reasons, alternatives and notes are not compared, for they follow from
    the rest.
    """
    lines = (*_facts(old, new), *_operations(old, new), *_predictions(old, new))
    return (*lines, *_fields(old, new, told=bool(lines)))


_IN_WORDS = (
    "graph",
    "sizes",
    "kind",
    "pins",
    "prediction",
    "engine_flags",
    "schedule",
    "residency",
    "weight_routes",
    "channels",
    "pool",
)
"""Parts of a plan that are told in words, or follow from what is."""

_PLACED = ("backend", "dtype", "process", "replicas", "num_slots", "devices", "layout")


def _fields(old: PlacementPlan, new: PlacementPlan, *, told: bool) -> Iterator[str]:
    """Fields of which no other line tells.

    Args:
        told: Some line tells of a difference, from which times, routes and channels follow.
    """
    for key, one, other in differences(old, new):
        first, _, rest = key.partition(".")
        name = rest.partition(".")[2].partition(".")[0]
        if told and (first in _IN_WORDS or first == "operations" or name in _PLACED):
            continue
        yield f"{key}: {field_text(one)} -> {field_text(other)}"


def _facts(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    yield from _changed("workflow", old.graph, new.graph)
    yield from _changed("devices", _pool(old), _pool(new))
    for name in old.sizes.__dataclass_fields__:
        yield from _changed(
            f"sizes.{name}", str(getattr(old.sizes, name)), str(getattr(new.sizes, name))
        )
    yield from _changed("schedule", _schedule(old), _schedule(new))
    before = {placement.role: placement for placement in old.placements}
    after = {placement.role: placement for placement in new.placements}
    for role in dict.fromkeys((*before, *after)):
        if role not in after:
            yield f"role {role}: gone"
        elif role not in before:
            yield f"role {role}: new, on {device_names(after[role].devices)}"
        else:
            one, other = before[role], after[role]
            for name in ("backend", "dtype", "process", "replicas", "num_slots"):
                yield from _changed(
                    f"{role}.{name}", str(getattr(one, name)), str(getattr(other, name))
                )
    pinned = [[f"{p.subject}.{p.field}={p.value}" for p in plan.pins] for plan in (old, new)]
    yield from _changed("pinned", ", ".join(pinned[0]) or "-", ", ".join(pinned[1]) or "-")


def _operations(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    before = {operation.node: operation for operation in old.operations}
    after = {operation.node: operation for operation in new.operations}
    for node in dict.fromkeys((*before, *after)):
        if node not in after:
            yield f"{node}: gone"
        elif node not in before:
            yield f"{node}: new"
        else:
            one, other = _words(before[node], old), _words(after[node], new)
            for what, words in one.items():
                yield from _changed(f"{node} {what}", words, other[what])


def _words(operation: Operation, plan: PlacementPlan) -> dict[str, str]:
    return {
        "devices": device_names(operation.devices) or "-",
        "layout": operation.layout.describe(),
        "library": operation.library or "-",
        "shard": operation.shard,
        "recompute": operation.recompute,
        "offload": ", ".join(operation.offload) or "none",
        "micro-batch": f"{operation.micro_tokens} tokens"
        if operation.micro_tokens
        else f"{operation.micro_batch} rows",
        "kv cache": f"{operation.kv_tokens} tokens" if operation.kv_tokens else "-",
        "slots": str(operation.slots or "-"),
        "drawn by": _drawn_by(operation, plan),
        "start": f"{operation.start}, {operation.chunk} at once",
        "environment": _environment(operation.environment),
    }


def _drawn_by(operation: Operation, plan: PlacementPlan) -> str:
    """Who draws, of a plan for one machine; nothing of others, whose layout says it."""
    if operation.op != Op.GENERATE or plan.schedule is not None:
        return "-"
    if operation.process in ("", MAIN_PROCESS):
        return "its role's process"
    cores = f" on cores {', '.join(map(str, operation.cores))}" if operation.cores else ""
    return f"{counted(operation.replicas, 'engine process', 'engine processes')}{cores}"


def _environment(use: EnvironmentUse | None) -> str:
    return "-" if use is None else f"{use.mode}, {use.at_once:,.0f} calls at once"


def _predictions(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    one, other = old.prediction, new.prediction
    yield from _changed("step", _seconds(one.step_s), _seconds(other.step_s))
    for node in dict.fromkeys(entry.node for entry in (*one.confidence, *other.confidence)):
        times = [
            next((entry.seconds for entry in plan.confidence if entry.node == node), None)
            for plan in (one, other)
        ]
        yield from _changed(f"{node} takes", _seconds(times[0]), _seconds(times[1]))
    yield from _changed("waits most for", one.bottleneck or "-", other.bottleneck or "-")
    yield from _changed(
        "a sample takes of a device", _seconds(one.device_s), _seconds(other.device_s)
    )
    yield from _changed("fullest device", _peak(old), _peak(new))


def _changed(what: str, old: str, new: str) -> Iterator[str]:
    if old != new:
        yield f"{what}: {old} -> {new}"


def _pool(plan: PlacementPlan) -> str:
    counts: dict[str, int] = {}
    for device in plan.pool.devices:
        if device.type != "cpu":
            counts[device.name] = counts.get(device.name, 0) + 1
    return ", ".join(f"{number} x {name}" for name, number in counts.items()) or "CPUs"


def _schedule(plan: PlacementPlan) -> str:
    return plan.kind or "one device"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def _peak(plan: PlacementPlan) -> str:
    totals = [entry.memory.total for entry in plan.prediction.memory]
    return format_bytes(max(totals)) if totals else "-"
