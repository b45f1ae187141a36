"""Commands that answer and end hold back the garbage collector, and leave it as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flowrl.cli import main

FEW = 10_000
"""New objects; a graph that is read a second time makes fewer."""


@pytest.fixture(autouse=True)
def never_due() -> Iterator[None]:
    """No collection sets the count of new objects back, and nothing is frozen at first."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    gc.collect()
    gc.set_threshold(1_000_000_000)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def read_a_graph() -> None:
    """With many new objects around."""
    kept: list[list[int]] = [[] for _ in range(2 * FEW)]
    assert gc.get_count()[0] > FEW
    with pytest.raises(SystemExit) as end:
        main(["graph", "grpo"])
    assert end.value.code == 0
    assert kept


def test_what_a_command_made_is_not_looked_through_as_new_after_it() -> None:
    read_a_graph()
    assert gc.isenabled()
    assert gc.get_count()[0] < FEW
    assert gc.get_freeze_count() == 0


def test_what_a_program_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    read_a_graph()
    assert FEW < gc.get_freeze_count() <= frozen


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        read_a_graph()
        assert not gc.isenabled()
        assert gc.get_count()[0] > FEW
    finally:
        gc.enable()
