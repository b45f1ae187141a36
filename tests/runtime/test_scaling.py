"""Engines that join and leave while samples are generated."""

from __future__ import annotations

import itertools
import json
import select
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import flowrl as fl
from flowrl.errors import BackendError, WorkerDied
from flowrl.files import write_json_atomic
from flowrl.ids import EngineId, RoleName
from flowrl.observe import scale_requests
from flowrl.observe.rows import StepMetrics
from flowrl.observe.scale_requests import RequestBox, read_target
from flowrl.rollout.policies.engines import FinishRunning, KeepRunning
from flowrl.runtime.driver.rounds import one_round
from flowrl.runtime.driver.scaling import Scaling
from flowrl.runtime.local.engine_process import EngineProcess
from tests.runtime.scripted_engine import ScriptedEngine, context
from tests.runtime.test_engine_deaths import Fragile
from tests.runtime.test_local_plans import by_own_logprobs, config_of, rows_of
from tests.runtime.test_rollouts import Engine, World, driver_of, prompts
from tests.runtime.test_streaming_driver import Rollout
from tests.runtime.tiny_runs import WatchedDisplay

FIRST, SECOND, THIRD = (EngineId(f"actor.generate[{number}]") for number in range(3))
DEADLINE_S = 60.0


class Fleet:
    """Engines in memory, which open at the second look, or fail as a test says."""

    def __init__(self, engines: dict[EngineId, Any], further: Sequence[Any] = ()) -> None:
        self.engines = engines
        self.most = 3
        self.removed: list[EngineId] = []
        self.refusal: BackendError | None = None
        self.failure: WorkerDied | None = None
        self._further = list(further)
        self._seen: set[EngineId] = set()

    def open(self, names: Sequence[EngineId]) -> None:
        if self.refusal is not None:
            raise self.refusal

    def has_opened(self, name: EngineId) -> bool:
        if self.failure is not None:
            raise self.failure
        if name in self._seen:
            self.engines[name] = self._further.pop(0)
        self._seen.add(name)
        return name in self.engines

    def remove(self, name: EngineId) -> None:
        del self.engines[name]
        self.removed.append(name)


def ask(folder: Path, text: str) -> None:
    write_json_atomic(folder / "requests" / f"{text}.json", asdict(read_target(text)))


def answer(folder: Path, text: str) -> tuple[bool, str]:
    found = json.loads((folder / "requests" / f"{text}.answer.json").read_text())
    return found["done"], found["text"]


def scaling_of(
    folder: Path, fleet: Any, *drivers: Any, roles: Sequence[str] = ("actor",)
) -> Scaling:
    clock = itertools.count()
    part = SimpleNamespace(turn_nodes=[SimpleNamespace(role=role) for role in roles])
    rollouts = [SimpleNamespace(part=part, driver=driver) for driver in drivers]
    box = RequestBox(folder, clock=lambda: float(next(clock)))
    return Scaling(box, cast(Any, rollouts), {} if fleet is None else {RoleName("actor"): fleet})


class Scaled:
    """A driver of two engines in memory, and another one that can be opened."""

    def __init__(self, folder: Path, second: type[Engine] = Engine, **options: Any) -> None:
        self.folder = folder
        self.world = World()
        self.engines = [Engine(self.world), second(self.world, **options), Engine(self.world)]
        self.fleet = Fleet(dict(zip((FIRST, SECOND), self.engines, strict=False)), self.engines[2:])
        self.driver = driver_of(self.world, self.engines[0], engines=self.fleet.engines)
        self.scaling = scaling_of(folder, self.fleet, self.driver)

    def collect(self, groups: int) -> list[list[int]]:
        """Returns the lengths of a batch's samples, by group."""
        driver = self.driver
        driver.offer(prompts(groups))
        driver.begin()
        driver.request(1, groups)
        driver.run(
            lambda: driver.has_settled(1), lambda: self.scaling.look() + one_round((driver,))
        )
        assert driver.scheduler.counts.conserved
        return [[len(p.tokens) for _, p in members] for _, members in driver.take(1).groups]

    def answered(self, text: str) -> tuple[bool, str]:
        ask(self.folder, text)
        for _ in range(9):
            self.scaling.look()
        return answer(self.folder, text)


