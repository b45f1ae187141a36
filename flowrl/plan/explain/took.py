"""What plans take, in what the best one has least of: a step's seconds, or device time."""

from __future__ import annotations

from flowrl.plan.many import Chosen
from flowrl.plan.show.many import device_seconds_apart, seconds_apart


def by_step_time(one: Chosen) -> bool:
    """Whether the step is to be short; else its device time is to be little."""
    return one.posed.candidates.options.objective == "step_time"


def measure(one: Chosen) -> float:
    """Seconds of a step, or device-seconds per sample."""
    if by_step_time(one):
        return one.step_s
    return one.objective / max(task.samples for task in one.posed.tasks)


def took_apart(one: Chosen, best: Chosen) -> str:
    """Returns both in as many digits as differ: `119 s, the plan's 92.7 s`."""
    if by_step_time(best):
        its, mine = seconds_apart(measure(one), measure(best))
        return f"{its}, the plan's {mine}"
    its, mine = device_seconds_apart(measure(one), measure(best))
    return f"{its} device-seconds per sample, the plan's {mine}"
