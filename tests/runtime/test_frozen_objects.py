"""What a run keeps out of garbage collections, and that it leaves a program's own choice alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl import api
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics
from tests.runtime.tiny_runs import tiny_config


class Watching(SilentDisplay):
    """How many objects are frozen at each step."""

    def __init__(self) -> None:
        self.frozen: list[int] = []

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        self.frozen.append(gc.get_freeze_count())


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def watched(runs: Path) -> list[int]:
    display = Watching()
    api.run(None, tiny_config(runs), display=display)
    return display.frozen


@pytest.mark.usefixtures("nothing_frozen")
def test_libraries_and_rows_are_frozen_while_a_run_makes_steps(tmp_path: Path):
    frozen = watched(tmp_path)
    assert len(frozen) == 8
    assert min(frozen) > 10_000  # the libraries alone are more
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_program_has_frozen_stays_so_and_nothing_is_added(tmp_path: Path):
    gc.freeze()
    before = gc.get_freeze_count()
    # Frozen objects that nothing refers to any more are freed as ever, so there may be fewer.
    assert max(watched(tmp_path)) <= before
    assert 0 < gc.get_freeze_count() <= before
