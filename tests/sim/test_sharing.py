"""Pieces of work that share cores and interpreters: speeds worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.ids import EngineId, SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.driver import SimDriver
from flowrl.sim.lanes import Lane
from flowrl.sim.model import SimModel
from flowrl.sim.report import SimReport
from flowrl.sim.scorers import ScoreTimes, SimScorers
from flowrl.sim.sharing import Beside, Sharing
from tests.sim.worlds import run, small_model


class World:
    """A machine, and when what it was asked for is done."""

    def __init__(self, num_cores: int) -> None:
        self.clock = Clock()
        self.sharing = Sharing(clock=self.clock, num_cores=num_cores)
        self.lanes: dict[str, Lane] = {}
        self.done: dict[str, float] = {}

    def lane(self, name: str, process: str = "") -> Lane:
        return self.lanes.setdefault(name, Lane(name=name, device="cpu:0", process=process or name))

    def work(
        self,
        lane: Lane,
        what: str,
        seconds: float,
        beside: Beside | None = None,
    ) -> None:
        def then() -> None:
            self.done[what] = self.clock.now

        self.sharing.work(lane, what, seconds, then, beside=beside)

    def run(self) -> dict[str, float]:
        self.clock.run_until(lambda: False)
        return {what: pytest.approx(at_s) for what, at_s in self.done.items()}


def test_processes_with_cores_enough_do_not_notice_each_other():
    world = World(2)
    world.work(world.lane("a"), "first", 3.0)
    world.work(world.lane("b"), "second", 5.0)
    assert world.run() == {"first": 3.0, "second": 5.0}


def test_a_lane_does_one_piece_after_the_other():
    world = World(2)
    world.work(world.lane("a"), "first", 3.0)
    world.work(world.lane("a"), "call", 0.0)
    world.work(world.lane("a"), "second", 1.0)
    assert world.run() == {"first": 3.0, "call": 3.0, "second": 4.0}
    assert world.lane("a").busy_s == 4.0


def test_three_processes_share_two_cores_until_one_has_done():
    world = World(2)
    for name, seconds in (("a", 2.0), ("b", 4.0), ("c", 4.0)):
        world.work(world.lane(name), name, seconds)
    # Each at two thirds: a is done at 3. By then the others have 2 left each, at full speed.
    assert world.run() == {"a": 3.0, "b": 5.0, "c": 5.0}


def test_a_piece_that_comes_later_slows_what_is_under_way():
    world = World(1)
    world.work(world.lane("a"), "first", 4.0)
    world.clock.at(2.0, world.work, world.lane("b"), "second", 1.0)
    # From 2 on at half speed each: the second takes 2 seconds, the first has 1 left then.
    assert world.run() == {"second": 4.0, "first": 5.0}


def test_threads_of_a_process_leave_each_other_what_was_measured():
    world = World(8)
    main, thread = world.lane("main"), world.lane("rollout", "main")
    world.work(main, "update", 10.0, Beside(loses=1.0, lets=0.75))
    world.work(thread, "collect", 3.0)
    # The thread takes 4 seconds, in which the update does one of its 10.
    assert world.run() == {"collect": 4.0, "update": 13.0}


def test_two_threads_with_nothing_but_python_take_turns():
    world = World(8)
    world.work(world.lane("main"), "host", 2.0)
    world.work(world.lane("rollout", "main"), "collect", 3.0)
    assert world.run() == {"host": 4.0, "collect": 5.0}


def test_a_thread_that_loses_its_caches_loses_more_than_the_time_it_stands_still():
    world = World(8)
    world.work(world.lane("main"), "update", 5.0, Beside(loses=1.5, lets=0.8))
    world.clock.at(1.0, world.work, world.lane("rollout", "main"), "collect", 2.0)
    # The thread takes 2.5 seconds; the update has 4 + 1.5 * 2 - 2.5 left then.
    assert world.run() == {"collect": 3.5, "update": 3.5 + 4.5}


def test_a_thread_that_gets_nothing_waits_for_the_other_one():
    world = World(8)
    world.work(world.lane("main"), "update", 5.0, Beside())
    world.work(world.lane("rollout", "main"), "collect", 2.0)
    assert world.run() == {"collect": 2.0, "update": 7.0}


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=8),
    starts=st.lists(st.floats(0, 10), min_size=8, max_size=8),
    cores=st.integers(1, 4),
)
def test_cores_are_never_idle_while_somebody_waits_and_never_do_more(seconds, starts, cores):
    world = World(cores)
    for number, length in enumerate(seconds):
        lane = world.lane(str(number))
        world.clock.at(starts[number], world.work, lane, str(number), length)
    world.run()
    assert len(world.done) == len(seconds)
    for number, length in enumerate(seconds):
        assert world.done[str(number)] >= starts[number] + length - 1e-6
    last = max(world.done.values())
    first = min(starts[: len(seconds)])
    assert last - first >= sum(seconds) / cores - (max(starts) - first) - 1e-6
    if cores == 1:
        assert last <= max(starts[: len(seconds)]) + sum(seconds) + 1e-6


# Engines


def walls(report: SimReport) -> list[float]:
    return [step.wall_s for step in report.steps]


def shared_model(engines: int, cores: int) -> SimModel:
    model = small_model(engines=engines, slots=2, groups=engines, learn_s=4.0)
    return replace(model, num_cores=cores)


def test_engines_that_share_a_core_take_twice_as_long():
    # Two samples each, 8 tokens: 8 seconds of each engine.
    apart, together = (run(shared_model(2, cores), steps=2) for cores in (2, 1))
    assert walls(apart) == pytest.approx([12.0, 12.0])
    assert walls(together) == pytest.approx([20.0, 20.0])
    assert together.engines["tokens"] == apart.engines["tokens"] == 2 * 4 * 8


def test_an_engine_goes_on_at_full_speed_when_the_other_one_has_ended():
    model = small_model(engines=2, slots=1, groups=1, group_size=3, learn_s=4.0)
    # Three samples of 8 seconds: one engine draws two of them. Half speed up to 16, then full.
    assert walls(run(model, steps=1)) == [16.0 + 4.0]
    assert walls(run(replace(model, num_cores=1), steps=1)) == pytest.approx([16.0 + 8.0 + 4.0])


def test_a_pace_changes_only_what_is_left_of_a_stretch():
    model = replace(small_model(learn_s=4.0, staleness=1), num_cores=1, trainer="trainer")
    # A batch is drawn in 8 seconds and learned from in 4, and all of it on one core: 12 a step.
    assert walls(run(model, steps=6))[1:] == pytest.approx([12.0] * 5, rel=0.1)


# Rewards, and the driver that takes their answers


def scorers(
    world: World, times: ScoreTimes, answer_s: float, answers: list[tuple[float, int]]
) -> SimScorers:
    driver = SimDriver(clock=world.clock, lane=world.lane("driver"), sharing=world.sharing)
    return SimScorers(
        clock=world.clock,
        lanes=[world.lane("verifier")],
        times=times,
        driver=driver,
        answer=lambda samples: answers.append((world.clock.now, len(samples))),
        answer_s=answer_s,
    )


def names(number: int) -> list[SampleId]:
    return [SampleId(f"0/{i}/0") for i in range(number)]


def test_rewards_are_scored_in_batches_whose_answers_the_driver_takes_meanwhile():
    world, answers = World(2), []
    scorers(world, ScoreTimes(sample_s=0.001, latency_s=0.002), 0.0005, answers).submit(names(300))
    world.run()
    # Batches of 128, 128 and 44; the next is sent when the driver begins with the answers.
    batch_s = 0.128 + 0.002
    # The third one is there before the driver has done with the second.
    expected = [batch_s + 0.064, 2 * batch_s + 0.064, 2 * batch_s + 0.064 + 0.022]
    assert [at_s for at_s, _ in answers] == pytest.approx(expected)
    assert [number for _, number in answers] == [128, 128, 44]


def test_a_busy_driver_keeps_the_next_batch_waiting():
    world, answers = World(2), []
    made = scorers(world, ScoreTimes(sample_s=0.001), 0.0001, answers)
    made.submit(names(256))
    world.work(world.lane("driver"), "collect", 1.0)
    world.run()
    # The first batch is scored at 0.128, and its answers taken from 1 on, when the next is sent.
    assert answers == [
        (pytest.approx(1.0128), 128),
        (pytest.approx(1.128 + 0.0128), 128),
    ]


def test_answers_of_slow_samples_do_not_wait_for_the_batch():
    world, answers = World(2), []
    scorers(world, ScoreTimes(sample_s=1.0), 0.0, answers).submit(names(3))
    world.run()
    assert answers == [(pytest.approx(float(n)), 1) for n in (1, 2, 3)]


def test_names_of_engines_do_not_matter_to_their_pace():
    model = shared_model(2, 1)
    renamed = replace(
        model,
        engines=tuple(
            replace(engine, name=EngineId(f"other {engine.name}")) for engine in model.engines
        ),
    )
    assert run(renamed, steps=2).sim_s == run(model, steps=2).sim_s
