"""Words of messages: with numbers, the nearest of names, and the label of warnings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from difflib import SequenceMatcher

__all__ = ["HOURS", "Unconfigured", "Warnings", "counted", "hours_text", "nearest", "percent"]

HOURS = 7200.0
"""Seconds from which on times are told in hours and minutes."""


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 device`, `2 devices`.

    Args:
        noun: Of one; as `device` or `number of devices`.
        plural: Of several, where it is not the noun with an `s`.

    >>> counted(1, "number of devices", "numbers of devices"), counted(1024, "device")
    ('1 number of devices', '1024 devices')
    """
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun if number == 1 else plural or noun + 's'}"


def hours_text(seconds: float) -> str:
    """Hours and whole minutes.

    >>> hours_text(13140.0), hours_text(7199.0)
    ('3 h 39 min', '2 h 0 min')
    """
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """A share as all texts write it.

    >>> percent(0.084), percent(0.0021, 1), percent(0.25, signed=True)
    ('8 %', '0.2 %', '+25 %')
    """
    return f"{100 * share:{'+' if signed else ''}.{digits}f} %"


def nearest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice most like `name`, or None where none is alike.

    One that is a single edit away comes before all others; two neighbours that changed places are
    one edit. A beginning that only one choice has is enough (`temp`). Upper case, `-` and `_` make
    no difference: `Group-Size` is next to `group_size`.

    Args:
        cutoff: Least share of the letters, from 0 to 1, that the two have in common.

    >>> nearest("gpro", ["gspo", "grpo", "ppo"]), nearest("temp", ["top_p", "temperature"])
    ('grpo', 'temperature')
    """
    form = _form(name)
    by_form = {_form(choice): choice for choice in choices}
    likeness = {each: _likeness(form, each) for each in by_form}
    best = max(likeness, key=likeness.__getitem__, default=None)
    if best is not None and likeness[best] >= cutoff:
        return by_form[best]
    longer = [each for each in by_form if each.startswith(form)]
    return by_form[longer[0]] if len(form) > 2 and len(longer) == 1 else None


def _likeness(one: str, other: str) -> float:
    shared = SequenceMatcher(None, other, one).ratio()
    is_long = min(len(one), len(other)) > 2 or sorted(one) == sorted(other)
    return 1 + shared if is_long and _is_one_edit(one, other) else shared


def _is_one_edit(one: str, other: str) -> bool:
    """Whether a letter more, less or other, or two exchanged neighbours, make one the other."""
    pairs = zip(one, other, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    one, other = one[start:], other[start:]
    if one[1:] == other[1:] or one[1:] == other or one == other[1:]:
        return True
    return one[:2] == other[1::-1] and one[2:] == other[2:]


def _form(name: str) -> str:
    return name.lower().replace("-", "_")


class Warnings(logging.Handler):
    """Warnings as lines with their label on standard error, wherever that points at the time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)
        except Exception:  # logging must not end a run
            self.handleError(record)


class Unconfigured(Warnings):
    """In the place of `logging.lastResort`, which leaves the label out.

    Like it, it writes nothing where the program that uses flowrl has handlers of its own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return bool(super().filter(record))
