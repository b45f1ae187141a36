"""The whole state of a scheduler between two steps, and a description of what it waits for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flowrl.ids import GroupId
from flowrl.rollout.batches import Pool, open_pool
from flowrl.rollout.machine import Machine, Observer
from flowrl.rollout.offered import OfferedGroups
from flowrl.rollout.placement import Placement
from flowrl.rollout.records import Group
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import GroupPhase, State

__all__ = ["SchedulerState", "describe_waits"]


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """Everything that a scheduler knows. `flowrl.rollout.validation` checks what is said here."""

    settings: SchedulerSettings
    placement: Placement  # the engines, and every QUEUED sample
    machine: Machine  # every live sample, and how many ever were in each state
    pool: Pool  # alive groups, and dead ones that no batch has named yet
    groups: dict[GroupId, Group] = field(default_factory=dict)  # alive groups in offer order
    offered: OfferedGroups = field(default_factory=OfferedGroups)  # every group ever offered
    num_offered: int = 0  # their number, which is the next group's seq
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (batch, groups) as asked
    lost: int = 0  # refill: dead groups for which no replacement was asked for; >= 0
    requested: int = 0  # refill: replacements asked for and not yet offered; >= 0
    fenced: int = 0  # reports on dead attempts, and answers to nothing asked; never falls
    stopped: str | None = None  # reason of the stop; then nothing is alive and nothing waits

    @classmethod
    def new(
        cls, settings: SchedulerSettings, observer: Observer | None, *, keep_stories: bool
    ) -> SchedulerState:
        """The state before the first event."""
        placement = Placement()
        return cls(
            settings=settings,
            placement=placement,
            machine=Machine(placement, observer, keep_stories=keep_stories),
            pool=open_pool(max_staleness=settings.max_staleness, refill=settings.refill),
        )


def describe_waits(state: SchedulerState) -> list[str]:
    """Who waits for whom, one line each."""
    counts = state.machine.total()
    lines = [f"batch {batch} waits for {groups} groups" for batch, groups in state.waiting]
    if counts.queued:
        room = "no free slot of an engine" if state.placement.engines else "no engine"
        lines.append(f"{counts.queued} samples are queued: there is {room}")
    lines += [
        f"engine {engine.id} holds {len(engine.held)} of {engine.capacity} samples, "
        f"first {next(iter(engine.held))}"
        for engine in state.placement.engines.values()
        if engine.held
    ]
    if counts.scoring:
        first = next(s.id for s in state.machine.samples.values() if s.state is State.SCORING)
        lines.append(f"{counts.scoring} samples wait for their score, first {first}")
    judging = [group.id for group in state.groups.values() if group.phase is GroupPhase.JUDGING]
    if judging:
        lines.append(f"{len(judging)} groups wait for a verdict, first {judging[0]}")
    if state.requested:
        lines.append(f"{state.requested} further groups were asked for and not offered")
    return lines
