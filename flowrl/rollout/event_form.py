"""Events as plain JSON values, and back: `event_from_json(event_to_json(e)) == e`.

An event is an object with its kind and fields; fields with their default are left out, and an end
of an attempt is a list of its fields, because there are many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_args

from flowrl.errors import SchedulerError
from flowrl.ids import SampleId
from flowrl.rollout.events import Event, SampleEnd
from flowrl.specs import FinishReason

__all__ = ["event_from_json", "event_to_json"]

_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}

_FIELDS: dict[str, list[tuple[str, object]]] = {
    name: [(of.name, of.default) for of in fields(kind)] for name, kind in _KINDS.items()
}


def event_to_json(event: Event) -> dict[str, Any]:
    """`{"event": kind, field: value, ...}`."""
    kind = type(event).__name__
    obj: dict[str, Any] = {"event": kind}
    for name, default in _FIELDS[kind]:
        value = getattr(event, name)
        if default is MISSING or value != default:
            obj[name] = [_end_to_json(end) for end in value] if name == "ends" else value
    return obj


def event_from_json(obj: dict[str, Any]) -> Event:
    """The event that `event_to_json` described.

    Raises:
        SchedulerError: it describes none.
    """
    try:
        kind = _KINDS[obj["event"]]
        values = {
            name: _READERS.get(name, _plain)(value)
            for name, value in obj.items()
            if name != "event"
        }
        event: Event = kind(**values)
        return event
    except (KeyError, TypeError, ValueError) as error:
        raise SchedulerError(
            "this is no event of the scheduler",
            found=f"{type(error).__name__}: {error} in {str(obj)[:200]}",
            expected="an object as event_to_json makes it",
        ) from error


def _end_to_json(end: SampleEnd) -> list[Any]:
    return [end.sample, end.attempt, end.reason, end.num_tokens, end.versions]


def _end_from_json(values: list[Any]) -> SampleEnd:
    sample, attempt, reason, num_tokens, versions = values
    return SampleEnd(
        sample=SampleId(sample),
        attempt=attempt,
        reason=FinishReason(reason),
        num_tokens=num_tokens,
        versions=_pairs(versions),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pairs(value: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(item) for item in value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "progress": _pairs,
    "scores": _pairs,
    "verdicts": _pairs,
    "ends": lambda value: tuple(_end_from_json(item) for item in value),
}
