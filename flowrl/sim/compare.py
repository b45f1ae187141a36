"""A prediction beside what a run measured, kind of work by kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flowrl.observe.rows import StepMetrics, overlapping_work
from flowrl.sim.report import SimReport, seconds_text
from flowrl.wording import percent

WARM_UP = 3
"""Steps of a run that are left out where it has twice as many: the first allocate and compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Medians over steps.

    Attributes:
        what: `step`, or a kind of work. `host` is what is left of a measured step
            (`rest_s`).
    """

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None where nothing was measured."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


def beside(report: SimReport, rows: Sequence[StepMetrics]) -> list[Beside]:
    """The whole step first, then every kind of work that either side has.

    Args:
        rows: Of the stage that was simulated, in order.
    """
    later = rows[WARM_UP:] if len(rows) >= 2 * WARM_UP else rows
    if not later:
        return []
    measured = {
        kind: median(row.seconds.get(kind, 0.0) for row in later)
        for kind in dict.fromkeys(kind for row in later for kind in row.seconds)
    }
    measured["host"] = median(rest_s(row) for row in later)
    steps = [
        Beside(
            what="step",
            predicted_s=report.step_s,
            measured_s=median(row.wall_s for row in later),
        )
    ]
    kinds = dict.fromkeys((*report.kinds, *measured))
    return steps + [
        Beside(
            what=kind,
            predicted_s=report.seconds(kind),
            measured_s=measured.get(kind, 0.0),
        )
        for kind in kinds
    ]


def rest_s(row: StepMetrics) -> float:
    """Seconds of a step that no kind of work has.

    Where a step waits for a batch that is drawn all the time (`wait`), drawing is beside it.
    """
    beside = overlapping_work(row.seconds)
    spent = sum(seconds for kind, seconds in row.seconds.items() if kind not in beside)
    return max(0.0, row.wall_s - spent)


def beside_text(pairs: Sequence[Beside]) -> str:
    """A table for people, as plain lines.

    >>> print(beside_text([Beside(what="step", predicted_s=0.11, measured_s=0.1)]))
    medians    predicted    measured
      step       110 ms      100 ms    +10 %
    """
    width = max((len(pair.what) for pair in pairs), default=4)
    lines = [f"{'medians':<{width + 2}} {'predicted':>12}{'measured':>12}"]
    for pair in pairs:
        error = "" if pair.error is None else f"{percent(pair.error, signed=True):>9}"
        lines.append(
            f"  {pair.what:<{width}} {seconds_text(pair.predicted_s):>12}"
            f"{seconds_text(pair.measured_s):>12}{error}"
        )
    return "\n".join(lines)
