"""Engines that break in the middle of a rollout: samples are drawn again, or the run says why."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest

from flowrl.backend.protocols import Finished, GenerateRequest, Loaded, Progress
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import EngineId
from flowrl.runtime.local.engine_restarts import MAX_FAILURES, EngineFailures
from tests.runtime.test_rollouts import Engine, World, driver_of, prompts

ONE, TWO = EngineId("actor[0]"), EngineId("actor[1]")


class Fragile(Engine):
    """Breaks at chosen polls; opened anew it is empty."""

    def __init__(
        self,
        world: World,
        breaks: Sequence[int] = (),
        error: Exception | None = None,
        slots: int = 4,
    ) -> None:
        super().__init__(world, slots=slots)
        self.breaks = set(breaks)
        self.error = error or WorkerDied("the engine's process died", found="signal SIGKILL")
        self.polls = 0
        self.restarts = 0

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        self.polls += 1
        if self.polls in self.breaks:
            raise self.error
        return super().poll(timeout_s)

    def restart(self) -> None:
        self.restarts += 1
        self.requests.clear()
        self._aborted.clear()

    def end(self) -> None: ...


class Unfit(Fragile):
    """Takes no request."""

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        raise MemoryError("no room")


def test_a_broken_engine_is_asked_for_nothing_until_it_is_opened_anew():
    deaths = EngineFailures({ONE: Fragile(World())})
    asked: list[str] = []

    def act() -> str:
        asked.append("act")
        raise RuntimeError("broken")

    assert [deaths.call(ONE, act, "nothing") for _ in range(2)] == ["nothing"] * 2
    assert asked == ["act"]
    assert deaths.restart(ONE)
    assert deaths.call(ONE, lambda: "answer", "nothing") == "answer"


class Quiet(Fragile):
    def silent_s(self) -> float:
        return 5.0


def test_an_engine_is_silent_once_and_one_that_broke_is_no_longer_waited_for():
    deaths = EngineFailures({ONE: Quiet(World()), TWO: Quiet(World())})
    assert deaths.fallen_silent(5.0) == []
    deaths.give_up(TWO, "a test says so")
    assert deaths.fallen_silent(4.9) == [ONE]
    assert deaths.fallen_silent(4.9) == []
    assert deaths.fallen_silent(5.0) == []  # heard from
    assert deaths.fallen_silent(4.9) == [ONE]


def attempts(world: World) -> Counter[str]:
    return Counter(event for event in world.log if event.startswith("submit"))


def test_samples_of_a_broken_engine_are_drawn_again_with_the_next_attempt():
    world = World()
    engine = Fragile(world, breaks=[2])
    driver = driver_of(world, engine)
    driver.offer(prompts(2))
    collected = driver.collect(1, 2)
    assert [group for group, _ in collected.groups] == ["0/0", "0/1"]
    assert engine.restarts == 1
    # One had ended before; the three others were begun twice.
    assert sorted(attempts(world).values()) == [1, 2, 2, 2]
    by_sample = {sample: p for _, members in collected.groups for sample, p in members}
    assert by_sample["0/0/0"].attempt == 0
    assert by_sample["0/0/1"].attempt == 1
    assert len(by_sample["0/0/1"].tokens) == 3
    assert driver.scheduler.counts.conserved


@pytest.mark.parametrize("error", [RuntimeError("a library's own"), MemoryError("full")])
def test_what_nobody_meant_to_raise_counts_as_a_death(error: Exception):
    world = World()
    engine = Fragile(world, breaks=[1], error=error)
    driver = driver_of(world, engine)
    driver.offer(prompts(1))
    assert len(driver.collect(1, 1).groups) == 1
    assert engine.restarts == 1


def test_a_user_s_mistake_is_not_tried_again():
    world = World()
    engine = Fragile(world, breaks=[1], error=BackendError("logits are not finite", hint="lower"))
    driver = driver_of(world, engine)
    driver.offer(prompts(1))
    with pytest.raises(BackendError, match="not finite"):
        driver.collect(1, 1)
    assert engine.restarts == 0


def test_an_engine_that_breaks_again_and_again_ends_the_run_with_what_it_raised():
    world = World()
    engine = Fragile(world, breaks=range(100), error=RuntimeError("no such kernel"))
    driver = driver_of(world, engine)
    driver.offer(prompts(1))
    with pytest.raises(WorkerDied, match=f"broke {MAX_FAILURES} times") as caught:
        driver.collect(1, 1)
    assert "RuntimeError: no such kernel" in str(caught.value)
    assert "actor[0]" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.restarts == MAX_FAILURES - 1


def test_deaths_with_ended_samples_between_them_are_forgiven():
    world = World()
    engine = Fragile(world, breaks=[2, 4, 6, 8, 10])
    driver = driver_of(world, engine)
    driver.offer(prompts(8))
    collected = driver.collect(1, 8)
    assert engine.restarts == 5
    # A sample that three engines died under is given up, and its group with it.
    ended = len(collected.groups) + len({s.rpartition("/")[0] for s, _, _ in collected.dropped})
    assert ended == 8


def test_the_others_go_on_without_an_engine_that_is_given_up():
    world = World()
    bad, good = Unfit(world, slots=1), Fragile(world, slots=4)
    driver = driver_of(world, good, engines={ONE: bad, TWO: good})
    driver.offer(prompts(6))
    collected = driver.collect(1, 6)
    # The first samples were sent to it each time; after three attempts they are given up.
    assert len(collected.groups) >= 5
    assert bad.restarts == MAX_FAILURES - 1
    driver.offer(prompts(2, first=6))
    assert len(driver.collect(2, 2).groups) == 2


def test_an_engine_that_cannot_be_opened_anew_raises_what_broke_it():
    world = World()
    engine = Engine(world)

    def poll(timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        raise RuntimeError("out of luck")

    engine.poll = poll  # type: ignore[method-assign]
    driver = driver_of(world, engine)
    driver.offer(prompts(1))
    with pytest.raises(RuntimeError, match="out of luck"):
        driver.collect(1, 1)


def test_a_sample_that_two_engines_share_no_slot_of_ends_once():
    """Its first engine's late answer is about a dead attempt."""
    world = World()
    first = Fragile(world, breaks=[1], slots=4)
    second = Engine(world, deque(["0/0/0", "0/0/1"]), slots=4)
    driver = driver_of(world, first, engines={ONE: first, TWO: second})
    driver.offer(prompts(1))
    collected = driver.collect(1, 1)
    assert len(collected.groups) == 1
    assert driver.scheduler.counts.consumed == 2
