"""Whether the numbers of a plan's file can be: a person may have edited it.

Everything that a plan counts or predicts is a finite number and none is negative; shares are at
most 1. Checked on what was read, before anything is made of it, so that the message names the key.
"""

from __future__ import annotations

import math

from flowrl.errors import PlanError

__all__ = ["check_numbers"]

_SHARES = ("idle_share",)

_AT_LEAST_ONE = (
    *("every", "chunks", "version", "num_devices", "tp", "pp", "dp", "cp", "ep"),
    *("at_once", "turns", "replicas", "node_size"),
)

_ABOVE_ZERO = (
    *("flops", "memory_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s", "host_bytes_per_s"),
    *("measured_flops", "measured_memory_bytes_per_s", "sibling_bytes_per_s"),
)


def check_numbers(raw: object, where: str) -> None:
    """Raises PlanError for the first number that cannot be.

    Args:
        raw: Plain dicts, lists and numbers, as JSON or YAML has them.
        where: Names the file in messages.
    """
    waiting: list[tuple[str, str, object]] = [("", "", raw)]
    while waiting:
        path, key, value = waiting.pop()
        if isinstance(value, dict):
            inner = [(f"{path}.{name}", str(name), one) for name, one in value.items()]
            waiting += reversed(inner)
        elif isinstance(value, list | tuple):
            waiting += reversed([(f"{path}.{i}", key, one) for i, one in enumerate(value)])
        elif isinstance(value, int | float) and not isinstance(value, bool):
            expected = _expected(key, value)
            if expected is not None:
                raise PlanError(
                    "a number that cannot be",
                    where=f"{where}: {path.removeprefix('.')}",
                    found=repr(value),
                    expected=expected,
                )


def _expected(key: str, value: float) -> str | None:
    """What the number of a key should be; None where it is."""
    if not math.isfinite(value):
        return "a finite number"
    if key in _AT_LEAST_ONE and value < 1:
        return "at least 1"
    if value < 0:
        return "no negative number"
    if key in _ABOVE_ZERO and not value:
        return "a number above 0"
    if key in _SHARES and value > 1:
        return "a share, 0 to 1"
    return None
