"""What each update of a trainer takes, where a role has several.

One trainer does all updates of a role in a step, one after the other; the search places it as one
task (`flowrl.plan.ways.tasks`). Plans have an operation for each update: its seconds, and its part
of the way from the host and back, which the first one begins with and the last one ends with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.cost.source import Estimate
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.tasks import TaskWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An operation of a task.

    Attributes:
        estimate: Of its work.
        move_s: Of its way from the host and back, if it is there between turns.
    """

    node: str
    estimate: Estimate
    move_s: float

    @property
    def seconds(self) -> float:
        """Of a step, moves included."""
        return self.estimate.seconds + self.move_s


def turns_of(task: TaskWork, way: Candidate, made: Candidates) -> tuple[Turn, ...]:
    """The operations of a task, one after the other; one for all but trainers of several."""
    if len(task.updated) < 2:
        return (Turn(node=task.id, estimate=way.estimate, move_s=way.move_s),)
    estimates = made.train_each(task, way.layout, made.options_of(task, way))
    last = len(estimates) - 1
    return tuple(
        Turn(
            node=one.node,
            estimate=estimate,
            move_s=way.move_s / 2 if at in (0, last) else 0.0,
        )
        for at, (one, estimate) in enumerate(zip(task.updated, estimates, strict=True))
    )


def nodes_in_turn(tasks: Sequence[TaskWork]) -> dict[str, tuple[str, ...]]:
    """The operations of each task that a schedule runs, one after the other."""
    return {task.id: task.operations for task in tasks}


def in_turns(task: str, devices: int, nodes: Mapping[str, tuple[str, ...]]) -> ScheduleStep:
    """A task as plans keep it: its operations in turn."""
    runs = [
        ScheduleStep(kind="run", devices=devices, node=node) for node in nodes.get(task, (task,))
    ]
    step = runs.pop()
    while runs:
        step = ScheduleStep(kind="temporal", devices=devices, parts=(runs.pop(), step))
    return step
