"""Whether the numbers of a plan's file can be: a person may have edited it.

Everything that a plan counts or predicts is a finite number and none is negative; shares are at
most 1. Checked on what was read, before anything is made of it, so that the message names the key.
"""

from __future__ import annotations

import math

from flowrl.cluster.rates import FIGURES
from flowrl.errors import PlanError

UNDO = "undo the edit, or make the plan again: flowrl plan CONFIG -o FILE"
"""What to do about a plan whose parts contradict each other."""

PRICE_ANEW = (
    "undo the edit, or evaluate its decisions again with their configuration: "
    "flowrl plan CONFIG --plan FILE --output NEW"
)
"""What to do about a prediction that is not of the plan's decisions."""

_SHARES = ("idle_share",)

_MOST = 1e24
"""Of any number in a plan; a million devices do some 1e21 operations a second."""

_AT_LEAST_ONE = (
    *("every", "chunks", "version", "num_devices", "tp", "pp", "dp", "cp", "ep"),
    *("at_once", "turns", "replicas", "node_size"),
)

_FIGURES = {
    **dict.fromkeys(("flops", "measured_flops"), FIGURES["tflops"]),
    **dict.fromkeys(
        ("memory_bytes_per_s", "measured_memory_bytes_per_s"), FIGURES["memory_tb_per_s"]
    ),
    **dict.fromkeys(
        ("intra_bytes_per_s", "inter_bytes_per_s", "sibling_bytes_per_s"),
        FIGURES["link_gb_per_s"],
    ),
    "host_bytes_per_s": FIGURES["host_gb_per_s"],
}
"""Rates of the machines that a plan was made for."""


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
                    found=repr(value)[:60],
                    expected=expected,
                    hint="write such a number, or make the plan again: flowrl plan CONFIG -o FILE",
                )


def _expected(key: str, value: float) -> str | None:
    """What the number of a key should be; None where it is."""
    if value != value or abs(value) == math.inf:
        return "a finite number"
    if abs(value) > _MOST:
        return f"at most {_MOST:g}"
    if key in _AT_LEAST_ONE and value < 1:
        return "at least 1"
    if value < 0:
        return "no negative number"
    if (figure := _FIGURES.get(key)) is not None and not figure.holds_plain(value):
        return f"in operations or bytes a second what is {figure.describe()}"
    if key in _SHARES and value > 1:
        return "a share, 0 to 1"
    return None
