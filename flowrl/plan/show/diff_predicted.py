"""The predictions in which two plans differ."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.memory import format_bytes
from flowrl.plan.names import device_names
from flowrl.plan.prediction import CostSource
from flowrl.plan.schema import PlacementPlan, PredictedMemory, PredictedSpan
from flowrl.plan.show.diff_words import bytes_pair, changed, seconds_pair
from flowrl.plan.show.many import memory_note
from flowrl.wording import percent


def predictions(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """Each prediction that differs, in a line."""
    one, other = old.prediction, new.prediction
    yield from _seconds("step", one.step_s, other.step_s)
    yield from _times(old, new)
    yield from _bars(old, new)
    yield from changed("bottleneck", one.bottleneck or "-", other.bottleneck or "-")
    shares = one.idle_share, other.idle_share
    yield from changed("idle device time", *shares, _share, _share)
    yield from _seconds("weight sync", one.sync_s, other.sync_s)
    yield from _seconds("device-seconds per sample", one.device_s, other.device_s)
    rates = one.tokens_per_device_s, other.tokens_per_device_s
    yield from changed("tokens/s per device", *rates, _tokens, _tokens)
    if _peak(old) != _peak(new):
        yield f"fullest device: {' -> '.join(bytes_pair(_peak(old), _peak(new)))}"
    yield from _memory(old, new)


def _seconds(what: str, old: float | None, new: float | None) -> Iterator[str]:
    if old != new:
        yield f"{what}: {' -> '.join(seconds_pair(old, new))}"


def _tokens(rate: float | None, digits: int = 0) -> str:
    return "-" if rate is None else f"{rate:,.{digits}f}"


def _share(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else percent(share, digits)


def _times(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    before, after = ({one.node: one for one in p.prediction.confidence} for p in (old, new))
    for node in dict.fromkeys((*before, *after)):
        one, other = before.get(node), after.get(node)
        if one == other:
            continue
        said = [None if each is None else each.seconds for each in (one, other)]
        texts = seconds_pair(*said)
        words = texts[0] if said[0] == said[1] else " -> ".join(texts)
        more = ", ".join(_parts(one, other)) if one and other else ""
        yield f"{node} takes: {words}{f' ({more})' if more else ''}"


def _parts(old: CostSource, new: CostSource) -> list[str]:
    """Of a time, the parts that differ and where it comes from."""
    told = [] if old.source == new.source else [f"{old.source} -> {new.source}"]
    before, after = dict(old.parts), dict(new.parts)
    if old.seconds != new.seconds and not (before and after):
        return told
    return told + [
        f"{name} {' -> '.join(seconds_pair(before.get(name), after.get(name)))}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def _bars(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """When operations begin and end."""
    before, after = _spans(old), _spans(new)
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            gone = (
                "in the timeline -> not in it" if other is None else "not in it -> in the timeline"
            )
            yield f"{key[0]}: {gone}"
            continue
        yield from _seconds(f"{key[0]} begins", one.begin_s, other.begin_s)
        yield from _seconds(f"{key[0]} ends", one.end_s, other.end_s)
        if _moved(key[0], old, new) or one.device == other.device:
            continue
        yield from changed(f"{key[0]} in the timeline of", one.device, other.device)


def _spans(plan: PlacementPlan) -> dict[tuple[str, int], PredictedSpan]:
    found: dict[tuple[str, int], PredictedSpan] = {}
    for span in plan.prediction.timeline or ():
        found[span.node, sum(node == span.node for node, _ in found)] = span
    return found


def _moved(node: str, old: PlacementPlan, new: PlacementPlan) -> bool:
    """Whether an operation is told to be on other devices."""
    on = [[one.devices for one in plan.operations if one.node == node] for plan in (old, new)]
    return on[0] != on[1]


def _peak(plan: PlacementPlan) -> int:
    return max((entry.memory.total for entry in plan.prediction.memory), default=0)


def _memory(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """What devices hold in each phase, fuller ones first, with the parts that differ."""
    before, after = _rows(old), _rows(new)
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if one == other:
            continue
        what = f"memory in {key[1]} of {key[0]}{', other devices' if key[2] else ''}"
        if one is None or other is None:
            yield f"{what}: {_held(one) if one else '-'} -> {_held(other) if other else '-'}"
            continue
        totals = bytes_pair(one.memory.total, other.memory.total)
        words = [totals[0] if one.memory.total == other.memory.total else " -> ".join(totals)]
        words += _held_parts(one, other)
        where = _on(one), _on(other)
        words += [] if where[0] == where[1] else [f"on {where[0]} -> {where[1]}"]
        yield f"{what}: {', '.join(words)}"


def _rows(plan: PlacementPlan) -> dict[tuple[str, str, int], PredictedMemory]:
    found: dict[tuple[str, str, int], PredictedMemory] = {}
    for one in sorted(plan.prediction.memory, key=lambda one: -one.memory.total):
        mine = (one.active, str(one.memory.phase))
        found[*mine, sum(key[:2] == mine for key in found)] = one
    return found


def _held(entry: PredictedMemory) -> str:
    return f"{format_bytes(entry.memory.total)} on {_on(entry)}"


def _on(entry: PredictedMemory) -> str:
    return f"{device_names([entry.device])}{memory_note(entry.num_devices)}"


def _held_parts(old: PredictedMemory, new: PredictedMemory) -> list[str]:
    before, after = _named(old), _named(new)
    return [
        f"{name} {' -> '.join(bytes_pair(before.get(name, 0), after.get(name, 0)))}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name, 0) != after.get(name, 0)
    ]


def _named(entry: PredictedMemory) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in entry.memory.parts:
        name = f"{part.role} {part.name}".strip()
        found[name] = found.get(name, 0) + part.nbytes
    return found
