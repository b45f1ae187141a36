"""Profiles that are measured in seconds: fewer repetitions, and short runs of few samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl.sim import calibrate, measure_stage

__all__ = ["quick_profiles"]


@contextmanager
def quick_profiles() -> Iterator[None]:
    """All that are measured meanwhile; their times are less exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_stage, "_OP_S", 0.1)
        patch.setattr(calibrate, "_STEPS", 6)
        patch.setattr(calibrate, "_WARM_UP", 2)
        patch.setattr(calibrate, "_MAX_SAMPLES", 64)
        yield
