"""Formatting of messages: numbers with nouns, lists, similar names, and labelled warnings."""

from __future__ import annotations

import glob
import logging
import sys
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

MAX_LISTED = 64
"""The number of names that a list in a message shows: every choice that flowrl offers anywhere."""

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


def listing(choices: Iterable[str]) -> str:
    """Returns the choices in one line, cut after `MAX_LISTED`; `nothing` where there are none."""
    names = list(choices)
    if not names:
        return "nothing"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def excerpt(text: str, most: int = 60) -> str:
    """Returns a text, or its beginning and `...` where it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with left-aligned columns, without trailing blanks."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


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


def suggestion(name: str, choices: Iterable[str]) -> str | None:
    """Returns `did you mean 'steps'?`, or None if no choice is similar."""
    match = nearest(name, choices)
    return f"did you mean {match!r}?" if match is not None else None


def one_of_them(name: str, choices: Iterable[str]) -> str:
    """Returns the hint for a name that is none of the choices, which the message lists."""
    return suggestion(name, choices) or "take one of them"


def nearest_file(path: Path, suffixes: tuple[str, ...] = ("",), *folders: Path) -> str | None:
    """Returns `did you mean FOLDER/NAME?` for a missing file; None if there is no similar one.

    A file of the same name in a subfolder is the first choice, then a similar name in the same
    folder. Suffixes do not count (`nope.yaml` is not near `laptop.yaml`), except between names
    that differ in nothing else.

    Args:
        path: The missing file.
        suffixes: Ends of the names that are considered; by default all names.
        folders: Further folders in which a bare name is looked for.
    """
    if path.exists():
        return None
    for below in sorted(path.parent.glob(f"*/{glob.escape(path.name)}")):
        if below.is_file():
            return f"did you mean {below}?"
    for folder in (path.parent, *(folders if len(path.parts) == 1 else ())):
        entries = [entry for entry in sorted(folder.glob("*")) if entry.name.endswith(suffixes)]
        entries.sort(key=lambda entry: entry.suffix == path.suffix)
        by_stem = {entry.stem: entry for entry in entries}
        if (stem := nearest(path.stem, by_stem)) is not None:
            return f"did you mean {by_stem[stem]}?"
    return None


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
