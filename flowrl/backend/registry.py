"""Backends by name: the entry points of group `flowrl.backends`, checked against `Plugin`.

`find` imports the one plug-in asked for; `available` imports all and reports a broken one with
the others. Both trust nothing that a plug-in says before they have looked at it.

A distribution makes a backend known in its own pyproject.toml:

    [project.entry-points."flowrl.backends"]
    mine = "my_package.flowrl_plugin:plugin"
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.backend.capabilities import Capabilities
from flowrl.backend.plugin import Plugin
from flowrl.entry_points import Entry, entries, find_entry
from flowrl.errors import BackendError

__all__ = ["GROUP", "Found", "available", "find"]

GROUP = "flowrl.backends"

# What a plug-in must offer, read off the protocol, so that the two cannot drift apart.
_MEMBERS = tuple(name for name in vars(Plugin) if not name.startswith("_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One declared backend: a plug-in that works, or why it does not.

    Attributes:
        name: As written in `roles.<name>.backend`.
        distribution: Name of the distribution that declares it.
        version: Of the distribution.
        plugin: The plug-in; None where it is broken.
        error: What is wrong; None where nothing is.
    """

    name: str
    distribution: str
    version: str
    plugin: Plugin | None
    error: BackendError | None


def find(name: str, *, where: str | None = None) -> Plugin:
    """The plug-in called `name`.

    Args:
        where: Config key that asks for it, for the message.

    Raises:
        BackendError: No distribution declares it (with the nearest name), more than one does, its
            import fails, or it does not satisfy `Plugin`.
    """
    return _load(find_entry(GROUP, name, kind="backend", error=BackendError, where=where))


def available() -> tuple[Found, ...]:
    """Every declared backend, by name; a broken one carries its error instead of a plug-in."""
    found = []
    for entry in entries(GROUP):
        plugin, error = None, None
        try:
            plugin = find(entry.name)
        except BackendError as reason:
            error = reason
        found.append(
            Found(
                name=entry.name,
                distribution=entry.distribution,
                version=entry.version,
                plugin=plugin,
                error=error,
            )
        )
    return tuple(found)


def _load(entry: Entry) -> Plugin:
    candidate = entry.load(BackendError)
    problem = _problem(entry, candidate)
    if problem is not None:
        raise BackendError(
            f"backend {entry.name!r} is no flowrl plug-in: {problem}",
            where=entry.origin,
            expected="an object with flowrl.backend.protocols.Plugin's members",
            hint=f"repair {entry.target} or uninstall {entry.distribution}",
        )
    assert isinstance(candidate, Plugin)
    return candidate


def _problem(entry: Entry, candidate: object) -> str | None:
    """Returns why `candidate` is no `Plugin`, in one sentence; None if it is one."""
    if isinstance(candidate, type):
        return f"{entry.target} is the class {candidate.__name__}, not an instance of it"
    missing = []
    for member in _MEMBERS:
        try:
            getattr(candidate, member)
        except AttributeError:
            missing.append(member)
        # A property of foreign code may raise anything.
        except Exception as reason:
            return f"its {member!r} raises {type(reason).__name__}: {reason}"
    if missing:
        return f"it lacks {', '.join(missing)}"
    assert isinstance(candidate, Plugin)
    if candidate.name != entry.name:
        return f"it calls itself {candidate.name!r}"
    capabilities: object = candidate.capabilities
    if not isinstance(capabilities, Capabilities):
        return f"its capabilities are a {type(capabilities).__name__}"
    return None
