"""`flowrl backends`: every installed plug-in, and if it can be used here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from flowrl.backend.plugin import BackendStatus, Plugin
from flowrl.backend.registry import Found, available
from flowrl.files import encode_json

__all__ = ["BackendRow", "collect", "describe", "render", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """A plug-in as a row of the table.

    Attributes:
        name: The name in `roles.<name>.backend`.
        distribution: The distribution that declares it.
        version: The version of the distribution.
        services: The services that it opens: `generate`, `train`, `score`.
        devices: The types of devices on which it runs.
        dtypes: Parameter types.
        library: Version of the library behind it; empty where there is none.
        usable: True if it can be used on this machine.
        problem: Why it cannot be used; empty when usable.
        hint: What to do about it; empty when usable.
    """

    name: str
    distribution: str
    version: str
    services: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    library: str = ""
    usable: bool = False
    problem: str = ""
    hint: str = ""


def collect() -> tuple[BackendRow, ...]:
    """Returns a row for every declared plug-in, by name; a broken one has a row too."""
    return tuple(describe(found) for found in available())


def describe(found: Found) -> BackendRow:
    """Returns the row of a plug-in."""
    if found.plugin is None:
        error = found.error
        problem = "it does not load"
        if error is not None:
            problem = error.what + (f" ({error.found})" if error.found else "")
        return BackendRow(
            name=found.name,
            distribution=found.distribution,
            version=found.version,
            problem=problem,
            hint=(error.hint or "") if error is not None else "",
        )
    capabilities = found.plugin.capabilities
    status = _check(found.plugin, found.distribution)
    return BackendRow(
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        services=tuple(sorted(str(service) for service in capabilities.services)),
        devices=tuple(sorted(capabilities.devices)),
        dtypes=tuple(sorted(capabilities.dtypes)),
        library=status.version,
        usable=status.usable,
        problem=status.problem,
        hint=status.hint,
    )


def _check(plugin: Plugin, distribution: str) -> BackendStatus:
    try:
        return plugin.check()
    # Foreign code: one that breaks its promise not to raise must not hide the other plug-ins.
    except Exception as error:
        return BackendStatus(
            usable=False,
            problem=f"its check() raises {type(error).__name__}: {error}",
            hint=f"repair or uninstall {distribution}",
        )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with left-aligned columns, without trailing blanks."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def render(rows: Sequence[BackendRow]) -> str:
    """Returns a table for people, with a hint under each plug-in that cannot be used."""
    if not rows:
        return (
            "no plug-in declares the entry point group flowrl.backends\n"
            "  to do: install flowrl itself, for example `pip install -e .`\n"
        )
    head = ("backend", "usable", "services", "devices", "library", "from")
    cells = [
        (
            row.name,
            "yes" if row.usable else "no",
            " ".join(row.services) or "-",
            " ".join(row.devices) or "-",
            row.library or "-",
            f"{row.distribution} {row.version}".strip(),
        )
        for row in rows
    ]
    first, *lines = table(head, cells)
    shown = [first]
    for row, line in zip(rows, lines, strict=True):
        shown.append(line)
        if not row.usable:
            shown.append(f"  why: {row.problem or 'it does not say'}")
            if row.hint:
                shown.append(f"  to do: {row.hint}")
    return "\n".join(shown) + "\n"


def run(json: bool) -> int:
    """Prints the plug-ins, as JSON or as a table; returns the exit code, always 0."""
    rows = collect()
    if json:
        print(encode_json({"backends": [asdict(row) for row in rows]}), end="")
    else:
        print(render(rows), end="")
    return 0
