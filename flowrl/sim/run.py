"""Runs a model of a stage on a virtual clock, step by step.

    offer prompts -> ask for a batch -> (engines, scorers) -> delivered -> operations -> publish

The trainer is the main line of this module; everything else happens on the clock while it waits.
With `ahead=0` a step offers its own prompts, and engines are idle while it learns. With `ahead=a`
prompts of a further batches are always under way, so engines go on while the trainer works where
they have lanes of their own, and samples are up to `max_staleness` publications behind.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, SampleId
from flowrl.observe.rows import DRIVER_WORK
from flowrl.rollout.states import Counts
from flowrl.sim.batch import Batch, step_row
from flowrl.sim.clock import Clock
from flowrl.sim.costs import HostCost
from flowrl.sim.driver import SimDriver
from flowrl.sim.engine import SimEngine
from flowrl.sim.engine_faults import EngineBreaker
from flowrl.sim.episodes import SimEnvironment
from flowrl.sim.faults import Faults, chance
from flowrl.sim.lanes import Lane, LaneGroup
from flowrl.sim.model import EngineModel, EnvironmentModel, RolloutModel, ScorerModel, SimModel
from flowrl.sim.model_lanes import lanes_of
from flowrl.sim.operations import SimOperations
from flowrl.sim.report import SimReport, SimStep, steady_from
from flowrl.sim.rollout import RolloutFaults, SimRollout
from flowrl.sim.rows import Ended
from flowrl.sim.scorers import SimScorers
from flowrl.sim.sharing import Sharing
from flowrl.sim.trace import Trace
from flowrl.sim.workload import Workload

_STALLED = 100_000
"""Calls of the clock without an event for a scheduler after which nothing moves any more."""

_ROUNDING_S = 1e-6
"""Less than this is what sums of seconds are inexact by."""


def simulate(
    model: SimModel,
    *,
    steps: int,
    workloads: Mapping[str, Workload],
    faults: Faults | None = None,
    seed: int = 0,
    trace: Trace | None = None,
) -> SimReport:
    """Simulates the first `steps` steps.

    Args:
        workloads: What each rollout of the model is given, by its name.
        seed: Of the faults.
        trace: Records what happens.

    Raises:
        SchedulerError: nothing moves any more; says who waits for whom.
    """
    with _without_collector():
        return _Simulation(model, workloads, faults or Faults(), seed, trace).run(steps)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Samples hold no cycles, and to look for some takes longer the more are in flight."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Simulation:
    """One run. Its parts are made in `__init__`; `run` is the trainer."""

    def __init__(
        self,
        model: SimModel,
        workloads: Mapping[str, Workload],
        faults: Faults,
        seed: int,
        trace: Trace | None,
    ) -> None:
        self.model = model
        self.clock = Clock()
        self.faults = faults
        self.seed = seed
        self.trace = trace
        self.lanes, self.groups = lanes_of(model.lanes, trace)
        shared = model.num_cores > 0
        self.sharing = Sharing(clock=self.clock, num_cores=model.num_cores) if shared else None
        self.driver = SimDriver(
            clock=self.clock, lane=self.lanes[model.driver], sharing=self.sharing
        )
        self.trainer = self.lanes[model.trainer or model.driver]
        self.engines = [self._engine(engine) for engine in model.engines]
        self.specs = {
            engine.id: spec for engine, spec in zip(self.engines, model.engines, strict=True)
        }
        self.versions: Counter[str] = Counter()  # publications so far, by role
        self.unlearned = 0  # the last step, where all its groups were filtered
        self.asked: set[int] = set()  # batches that were asked for before their step
        self.rows_until = 0  # the last step whose rows were offered, where batches name them
        self.workloads = workloads
        self.operations = SimOperations(
            model=model,
            clock=self.clock,
            lanes=self.lanes,
            engines=self.engines,
            driver=self.driver,
            trainer=self.trainer,
            publish=self._publish,
        )
        self.streams = self.operations.streams
        self.rollouts = [
            self._rollout(rollout, workloads[rollout.name]) for rollout in model.rollouts
        ]
        self.by_name = dict(zip((spec.name for spec in model.rollouts), self.rollouts, strict=True))
        for spec in model.rollouts:
            if spec.parent is not None and spec.child_prompt is not None:
                parent = self.by_name[spec.parent]
                children = parent.of_kept if spec.of_kept else parent.children
                children.append((self.by_name[spec.name], spec.child_prompt))
        self.before = self._turns()  # by rollout, those that it waits for
        # A rollout that no update reads (a baseline) is consumed, but not learned from; without an
        # update, samples are what the step is for.
        updates = [op for op in model.ops if op.op == "update"]
        everything = {rollout.name for rollout in model.rollouts}
        self.learned = {op.rollout for op in updates} if updates else everything
        readers = updates or model.ops
        self.num_rows = max((op.rows for op in readers if op.rollout is None), default=0)
        self.breaker = EngineBreaker(
            clock=self.clock,
            faults=faults,
            seed=seed,
            engines=self.engines,
            rollouts=self.rollouts,
            version=lambda engine: self.versions[self.specs[engine.id].role],
            trace=trace,
        )
        self.breaker.begin()

    # Parts

    def _engine(self, model: EngineModel) -> SimEngine:
        def report(engine: SimEngine, ends: Sequence[Ended]) -> None:
            by_rollout: dict[str, list[Ended]] = {}
            for end in ends:
                by_rollout.setdefault(end.request.rollout, []).append(end)
            for name, own in by_rollout.items():
                self.by_name[name].ended(engine, own)

        return SimEngine(
            id=EngineId(model.name),
            clock=self.clock,
            lane=self._lane(model.lane),
            times=model.times,
            num_slots=model.num_slots,
            report=report,
            kv_tokens=model.kv_tokens,
            admit_at=model.admit_at,
            poll=model.poll,
            keeps_prefixes=model.keeps_prefixes,
            reserve=model.reserve,
            recorder=self.trace,
            sharing=self.sharing,
        )

    def _rollout(self, model: RolloutModel, workload: Workload) -> SimRollout:
        rollout = SimRollout(
            name=model.name,
            clock=self.clock,
            settings=model.settings,
            workload=workload,
            driver=self.driver,
            host=self.model.host,
            faults=self._rollout_faults(),
            capacity=lambda engine: self.specs[engine.id].capacity,
            load_s=lambda engine: self.specs[engine].load_s,
            environment=self._environment(model.environment),
            turns_of=lambda engine: self._taking_turns(model, engine),
            tells_lengths=model.tells_lengths,
            listener=self.streams if any(op.streams for op in self.model.ops) else None,
        )
        rollout.scorers = [self._scorers(scorer, rollout) for scorer in model.scorers]
        for engine in self._of_role(model.role):
            rollout.join(engine)
        return rollout

    def _turns(self) -> dict[str, set[str]]:
        """For each rollout those that come before it: they draw on lanes of its engines.

        Children are generated together with the rest of their tree; their batch is asked for when
        that of their parents is there, which says how many they are. Rollouts whose batches name
        their rows were offered these together.
        """
        found: dict[str, set[str]] = {}
        roots: dict[str, str] = {}
        seen: list[tuple[str, frozenset[str]]] = []
        for spec in self.model.rollouts:
            engines = [e for role in (spec.role, *spec.turns) for e in self._of_role(role)]
            lanes = frozenset().union(*(engine.lane.names for engine in engines))
            before = {*spec.after, *(name for name, others in seen if others & lanes)}
            roots[spec.name] = spec.name if spec.parent is None else roots[spec.parent]
            others = {name for name in before if roots[name] != roots[spec.name]}
            found[spec.name] = set() if spec.settings.named else others
            if spec.parent is not None:
                found[spec.name].add(spec.parent)
            seen.append((spec.name, lanes))
        return found

    def _environment(self, model: EnvironmentModel | None) -> SimEnvironment | None:
        if model is None:
            return None
        return SimEnvironment(lane=self._lane(model.lane), times=model.times, shape=model.shape)

    def _lane(self, name: str) -> Lane | LaneGroup:
        return self.groups.get(name) or self.lanes[name]

    def _scorers(self, model: ScorerModel, rollout: SimRollout) -> SimScorers:
        rewards = self.faults.rewards

        def extra_s(sample: SampleId) -> float:
            slow = chance(self.seed, f"slow {model.name}", sample) < rewards.slow_share
            return rewards.slow_s if slow else 0.0

        return SimScorers(
            clock=self.clock,
            lanes=[self.lanes[lane] for lane in model.lanes],
            times=model.times,
            driver=self.driver,
            answer=rollout.scored,
            answer_s=self.model.host.answer_s,
            extra_s=extra_s if rewards.slow_share else None,
        )

    def _rollout_faults(self) -> RolloutFaults | None:
        attempts, rewards = self.faults.samples.fail_share, self.faults.rewards.fail_share
        if not attempts and not rewards:
            return None
        return RolloutFaults(
            attempt_fails=lambda sample, attempt: (
                chance(self.seed, "attempt", sample, attempt) < attempts
            ),
            reward_fails=lambda sample, time: chance(self.seed, "reward", sample, time) < rewards,
        )

    def _taking_turns(self, model: RolloutModel, engine: SimEngine) -> list[SimEngine]:
        """The engines that draw the turns of an engine's episodes, in order."""
        place = self._of_role(model.role).index(engine)
        pools = [self._of_role(role) for role in model.turns or (model.role,)]
        return [pool[place % len(pool)] for pool in pools]

    def _of_role(self, role: str) -> list[SimEngine]:
        return [engine for engine in self.engines if self.specs[engine.id].role == role]

    # The trainer

    def run(self, steps: int) -> SimReport:
        model = self.model
        for rollout, spec in zip(self.rollouts, model.rollouts, strict=True):
            given = spec.parent is not None or spec.settings.named
            if model.ahead and steps and not given and not self._offers_itself(spec):
                rollout.offer(model.ahead * spec.groups)
        rows: list[SimStep] = []
        ages: Counter[int] = Counter()
        for number in range(1, steps + 1):
            row, batches = self._step(number, is_last=number == steps)
            rows.append(row)
            for name, batch in batches.items():
                if name in self.learned:
                    ages.update(batch.ages)
        end_s = self.clock.now
        for rollout in self.rollouts:
            rollout.stop()
        return self._report(rows, ages, end_s)

    def _step(self, number: int, *, is_last: bool) -> tuple[SimStep, dict[str, Batch]]:
        clock, version = self.clock, sum(self.versions.values())
        begin_s = clock.now
        generated = [engine.lane.spent("generate") for engine in self.engines]
        driven, host_s = self._driven(), 0.0
        seconds: dict[str, float] = {"generate": 0.0} if self.rollouts else {}
        if self.model.host.step_s:
            host_s = self.driver.wait(self.trainer, "host", self.model.host.step_s)
        asked_s = clock.now
        self._offer_rows(number)
        batches = self._collect(number, seconds)
        driven_s = sum(self._driven().values()) - sum(driven.values())
        drawn_s = clock.now - asked_s - driven_s
        took = [batch for batch in batches.values() if batch.delivered or not batch.filtered]
        self.unlearned = 0 if took or not batches else number
        if self.model.ahead and self.streams.run_ahead and not is_last:
            self._ask(number + 1)
        self.operations.learn(number, batches, seconds)
        self._call_driver()
        if self.rollouts:
            seconds["generate"] = max(
                (
                    engine.lane.spent("generate") - before
                    for engine, before in zip(self.engines, generated, strict=True)
                ),
                default=0.0,
            )
            self._book_rest(seconds, drawn_s)
        if self.model.host != HostCost():
            for what, spent_s in self._driven().items():
                seconds[what] = spent_s - driven[what]
            seconds["host"] = host_s + seconds.pop("host", 0.0)
        learned = [batch for name, batch in batches.items() if name in self.learned]
        row = step_row(number, version, begin_s, clock.now, seconds, learned)
        return replace(row, num_rows=self.num_rows), batches

    def _book_rest(self, seconds: dict[str, float], drawn_s: float) -> None:
        """What is left of drawing where the busiest engine drew nothing and no score was due.

        Args:
            drawn_s: Seconds until the batch was there, without the driver's work.
        """
        rest_s = drawn_s - seconds["generate"] - seconds.get("score", 0.0)
        if self.model.ahead or rest_s <= _ROUNDING_S:
            return  # drawing is beside the step, or all of it is told
        if not any(lane.num_devices for lane in self.model.lanes):
            seconds["generate"] += rest_s  # so do runs count it, whose driver waits for engines
            return
        played = [spec.environment for spec in self.model.rollouts]
        seconds["environment" if len(played) == 1 and played[0] else "wait"] = rest_s

    def _driven(self) -> dict[str, float]:
        """Seconds of the driver so far, by what it did."""
        return {what: self.driver.lane.spent(what) for what in DRIVER_WORK}

    @staticmethod
    def _offers_itself(spec: RolloutModel) -> bool:
        """Whether the scheduler asks for prompts as its age budget allows."""
        return spec.settings.budget is not None

    def _collect(self, number: int, seconds: dict[str, float]) -> dict[str, Batch]:
        """Waits for the batches of a step; rollouts that have to wait for others take turns."""
        found: dict[str, Batch] = {}
        asked: set[str] = set()
        begin_s = self.clock.now
        own = dict(zip((spec.name for spec in self.model.rollouts), self.rollouts, strict=True))
        while len(found) < len(own):
            for spec in self.model.rollouts:
                if spec.name not in asked and self.before[spec.name] <= found.keys():
                    asked.add(spec.name)
                    self._call_driver()
                    if spec.settings.named:
                        own[spec.name].ask_expected(number)
                        continue
                    if spec.parent is not None:
                        self._ask_for_children(own[spec.name], number)
                        continue
                    if not self._offers_itself(spec):
                        self._offer(own[spec.name], spec.groups)
                    if number not in self.asked:
                        own[spec.name].ask(number, spec.groups)
            self._wait_for([own[name] for name in asked if name not in found], number)
            for spec in self.model.rollouts:
                if spec.name in asked and number in own[spec.name].batches:
                    found[spec.name] = own[spec.name].batches.pop(number)
                    if spec.scorers and not self.model.ahead:
                        idle_s = own[spec.name].idle_s
                        seconds["score"] = seconds.get("score", 0.0) + idle_s
        if self.model.ahead:
            seconds["wait"] = self.clock.now - begin_s
        return found

    def _offer_rows(self, number: int) -> None:
        """Offers the rows of the steps that are not too far ahead of the weights of this one."""
        rows = [
            (rollout, spec.groups)
            for rollout, spec in zip(self.rollouts, self.model.rollouts, strict=True)
            if spec.settings.named and spec.parent is None
        ]
        for step in range(max(number, self.rows_until + 1), number + self.model.ahead + 1):
            for rollout, groups in rows:
                rollout.offer_rows(step, groups)
            self.rows_until = step

    def _offer(self, rollout: SimRollout, groups: int) -> None:
        rollout.offer(groups)
        self.clock.run_until(lambda: not rollout.num_offering)

    def _ask_for_children(self, rollout: SimRollout, number: int) -> None:
        """Asks for the children of all samples of a step; their parents' batch is there."""
        self.clock.run_until(lambda: not rollout.num_offering)
        if rollout.num_unasked:
            rollout.ask(number, rollout.num_unasked)
        else:
            rollout.batches[number] = Batch(delivered=(), filtered=(), ages={})
        rollout.num_unasked = 0

    def _call_driver(self) -> None:
        """Where the driver is a thread of its own, a call waits until it has done what it is at."""
        if self.sharing is not None and self.driver.lane is not self.trainer:
            self.driver.wait(self.driver.lane, "call", 0.0)

    def _ask(self, number: int) -> None:
        """Asks for a batch before its step: operations begin on it as soon as it is there."""
        self.asked.add(number)
        for rollout, spec in zip(self.rollouts, self.model.rollouts, strict=True):
            if not spec.settings.named:
                rollout.ask(number, spec.groups)

    def _wait_for(self, rollouts: Sequence[SimRollout], number: int) -> None:
        """Until one of the rollouts has delivered."""
        clock = self.clock

        def there() -> bool:
            return any(number in rollout.batches for rollout in rollouts)

        while not there():
            events, calls = self._num_events(), clock.num_calls

            def over() -> bool:
                return there() or clock.num_calls - calls >= _STALLED  # noqa: B023

            if not clock.run_until(over) or (not there() and self._num_events() == events):
                raise self._stalled(rollouts, number)

    def _stalled(self, rollouts: Sequence[SimRollout], number: int) -> SchedulerError:
        """Nobody waits for anything that may still come."""
        waits = [line for rollout in rollouts for line in rollout.scheduler.waits()]
        where, found = f"{self.model.name}, step {number}, {self.clock.now:g} s", "; ".join(waits)
        if not self.unlearned:
            return SchedulerError(
                "nothing moves any more",
                where=where,
                found=found or "nobody waits",
                hint="an engine that is lost for good may be what is missing",
            )
        return SchedulerError(
            f"the filter took every group of step {self.unlearned}, so nothing was learned, no "
            "weights were published, and no samples may be generated further ahead of them",
            where=where,
            found=found or None,
            hint="name lengths of a run that kept some groups (--lengths), or replace "
            "filtered groups by others: train.refill=true",
        )

    def _num_events(self) -> int:
        return sum(rollout.num_events for rollout in self.rollouts)

    def _publish(self, role: str) -> None:
        self.versions[role] += 1
        version = self.versions[role]
        own = [
            rollout
            for rollout, spec in zip(self.rollouts, self.model.rollouts, strict=True)
            if spec.role == role
        ]
        # Engines that are emptied first are told by the scheduler when it is their turn.
        if not any(rollout.settings.publication.empties for rollout in own):
            for engine in self._of_role(role):
                engine.publish(version, self.specs[engine.id].load_s)
        for rollout in own:
            rollout.publish(version)
        if self.trace is not None:
            self.trace.moment(self.driver.lane, f"{role} version {version}", self.clock.now)

    # What it comes to

    def _report(self, rows: list[SimStep], ages: Counter[int], end_s: float) -> SimReport:
        counts = [rollout.scheduler.counts for rollout in self.rollouts]
        reasons: Counter[str] = Counter()
        for rollout in self.rollouts:
            reasons.update({f"dropped: {why}": n for why, n in rollout.dropped.items()})
            reasons.update({f"filtered: {why}": n for why, n in rollout.live.filtered.items()})
        totals = [engine.totals for engine in self.engines]
        return SimReport(
            name=self.model.name,
            seed=self.seed,
            workload="; ".join(dict.fromkeys(str(w) for w in self.workloads.values())) or "data",
            times=self.model.times,
            num_engines=len(self.engines),
            sim_s=end_s,
            steps=rows,
            lanes=[lane.use(steady_from(rows, ages), end_s) for lane in self.lanes.values()],
            ages=dict(ages),
            samples=_added(counts),
            reasons=dict(reasons),
            engines={
                "tokens": sum(t.tokens for t in totals),
                "steps": sum(t.steps for t in totals),
                "preempted": sum(t.preempted for t in totals),
                "lost": self.breaker.num_lost,
                "kv_peak": max((t.kv_peak for t in totals), default=0),
            },
            num_events=self._num_events(),
            notes=self.model.notes,
            ahead=self.model.ahead,
        )


def _added(counts: Sequence[Counts]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for count in counts:
        added.update(count.to_json())
    return {end: added[end] for end in ("admitted", "consumed", "filtered", "dropped")}