def test_an_engine_joins_when_it_has_opened_and_gets_samples(tmp_path: Path):
    run = Scaled(tmp_path)
    ask(tmp_path, "actor.generate=+1")
    assert run.collect(12) == [[2, 3]] * 12
    assert run.engines[2].most > 0
    assert answer(tmp_path, "actor.generate=+1") == (True, f"{THIRD} joined")


def test_samples_of_an_engine_that_leaves_go_on_elsewhere_with_their_tokens(tmp_path: Path):
    run = Scaled(tmp_path)
    ask(tmp_path, "actor.generate=1")
    lengths = run.collect(8)
    stopped = {event.split()[1] for event in run.world.log if event.startswith("abort")}
    assert stopped
    # What the fake engine adds after it was stopped: its tokens are generated once more.
    for (_, members), sizes in zip(enumerate(prompts(8)), lengths, strict=True):
        for member, size in enumerate(sizes):
            aborted = f"{members.group}/{member}" in stopped
            assert size == (member + 2) + (member + 1) * aborted
    assert answer(tmp_path, "actor.generate=1") == (True, f"{SECOND} left")
    assert run.fleet.removed == [SECOND]
    assert not run.driver.serves(SECOND)


def test_an_engine_that_breaks_while_it_leaves_is_not_restarted(tmp_path: Path):
    run = Scaled(tmp_path, Fragile, breaks=[1])
    ask(tmp_path, "actor.generate=-1")
    assert run.collect(8) == [[2, 3]] * 8
    assert cast(Fragile, run.engines[1]).restarts == 0
    assert answer(tmp_path, "actor.generate=-1") == (True, f"{SECOND} left")


def test_an_engine_that_left_can_join_again_and_idle_ones_leave_at_once(tmp_path: Path):
    run = Scaled(tmp_path)
    assert run.answered("actor.generate=-1") == (True, f"{SECOND} left")
    assert run.answered("actor.generate=+1") == (True, f"{SECOND} joined")
    assert run.answered("actor.generate=2") == (True, "nothing changes")
    assert run.collect(8) == [[2, 3]] * 8
    assert run.engines[2].most > 0


def test_a_request_that_a_stage_does_not_finish_is_answered_at_its_end(tmp_path: Path):
    run = Scaled(tmp_path)
    ask(tmp_path, "actor.generate=+1")
    assert run.scaling.look() == 1
    run.scaling.close()
    done, text = answer(tmp_path, "actor.generate=+1")
    assert not done
    assert "the stage ended before" in text


def test_an_engine_ends_when_the_last_rollout_has_let_it_go(tmp_path: Path):
    run, world = Scaled(tmp_path), World()
    busy = driver_of(world, run.engines[0], engines=dict(run.fleet.engines))
    busy.offer(prompts(8))
    scaling = scaling_of(tmp_path, run.fleet, run.driver, busy)
    ask(tmp_path, "actor.generate=-1")
    assert [scaling.look() for _ in range(3)] == [1, 0, 0]
    assert busy.serves(SECOND)
    assert not run.driver.serves(SECOND)
    busy.begin()
    busy.request(1, 8)
    busy.run(lambda: busy.has_settled(1))
    assert scaling.look() == 1
    assert run.fleet.removed == [SECOND]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("critic.generate=+1", "no engine generates for role 'critic'"),
        ("actor.generate=-2", "cannot generate with 0 engines"),
        ("actor.generate=4", "cannot generate with 4 engines"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, text: str, refusal: str
):
    done, found = Scaled(tmp_path).answered(text)
    assert not done
    assert refusal in found


def test_an_engine_without_a_place_or_that_does_not_open_changes_nothing(tmp_path: Path):
    run = Scaled(tmp_path)
    run.fleet.refusal = BackendError("the Ray cluster has no place for it")
    assert run.answered("actor.generate=+1") == (False, "the Ray cluster has no place for it")
    run.fleet.refusal = None
    run.fleet.failure = WorkerDied("the engine's process died", found="signal SIGKILL")
    done, text = run.answered("actor.generate=3")
    assert not done
    assert f"{THIRD} cannot be opened" in text
    assert list(run.fleet.engines) == [FIRST, SECOND]
    assert run.collect(2) == [[2, 3]] * 2


