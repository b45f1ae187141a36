"""Whom the driver of a rollout waits for."""

from __future__ import annotations

from flowrl.ids import SampleId
from flowrl.runtime.driver.rounds import one_round
from flowrl.runtime.workers import wait_for_any
from tests.runtime.test_rollouts import VERIFIER, Engine, Scoring, World, by_member, driver_of


class Apart(Engine):
    """An engine that can be waited for."""

    def fileno(self) -> int:
        return 0

    def seconds_to_limit(self) -> float:
        return 60.0


class ApartScoring(Scoring):
    """Scorers that can be waited for."""

    def fileno(self) -> int:
        return 1

    def seconds_to_limit(self) -> float:
        return 60.0


class Polled:
    """`select`, which notes what is waited for and how long, in milliseconds."""

    POLLIN = 1

    def __init__(self) -> None:
        self.waits: list[tuple[list[int], float]] = []
        self._registered: list[int] = []

    def poll(self, milliseconds: float | None = None) -> Polled:
        if milliseconds is not None:
            self.waits.append((self._registered, milliseconds))
            self._registered = []
        return self

    def register(self, descriptor: int, event: int) -> None:
        self._registered.append(descriptor)


def test_a_wait_ends_just_after_the_first_limit_and_never_after_its_own(monkeypatch):
    polled = Polled()
    monkeypatch.setattr("flowrl.runtime.workers.select", polled)
    world = World()
    soon, late = Apart(world), ApartScoring(world, by_member)
    soon.seconds_to_limit = lambda: 0.25  # type: ignore[method-assign]
    wait_for_any([late, soon], 2.0)
    wait_for_any([late], 2.0, 7)
    wait_for_any([], 0.5)
    soon.seconds_to_limit = lambda: -3.0  # type: ignore[method-assign]
    wait_for_any([soon], 2.0)
    assert polled.waits == [([1, 0], 251.0), ([1, 7], 2000.0), ([], 500.0), ([0], 0.0)]


def test_a_round_in_which_nothing_moves_waits_for_the_engines(monkeypatch):
    world = World()
    driver = driver_of(world, Apart(world))
    waits: list[int] = []
    monkeypatch.setattr(
        "flowrl.runtime.driver.rounds.wait_for_any",
        lambda workers, _: waits.append(len(list(workers))),
    )
    (held,) = driver._running.values()
    held[SampleId("0/0/0")] = 0
    assert one_round([driver]) == 0
    assert waits == [1]


def test_scorers_are_waited_for_only_while_they_owe_an_answer():
    world = World()
    engine, scoring = Apart(world), ApartScoring(world, by_member)
    driver = driver_of(world, engine, scorers={VERIFIER: scoring})
    assert driver.waitable() == [engine]
    driver._results.due[SampleId("0/0/0")] = 1
    assert driver.waitable() == [engine, scoring]
