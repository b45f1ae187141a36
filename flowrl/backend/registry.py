"""Backends by name: the entry points of group `flowrl.backends`, checked against `Plugin`.

`find` imports one plug-in; `available` imports all and reports broken ones. A distribution
makes a backend known in its own pyproject.toml:

    [project.entry-points."flowrl.backends"]
    mine = "my_package.flowrl_plugin:plugin"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from flowrl.backend.pair import Pair
from flowrl.backend.plugin import NO_OPTIONS, PROTOCOL, Capabilities, Plugin, options_of, status_of
from flowrl.config.problems import validated
from flowrl.entry_points import Entry, entries, find_entry
from flowrl.errors import BackendError, ConfigError
from flowrl.wording import listing

__all__ = ["GROUP", "Found", "available", "check_options", "find", "require_usable"]

GROUP = "flowrl.backends"

# The members of the protocol, so that the check cannot differ from it.
_MEMBERS = tuple(name for name in vars(Plugin) if not name.startswith("_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A declared backend.

    Attributes:
        name: Its name, as `roles.<name>.backend` gives it.
        distribution: The name of the distribution that declares it.
        version: The version of the distribution.
        plugin: The plug-in; None if it is broken.
        error: The error of a broken plug-in; None if it works.
    """

    name: str
    distribution: str
    version: str
    plugin: Plugin | None
    error: BackendError | None


def find(name: str, *, where: str | None = None) -> Plugin:
    """Returns the plug-in called `name`; of `a+b` the trainer of `a` with the engine of `b`.

    Args:
        where: The config key that names it, for messages.

    Raises:
        BackendError: No distribution declares it (with the nearest name), more than one does, its
            import fails, or it does not satisfy `Plugin`.
    """
    trains, _, generates = name.partition("+")
    if generates:
        return Pair(find(trains, where=where), find(generates, where=where), where)
    return _load(find_entry(GROUP, name, kind="backend", error=BackendError, where=where))


def check_options(
    backend: str,
    model: type[BaseModel] | None,
    values: Mapping[str, object],
    *,
    at: str,
    where: Callable[[str], str],
) -> None:
    """Checks values of options against the model that a plug-in declares.

    Args:
        backend: The plug-in's name, for messages.
        model: What it declares (`options_of`).
        at: The dotted key of the values.
        where: Returns the place where a dotted key is written.

    Raises:
        ConfigError: One error for all that is wrong.
    """
    if model is not None:
        validated(model, values, where, at=at)
    elif values:
        raise ConfigError(
            f"backend {backend!r} has no options",
            where=where(at),
            found=listing(values),
            hint=f"leave {at} out",
        )


def require_usable(
    backend: str,
    role: str,
    options: Mapping[str, object],
    engine_options: Mapping[str, object] = NO_OPTIONS,
) -> str:
    """Checks that a role's plug-ins can be used on this machine with its options.

    Returns:
        Their names, with the versions of the libraries behind them.

    Args:
        backend: The name of a plug-in, or `a+b`.
        engine_options: Those of `b`.

    Raises:
        BackendError: One cannot; the hint shows what to do.
    """
    versions = []
    given = (("backend", options), ("engine", engine_options))
    for name, (key, values) in zip(backend.split("+"), given, strict=False):
        status = status_of(find(name), values)
        if not status.usable:
            raise BackendError(
                f"backend {name!r} cannot be used here: {status.problem}",
                where=f"roles.{role}.{key}",
                hint=status.hint,
            )
        versions.append(f"{name} {status.version}".strip())
    return " + ".join(versions)


def available() -> tuple[Found, ...]:
    """Returns every declared backend, by name; a broken one has its error in place of a plug-in."""
    return tuple(map(_found, entries(GROUP)))


def _found(entry: Entry) -> Found:
    plugin, error = None, None
    try:
        plugin = find(entry.name)
    except BackendError as reason:
        error = reason
    return Found(
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        plugin=plugin,
        error=error,
    )


def _load(entry: Entry) -> Plugin:
    candidate = entry.load(BackendError)
    problem = _problem(entry, candidate)
    if problem is not None:
        raise BackendError(
            f"backend {entry.name!r} is no flowrl plug-in: {problem}",
            where=entry.origin,
            expected="an object with the members of flowrl.backend.plugin.Plugin",
            hint=f"repair {entry.target} or uninstall {entry.distribution}",
        )
    assert isinstance(candidate, Plugin)
    return candidate


def _problem(entry: Entry, candidate: object) -> str | None:
    """Returns why `candidate` is no `Plugin`, in one sentence; None if it is one."""
    version = getattr(candidate, "protocol", 1)
    if version != 1 and (not isinstance(version, int) or not 1 <= version <= PROTOCOL):
        return (
            f"it is written for protocol {version!r}, and this flowrl has protocol {PROTOCOL}; "
            "install a newer flowrl or an older plug-in"
        )
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
    options: object = options_of(candidate)
    if options is None:
        return None
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        return f"its options are {options!r}, not a pydantic model"
    if options.model_config.get("extra") != "forbid":
        return f"its options ({options.__name__}) accept unknown keys: set extra='forbid'"
    return None
