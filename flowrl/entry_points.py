"""The entry points of installed distributions in one group.

`entries` reads metadata only; no plug-in is imported before `Entry.load`. An error names a broken
distribution, and the others remain usable.

    entries("flowrl.graphs")                       # metadata of all
    find_entry("flowrl.graphs", "grpo", kind="workflow", error=ConfigError).load()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from flowrl.errors import FlowError
from flowrl.wording import listing, suggestion

_UNKNOWN = "unknown distribution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One declared entry point.

    Attributes:
        group: `flowrl.backends` or `flowrl.graphs`.
        name: The name in configs.
        target: `module:attribute`.
        distribution: The name of the distribution that declares it.
        version: The version of the distribution.
    """

    group: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def load(self, error: type[FlowError] = FlowError) -> object:
        """Imports the target and returns it.

        Args:
            error: The type of the error that is raised if the import fails or the attribute is
                missing; its message names the distribution.
        """
        point = metadata.EntryPoint(name=self.name, value=self.target, group=self.group)
        try:
            return point.load()
        # A plug-in is foreign code: every error of its import, SystemExit included, is reported.
        except (Exception, SystemExit) as reason:
            raise error(
                f"{self.name!r} cannot be imported",
                where=self.origin,
                found=f"{type(reason).__name__}: {_first_line(reason)}",
                expected=f"{self.target} to import",
                hint=f"repair or uninstall {self.distribution}",
            ) from reason


def entries(group: str) -> tuple[Entry, ...]:
    """Returns all entry points of `group`, sorted by name, then distribution.

    A name that two distributions declare appears twice. Folders are read once for each `sys.path`;
    `find_entry` reads them again for an unknown name.
    """
    return _entries(group, tuple(sys.path), metadata.entry_points)


@cache
def _points(
    path: tuple[str, ...], entry_points: Callable[..., metadata.EntryPoints]
) -> metadata.EntryPoints:
    """Returns the entry points of all groups, as finding one group reads all distributions."""
    return entry_points()


@cache
def _entries(
    group: str, path: tuple[str, ...], entry_points: Callable[..., metadata.EntryPoints]
) -> tuple[Entry, ...]:
    points = []
    origins: dict[int, tuple[str, str]] = {}
    for point in _points(path, entry_points).select(group=group):
        if id(point.dist) not in origins:
            # Each access to the metadata parses it again, also for a name or a version alone.
            known = point.dist
            fields = known.metadata if known else {"Name": _UNKNOWN, "Version": ""}
            origins[id(known)] = (fields["Name"], fields["Version"])
        distribution, version = origins[id(point.dist)]
        points.append(
            Entry(
                group=group,
                name=point.name,
                target=point.value,
                distribution=distribution,
                version=version,
            )
        )
    return tuple(sorted(points, key=lambda entry: (entry.name, entry.distribution)))


def find_entry(
    group: str, name: str, *, kind: str, error: type[FlowError], where: str | None = None
) -> Entry:
    """Returns the entry point with the name `name`, without importing it.

    Args:
        group: The group of entry points.
        name: The name of the entry point.
        kind: The kind of the group's entries, for messages: `backend`, `workflow`.
        error: The type of the error for an unknown or ambiguous name.
        where: The config key or file that contains the name.
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
