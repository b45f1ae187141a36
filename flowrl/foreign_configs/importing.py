"""Imports a file, and writes the result and the list of what became of each key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from flowrl.config.load import load_config
from flowrl.errors import ConfigError
from flowrl.foreign_configs.read import read_foreign
from flowrl.foreign_configs.rules import load_table, settings_of
from flowrl.foreign_configs.translate import Entry, Imported, Status, translate
from flowrl.wording import counted

_FRAMEWORKS = ("verl", "slime", "mindspeed_rl", "mindrlhf")


def import_config(path: Path, framework: str | None = None) -> Imported:
    """Returns the configuration of flowrl for a file of another framework.

    Args:
        path: A YAML file, or a shell script with the command line of a training.
        framework: `verl`, `slime`, `mindspeed_rl` or `mindrlhf`; None finds it by the keys.

    Raises:
        ConfigError: The file is of no framework, or its values make no configuration.
    """
    tables = {name: load_table(name) for name in _FRAMEWORKS}
    signs = {name: table.sign for name, table in tables.items()}
    found, values = read_foreign(path, signs, framework)
    name = re.sub(r"[^\w.-]+", "_", path.stem)
    try:
        imported = translate(settings_of(tables[found], values), values, name)
        load_config(None, base=imported.config)
    except ConfigError as error:
        error.where = f"{path} ({error.where})"
        raise
    return imported


def config_text(imported: Imported, path: Path) -> str:
    """Returns the YAML of the result."""
    text = yaml.safe_dump(dict(imported.config), sort_keys=False, width=100)
    return f"# Imported from {path.name} ({imported.framework}) by `flowrl import-config`.\n{text}"


def report(imported: Imported, path: Path) -> Iterator[str]:
    """Yields the lines of the list: each key once, below what became of it."""
    written = [entry for entry in imported.entries if not entry.is_default]
    counts = Counter(entry.outcome.status for entry in written)
    parts = ", ".join(f"{counts[status]} {status}" for status in Status)
    yield f"{path}: {counted(len(written), 'key')} of {imported.framework}: {parts}"
    for status in Status:
        yield from _rows(f"{status}:", [e for e in written if e.outcome.status is status])
    defaults = [entry for entry in imported.entries if entry.is_default]
    yield from _rows(f"defaults of {imported.framework}, which the file does not write:", defaults)


def _rows(title: str, entries: Sequence[Entry]) -> Iterator[str]:
    """Yields the keys of a section; those with the same note and no values here are together."""
    if entries:
        yield title
    together: dict[str, list[str]] = {}
    for entry in entries:
        key = f"{entry.key}" + ("" if entry.value is None else f"={_shown(entry.value)}")
        if entry.outcome.writes:
            yield f"  {key} -> {_settings(entry.outcome.writes)}"
            yield from [f"      {entry.outcome.note}"] if entry.outcome.note else []
        else:
            together.setdefault(entry.outcome.note, []).append(key)
    for note, keys in together.items():
        yield from [f"  {note}:"] if note else []
        yield from (f"  {'  ' if note else ''}{key}" for key in keys)


def _settings(writes: Mapping[str, object]) -> str:
    return ", ".join(f"{target}={_shown(value)}" for target, value in writes.items())


def _shown(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def to_json(imported: Imported) -> dict[str, object]:
    """Returns the list and the configuration as plain values."""
    return {
        "framework": imported.framework,
        "keys": [
            {
                "key": entry.key,
                "value": entry.value,
                "status": entry.outcome.status.value,
                "writes": dict(entry.outcome.writes),
                "note": entry.outcome.note,
                "is_default": entry.is_default,
            }
            for entry in imported.entries
        ],
        "config": dict(imported.config),
    }
