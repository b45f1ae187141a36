"""Fields of two plans beside each other, in as many digits as tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeAlias

from flowrl.cost.memory import format_bytes
from flowrl.graph.types import Op
from flowrl.plan.host import MAIN_PROCESS
from flowrl.plan.names import device_names
from flowrl.plan.plan_fields import field_text
from flowrl.plan.schema import Operation, PlacementPlan, StartUnit
from flowrl.plan.show.many import seconds_apart, seconds_text
from flowrl.wording import counted

__all__ = ["bytes_pair", "changed", "operation_words", "pair", "seconds_pair"]


MOST_DIGITS = 9
"""That numbers are told in, to tell them apart."""

Finer: TypeAlias = Callable[[Any, int], str]
"""A value in words with so many digits behind the point."""


def pair(
    old: Any, new: Any, text: Callable[[Any], str], finer: Finer | None = None
) -> tuple[str, str]:
    """Both in words; where words are alike and values are not, in as many digits as tell them
    apart, or as they are."""
    words = text(old), text(new)
    digits = 2
    while finer is not None and words[0] == words[1] and old != new and digits <= MOST_DIGITS:
        words = finer(old, digits), finer(new, digits)
        digits += 1
    return (str(old), str(new)) if words[0] == words[1] and old != new else words


def bytes_pair(old: int, new: int) -> tuple[str, str]:
    """Both sizes; `-` for nothing.

    >>> bytes_pair(3 << 30, 3 << 30 | 1 << 24), bytes_pair(3 << 30, (3 << 30) + 1)
    (('3.00 GiB', '3.02 GiB'), ('3,221,225,472 bytes', '3,221,225,473 bytes'))
    """
    return pair(old, new, lambda size: format_bytes(size) if size else "-", _finer_bytes)


def _finer_bytes(nbytes: int, digits: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size and digits <= 4:
            return f"{nbytes / size:,.{digits}f} {unit}"
    return f"{nbytes:,} bytes"


def seconds_pair(old: float | None, new: float | None) -> tuple[str, str]:
    """Both times; `-` for one that there is not."""
    if old is not None and new is not None:
        return seconds_apart(old, new)
    one, other = ("-" if each is None else seconds_text(each) for each in (old, new))
    return one, other


def changed(
    what: str,
    old: Any,
    new: Any,
    text: Callable[[Any], str] = field_text,
    finer: Finer | None = None,
) -> Iterator[str]:
    """A line where values differ."""
    if old != new:
        yield f"{what}: {' -> '.join(pair(old, new, text, finer))}"


_NAMES = {
    "kv_tokens": "kv cache",
    "micro_tokens": "micro-batch",
    "micro_batch": "micro-batch",
    "move_s": "to the host and back",
    "steady_s": "from one batch to the next",
    "seconds": "takes by itself",
}
"""Fields of an operation that have another name for people."""

_APART = ("start", "chunk", "process", "cores", "environment", "replicas", "node")
"""Those that have lines of their own."""


def operation_words(
    old: Operation, new: Operation, one: PlacementPlan, other: PlacementPlan
) -> Iterator[str]:
    """All in which an operation differs; not what follows from another of its fields.

    Args:
        one: The plan that has `old`.
        other: The plan that has `new`.
    """
    node = old.node
    for field in fields(old):
        name = field.name
        is_told = name == "micro_batch" and old.micro_tokens != new.micro_tokens
        if name in _APART or is_told:
            continue
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name in ("seconds", "steady_s", "move_s"):
            yield f"{node} {_NAMES[name]}: {' -> '.join(seconds_pair(before, after))}"
        else:
            yield from changed(f"{node} {_NAMES.get(name, name)}", before, after, _text(name))
    by, by_now = _drawn_by(old, one), _drawn_by(new, other)
    if by != by_now:
        yield from changed(f"{node} drawn by", by, by_now)
    else:
        yield from changed(f"{node} process", old.process, new.process)
        yield from changed(f"{node} cores", list(old.cores), list(new.cores))
        if old.layout == new.layout:
            yield from changed(f"{node} replicas", old.replicas, new.replicas)
    yield from changed(f"{node} begins on", _begins(old), _begins(new))
    yield from _environment(old, new)


def _text(name: str) -> Callable[[Any], str]:
    match name:
        case "devices":
            return lambda devices: device_names(devices) or "-"
        case "layout":
            return lambda layout: str(layout.describe())
        case "offload" | "after":
            return lambda words: ", ".join(words) or "none"
        case "micro_tokens" | "kv_tokens":
            return lambda tokens: f"{tokens:,} tokens" if tokens else "-"
        case "micro_batch":
            return lambda rows: f"{rows:,} rows"
        case "library" | "slots":
            return lambda value: field_text(value) if value else "-"
        case _:
            return field_text


def _begins(operation: Operation) -> str:
    """What must be there before an operation begins, and how much of it it takes at once."""
    match operation.start:
        case StartUnit.STEP:
            text = "the beginning of the step"
        case StartUnit.BATCH:
            text = "the whole batch"
        case unit:
            if operation.chunk:
                return counted(operation.chunk, str(unit))
            return f"the first {unit}"
    return f"{text}, {operation.chunk:,} at once" if operation.chunk else text


def _drawn_by(operation: Operation, plan: PlacementPlan) -> str:
    """Who draws, of a plan for one machine; nothing of others, whose layout says it."""
    if operation.op != Op.GENERATE or plan.schedule is not None:
        return "-"
    if operation.process in ("", MAIN_PROCESS):
        return "its role's process"
    cores = f" on cores {', '.join(map(str, operation.cores))}" if operation.cores else ""
    return f"{counted(operation.replicas, 'engine process', 'engine processes')}{cores}"


def _environment(old: Operation, new: Operation) -> Iterator[str]:
    one, other = old.environment, new.environment
    if one is None or other is None:
        use = one or other
        if one is not other and use is not None:
            text = f"{use.mode}, {use.at_once:,.0f} calls at once"
            yield f"{old.node} environment: {text if one else '-'} -> {text if other else '-'}"
        return
    for field in fields(one):
        before, after = getattr(one, field.name), getattr(other, field.name)
        name = "" if field.name == "mode" else f" {field.name}"
        yield from changed(f"{old.node} environment{name}", before, after)
