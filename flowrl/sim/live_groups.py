"""Groups of a simulated rollout that are on their way to a batch, and who is told of them.

    offered -> its samples live -> complete (kept, or filtered) -> delivered, or named by a batch

Redundant members may be drawn beside those that a group is delivered with; a group counts with the
lengths of those that it has in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from flowrl.ids import GroupId, SampleId, sample_id
from flowrl.rollout.actions import Deliver
from flowrl.rollout.events import Event, GroupsJudged, SamplesScored
from flowrl.rollout.states import Group, GroupPhase
from flowrl.sim.batch import Batch
from flowrl.sim.workload import GroupDraw


@dataclass(slots=True, eq=False)
class Life:
    """What the simulation knows of a live sample."""

    group: GroupId
    draw: GroupDraw
    length: int
    attempt: int = -1
    tokens: int = 0  # of ended attempts
    first_version: int | None = None  # of those tokens
    due: int = 0  # scorers that have not answered
    num_scored: int = 0  # times that all of them have answered


class GroupListener(Protocol):
    """Is told of samples, groups and batches as they are there (`flowrl.sim.streams`)."""

    def sample(self, rollout: str, sample: SampleId, draw: GroupDraw) -> None:
        """A sample is scored; `draw` is it alone."""
        ...

    def complete(
        self,
        rollout: str,
        group: GroupId,
        samples: tuple[SampleId, ...],
        draw: GroupDraw,
        *,
        kept: bool,
    ) -> None:
        """A group is complete, or a filter has taken it out; told once."""
        ...

    def delivered(
        self, rollout: str, batch: int, kept: Iterable[GroupId], filtered: Iterable[GroupId]
    ) -> None:
        """A batch is whole; each of its groups was told before."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class LiveGroups:
    """See the module.

    Attributes:
        rollout: The node that draws.
        listener: Is told of groups; None where nobody begins on them before the batch.
        lives: Samples that no batch has and that are not dropped.
        filtered: Samples of filtered groups, by reason.
        of_parents: How many publications the parent of a group is behind, where it has one.
    """

    rollout: str
    listener: GroupListener | None
    lives: dict[SampleId, Life] = field(default_factory=dict)
    filtered: Counter[str] = field(default_factory=Counter)
    of_parents: dict[GroupId, int] = field(default_factory=dict)
    _draws: dict[GroupId, GroupDraw] = field(default_factory=dict)
    _judged: dict[GroupId, GroupDraw] = field(default_factory=dict)  # filtered, not yet named
    _told: set[GroupId] = field(default_factory=set)  # complete ones, not yet delivered

    def offer(self, group: GroupId, draw: GroupDraw) -> None:
        """A group, with what will be drawn of it."""
        self._draws[group] = draw
        for member, length in enumerate(draw.lengths):
            self.lives[sample_id(group, member)] = Life(group, draw, length)

    def tell_complete(self, event: Event, groups: Mapping[GroupId, Group]) -> None:
        """Tells of samples that are scored, and of groups that an event has made ready.

        A group that is delivered with the event is told there.

        Args:
            groups: The scheduler's, after the event.
        """
        assert self.listener is not None
        match event:
            case SamplesScored():
                names = []
                for sample, _ in event.scores:
                    life = self.lives.get(sample)
                    if life is not None:
                        names.append(life.group)
                        alone = replace(life.draw, lengths=(life.length,))
                        self.listener.sample(self.rollout, sample, alone)
            case GroupsJudged():
                names = [name for name, _ in event.verdicts]
            case _:
                return
        for name in dict.fromkeys(names):
            group = groups.get(name)
            if group is not None and group.phase is GroupPhase.READY and name not in self._told:
                self._told.add(name)
                samples = tuple(member.id for member in group.members)
                self._tell_group(self.listener, name, samples)

    def _tell_group(
        self, listener: GroupListener, name: GroupId, samples: tuple[SampleId, ...]
    ) -> None:
        draw = self._draws[name]
        if len(samples) != len(draw.lengths):  # redundant members were drawn
            draw = replace(draw, lengths=tuple(self.lives[s].length for s in samples))
        listener.complete(self.rollout, name, samples, draw, kept=True)

    def judge(self, group: GroupId) -> str | None:
        """The filter's reason against a group, if it has one."""
        draw = self._draws[group]
        if draw.filtered is not None:
            self._judged[group] = draw
            self.filtered[draw.filtered] += len(draw.lengths)
            if self.listener is not None:
                members = range(len(draw.lengths))
                samples = tuple(sample_id(group, member) for member in members)
                self.listener.complete(self.rollout, group, samples, draw, kept=False)
        return draw.filtered

    def deliver(self, action: Deliver) -> Batch:
        """A batch takes its groups, and those that were filtered since the one before."""
        ages: dict[SampleId, int] = {}
        of_delivered = Counter[int]()
        delivered: dict[GroupId, GroupDraw] = {}
        for group in action.groups:
            if self.listener is not None and group.group not in self._told:
                self._tell_group(self.listener, group.group, group.samples)
            self._told.discard(group.group)
            of_group = {sample: self._age(sample, action.version) for sample in group.samples}
            ages |= of_group
            of_delivered.update(of_group.values())
            lives = [self.lives.pop(sample) for sample in group.samples]
            draw = self._draws.pop(group.group)
            if len(lives) != len(draw.lengths):  # redundant members were drawn
                draw = replace(draw, lengths=tuple(life.length for life in lives))
            delivered[group.group] = draw
            self.of_parents.pop(group.group, None)
        filtered: dict[GroupId, GroupDraw] = {}
        for name in action.filtered:
            judged = self._judged.pop(name, None)
            if judged is not None:
                filtered[name] = judged
                for member in range(len(judged.lengths)):
                    sample = sample_id(name, member)
                    if sample in self.lives:
                        ages[sample] = self._age(sample, action.version)
                        del self.lives[sample]
            self._draws.pop(name, None)
        if self.listener is not None:
            self.listener.delivered(self.rollout, action.batch, list(delivered), list(filtered))
        return Batch(
            delivered=list(delivered.values()),
            filtered=list(filtered.values()),
            ages=of_delivered,
            of_samples=ages,
        )

    def _age(self, sample: SampleId, version: int) -> int:
        """Returns the publications that a sample is behind, or what its prompt is made of."""
        life = self.lives[sample]
        own = 0 if life.first_version is None else version - life.first_version
        return max(own, self.of_parents.get(life.group, 0))
