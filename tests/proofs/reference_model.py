"""The reference model of the rollout scheduler: what is true, recorded without reading its state.

The model carries out every action of the scheduler and checks it: which engine runs which sample
and within which capacity, which weights made which token, how each sample ended, and what every
batch holds. Each check belongs to one invariant of docs/scheduling.md, and a `Violation` carries
the number of that invariant. `checked` counts the checks, so that a test can show that an invariant
was really tested.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import assert_never

from flowrl.ids import EngineId, GroupId, SampleId, sample_id
from flowrl.rollout.actions import (
    Abort,
    Action,
    ContinueEngine,
    Deliver,
    Drop,
    Judge,
    NeedPrompts,
    PauseEngine,
    ReleaseEngine,
    Score,
    Submit,
    UpdateEngine,
    Wake,
)
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import Counts
from tests.proofs.starvation_rules import is_there

__all__ = ["INVARIANTS", "Attempt", "EngineTruth", "ReferenceModel", "Violation"]

INVARIANTS = {
    1: "conservation",
    2: "exactly once",
    3: "age",
    4: "whole groups",
    5: "exact batches",
    6: "nothing starves",
    7: "a stuck sample blocks its own group only",
    8: "liveness",
    9: "no lost wake-up",
    10: "aborts join exactly",
    11: "crash and resume",
    12: "makespan",
}
"""The invariants by number. Tests in tests/rollout check 7 and 12."""


class Violation(AssertionError):
    """The scheduler broke an invariant.

    Attributes:
        invariant: The number of the invariant in `INVARIANTS`.
    """

    def __init__(self, invariant: int, what: str) -> None:
        super().__init__(f"[{invariant}: {INVARIANTS[invariant]}] {what}")
        self.invariant = invariant


@dataclass(slots=True)
class Attempt:
    """One attempt at a sample, as the engine that runs it knows it."""

    attempt: int
    kept: int
    moved_s: float = 0.0  # time of the last reported token, or of the start
    reported: int = 0  # tokens of this attempt that progress reports have named
    made: list[int] = field(default_factory=list)  # version of each token of this attempt
    abort_asked: bool = False
    stuck: bool = False  # it will never make another token, nor answer


@dataclass(slots=True)
class EngineTruth:
    """The true state of an engine."""

    capacity: int
    version: int
    running: dict[SampleId, Attempt] = field(default_factory=dict)
    silent: bool = False  # it reports nothing, and the scheduler knows it
    leaving: bool = False
    held: bool = False  # the caller paused it
    paused: bool = False  # the scheduler paused it
    loading: int | None = None  # weights that it was asked to load

    def clone(self) -> EngineTruth:
        """Returns an independent copy."""
        other = EngineTruth(**{of.name: getattr(self, of.name) for of in fields(self)})
        other.running = {
            name: Attempt(
                a.attempt, a.kept, a.moved_s, a.reported, [*a.made], a.abort_asked, a.stuck
            )
            for name, a in self.running.items()
        }
        return other

    @property
    def is_open(self) -> bool:
        """Whether the scheduler may submit samples to the engine."""
        return not (self.silent or self.leaving or self.paused or self.loading is not None)


@dataclass(slots=True, kw_only=True)
class ReferenceModel:
    """What is true around a scheduler, and what the scheduler's actions must agree with.

    A checkpoint of a `World` holds the scheduler's written state and a copy of this model.
    """

    settings: SchedulerSettings
    max_tokens: int
    groups: list[GroupId] = field(default_factory=list)  # offered, in order
    version: int = 0
    now_s: float = 0.0  # the latest time of an event
    wake_s: float | None = None  # when it asked to be woken
    num_asked: int = 0
    asked: dict[int, tuple[int, int | None]] = field(default_factory=dict)  # groups, version
    floor: int = 0  # least version of the next batch
    served: tuple[int, int] = (
        0,
        0,
    )  # version of the last batch, and number of batches of that version
    wanted: Counter[str] = field(default_factory=Counter)  # prompts asked for, by source
    untrained: int = 0  # delivered batches whose weights are not published
    engines: dict[EngineId, EngineTruth] = field(default_factory=dict)
    # Engines that were paused and have finished nothing since, perhaps on trial.
    doubtful: dict[EngineId, None] = field(default_factory=dict)
    payload: dict[SampleId, list[int]] = field(default_factory=dict)  # version of each kept token
    began: dict[SampleId, int] = field(default_factory=dict)  # version at dispatch, without tokens
    attempts: dict[SampleId, int] = field(default_factory=dict)  # latest attempt
    scoring: dict[SampleId, None] = field(default_factory=dict)
    scored: dict[SampleId, None] = field(default_factory=dict)
    judging: dict[GroupId, None] = field(default_factory=dict)
    ready: dict[GroupId, None] = field(default_factory=dict)  # could be delivered
    dead: dict[GroupId, None] = field(default_factory=dict)  # ended, and not named in any batch
    end: dict[SampleId, str] = field(default_factory=dict)
    delivered: list[Deliver] = field(default_factory=list)
    stopped: bool = False
    given_up: dict[tuple[EngineId, SampleId], bool] = field(default_factory=dict)  # in this step
    past: list[tuple[EngineId, SampleId, int, int]] = field(default_factory=list)  # dead attempts
    checked: Counter[int] = field(default_factory=Counter)  # by invariant; of all clones together

    def clone(self) -> ReferenceModel:
        """Returns a copy that shares nothing but `checked`."""
        other = ReferenceModel(settings=self.settings, max_tokens=self.max_tokens)
        for of in fields(self):
            value = getattr(self, of.name)
            if of.name == "checked":
                other.checked = value
            elif isinstance(value, dict | list):
                setattr(other, of.name, value.copy())
            else:
                setattr(other, of.name, value)
        other.payload = {name: [*tokens] for name, tokens in self.payload.items()}
        other.engines = {name: engine.clone() for name, engine in self.engines.items()}
        return other

    def check(self, invariant: int, fine: bool, what: str) -> None:
        """Counts a check, and raises a `Violation` unless `fine`."""
        self.checked[invariant] += 1
        if not fine:
            raise Violation(invariant, what)

    # Queries

    def length(self, sample: SampleId) -> int:
        """Returns the number of response tokens that the sample ends with."""
        # It follows from the name alone, as tokens follow from a sample's own random stream.
        return random.Random(str(sample)).randint(0, self.max_tokens)

    def members(self, group: GroupId) -> list[SampleId]:
        """Returns a group's samples in member order, with its spare members."""
        return [sample_id(group, member) for member in range(self.settings.num_members)]

    def live(self, group: GroupId) -> list[SampleId]:
        """Returns a group's samples that have not ended."""
        return [sample for sample in self.members(group) if sample not in self.end]

    def first_version(self, sample: SampleId) -> int | None:
        """Returns the version that the sample's staleness counts from."""
        tokens = self.payload.get(sample)
        return min(tokens) if tokens else self.began.get(sample)

    def horizon(self) -> int:
        """Returns the version that the next batch is for."""
        horizon = max(self.floor, self.version)
        budget = self.settings.budget
        if budget is not None:
            version, batches = self.served
            horizon = max(horizon, version + (batches >= budget.batches_per_version))
        if self.asked:
            horizon = max(horizon, next(iter(self.asked.values()))[1] or 0)
        return horizon

    def forget(self, engine: EngineId) -> None:
        """Removes an engine; its attempts are over, and their tokens are lost."""
        truth = self.engines.pop(engine, None)
        if truth is not None:
            for sample, attempt in truth.running.items():
                self.bury(engine, sample, attempt)
                self.lose_tokens(sample)

    def bury(self, engine: EngineId, sample: SampleId, attempt: Attempt) -> None:
        """Records an attempt that is over, so that late reports can name it."""
        self.past.append((engine, sample, attempt.attempt, attempt.kept + len(attempt.made)))

    def lose_tokens(self, sample: SampleId) -> None:
        """Ends an attempt without tokens; without kept tokens the sample's staleness restarts."""
        if not self.payload.get(sample):
            self.began.pop(sample, None)

    def running(self) -> Iterable[SampleId]:
        """Yields the samples that engines hold and that have not ended."""
        for engine in self.engines.values():
            yield from (sample for sample in engine.running if sample not in self.end)

    # Actions

    def carry_out(self, actions: list[Action], counts: Counts) -> None:
        """Carries out the actions and checks each of them."""
        dropped: list[SampleId] = []
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
                            2,
                            sample not in self.end and length == self.length(sample),
                            f"{sample} is scored with {length} tokens",
                        )
                        self.scoring[sample] = None
                case Judge(groups=groups, samples=samples):
                    for group, members in zip(groups, samples, strict=True):
                        self.check(
                            4,
                            len(members) == self.settings.group_size
                            and all(s in self.scored for s in members),
                            f"{group} is judged before it is scored",
                        )
                        self.judging[group] = None
                case Deliver():
                    self._on_deliver(action)
                case Drop(sample=sample):
                    self._on_drop(sample)
                    dropped.append(sample)
                case NeedPrompts(groups=num_groups, source=source):
                    asks = self.settings.refill or self.settings.budget is not None
                    self.check(
                        5, asks and num_groups > 0, "prompts are requested that no batch needs"
                    )
                    self.wanted[source] += num_groups
                case Wake(at_s=at_s):
                    fine = at_s > self.now_s and (self.wake_s is None or at_s < self.wake_s)
                    self.check(9, fine, f"wake at {at_s} s: now {self.now_s}, {self.wake_s}")
                    self.wake_s = at_s
                case PauseEngine() | ContinueEngine() | UpdateEngine() | ReleaseEngine():
                    self._on_engine(action)
                case _:
                    assert_never(action)
        unheard = [where for where, told in self.given_up.items() if not told]
        self.check(10, not unheard, f"{unheard} are given up, and run on")
        self.given_up.clear()
        for sample in dropped:
            runs = any(
                sample in engine.running and not engine.running[sample].abort_asked
                for engine in self.engines.values()
            )
            self.check(10, not runs, f"{sample} is dropped and runs on")
        self.floor = self.horizon()
        self._check_counts(counts)

    def _on_submit(self, submit: Submit) -> None:
        engine = self.engines.get(submit.engine)
        self.check(8, engine is not None, f"{submit.engine} is gone")
        assert engine is not None
        self.check(
            3,
            engine.version == self.version,
            f"{submit.engine} has weights {engine.version} and gets samples at {self.version}",
        )
        for dispatch in submit.samples:
            sample = dispatch.sample
            self.check(2, sample not in self.end, f"{sample} runs after its end")
            self.check(
                2,
                not any(sample in others.running for others in self.engines.values()),
                f"{sample} runs twice",
            )
            self.check(
                2,
                dispatch.attempt > self.attempts.get(sample, -1),
                f"attempt {dispatch.attempt} of {sample} is not a new one",
            )
            kept = len(self.payload.get(sample, ()))
            self.check(
                10,
                dispatch.kept_tokens == kept,
                f"{sample} goes on from {dispatch.kept_tokens} tokens, but {kept} are kept",
            )
            self.attempts[sample] = dispatch.attempt
            if not kept:
                self.began.setdefault(sample, self.version)
            first = self.first_version(sample)
            self.check(
                3,
                first is not None and first >= self.horizon() - self.settings.max_staleness,
                f"{sample} starts at {first}, too old for a batch at {self.horizon()}",
            )
            engine.running[sample] = Attempt(
                attempt=dispatch.attempt, kept=kept, moved_s=self.now_s
            )
        held = sum(sample not in self.end for sample in engine.running)
        closed = engine.paused or engine.silent or engine.leaving
        fine = held <= engine.capacity and not closed
        self.check(9, fine, f"{submit.engine} holds {held} samples: {engine}")

    def _on_abort(self, abort: Abort) -> None:
        engine = self.engines.get(abort.engine)
        for sample in abort.samples:
            if self.given_up.get((abort.engine, sample)) is False:
                self.given_up[abort.engine, sample] = True
                continue
            attempt = engine.running.get(sample) if engine is not None else None
            self.check(
                10,
                attempt is not None and not attempt.abort_asked,
                f"{sample} is aborted where it does not run, or twice",
            )
            if attempt is not None:
                attempt.abort_asked = True
                attempt.moved_s = self.now_s

    def _on_engine(
        self, action: PauseEngine | ContinueEngine | UpdateEngine | ReleaseEngine
    ) -> None:
        engine = self.engines.get(action.engine)
        self.check(8, engine is not None, f"{action} of an engine that is gone")
        assert engine is not None
        live = [sample for sample in engine.running if sample not in self.end]
        match action:
            case PauseEngine():
                self.check(9, not engine.paused, f"{action.engine} is paused twice")
                engine.paused = True
                self.doubtful[action.engine] = None
            case ContinueEngine():
                self.check(9, engine.paused and not engine.held, f"{action.engine} continues")
                engine.paused = False
                self.doubtful[action.engine] = None
                for attempt in engine.running.values():
                    attempt.moved_s = self.now_s
            case UpdateEngine(version=version):
                fine = not live and engine.loading is None and version == self.version
                self.check(3, fine, f"{action} while {live} run on {engine}")
                engine.loading = version
            case ReleaseEngine():
                fine = engine.silent or (engine.leaving and not live)
                self.check(8, fine, f"{action} while {live} run")
                self.forget(action.engine)

    def _on_deliver(self, deliver: Deliver) -> None:
        expected = self.horizon()
        self.check(
            3,
            deliver.version == expected,
            f"batch {deliver.batch} is for version {deliver.version}, expected {expected}",
        )
        due = next(iter(self.asked), None)
        self.check(5, deliver.batch == due, f"batch {deliver.batch} is delivered before {due}")
        there = is_there(self, self.asked[deliver.batch][0], unknown=True)
        self.check(6, there, f"batch {deliver.batch} should have waited")
        asked, _ = self.asked.pop(deliver.batch)
        self.untrained += 1
        self.delivered.append(deliver)
        self.floor = expected
        version, batches = self.served
        self.served = (expected, batches + 1 if version == expected else 1)
        counted = len(deliver.groups) + (0 if self.settings.refill else len(deliver.filtered))
        self.check(5, counted == asked, f"batch of {asked} has {counted} groups")
        for name in deliver.filtered:
            ends = {self.end.get(sample, "live") for sample in self.members(name)}
            self.check(4, ends <= {"filtered", "dropped"}, f"{name} is named filtered, but {ends}")
            self.check(2, name in self.dead, f"{name} is named a second time")
            del self.dead[name]
        for group in deliver.groups:
            self._check_group(deliver, group.group, group.samples)

    def _check_group(self, deliver: Deliver, group: GroupId, samples: tuple[SampleId, ...]) -> None:
        self.check(2, group in self.ready, f"{group} is delivered and not ready")
        self.ready.pop(group)
        members = [sample for sample in self.members(group) if sample in samples]
        self.check(
            4,
            members == list(samples) and len(members) == self.settings.group_size,
            f"{group} is delivered with {samples}",
        )
        self.check(4, self.live(group) == members, f"{group} has members beside {samples}")
        for sample in samples:
            self.check(4, sample in self.scored, f"{sample} is consumed without a score")
            age = deliver.version - min(self.payload.get(sample, []), default=deliver.version)
            self.check(3, age <= self.settings.max_staleness, f"{sample} is {age} versions old")
            self.finish(sample, "consumed")

    def _on_drop(self, sample: SampleId) -> None:
        group = GroupId(sample.rpartition("/")[0])
        self.finish(sample, "dropped")
        self.scoring.pop(sample, None)
        if len(self.live(group)) < self.settings.group_size:
            self.judging.pop(group, None)
            self.ready.pop(group, None)
            self.dead[group] = None

    def finish(self, sample: SampleId, end: str) -> None:
        """Records how the sample ended, and checks that it had not ended before."""
        self.check(
            2, sample not in self.end, f"{sample} ends {end}, but was {self.end.get(sample)}"
        )
        self.end[sample] = end
        self.began.pop(sample, None)

    def _check_counts(self, counts: Counts) -> None:
        ends = Counter(self.end.values())
        running = sum(1 for _ in self.running())
        ready = sum(1 for sample in self.scored if sample not in self.end)
        mine = (
            len(self.groups) * self.settings.num_members,
            running,
            len(self.scoring),
            ready,
            ends["consumed"],
            ends["filtered"],
            ends["dropped"],
        )
        told = (
            counts.admitted,
            counts.running,
            counts.scoring,
            counts.ready,
            counts.consumed,
            counts.filtered,
            counts.dropped,
        )
        self.check(1, counts.conserved and mine == told, f"counts are {told}, but should be {mine}")
