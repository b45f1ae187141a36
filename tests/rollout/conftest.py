"""A hand-held scheduler for tests that say what happens event by event."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.actions import Action, Submit
from flowrl.rollout.events import (
    DeadlineReached,
    EngineJoined,
    Event,
    PromptsOffered,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
)
from flowrl.rollout.machine import Transition
from flowrl.rollout.placement import in_order
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs import FinishReason

A = TypeVar("A")

E0, E1 = EngineId("e0"), EngineId("e1")


class Play:
    """A validated scheduler; events get their ids and the time, and attempts are remembered.

    After each event the state is written, read and written again.
    """

    def __init__(self, **settings: Any) -> None:
        self.journal: list[Transition] = []
        self.scheduler = RolloutScheduler(
            SchedulerSettings(**{"group_size": 2, **settings}),
            validate=True,
            observer=self.journal.append,
        )
        self.attempts: dict[SampleId, tuple[EngineId, int, int]] = {}
        self.now_s = 0.0
        self.events: list[Event] = []

    def __call__(self, kind: Callable[..., Any], **fields: Any) -> list[Action]:
        fields = {"at_s": self.now_s, **fields}
        event = kind(id=self.scheduler.last_event_id + 1, **fields)
        self.events.append(event)
        actions = self.scheduler.step(event)
        written = self.scheduler.to_json()
        again = RolloutScheduler.from_json(json.loads(json.dumps(written)), validate=True)
        assert again.to_json() == written
        for action in actions:
            if isinstance(action, Submit):
                for d in action.samples:
                    self.attempts[d.sample] = (action.engine, d.attempt, d.kept_tokens)
        return actions

    def join(self, engine: EngineId = E0, capacity: int = 8, **how: Any) -> list[Action]:
        return self(EngineJoined, engine=engine, capacity=capacity, **how)

    def offer(self, *groups: str, **how: Any) -> list[Action]:
        return self(PromptsOffered, groups=tuple(GroupId(g) for g in groups), **how)

    def wait(self, seconds: float) -> list[Action]:
        """Time passes, and the scheduler is told."""
        self.now_s += seconds
        return self(DeadlineReached)

    def end(
        self, sample: str, *, tokens: int = 3, version: int | None = None, reason: str = "stop"
    ) -> SampleEnd:
        """The end of the sample's latest attempt, with `tokens` new ones."""
        _, attempt, kept = self.attempts[SampleId(sample)]
        version = self.scheduler.version if version is None else version
        return SampleEnd(
            sample=SampleId(sample),
            attempt=attempt,
            reason=FinishReason(reason),
            num_tokens=kept + tokens,
            versions=((version, tokens),) if tokens else (),
        )

    def finish(self, *samples: str, **how: Any) -> list[Action]:
        """Ends the latest attempts of samples that run on one engine."""
        engine = self.attempts[SampleId(samples[0])][0]
        ends = tuple(self.end(sample, **how) for sample in samples)
        return self(SamplesFinished, engine=engine, ends=ends)

    def score(self, *samples: str) -> list[Action]:
        return self(SamplesScored, scores=tuple((SampleId(s), 1.0) for s in samples))

    def finish_and_score(self, *samples: str, **how: Any) -> list[Action]:
        self.finish(*samples, **how)
        return self.score(*samples)

    def moves(self, sample: str) -> list[str]:
        """The states that the sample went through."""
        return [str(step.after) for step in self.journal if step.sample == sample]

    def runs(self, engine: str) -> list[str]:
        """Samples that the scheduler has on the engine, in order of admission."""
        return [s.id for s in in_order(self.scheduler.state.placement.engines[EngineId(engine)])]

    def drops(self) -> dict[str, str]:
        """Reasons of dropped samples."""
        return {step.sample: step.reason for step in self.journal if step.after == "dropped"}


@pytest.fixture
def play() -> type[Play]:
    return Play


@pytest.fixture
def where() -> Callable[[list[Action]], dict[str, list[str]]]:
    """Engine -> samples, of the submissions."""

    def find(actions: list[Action]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for action in actions:
            if isinstance(action, Submit):
                found.setdefault(action.engine, []).extend(d.sample for d in action.samples)
        return found

    return find


@pytest.fixture
def only() -> Callable[[list[Action], type[A]], A]:
    """The one action of a kind."""

    def find(actions: list[Action], kind: type[A]) -> A:
        found = [action for action in actions if isinstance(action, kind)]
        assert len(found) == 1, actions
        return found[0]

    return find
