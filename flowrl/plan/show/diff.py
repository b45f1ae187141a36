"""What one plan does otherwise than another, for people: each field but notes, reasons,
alternatives and warnings, which follow from the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeAlias

from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.names import device_names
from flowrl.plan.plan_fields import differences, field_text, texts_apart
from flowrl.plan.schema import Operation, PlacementPlan
from flowrl.plan.show.diff_predicted import predictions
from flowrl.plan.show.diff_words import changed, operation_words, pair, seconds_pair


def diff_plans(old: PlacementPlan, new: PlacementPlan) -> tuple[str, ...]:
    """One line for each thing that differs, as `what: old -> new`; nothing where none does.

    Predictions are told last. What no words are for (figures of devices, for one) is told by its
    key.
    """
    return (
        *_facts(old, new),
        *_operations(old, new),
        *_ways(old, new),
        *predictions(old, new),
        *_fields(old, new),
    )


_IN_WORDS = re.compile(
    r"^(graph|sizes|placements|operations|schedule|kind|pins|prediction|engine_flags|residency"
    r"|weight_routes|channels)\b"
)
"""Parts of a plan of which every field is told in words."""


_OF_DEVICE = re.compile(r"^pool\.devices\.(\d+)\.(\w+)$")


def _fields(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """Fields of which no other line tells; those of devices once for all that differ alike."""
    counts = _pool(old) != _pool(new)
    alike: dict[tuple[str, str], list[str]] = {}
    for key, one, other in differences(old, new):
        if _IN_WORDS.match(key):
            continue
        is_list = isinstance(one, list) and isinstance(other, list)
        texts = texts_apart(one, other) if is_list else pair(one, other, field_text)
        words = " -> ".join(texts)
        if (found := _OF_DEVICE.match(key)) is not None:
            address = old.pool.devices[int(found[1])].address
            alike.setdefault((found[2], words), []).append(address)
        elif not (counts and key.startswith("pool.devices")):
            yield f"{key}: {words}"
    for (name, words), addresses in alike.items():
        yield f"{name} of {device_names(addresses)}: {words}"


def _facts(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    yield from changed("workflow", old.graph, new.graph)
    yield from changed("devices", _pool(old), _pool(new))
    for name in old.sizes.__dataclass_fields__:
        yield from changed(f"sizes.{name}", getattr(old.sizes, name), getattr(new.sizes, name))
    yield from changed("schedule", old.kind or "one device", new.kind or "one device")
    yield from changed("order", old.schedule, new.schedule, _order, _order)
    yield from _roles(old, new)
    pinned = [
        [f"{p.subject}.{p.field}={p.value} ({', '.join(p.nodes)})" for p in plan.pins]
        for plan in (old, new)
    ]
    brief = [[f"{p.subject}.{p.field}={p.value}" for p in plan.pins] for plan in (old, new)]
    told = pinned if brief[0] == brief[1] else brief
    yield from changed("pinned", ", ".join(told[0]) or "-", ", ".join(told[1]) or "-")


def _roles(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """Placements; not what follows from a change of the role's operations that is told."""
    before = {placement.role: placement for placement in old.placements}
    after = {placement.role: placement for placement in new.placements}
    for role in dict.fromkeys((*before, *after)):
        if role not in after:
            yield f"role {role}: removed"
            continue
        if role not in before:
            yield f"role {role}: added, on {device_names(after[role].devices)}"
            continue
        follows = _follows(role, old, new)
        for field in fields(before[role]):
            one, other = (getattr(each[role], field.name) for each in (before, after))
            if field.name not in follows:
                yield from changed(f"{role}.{field.name}", one, other, _text_of(field.name))


def _follows(role: str, old: PlacementPlan, new: PlacementPlan) -> frozenset[str]:
    """What of a placement is told with the role's operations."""
    before = {one.node: one for one in old.operations if one.role == role}
    both = [(before[one.node], one) for one in new.operations if one.node in before]
    names = ("devices", "layout", "slots")
    found = {name for name in names if any(getattr(a, name) != getattr(b, name) for a, b in both)}
    if "layout" in found:
        found.add("replicas")
    return frozenset("num_slots" if name == "slots" else name for name in found)


def _text_of(name: str) -> Callable[[Any], str]:
    if name == "devices":
        return lambda devices: device_names(devices) or "-"
    if name == "layout":
        return lambda layout: str(layout.describe())
    return field_text


def _order(step: ScheduleStep | None, digits: int = 1) -> str:
    """A schedule in a line: `generate (4), then update (4)`."""
    if step is None:
        return "-"
    if step.node is not None:
        return f"{step.node} ({step.devices})"
    parts = [_order(part, digits) for part in step.parts]
    nested = [
        f"[{text}]" if part.parts else text for text, part in zip(parts, step.parts, strict=True)
    ]
    joint = {"temporal": ", then ", "spatial": " alongside ", "asynchronous": " a step ahead of "}
    text = joint.get(step.kind, f" {step.kind} ").join(nested)
    if step.kind == "spatial":
        text += f" in {step.chunks} chunks" if step.chunks > 1 else " in one piece"
    if step.ready:
        shares = ", ".join(f"{100 * one:.{digits}f}" for one in step.ready)
        text += f" after {shares} % of the first's time"
    sizes = [part.devices for part in step.parts]
    if step.devices != (max(sizes, default=0) if step.kind == "temporal" else sum(sizes)):
        text += f" on {step.devices}"
    return text