def test_an_engine_next_to_its_trainer_stays_alone(tmp_path: Path):
    run = Scaled(tmp_path)
    run.scaling = scaling_of(tmp_path, None, run.driver)
    done, text = run.answered("actor.generate=+1")
    assert not done
    assert "one copy of the weights" in text


def test_policies_that_take_turns_keep_their_engines(tmp_path: Path):
    run = Scaled(tmp_path)
    run.scaling = scaling_of(tmp_path, run.fleet, run.driver, roles=("actor", "guest"))
    done, text = run.answered("actor.generate=+1")
    assert not done
    assert "take turns" in text


@pytest.mark.parametrize("publication", [KeepRunning(), FinishRunning()])
def test_an_engine_joins_a_rollout_ahead_of_its_trainer_and_leaves_it(
    tmp_path: Path, publication: Any
):
    run = Rollout(tmp_path, engines=1, slots=2, lengths=[4], publication=publication)
    first, second = EngineId("actor[0]"), EngineId("actor[1]")
    run.collect()
    run.publish()
    # As `EngineFleet.has_opened` does it: with the newest weights, before it joins.
    run.fleet.engines[second] = ScriptedEngine(context(tmp_path, num_slots=2))
    run.fleet.load(second)
    run.driver.join(second, run.fleet.engines[second])
    collected = [run.collect()]
    run.publish()
    collected.append(run.collect())
    assert run.fleet.log.count(f"{second} loads 2") == 1
    engines = run.driver.scheduler.state.placement.engines
    assert engines[second].version == 2
    assert engines[second].held
    run.driver.leave(second)
    run.publish()
    collected += [run.collect(), run.collect()]
    assert not run.driver.serves(second)
    assert list(run.driver.scheduler.state.placement.engines) == [first]
    payloads = [p for batch in collected for _, members in batch.groups for _, p in members]
    for payload in payloads:
        assert len(payload.tokens) == 4
        # Each token is the number of the weights that it is noted to be of.
        assert list(payload.tokens) == [v for v, count in payload.versions for _ in range(count)]
    assert run.driver.scheduler.counts.conserved


class Asking(WatchedDisplay):
    """Asks for another number of engines after a step, and waits until a new one is ready."""

    def __init__(self, opened: list[EngineProcess], asked: dict[int, str], runs: Path) -> None:
        super().__init__()
        self._opened = opened
        self._asked = asked
        self._runs = runs

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        (folder,) = self._runs.iterdir()
        if metrics.step in self._asked:
            ask(folder, self._asked[metrics.step])
        end = time.monotonic() + DEADLINE_S
        for process in self._opened:  # the driver asks for it when it next looks
            if not process.is_ready:
                assert select.select([process.fileno()], [], [], end - time.monotonic())[0]


def test_a_run_learns_the_same_to_the_last_bit_when_engines_join_and_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[EngineProcess] = []
    init = EngineProcess.__init__

    def watched(engine: EngineProcess, *arguments: Any, **options: Any) -> None:
        init(engine, *arguments, **options)
        opened.append(engine)

    def learned(runs: Path, num: int, asked: dict[int, str]) -> tuple[list[str], bytes]:
        config = {**config_of(runs, kind="temporal", steps=6), "args": {}}
        config["roles"]["actor"]["num_engines"] = num
        folder = fl.run(by_own_logprobs, config, display=Asking(opened, asked, runs)).folder
        rows = [f"{row['step']} {row['sample']} {row['response']}" for row in rows_of(folder)]
        return sorted(rows), (folder / "model" / "model.safetensors").read_bytes()

    expected = learned(tmp_path / "one", 1, {})  # next to its trainer
    monkeypatch.setattr(EngineProcess, "__init__", watched)
    monkeypatch.setattr(scale_requests, "_LOOK_S", 0.0)  # a quick step sees each request
    more, fewer = "actor.generate=+1", "actor.generate=1"
    assert learned(tmp_path / "changing", 2, {1: more, 4: fewer}) == expected
    assert [engine.name for engine in opened] == [FIRST, SECOND, THIRD]
    assert opened[2].busy_s > 0
    (folder,) = (tmp_path / "changing").iterdir()
    assert answer(folder, more) == (True, f"{THIRD} joined")
    done, text = answer(folder, fewer)
    assert done
    assert sorted(text.split("; ")) == [f"{SECOND} left", f"{THIRD} left"]
