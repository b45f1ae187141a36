"""A round of one or several rollout drivers: one look after their engines and scorers.

Several drivers go on at the same time where each answers what the samples of the one before become.
Engines in other processes decode all the time. Those in this process take turns, and each step
costs as much for one sample as for many: so an engine that still has free slots waits while another
one of a rollout before decodes, which may fill them. Further prompts are offered when no engine has
a sample, of whichever driver, so that the batches that engines decode do not depend on when a
scorer answered. Nor do the members of a group with spare ones: engines in this process wait until
what has ended is scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl.errors import SchedulerError
from flowrl.runtime.spans import SPANS
from flowrl.runtime.workers import wait_for_any

if TYPE_CHECKING:
    from flowrl.runtime.driver.rollout_driver import RolloutDriver


POLL_S = 0.25
"""Seconds to wait for other processes before Ctrl-C is checked again."""


def stalled(timeout_s: float, waits: str) -> SchedulerError:
    """Returns the error of a rollout in which nothing moves.

    Args:
        waits: Who waits for whom.
    """
    return SchedulerError(
        f"nothing moved for {timeout_s:g} s",
        found=waits,
        hint="raise runtime.stall_timeout_s if the worker that is waited for is slow",
    )


def one_round(drivers: Sequence[RolloutDriver]) -> int:
    """Looks once after everyone, and waits a little where nothing moved; what moved."""
    progressed = 0
    waits = any(driver.awaits_scores for driver in drivers)
    for place, driver in enumerate(drivers):
        if not waits and not _waits(driver, drivers[:place]):
            progressed += driver.look_after_engines(driver.spent)
    generating = next((driver for driver in drivers if driver.is_generating), None)
    idle = generating is None
    progressed += sum(driver.poll_scoring(driver.spent, wait=idle or waits) for driver in drivers)
    if idle:
        progressed += sum(driver.refill() for driver in drivers)
    if progressed or any(driver.is_broken for driver in drivers):
        return progressed
    if generating is not None:
        started = time.monotonic()
        if any(driver.waitable_engines() for driver in drivers):
            with SPANS.waiting("rollout", "engines"):
                wait_for_any([worker for driver in drivers for worker in driver.waitable()], POLL_S)
        generating.spent.generate += time.monotonic() - started
    elif not any(driver.is_scoring for driver in drivers):
        wake_s = min(driver.seconds_to_wake() for driver in drivers)
        if wake_s < math.inf:
            wait_for_any((), min(POLL_S, wake_s))
    return progressed


def _waits(driver: RolloutDriver, before: Sequence[RolloutDriver]) -> bool:
    """True if a driver's engines, all in this process, may get further samples before a step."""
    mine = driver.free_slots
    others = [other.free_slots for other in before]
    if not mine or min(mine.values()) <= 0 or any(mine.keys() & other for other in others):
        return False
    return any(others)
