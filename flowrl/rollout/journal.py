"""The journal of a scheduler: its events as JSON lines, from which its state can be made again.

    {"journal": 1, "settings": {"group_size": 2, ...}}
    {"event": "EngineJoined", "id": 0, "engine": "actor.generate[0]", "capacity": 8}
    {"event": "PromptsOffered", "id": 1, "groups": ["0/0", "0/1"]}
    {"rewind": 1}
    {"event": "Resumed", "id": 2}

The first line holds the settings, or the whole state where a journal begins in mid-run. `rewind`
says that the process restarted from the state after that event: later lines before it are void.
A process that dies may leave half a line at the end; it is left out, and `Journal.torn` says so.

Replaying a journal gives the state at its end, exactly, and with an observer every transition of
every sample on the way: a whole run can be questioned afterwards (`flowrl.rollout.event_history`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol, get_args

from flowrl.errors import SchedulerError
from flowrl.ids import SampleId
from flowrl.rollout.events import Event, SampleEnd
from flowrl.rollout.machine import Observer
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs import FinishReason

JOURNAL = 1
"""Version of the format; another one is refused."""


class TextSink(Protocol):
    """The target of a journal: an open text file, or anything with its `write`."""

    def write(self, text: str, /) -> object: ...


class JournalWriter:
    """Writes a journal line by line.

    >>> import io
    >>> from flowrl.rollout.events import EngineJoined
    >>> from flowrl.rollout.settings import SchedulerSettings
    >>> file = io.StringIO()
    >>> writer = JournalWriter(file)
    >>> writer.begin(SchedulerSettings(group_size=2))
    >>> writer.event(EngineJoined(id=0, engine="e", capacity=8))
    >>> file.getvalue().splitlines()[1]
    '{"event": "EngineJoined", "id": 0, "engine": "e", "capacity": 8}'

    Write an event before it is stepped: then the journal is never behind what was done.
    """

    def __init__(self, sink: TextSink) -> None:
        self._sink = sink

    def begin(self, start: SchedulerSettings | RolloutScheduler) -> None:
        """Writes the head of a new journal: of a new scheduler, or of one in mid-run."""
        kind = "settings" if isinstance(start, SchedulerSettings) else "state"
        self._write({"journal": JOURNAL, kind: start.to_json()})

    def event(self, event: Event) -> None:
        """Writes the event that is stepped next."""
        self._write(event_to_json(event))

    def rewind(self, last_event_id: int) -> None:
        """Notes that the process went back to the state after the event of that id."""
        self._write({"rewind": last_event_id})

    def _write(self, obj: dict[str, Any]) -> None:
        self._sink.write(json.dumps(obj, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A journal that was read.

    Attributes:
        head: Its first line.
        events: Events that count, in order; what was rewound is left out.
        rewinds: How often the process restarted.
        torn: Whether the last line is incomplete.
    """

    head: dict[str, Any]
    events: tuple[Event, ...]
    rewinds: int
    torn: bool

    def open(self, *, observer: Observer | None = None, validate: bool = False) -> RolloutScheduler:
        """Returns the scheduler before the first event.

        Raises:
            SchedulerError: its settings or its state cannot be read.
        """
        if "state" in self.head:
            state = self.head["state"]
            return RolloutScheduler.from_json(state, observer=observer, validate=validate)
        try:
            settings = SchedulerSettings.from_json(self.head["settings"])
        except (KeyError, TypeError, AttributeError) as error:
            raise SchedulerError(
                "the settings of this journal cannot be read",
                found=f"{type(error).__name__}: {error}",
            ) from error
        return RolloutScheduler(settings, observer=observer, validate=validate)


def read_journal(lines: Iterable[str]) -> Journal:
    """Reads a journal, for example an open file.

    Raises:
        SchedulerError: another format, or a broken line that is not the last.
    """
    head: dict[str, Any] | None = None
    events: list[Event] = []
    rewinds = 0
    broken: int | None = None
    for number, line in enumerate(lines, 1):
        if broken is not None:
            raise _unreadable(broken, "a line that is not the last is broken")
        obj = _parse(line)
        if obj is None:
            broken = number
        elif head is None:
            if obj.get("journal") != JOURNAL:
                raise _unreadable(number, f"expected the head of a journal of format {JOURNAL}")
            head = obj
        elif "rewind" in obj:
            rewinds += 1
            while events and events[-1].id > obj["rewind"]:
                events.pop()
        else:
            events.append(event_from_json(obj))
    if head is None:
        raise _unreadable(1, "the journal is empty")
    return Journal(head=head, events=tuple(events), rewinds=rewinds, torn=broken is not None)


def replay(
    journal: Journal, *, observer: Observer | None = None, validate: bool = False
) -> RolloutScheduler:
    """Returns the scheduler at the end of the journal."""
    scheduler = journal.open(observer=observer, validate=validate)
    for event in journal.events:
        scheduler.step(event)
    return scheduler


def _parse(line: str) -> dict[str, Any] | None:
    """Returns the line's object; None if the line is torn."""
    if not line.endswith("\n"):
        return None
    try:
        obj = json.loads(line)
    except ValueError:
        return None
    return obj if isinstance(obj, dict) else None


def _unreadable(number: int, what: str) -> SchedulerError:
    return SchedulerError(f"this journal cannot be read: {what}", where=f"line {number}")


# Events as plain JSON values, and back: `event_from_json(event_to_json(e)) == e`.

_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}

_FIELDS: dict[str, list[tuple[str, object]]] = {
    name: [(of.name, of.default) for of in fields(kind)] for name, kind in _KINDS.items()
}


def event_to_json(event: Event) -> dict[str, Any]:
    """Returns `{"event": kind, field: value, ...}`."""
    kind = type(event).__name__
    obj: dict[str, Any] = {"event": kind}
    for name, default in _FIELDS[kind]:
        value = getattr(event, name)
        if default is MISSING or value != default:
            obj[name] = [_end_to_json(end) for end in value] if name == "ends" else value
    return obj


def event_from_json(obj: dict[str, Any]) -> Event:
    """Returns the event that `event_to_json` described.

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
    **dict.fromkeys(("progress", "scores", "verdicts"), _pairs),
    "ends": lambda value: tuple(_end_from_json(item) for item in value),
}
