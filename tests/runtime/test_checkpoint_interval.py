"""When a run writes checkpoints between its steps, and how its first lines say so."""

from __future__ import annotations

import pytest

from flowrl.config.schema import RuntimeConfig
from flowrl.runtime.checkpoint.store import CheckpointInterval


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def interval(clock: Clock, *, every: int = 0, minutes: float = 10.0) -> CheckpointInterval:
    config = RuntimeConfig(checkpoint_every=every, checkpoint_minutes=minutes)
    return CheckpointInterval(config, clock=clock)


def due_steps(made: CheckpointInterval, clock: Clock, step_s: float, steps: int) -> list[int]:
    """The steps after which a checkpoint is written, each of which takes `step_s` seconds."""
    due = []
    for step in range(1, steps + 1):
        clock.now += step_s
        if made.is_due(step):
            due.append(step)
            clock.now += 45.0  # writing it takes time, which counts for no interval
            made.restart()
    return due


def test_a_run_of_an_hour_writes_a_checkpoint_every_ten_minutes_by_default():
    clock = Clock()
    made = CheckpointInterval(RuntimeConfig(), clock=clock)
    assert due_steps(made, clock, step_s=60.0, steps=60) == [10, 20, 30, 40, 50, 60]


def test_a_checkpoint_is_due_at_the_minute_and_not_a_second_before():
    clock = Clock()
    made = interval(clock)
    clock.now += 599.0
    assert not made.is_due(1)
    clock.now += 1.0
    assert made.is_due(1)


def test_a_step_longer_than_the_interval_is_followed_by_a_checkpoint():
    clock = Clock()
    assert due_steps(interval(clock), clock, step_s=1800.0, steps=3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("step_s", "due"),
    [(60.0, [4, 8, 12]), (240.0, [3, 4, 7, 8, 11, 12])],
    ids=["steps first", "minutes first"],
)
def test_of_steps_and_minutes_whichever_comes_first_writes_a_checkpoint(step_s, due):
    clock = Clock()
    assert due_steps(interval(clock, every=4), clock, step_s, steps=12) == due


def test_zero_minutes_measure_no_time():
    clock = Clock()
    assert due_steps(interval(clock, minutes=0.0), clock, step_s=1e6, steps=5) == []
    assert due_steps(interval(clock, every=2, minutes=0.0), clock, step_s=1e6, steps=5) == [2, 4]


@pytest.mark.parametrize(
    ("every", "minutes", "text"),
    [
        (0, 10.0, "every 10 minutes, at the end of each stage and at Ctrl-C"),
        (0, 1.0, "every 1 minute, at the end of each stage and at Ctrl-C"),
        (
            50,
            2.5,
            "every 50 steps or 2.5 minutes, whichever comes first, "
            "at the end of each stage and at Ctrl-C",
        ),
        (1, 0.0, "every 1 step, at the end of each stage and at Ctrl-C"),
        (
            0,
            0.0,
            "at the end of each stage and at Ctrl-C only; a run that is killed loses its stage",
        ),
    ],
)
def test_the_interval_is_told_in_words(every, minutes, text):
    assert str(interval(Clock(), every=every, minutes=minutes)) == text
