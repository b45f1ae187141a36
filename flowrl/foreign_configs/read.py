"""Finds the framework of a file, and reads its keys and values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from flowrl.config.tree import Node, Value
from flowrl.config.yaml_tree import YAML_SUFFIXES, FileKind, read_text, read_yaml_file
from flowrl.errors import ConfigError
from flowrl.foreign_configs.command_line import options_of
from flowrl.wording import listing, one_of_them

_KIND = FileKind(
    noun="configuration of another framework",
    begins="name a configuration of verl, slime, MindSpeed-RL or MindRLHF",
    hint="name a shell script, or a YAML file",
)


def read_foreign(
    path: Path, signs: Mapping[str, str], framework: str | None = None
) -> tuple[str, dict[str, Value]]:
    """Returns the framework of a file, and its values by dotted key or flag, in order.

    Args:
        path: A YAML file, or a file with a command line.
        signs: By framework, an expression that matches some key of each of its configurations; the
            first framework whose expression does is that of a file.
        framework: The framework; None finds it by the keys.

    Raises:
        ConfigError: The file cannot be read, or has no key of the framework, or of any.
    """
    if framework is not None and framework not in signs:
        raise ConfigError(
            f"{framework!r} is no framework whose configurations can be imported",
            where="--from",
            expected=f"one of {listing(signs)}",
            hint=one_of_them(framework, signs),
        )
    if path.suffix in YAML_SUFFIXES:
        values = _with_references(dict(_flat(read_yaml_file(path, _KIND))))
    else:
        values = options_of(read_text(path, _KIND), path)
    found = [name for name, sign in signs.items() if any(re.fullmatch(sign, key) for key in values)]
    for name in found:
        if framework in (None, name):
            return name, values
    keys = f"the keys {listing(list(values)[:8])}" if values else "no key of a training"
    raise ConfigError(
        f"this is no configuration of {framework or ' or '.join(signs)}",
        where=str(path),
        found=f"keys of {listing(found)}" if found else keys,
        expected="a YAML file, or a training command with `key=value` or `--flag value`",
        hint=f"write --from {found[0]}, or leave --from out" if found else _KIND.begins,
    )


def _flat(node: Node, prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, inner in node.entries.items():
        if inner.entries:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner.plain


def _with_references(values: dict[str, Value]) -> dict[str, Value]:
    """Replaces values that are one reference (`${data.max_prompt_length}`) by what they name."""
    for key, value in values.items():
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if match is not None and match[1] in values:
            values[key] = values[match[1]]
    return values
