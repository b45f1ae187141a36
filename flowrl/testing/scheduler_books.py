"""The books of a `World`: what is true around a scheduler, kept without looking into it.

Every action is carried out here and checked: who runs where and within which capacity, which token
was made by which weights, what ended how, what every batch holds.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never

from flowrl.ids import EngineId, GroupId, SampleId, sample_id
from flowrl.rollout import (
    Abort,
    Action,
    Counts,
    Deliver,
    Drop,
    Judge,
    NeedPrompts,
    SchedulerSettings,
    Score,
    Submit,
)

__all__ = ["Attempt", "Books", "Violation"]


class Violation(AssertionError):
    """The scheduler did what it must never do."""


@dataclass(slots=True)
class Attempt:
    """What an engine knows of a sample."""

    attempt: int
    kept: int
    made: list[int] = field(default_factory=list)  # version of each token of this attempt
    abort_asked: bool = False


@dataclass(slots=True, kw_only=True)
class Books:
    """What is true around a scheduler, and what its actions must agree with.

    A copy of the books beside a written state is what a checkpoint of a run holds.
    """

    settings: SchedulerSettings
    max_tokens: int
    num_offered: int = 0
    version: int = 0
    num_asked: int = 0
    asked: dict[int, int] = field(default_factory=dict)  # batch -> groups, not yet delivered
    wanted: int = 0  # prompts asked for
    untrained: int = 0  # delivered batches whose weights are not published
    capacity: dict[EngineId, int] = field(default_factory=dict)
    running: dict[EngineId, dict[SampleId, Attempt]] = field(default_factory=dict)
    payload: dict[SampleId, list[int]] = field(default_factory=dict)  # version of each kept token
    attempts: dict[SampleId, int] = field(default_factory=dict)  # latest attempt
    scoring: dict[SampleId, None] = field(default_factory=dict)
    scored: set[SampleId] = field(default_factory=set)
    judging: dict[GroupId, None] = field(default_factory=dict)
    end: dict[SampleId, str] = field(default_factory=dict)
    answered: set[GroupId] = field(default_factory=set)
    stopped: bool = False
    delivered: list[Deliver] = field(default_factory=list)

    def clone(self) -> Books:
        """An independent copy."""
        delivered, self.delivered = self.delivered, []
        other = copy.deepcopy(self)
        self.delivered = delivered
        other.delivered = list(delivered)
        return other

    def check(self, fine: bool, what: str) -> None:
        """Raises a `Violation` where something is not fine."""
        if not fine:
            raise Violation(what)

    def length(self, sample: SampleId) -> int:
        """Response tokens that the sample ends with."""
        # From the name alone, like tokens from a sample's own random stream.
        return random.Random(str(sample)).randint(0, self.max_tokens)

    def members(self, group: GroupId) -> list[SampleId]:
        """A group's samples in member order."""
        return [sample_id(group, member) for member in range(self.settings.group_size)]

    def num_available(self) -> int:
        """Groups that batches can still take."""
        if not self.settings.refill:
            return self.num_offered - len(self.answered)
        ended = {sample.rpartition("/")[0] for sample in self.end}
        return self.num_offered - len(ended)

    def carry_out(self, actions: list[Action], counts: Counts) -> None:
        """Carries actions out and checks each of them."""
        for action in actions:
            match action:
                case Submit():
                    self._on_submit(action)
                case Abort():
                    self._on_abort(action)
                case Score(samples=samples):
                    for sample in samples:
                        length = len(self.payload.get(sample, ()))
                        self.check(
                            sample not in self.end and length == self.length(sample),
                            f"{sample} is scored with {length} tokens",
                        )
                        self.scoring[sample] = None
                case Judge(groups=groups):
                    for group in groups:
                        whole = all(s in self.scored for s in self.members(group))
                        self.check(whole, f"{group} is judged before it is scored")
                        self.judging[group] = None
                case Deliver():
                    self._on_deliver(action)
                case Drop(sample=sample):
                    self.finish(sample, "dropped")
                    runs = any(
                        sample in running and not running[sample].abort_asked
                        for running in self.running.values()
                    )
                    self.check(not runs, f"{sample} is dropped and runs on")
                    self.scoring.pop(sample, None)
                    self.judging.pop(GroupId(sample.rpartition("/")[0]), None)
                case NeedPrompts(groups=num_groups):
                    self.check(self.settings.refill and num_groups > 0, "prompts without refill")
                    self.wanted += num_groups
                case _:
                    assert_never(action)
        self._check_counts(counts)

    def _on_submit(self, submit: Submit) -> None:
        self.check(submit.engine in self.capacity, f"{submit.engine} is gone")
        running = self.running[submit.engine]
        for dispatch in submit.samples:
            sample = dispatch.sample
            self.check(sample not in self.end, f"{sample} runs after its end")
            self.check(
                not any(sample in others for others in self.running.values()),
                f"{sample} runs twice",
            )
            self.check(
                dispatch.attempt > self.attempts.get(sample, -1),
                f"attempt {dispatch.attempt} of {sample} is not a new one",
            )
            kept = len(self.payload.get(sample, ()))
            self.check(
                dispatch.kept_tokens == kept,
                f"{sample} goes on from {dispatch.kept_tokens} tokens, but {kept} are kept",
            )
            self.attempts[sample] = dispatch.attempt
            running[sample] = Attempt(attempt=dispatch.attempt, kept=kept)
        held = sum(sample not in self.end for sample in running)
        capacity = self.capacity[submit.engine]
        self.check(held <= capacity, f"{submit.engine} holds {held} of {capacity}")

    def _on_abort(self, abort: Abort) -> None:
        running = self.running.get(abort.engine, {})
        for sample in abort.samples:
            self.check(
                sample in running and not running[sample].abort_asked,
                f"{sample} is aborted where it does not run, or twice",
            )
            running[sample].abort_asked = True

    def _on_deliver(self, deliver: Deliver) -> None:
        asked = self.asked.pop(deliver.batch, 0)
        self.check(asked > 0, f"batch {deliver.batch} was not asked for")
        self.untrained += 1
        self.delivered.append(deliver)
        counted = len(deliver.groups) + (0 if self.settings.refill else len(deliver.filtered))
        self.check(counted == asked, f"batch of {asked} has {counted} groups")
        for name in deliver.filtered:
            ends = {self.end.get(sample, "live") for sample in self.members(name)}
            self.check(ends <= {"filtered", "dropped"}, f"{name} is named filtered, but {ends}")
        names = [*(g.group for g in deliver.groups), *deliver.filtered]
        self.check(
            len(set(names)) == len(names) and not self.answered & set(names),
            f"a group of {names} is answered twice",
        )
        self.answered |= set(names)
        for listed in ([g.group for g in deliver.groups], list(deliver.filtered)):
            order = [int(g.partition("/")[0]) * 10 + int(g.partition("/")[2]) for g in listed]
            self.check(order == sorted(order), f"{listed} is not in offer order")
        for group in deliver.groups:
            self.check(list(group.samples) == self.members(group.group), f"{group} is not whole")
            for sample in group.samples:
                self.check(sample in self.scored, f"{sample} is consumed without a score")
                first = min(self.payload.get(sample, []), default=self.version)
                age = self.version - first
                self.check(age <= self.settings.max_staleness, f"{sample} is {age} versions old")
                self.finish(sample, "consumed")

    def finish(self, sample: SampleId, end: str) -> None:
        """The sample has that end; checks that it had no other."""
        ended = self.end.setdefault(sample, end)
        self.check(ended is end, f"{sample} ends {end}, but was {ended}")

    def _check_counts(self, counts: Counts) -> None:
        ends = Counter(self.end.values())
        admitted = self.num_offered * self.settings.group_size
        mine = (admitted, ends["consumed"], ends["filtered"], ends["dropped"])
        told = (counts.admitted, counts.consumed, counts.filtered, counts.dropped)
        self.check(counts.conserved and mine == told, f"counts are {told}, but should be {mine}")
