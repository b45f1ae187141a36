"""What installed distributions offer under an entry point group, whoever wrote them.

Looking (`entries`) reads metadata only; nothing of a plug-in is imported before `Entry.load`. A
broken distribution is named and leaves the others usable.

    entries("flowrl.graphs")                       # metadata of all
    find_entry("flowrl.graphs", "grpo", kind="workflow", error=ConfigError).load()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from flowrl.config.nearest import listing, suggestion
from flowrl.errors import FlowError

__all__ = ["Entry", "entries", "find_entry"]


_UNKNOWN = "unknown distribution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One declared entry point.

    Attributes:
        group: `flowrl.backends` or `flowrl.graphs`.
        name: What people write in a config.
        target: `module:attribute`.
        distribution: Name of the distribution that declares it.
        version: Of the distribution.
    """

    group: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def load(self, error: type[FlowError] = FlowError) -> object:
        """Imports the target and returns it.

        Args:
            error: Type of the error raised where the import fails or the attribute is missing; it
                names the distribution.
        """
        point = metadata.EntryPoint(name=self.name, value=self.target, group=self.group)
        try:
            return point.load()
        # A plug-in is foreign code: whatever its import raises, SystemExit included, is reported.
        except (Exception, SystemExit) as reason:
            raise error(
                f"{self.name!r} cannot be imported",
                where=self.origin,
                found=f"{type(reason).__name__}: {_first_line(reason)}",
                expected=f"{self.target} to import",
                hint=f"repair or uninstall {self.distribution}",
            ) from reason


def entries(group: str) -> tuple[Entry, ...]:
    """All entry points of `group` in installed distributions, by name, then distribution.

    A name that two distributions declare appears twice. Folders are read once while `sys.path`
    stays as it is; `find_entry` looks again for a name that it does not know.
    """
    return _entries(group, tuple(sys.path), metadata.entry_points)


@cache
def _points(
    path: tuple[str, ...], entry_points: Callable[..., metadata.EntryPoints]
) -> metadata.EntryPoints:
    """Of all groups: the folders of all distributions are looked through for any one of them."""
    return entry_points()


@cache
def _entries(
    group: str, path: tuple[str, ...], entry_points: Callable[..., metadata.EntryPoints]
) -> tuple[Entry, ...]:
    found = []
    origins: dict[int, tuple[str, str]] = {}
    for point in _points(path, entry_points).select(group=group):
        if id(point.dist) not in origins:
            # Each look at the metadata parses them anew, that at a name or a version too.
            known = point.dist
            told = known.metadata if known else {"Name": _UNKNOWN, "Version": ""}
            origins[id(known)] = (told["Name"], told["Version"])
        distribution, version = origins[id(point.dist)]
        found.append(
            Entry(
                group=group,
                name=point.name,
                target=point.value,
                distribution=distribution,
                version=version,
            )
        )
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.distribution)))


def find_entry(
    group: str, name: str, *, kind: str, error: type[FlowError], where: str | None = None
) -> Entry:
    """The entry point called `name`, without importing it.

    Args:
        kind: What the group holds, for messages: `backend`, `workflow`.
        error: Type of the error for an unknown or ambiguous name.
        where: Config key or file that asks for the name.
    """
    known = entries(group)
    if name not in {entry.name for entry in known}:
        _points.cache_clear()  # it may have been installed since
        _entries.cache_clear()
        known = entries(group)
    matches = [entry for entry in known if entry.name == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        origins = " and ".join(entry.origin for entry in matches)
        raise error(
            f"{kind} {name!r} is declared by more than one distribution",
            where=where,
            found=origins,
            expected="one",
            hint=f"uninstall {' or '.join(entry.distribution for entry in matches)}",
        )
    names = sorted({entry.name for entry in known})
    raise error(
        f"no {kind} is called {name!r}",
        where=where,
        expected=f"one of {listing(names)}" if names else None,
        hint=suggestion(name, names)
        or (
            f"install the distribution that declares it under the entry point group {group}"
            if names
            else f"nothing declares {group}: install flowrl itself, `pip install -e .`"
        ),
    )


def _first_line(reason: BaseException) -> str:
    lines = str(reason).strip().splitlines()
    return lines[0] if lines else "no message"
