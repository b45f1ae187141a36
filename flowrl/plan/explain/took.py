"""What plans take, in what the best one has least of: a step's seconds, or device time."""

from __future__ import annotations

from flowrl.plan.many import Chosen
from flowrl.plan.show.many import seconds_apart

__all__ = ["by_step_time", "measure", "took_apart"]


def by_step_time(one: Chosen) -> bool:
    """Whether the step is to be short; else its device time is to be little."""
    return one.posed.candidates.options.objective == "step_time"


def measure(one: Chosen) -> float:
    """Seconds of a step, or of a device for a sample."""
    if by_step_time(one):
        return one.step_s
    return one.objective / max(task.samples for task in one.posed.tasks)


def took_apart(one: Chosen, best: Chosen) -> str:
    """Both, in digits that tell them apart: `119 s, the plan's 92.7 s`."""
    its, mine = seconds_apart(measure(one), measure(best))
    unit = "" if by_step_time(best) else " of a device for a sample"
    return f"{its}{unit}, the plan's {mine}"
