"""Words of messages that depend on numbers."""

from __future__ import annotations

__all__ = ["counted"]


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
