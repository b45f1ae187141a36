"""Formatting of messages: numbers with nouns, similar names, and labelled warnings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from difflib import SequenceMatcher

__all__ = ["HOURS", "Unconfigured", "Warnings", "counted", "hours_text", "nearest", "percent"]

HOURS = 7200.0
"""The number of seconds from which times are shown in hours and minutes."""


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Formats a number with its noun: `1 device`, `2 devices`.

    Args:
        number: The number.
        noun: The singular, such as `device` or `number of devices`.
        plural: The plural, if it is not the noun with an `s`.

    >>> counted(1, "number of devices", "numbers of devices"), counted(1024, "device")
    ('1 number of devices', '1024 devices')
    """
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun if number == 1 else plural or noun + 's'}"


def hours_text(seconds: float) -> str:
    """Formats seconds as hours and whole minutes.

    >>> hours_text(13140.0), hours_text(7199.0)
    ('3 h 39 min', '2 h 0 min')
    """
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def percent(share: float, digits: int = 0, *, signed: bool = False) -> str:
    """Formats a share as a percentage.

    >>> percent(0.084), percent(0.0021, 1), percent(0.25, signed=True)
    ('8 %', '0.2 %', '+25 %')
    """
    return f"{100 * share:{'+' if signed else ''}.{digits}f} %"


def nearest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the choice most similar to `name`; None if no choice is similar.

    A choice that is a single edit away is preferred to all others; a swap of two adjacent letters
    is one edit. A prefix of exactly one choice is enough (`temp`). Upper case, `-` and `_` make no
    difference: `Group-Size` equals `group_size`.

    Args:
        name: The unknown name.
        choices: The valid names.
        cutoff: The least share of common letters, from 0 to 1.

    >>> nearest("gpro", ["gspo", "grpo", "ppo"]), nearest("temp", ["top_p", "temperature"])
    ('grpo', 'temperature')
    """
    form = _form(name)
    by_form = {_form(choice): choice for choice in choices}
    similarity = {choice: _similarity(form, choice) for choice in by_form}
    best = max(similarity, key=similarity.__getitem__, default=None)
    if best is not None and similarity[best] >= cutoff:
        return by_form[best]
    longer = [each for each in by_form if each.startswith(form)]
    return by_form[longer[0]] if len(form) > 2 and len(longer) == 1 else None


def _similarity(name: str, choice: str) -> float:
    shared = SequenceMatcher(None, choice, name).ratio()
    is_long = min(len(name), len(choice)) > 2 or sorted(name) == sorted(choice)
    return 1 + shared if is_long and _is_one_edit(name, choice) else shared


def _is_one_edit(a: str, b: str) -> bool:
    """Returns True if one insertion, deletion, replacement or swap of neighbours makes `a` `b`."""
    pairs = zip(a, b, strict=False)
    start = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    if a[1:] == b[1:] or a[1:] == b or a == b[1:]:
        return True
    return a[:2] == b[1::-1] and a[2:] == b[2:]


def _form(name: str) -> str:
    return name.lower().replace("-", "_")


class Warnings(logging.Handler):
    """A handler that writes warnings with their level to the current standard error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)
        except Exception:  # logging must not end a run
            self.handleError(record)


class Unconfigured(Warnings):
    """A replacement of `logging.lastResort`, which omits the level.

    Both write nothing if the program that uses flowrl has its own handlers.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return bool(super().filter(record))
