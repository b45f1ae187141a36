"""A rollout that runs ahead of the trainer, round by round, over engines in memory."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.protocols import Finished, Loaded, Progress, ScoreRequest, Weights
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import DataError, SchedulerError
from flowrl.ids import EngineId, group_id
from flowrl.rollout.policies.engines import AbortRunning, FinishRunning, KeepRunning
from flowrl.rollout.policies.limits import Patience
from flowrl.rollout.policies.prompts import AgeBudget
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.checkpoint.unused_samples import UnusedSamples, read_unused, write_unused
from flowrl.runtime.driver.collected_batch import CollectedBatch, FailureBudget
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import GroupRows
from flowrl.runtime.driver.rollout_tree import OpenRollout
from flowrl.runtime.driver.sources import PromptSupply
from flowrl.runtime.driver.streaming_driver import StreamingDriver
from flowrl.runtime.driver.streaming_tree import StreamingTree
from flowrl.specs import Sampling
from tests.policy_contexts import weights_of
from tests.runtime.node_world import lowered
from tests.runtime.scripted_engine import ScriptedEngine, context, weights
from tests.runtime.test_rollouts import VERIFIER, Scoring, Words, World, by_member

# Always readable, so that no round waits.
WAKE, _written = os.pipe()
os.write(_written, b"!")


@fl.workflow
def alone(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts, n=2)
    actor.update(rollout, verifier.score(rollout))


(PART,) = GraphParts(lowered(alone)).rollouts

N = 4  # groups of a batch
SIZE = 2  # members of a group


class Fleet:
    """Engines in this process, which load weights when they are told."""

    def __init__(self, folder: Path, num: int, slots: int, role: str = "actor") -> None:
        self.engines = {
            EngineId(f"{role}[{i}]"): ScriptedEngine(context(folder, num_slots=slots))
            for i in range(num)
        }
        self.busy_s = 0.0
        self.log: list[str] = []
        self._latest: Weights | None = None

    def announce(self, weights: Weights) -> None:
        self._latest = weights

    def load(self, name: EngineId) -> None:
        assert self._latest is not None
        self.engines[name].load(self._latest)
        self.log.append(f"{name} loads {self._latest.version}")


class Prompts:
    """Prompts whose answers have these lengths, over and over."""

    def __init__(self, lengths: Sequence[int] = (3,)) -> None:
        self.lengths = lengths
        self.taken: list[int] = []

    def take(self, num: int, source: str = "") -> list[PromptItem]:
        first = sum(self.taken)
        self.taken.append(num)
        return [self.item(index) for index in range(first, first + num)]

    def item(self, index: int) -> PromptItem:
        row = Row(
            index=index, prompt=str(index), answer="", solution="", fields={}, where=f"rows:{index}"
        )
        ids = np.array([1, self.lengths[index % len(self.lengths)]], np.int64)
        return PromptItem(epoch=0, index=index, group=group_id(0, index), row=row, prompt_ids=ids)

    def of_group(self, group: str) -> PromptItem:
        return self.item(int(group.split("/")[1]))


class Rollout:
    """A streaming driver, and a trainer that is played by a test."""

    def __init__(
        self,
        folder: Path,
        *,
        staleness: int = 1,
        lengths: Sequence[int] = (3,),
        engines: int = 1,
        slots: int = 64,
        rule: Callable[[ScoreRequest], float | str | None] = by_member,
        state: dict[str, Any] | None = None,
        unused: UnusedSamples | None = None,
        prompts: Prompts | None = None,
        limit: int = 1000,
        judge: Callable[[Sequence[GroupRows]], list[str | None]] | None = None,
        **policies: Any,
    ) -> None:
        self.folder = folder
        self.world = World()
        self.fleet = Fleet(folder, engines, slots)
        self.prompts = prompts or Prompts(lengths)
        self.version = 0
        self.batch = 0
        settings = SchedulerSettings(
            group_size=SIZE,
            max_staleness=staleness,
            judges_groups=judge is not None,
            admission=AgeBudget(groups=N),
            **policies,
        )
        scheduler = RolloutScheduler(settings, validate=True)
        if state is not None:
            scheduler = RolloutScheduler.from_json(state, validate=True)
        self.supply = PromptSupply(take=self.prompts.take, limit=limit)
        self.driver = StreamingDriver(
            fleet=self.fleet,  # type: ignore[arg-type]
            supply=self.supply,
            batch_groups=N,
            scheduler=scheduler,
            engines=self.fleet.engines,
            scorers={VERIFIER: Scoring(self.world, rule)},
            reported=VERIFIER,
            tokenizer=Words(),
            sampling=Sampling(max_tokens=50),
            group_size=SIZE,
            seed_of=lambda sample: 7,
            judge=judge,
            failures=FailureBudget(9),
            beat=lambda: None,
            stop=lambda: False,
            stall_timeout_s=5.0,
            unused=unused,
            clock=self.world.clock,
        )
        self.tree = StreamingTree(
            [OpenRollout(part=PART, driver=self.driver, begin=lambda: None)],
            [self.fleet],  # type: ignore[list-item]
            stall_timeout_s=5.0,
            clock=self.world.clock,
        )

    def written(self) -> tuple[dict[str, object], UnusedSamples]:
        (written,) = self.tree.written().values()
        return written

    def rounds(self, number: int = 1) -> None:
        for _ in range(number):
            self.tree.round(WAKE)

    def collect(self, *, most: int = 200) -> CollectedBatch:
        """The next batch, as a trainer that waits for it gets it."""
        self.batch += 1
        self.tree.ask(self.batch, {})
        for _ in range(most):
            if self.tree.is_delivered(self.batch):
                return self.tree.take(self.batch)[0].collected
            self.rounds()
        raise AssertionError(self.driver.describe())

    def publish(self) -> None:
        self.version += 1
        folder = weights(self.folder / str(self.version), self.version)
        self.tree.load(self.fleet, weights_of(self.version, folder))  # type: ignore[arg-type]


def ages(collected: CollectedBatch) -> list[int]:
    return [
        collected.version - min(version for version, _ in payload.versions)
        for _, members in collected.groups
        for _, payload in members
    ]


def test_so_many_prompts_are_under_way_as_ages_allow(tmp_path: Path):
    rollout = Rollout(tmp_path, staleness=2)
    rollout.rounds()
    assert sum(rollout.prompts.taken) == 3 * N
    rollout.collect()
    rollout.rounds(5)
    # The trainer learns: what began now would be three versions old when its turn came.
    assert sum(rollout.prompts.taken) == 3 * N
    rollout.publish()
    rollout.rounds()
    assert sum(rollout.prompts.taken) == 4 * N


def test_what_ends_early_waits_and_is_learned_from_later(tmp_path: Path):
    rollout = Rollout(tmp_path)
    first = rollout.collect()
    assert (first.version, len(first.groups)) == (0, N)
    rollout.rounds(8)
    rollout.publish()
    second = rollout.collect(most=0) if rollout.tree.is_delivered(2) else rollout.collect()
    assert second.version == 1
    assert ages(second) == [1] * (N * SIZE)
    groups = [group for group, _ in (*first.groups, *second.groups)]
    assert groups == [f"0/{i}" for i in range(2 * N)]


def test_a_batch_that_is_there_is_delivered_when_it_is_asked_for(tmp_path: Path):
    rollout = Rollout(tmp_path)
    rollout.rounds(12)
    rollout.tree.ask(1, {})
    assert rollout.tree.is_delivered(1)
    collected = rollout.tree.take(1)[0].collected
    assert collected.ready == N * SIZE
    assert collected.under_way == 0


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("publication", [KeepRunning(), AbortRunning(), FinishRunning()])
def test_no_sample_is_older_than_it_may_be_and_none_is_lost(
    tmp_path: Path, staleness: int, publication: Any
):
    rng = random.Random(staleness)
    lengths = [rng.choice([1, 2, 3, 5, 30]) for _ in range(97)]
    rollout = Rollout(
        tmp_path, staleness=staleness, lengths=lengths, slots=6, publication=publication
    )
    consumed: Counter[str] = Counter()
    oldest = 0
    for _ in range(25):
        collected = rollout.collect()
        oldest = max(oldest, *ages(collected))
        assert max(ages(collected)) <= staleness
        assert collected.dropped == []
        consumed.update(sample for _, members in collected.groups for sample, _ in members)
        for _, members in collected.groups:
            for _, payload in members:
                assert sum(count for _, count in payload.versions) == len(payload.tokens)
                # Each token is of the weights that its span says.
                spans = [version for version, count in payload.versions for _ in range(count)]
                assert payload.tokens.tolist() == spans
        rollout.rounds(rng.randrange(6))
        rollout.publish()
    assert staleness - 1 <= oldest <= staleness
    assert oldest > 0
    assert set(consumed.values()) == {1}
    counts = rollout.driver.scheduler.counts
    assert counts.consumed == 25 * N * SIZE
    assert counts.conserved


def test_kept_samples_go_on_with_the_new_weights_in_the_same_attempt(tmp_path: Path):
    rollout = Rollout(tmp_path, staleness=4, lengths=[9], publication=KeepRunning())
    rollout.rounds(3)
    rollout.publish()
    (_, members), *_ = rollout.collect().groups
    payload = members[0][1]
    assert payload.attempt == 0
    assert [version for version, _ in payload.versions] == [0, 1]
    assert len(payload.tokens) == 9


def test_aborted_samples_go_on_from_their_tokens_in_another_attempt(tmp_path: Path):
    rollout = Rollout(tmp_path, staleness=4, lengths=[9], publication=AbortRunning())
    rollout.rounds(3)
    rollout.publish()
    (_, members), *_ = rollout.collect().groups
    payload = members[0][1]
    assert payload.attempt == 1
    (old, before), (new, after) = payload.versions
    assert (old, new, before + after) == (0, 1, 9)
    assert payload.tokens.tolist() == [0] * before + [1] * after


def test_an_engine_that_finishes_its_samples_first_loads_when_it_is_empty(tmp_path: Path):
    rollout = Rollout(
        tmp_path, staleness=4, lengths=[2, 9], engines=2, slots=8, publication=FinishRunning()
    )
    rollout.rounds(3)
    rollout.publish()
    assert rollout.fleet.log == []
    rollout.rounds(12)
    assert sorted(rollout.fleet.log) == ["actor[0] loads 1", "actor[1] loads 1"]
    for _, members in rollout.collect().groups:
        for _, payload in members:
            assert len(payload.versions) == 1


def test_groups_that_are_filtered_make_room_for_others_at_once(tmp_path: Path):
    def judge(groups: Sequence[GroupRows]) -> list[str | None]:
        return ["even" if int(group.split("/")[1]) % 2 else None for group, _ in groups]

    rollout = Rollout(tmp_path, judge=judge, refill=True)
    for _ in range(6):
        collected = rollout.collect()
        assert len(collected.groups) == N
        assert all(int(group.split("/")[1]) % 2 == 0 for group, _ in collected.groups)
        rollout.publish()
    assert collected.num_filtered_groups > 0
    assert rollout.driver.scheduler.counts.conserved


def test_a_filter_that_lets_nothing_pass_stops_the_run_while_a_batch_is_waited_for(
    tmp_path: Path,
):
    rollout = Rollout(tmp_path, judge=lambda groups: ["even"] * len(groups), refill=True, limit=12)
    rollout.rounds(60)
    # Nobody waits: no more prompts are spent than a batch may cost.
    assert 12 <= sum(rollout.prompts.taken) <= 12 + 2 * N
    rollout.tree.ask(1, {})
    with pytest.raises(DataError, match=r"0 of \d+ groups passed \(0\.0 %\)"):
        rollout.rounds(60)


def test_the_engine_s_time_since_the_last_batch_is_told(tmp_path: Path):
    rollout = Rollout(tmp_path)
    rollout.fleet.busy_s = 2.0
    assert rollout.collect().seconds.generate == 2.0
    rollout.fleet.busy_s = 2.5
    rollout.publish()
    assert rollout.collect().seconds.generate == 0.5


def test_the_time_in_which_an_engine_is_waited_for_is_no_time_of_driving(tmp_path: Path):
    rollout = Rollout(tmp_path)
    (engine,) = rollout.fleet.engines.values()
    poll = engine.poll

    def patient(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        rollout.world.now += 1.0
        return poll(timeout_s)

    engine.poll = patient  # type: ignore[method-assign]
    began = rollout.world.now
    seconds = rollout.collect().seconds
    assert rollout.world.now - began >= 2.0
    assert (seconds.collect, seconds.dispatch, seconds.assemble) == (0.0, 0.0, 0.0)


# Standing still


def test_what_is_written_holds_the_tokens_of_running_samples_and_these_go_on(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[20])
    rollout.rounds(5)
    state, unused = rollout.written()
    assert len(unused.payloads) == 2 * N * SIZE
    assert {len(payload.tokens) for payload in unused.payloads.values()} <= set(range(1, 8))
    assert all(not engine["held"] for engine in state["engines"] if "held" in engine)  # type: ignore[attr-defined]
    (_, members), *_ = rollout.collect().groups
    assert [len(payload.tokens) for _, payload in members] == [20, 20]
    # What was written does not grow.
    assert max(len(payload.tokens) for payload in unused.payloads.values()) < 20


def test_a_driver_goes_on_from_what_was_written_without_losing_or_repeating_anything(
    tmp_path: Path,
):
    def judge(groups: Sequence[GroupRows]) -> list[str | None]:
        return ["third" if int(group.split("/")[1]) % 3 == 0 else None for group, _ in groups]

    def rule(request: ScoreRequest) -> float | str:
        return "raised KeyError" if request.sample == "0/13/1" else by_member(request)

    lengths = [1, 4, 2, 17, 3]
    rollout = Rollout(tmp_path, staleness=2, lengths=lengths, slots=5, judge=judge, rule=rule)
    ended: Counter[str] = Counter()

    def take(collected: CollectedBatch) -> None:
        ended.update(s for _, members in collected.groups for s, _ in members)
        ended.update(s for s, _, _ in (*collected.filtered, *collected.dropped))

    for turn in range(12):
        take(rollout.collect())
        rollout.publish()
        rollout.rounds(turn % 4)
        state, unused = rollout.written()
        folder = tmp_path / f"checkpoint-{turn}"
        write_unused(folder, unused)
        again = Rollout(
            tmp_path,
            state=state,
            unused=read_unused(folder, rollout.prompts.of_group),
            prompts=rollout.prompts,
            slots=5,
            judge=judge,
            rule=rule,
        )
        again.version, again.batch = rollout.version, rollout.batch
        for name in again.fleet.engines:
            again.fleet.announce(weights_of(again.version, tmp_path / str(again.version)))
            again.fleet.load(name)
        rollout = again
    assert set(ended.values()) == {1}
    counts = rollout.driver.scheduler.counts
    assert counts.conserved
    live = set(rollout.driver.unused().payloads)
    unreported = {sample for sample, _, _ in rollout.driver.unused().dropped}
    offered = {f"0/{i}/{m}" for i in range(sum(rollout.prompts.taken)) for m in range(SIZE)}
    assert set(ended) | live | unreported == offered
    assert not set(ended) & live


def test_a_batch_that_nobody_took_is_written_too_and_is_there_when_it_is_asked_for_again(
    tmp_path: Path,
):
    rollout = Rollout(tmp_path)
    rollout.rounds(12)
    rollout.tree.ask(1, {})
    assert rollout.tree.is_delivered(1)
    state, unused = rollout.written()
    again = Rollout(tmp_path, state=state, unused=unused, prompts=rollout.prompts)
    again.tree.ask(1, {})
    assert [group for group, _ in again.tree.take(1)[0].collected.groups] == [
        f"0/{i}" for i in range(N)
    ]
    assert again.driver.scheduler.counts.consumed == N * SIZE


def test_scorers_are_free_for_others_once_they_have_answered(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[1])
    rollout.rounds(2)
    rollout.driver.settle_scores()
    scoring = rollout.driver._scorers[VERIFIER]
    assert isinstance(scoring, Scoring)
    assert scoring.poll() == []


def test_scorers_that_never_answer_end_the_wait(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[1], rule=lambda request: None)
    rollout.rounds(3)
    with pytest.raises(SchedulerError, match="nothing moved for 5 s"):
        rollout.driver.settle_scores()


def test_a_batch_that_nothing_moves_for_is_given_up_and_one_that_nobody_wants_is_not(
    tmp_path: Path,
):
    rollout = Rollout(tmp_path)

    def stuck(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        rollout.world.now += 3.0
        return []

    rollout.rounds()
    for engine in rollout.fleet.engines.values():
        engine.poll = stuck  # type: ignore[method-assign]
    rollout.rounds(5)
    rollout.tree.ask(1, {})
    with pytest.raises(SchedulerError, match="nothing moved for 5 s") as caught:
        rollout.rounds(5)
    assert "batch 1 waits for 4 groups" in str(caught.value)


def test_samples_of_an_engine_that_breaks_are_drawn_by_another(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[5], engines=2, slots=4)
    rollout.rounds(3)
    broken = rollout.fleet.engines[EngineId("actor[0]")]

    def poll(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        raise RuntimeError("no more memory")

    broken.poll = poll  # type: ignore[method-assign]
    first = rollout.collect()
    rollout.publish()
    both = [*first.groups, *rollout.collect().groups]
    assert len(both) == 2 * N
    attempts = Counter(payload.attempt for _, members in both for _, payload in members)
    # Half of the samples ran there; nothing else was begun twice.
    assert attempts == {0: N * SIZE, 1: N * SIZE}


def test_an_engine_that_answers_late_for_what_was_given_up_holds_nothing_for_ever(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[5], engines=2, slots=16, patience=Patience(stall_s=2.0))
    rollout.rounds()
    slow = rollout.fleet.engines[EngineId("actor[0]")]
    answers, held = slow.poll, dict(slow._runs)
    assert held

    def silent(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        rollout.world.now += 0.5
        return []

    slow.poll = silent  # type: ignore[method-assign]
    while all(rollout.driver.store[sample].attempt == 0 for sample in held):
        rollout.rounds()
    slow.poll = answers  # type: ignore[method-assign]
    # It answers while they run elsewhere; nobody waits for it when the state is written down.
    rollout.written()
    first = rollout.collect()
    rollout.publish()
    both = [*first.groups, *rollout.collect().groups]
    moved = {s: p for _, members in both for s, p in members if s in held}
    assert set(moved) == set(held)
    assert all(len(payload.tokens) == 5 for payload in moved.values())


def silenced(rollout: Rollout) -> tuple[ScriptedEngine, Callable[[], None]]:
    """One of two engines says nothing from now on, while time passes; and what ends that."""
    engine = rollout.fleet.engines[EngineId("actor[0]")]
    answers, since = engine.poll, rollout.world.now

    def silent(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        rollout.world.now += 0.5
        return []

    def speak() -> None:
        engine.poll = answers  # type: ignore[method-assign]
        engine.silent_s = lambda: 0.0  # type: ignore[attr-defined]

    engine.poll = silent  # type: ignore[method-assign]
    engine.silent_s = lambda: rollout.world.now - since  # type: ignore[attr-defined]
    return engine, speak


def test_an_engine_that_is_silent_gets_nothing_until_it_is_heard_from(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[5], engines=2, slots=4, patience=Patience(heartbeat_s=2.0))
    rollout.rounds()
    _, speak = silenced(rollout)
    rollout.rounds(6)
    assert any("closed: suspected" in wait for wait in rollout.driver.scheduler.waits())
    speak()
    rollout.rounds(2)
    assert not any("closed" in wait for wait in rollout.driver.scheduler.waits())
    first = rollout.collect()
    rollout.publish()
    both = [*first.groups, *rollout.collect().groups]
    assert {payload.attempt for _, members in both for _, payload in members} == {0}


def test_an_engine_that_stays_silent_is_given_up_and_others_draw_its_samples(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[5], engines=2, slots=4, patience=Patience(heartbeat_s=2.0))
    rollout.rounds()
    engine, _ = silenced(rollout)
    held = set(engine._runs)
    first = rollout.collect()
    rollout.publish()
    both = [*first.groups, *rollout.collect().groups]
    again = {s for _, members in both for s, payload in members if payload.attempt}
    assert again == held
    assert EngineId("actor[0]") not in rollout.driver.scheduler.state.placement.engines
    rollout.written()  # and nobody waits for it


def test_no_time_passes_for_samples_while_nobody_listens(tmp_path: Path):
    rollout = Rollout(tmp_path, lengths=[9], patience=Patience(stall_s=2.0))
    rollout.rounds(2)
    rollout.tree.stop_clock()
    rollout.world.now += 100.0  # an evaluation, say
    rollout.tree.start_clock()
    groups = rollout.collect().groups
    assert {payload.attempt for _, members in groups for _, payload in members} == {0}