def _operations(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    before = {operation.node: operation for operation in old.operations}
    after = {operation.node: operation for operation in new.operations}
    for node in dict.fromkeys((*before, *after)):
        if node not in after:
            yield f"{node}: removed"
        elif node not in before:
            yield f"{node}: added"
        else:
            one, other = (_seen(each[node], plan) for each, plan in ((before, old), (after, new)))
            yield from operation_words(one, other, old, new)


def _seen(operation: Operation, plan: PlacementPlan) -> Operation:
    """The same without seconds that the prediction has too, which is told with it."""
    times = {one.node: one.seconds for one in plan.prediction.confidence}
    use, seconds = operation.environment, operation.seconds
    if use is not None and times.get(operation.node) == use.seconds:
        return replace(operation, environment=replace(use, seconds=0.0))
    if times.get(operation.node) == seconds:
        return replace(operation, seconds=None)
    return operation


def _ways(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """Weights, payloads, engines and what is on the devices when."""
    yield from _rows("", _switches(old), _switches(new))
    yield from _rows("weights ", _routes(old), _routes(new))
    times = [
        {(one.source, one.node or one.destination): one.seconds for one in plan.weight_routes}
        for plan in (old, new)
    ]
    for name in (one for one in times[0] if one in times[1]):
        if times[0][name] != times[1][name]:
            both = seconds_pair(times[0][name], times[1][name])
            yield f"weights {' to '.join(name)} take: {' -> '.join(both)}"
    yield from _rows("channel ", _channels(old), _channels(new))
    flags = [
        {(one.node, one.engine): dict(one.flags) for one in p.engine_flags} for p in (old, new)
    ]
    for node, engine in dict.fromkeys((*flags[0], *flags[1])):
        one, other = (each.get((node, engine)) for each in flags)
        if one is None or other is None:
            words = "not started" if one is None else "started"
            yield f"{node} engine {engine}: {words} -> {'started' if one is None else 'gone'}"
            continue
        told = [
            f"{name} {one.get(name, '-') or 'given'} -> {other.get(name, '-') or 'given'}"
            for name in dict.fromkeys((*one, *other))
            if one.get(name) != other.get(name)
        ]
        if told:
            yield f"{node} engine: {', '.join(told)}"


_Rows: TypeAlias = dict[str, tuple[str, ...]]
"""By name, what there is to say of each, in pieces that are compared one by one."""


def _rows(prefix: str, old: _Rows, new: _Rows) -> Iterator[str]:
    """Of each name, the pieces that differ."""
    for name in dict.fromkeys((*old, *new)):
        one, other = old.get(name, ()), new.get(name, ())
        if len(one) == len(other):
            both = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
            one, other = tuple(a for a, _ in both), tuple(b for _, b in both)
        yield from changed(f"{prefix}{name}", ", ".join(one) or "-", ", ".join(other) or "-")


def _switches(plan: PlacementPlan) -> _Rows:
    """Of each role, what it gives and takes."""
    found: _Rows = {}
    for one in plan.residency:
        words = f"{one.action} {one.what} before {one.before} on {one.device}"
        name = f"{one.role} residency"
        found[name] = (*found.get(name, ()), words)
    return found


def _routes(plan: PlacementPlan) -> _Rows:
    found: _Rows = {}
    for one in plan.weight_routes:
        name = f"{one.source} to {one.node or one.destination}"
        found[name] = (
            *found.get(name, ()),
            str(one.transport),
            f"from {one.source_layout.describe()}",
            f"to {one.destination_layout.describe()}",
            f"after {one.after}",
            f"every {one.every} steps" if one.every > 1 else "every step",
            " ".join(one.parameter_classes) or "nothing",
            f"for {one.destination}",
        )
    return found


def _channels(plan: PlacementPlan) -> _Rows:
    found: _Rows = {}
    for one in plan.channels:
        name = f"{one.source} to {one.destination}"
        capacity = f"{one.capacity:,} samples" if one.capacity else "a batch"
        words = (str(one.transport), f"holds {capacity}", f"of {' '.join(one.fields) or 'nothing'}")
        found[name] = (*found.get(name, ()), *words)
    return found


def _pool(plan: PlacementPlan) -> str:
    counts: dict[str, int] = {}
    for device in plan.pool.devices:
        if device.type != "cpu":
            counts[device.name] = counts.get(device.name, 0) + 1
    return ", ".join(f"{number} x {name}" for name, number in counts.items()) or "CPUs"
