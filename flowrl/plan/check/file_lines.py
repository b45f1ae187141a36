"""Where in a plan's file something is wrong: for messages to people who have edited it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from pydantic import ValidationError

from flowrl.config.problems import wrong_type
from flowrl.errors import ConfigError, PlanError
from flowrl.plan.check.numbers import UNDO

_OF_A_PLAN = re.compile(r"^(?:the )?plan of '[^']*'(?:: |$)")
"""Before the key, in messages about a plan."""

_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


def form_error(error: ValidationError, where: str) -> ConfigError:
    """What is told of a file that has not the form of a plan.

    Args:
        where: Names the file.
    """
    # A misspelt key is also a missing one; the key that is there says more.
    first = min(error.errors(), key=lambda item: item["type"] not in _UNKNOWN_KEY)
    key = ".".join(str(part) for part in first["loc"][1:])
    unknown = first["type"] in _UNKNOWN_KEY
    missing = first["type"] in ("missing", "missing_keyword_only_argument")
    return ConfigError(
        "unknown key" if unknown else "missing key" if missing else wrong_type(first),
        where=f"{where}: {key}",
        found=None if missing else repr(first["input"])[:80],
        hint=UNDO,
    )


@contextmanager
def lines_of(path: Path | None) -> Iterator[None]:
    """Errors about a plan inside name the line of its file; without one, nothing is changed."""
    try:
        yield
    except (ConfigError, PlanError) as error:
        found = _OF_A_PLAN.match(error.where or "")
        if path is not None and found is not None:
            error.where = at_line(path, (error.where or "")[found.end() :])
        raise


def at_line(path: Path, key: str) -> str:
    """`best.plan.json:123 (operations.1.seconds)`, of a key of a plan's file; without a key the
    file alone."""
    if not key:
        return str(path)
    line = line_of(path.read_text(encoding="utf-8"), key.partition(",")[0])
    return f"{path}: {key}" if line is None else f"{path}:{line} ({key})"


def line_of(text: str, key: str) -> int | None:
    """The line of a dotted key, counted from 1; of the last part that is there. None without any.

    JSON is read as the YAML that it is.

    >>> line_of("pool:\\n  devices:\\n  - address: a\\n  - address: b\\n", "pool.devices.1.address")
    4
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    line: int | None = None
    for part in key.split("."):
        if isinstance(node, yaml.MappingNode):
            found = next(((name, one) for name, one in node.value if name.value == part), None)
            if found is None:
                break
            name, node = found
            line = name.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal():
            if int(part) >= len(node.value):
                break
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            break
    return line
