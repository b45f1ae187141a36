"""On which line of a plan's file a key is: for messages to people who have edited it."""

from __future__ import annotations

import yaml

__all__ = ["line_of"]


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
