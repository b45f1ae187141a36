"""What rates and sizes of devices can be: a figure outside is a slip of the hand or of the unit.

The ranges are wide, from a small board to what no machine has yet; inside of them a prediction may
still be wrong, outside of them it means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The range of one figure.

    Attributes:
        scale: Of the unit, in operations or bytes (a second).
        typical: An example, for messages.
    """

    least: float
    most: float
    unit: str
    scale: float
    typical: str

    def describe(self) -> str:
        """The range in words: `from 0.001 to 1,000 TB/s (an H100 has 3.35)`."""
        return f"from {self.least:g} to {self.most:,.0f} {self.unit} ({self.typical})"

    def holds(self, value: float) -> bool:
        """Whether a value in the figure's unit can be."""
        return self.least <= value <= self.most

    def holds_plain(self, value: float) -> bool:
        """Whether a value in operations or bytes (a second) can be, rounding aside."""
        return self.least * 0.999 <= value / self.scale <= self.most * 1.001


FIGURES = {
    "tflops": Figure(
        least=0.001,
        most=100_000,
        unit="TFLOP/s",
        scale=1e12,
        typical="dense bfloat16: an H100 has 989; a core of a CPU 0.1",
    ),
    "memory_tb_per_s": Figure(
        least=0.001,
        most=1_000,
        unit="TB/s",
        scale=1e12,
        typical="an H100 has 3.35, a core of a CPU 0.01",
    ),
    "host_gb_per_s": Figure(
        least=0.1,
        most=10_000,
        unit="GB/s",
        scale=1e9,
        typical="of one device, in one direction: an H100 has 54, over PCIe gen 5",
    ),
    "link_gb_per_s": Figure(
        least=0.01,
        most=100_000,
        unit="GB/s",
        scale=1e9,
        typical="of one device, in one direction: NVLink of an H100 has 450, a network card of "
        "400 Gb/s has 50, an eighth of it where eight devices share it",
    ),
    "memory_gib": Figure(
        least=0.1,
        most=1_000_000,
        unit="GiB",
        scale=1 << 30,
        typical="as software reports it: an H100 has 79.1, a node of eight 2,048",
    ),
}


def within(name: str) -> Callable[[float | None], float | None]:
    """A check for fields of files: the value, where the figure `name` can have it."""
    figure = FIGURES[name]

    def check(value: float | None) -> float | None:
        if value is not None and not figure.holds(value):
            raise ValueError(f"must be {figure.describe()}")
        return value

    return check
