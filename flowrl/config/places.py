"""Several places of one message, told together where they are of one file or the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["places_together"]

_COMMAND_LINE = re.compile(r"command line \((?P<said>[\w.-]+(?:=.*)?)\)", re.DOTALL)
_IN_FILE = re.compile(r"(?P<file>.+):(?P<line>\d+) \((?P<said>[\w.-]+)\)")

_MANY = 3
"""Places of one file that are told together."""


def places_together(places: Sequence[str]) -> str:
    """Places in the order of the first of their kind: `mine.py:3 and command line (a.b=1)`.

    Three and more of the command line, or of one file, name it once, and each section of theirs.

    >>> pins = ("tp=2", "pp=4", "cp=1")
    >>> places_together([f"command line (plan.pins.actor.{key})" for key in pins])
    'command line (plan.pins.actor: tp=2, pp=4, cp=1)'
    >>> places_together([f"job.yaml:{line} (plan.pins.actor.{key})" for line, key in
    ...     ((7, "tp"), (8, "pp"), (9, "cp"))])
    'job.yaml:7, 8, 9 (plan.pins.actor: tp, pp, cp)'
    """
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for place in dict.fromkeys(places):
        if found := _COMMAND_LINE.fullmatch(place):
            kinds.setdefault("command line", []).append((place, "", found["said"]))
        elif found := _IN_FILE.fullmatch(place):
            kinds.setdefault(found["file"], []).append((place, found["line"], found["said"]))
        else:
            kinds.setdefault(place, []).append((place, "", ""))
    told: list[str] = []
    for kind, some in kinds.items():
        is_command_line = kind == "command line"
        if len(some) < _MANY:
            told += [place for place, _, _ in some]
            continue
        lines = "" if is_command_line else f":{', '.join(line for _, line, _ in some)}"
        told.append(f"{kind}{lines} ({_by_section(said for _, _, said in some)})")
    return " and ".join(told)


def _by_section(settings: Iterable[str]) -> str:
    """`plan.pins.actor.update: tp=2, pp=4; train.steps=3`."""
    sections: dict[str, list[str]] = {}
    for one in settings:
        key, equals, value = one.partition("=")
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name}{equals}{value}")
    return "; ".join(_of_section(section, some) for section, some in sections.items())


def _of_section(section: str, settings: Sequence[str]) -> str:
    """Of a section without a name, the settings alone."""
    if section and len(settings) == 1:
        return f"{section}.{settings[0]}"
    together = ", ".join(settings)
    return f"{section}: {together}" if section else together
