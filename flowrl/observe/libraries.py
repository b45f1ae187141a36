"""Which versions of libraries are installed, for what a run or a measurement writes down."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_versions"]


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
