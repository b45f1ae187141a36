"""What learning tests measure goes into their report too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Record", "measured"]

Record: TypeAlias = Callable[[str, object], None]
"""Pytest's `record_property`."""


def measured(record: Record, name: str, before: float | None, after: float | None) -> float:
    """How much a measure rose, recorded under its name."""
    assert before is not None
    assert after is not None
    record(name, f"{before:.3f} {after:.3f}")
    return after - before
