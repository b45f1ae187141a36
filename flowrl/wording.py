"""Words of messages that depend on numbers."""

from __future__ import annotations

__all__ = ["HOURS", "counted", "hours_text", "percent"]

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
