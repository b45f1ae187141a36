"""Checks that policies share: a number that makes no sense is refused when the policy is made."""

from __future__ import annotations

import math

from flowrl.errors import SchedulerError
from flowrl.specs.base import Spec

__all__ = ["require_at_least"]


def require_at_least(policy: Spec, least: float, *names: str) -> None:
    """Checks that the named options are finite numbers of at least `least`.

    Raises:
        SchedulerError: naming policy and option.
    """
    for name in names:
        value: float = getattr(policy, name)
        if not (math.isfinite(value) and value >= least):
            raise SchedulerError(
                f"{name} is out of range",
                where=f"{policy.family} policy {policy.kind}",
                found=repr(value),
                expected=f"a number of at least {least:g}",
            )
