"""Episodes on a virtual clock: turns of an engine, calls of an environment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from flowrl.backend.environment import EpisodeStart
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.rollout.policies.engines import AbortRunning
from flowrl.rollout.policies.prompts import AgeBudget
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.costs import HostCost, LinearCost, batch_work
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.faults import Faults, ScriptedFault
from flowrl.sim.lengths import Constant
from flowrl.sim.measure_environment import measure_environment
from flowrl.sim.model import EnvironmentModel, LaneModel, SimModel
from flowrl.sim.step_time import ConstantStep
from flowrl.sim.workload import GroupDraw
from tests.sim.pretend import Timer
from tests.sim.worlds import assumed, run, small_model

SHAPE = EpisodeShape(turn=1, observation=1, max_turns=4)


def played(times: EnvironmentTimes, model: SimModel, shape: EpisodeShape = SHAPE) -> SimModel:
    """A prefill takes a second, and so a turn of one token."""
    environment = EnvironmentModel(lane="game", times=times, shape=shape)
    return replace(
        model,
        lanes=(*model.lanes, LaneModel(name="game", device="cpu:0")),
        rollouts=tuple(replace(r, environment=environment) for r in model.rollouts),
    )


def test_an_episode_is_cut_into_turns_as_long_as_they_may_be():
    shape = EpisodeShape(turn=4, observation=2, max_turns=3)
    assert shape.turns(9) == (4, 4, 1)
    assert shape.turns(8) == (4, 4)
    assert shape.turns(100) == (4, 4, 4)
    assert (shape.said(9), shape.said(3)) == (4, 0)


def test_an_episode_takes_its_turns_and_all_calls_before_between_and_behind_them():
    model = played(EnvironmentTimes(wait_s=0.2), small_model(learn_s=0.0))
    report = run(model, workload=assumed(Constant(tokens=3)), steps=2)
    # Four episodes side by side: a reset, then three turns with a step behind each.
    assert [step.wall_s for step in report.steps] == pytest.approx([4 * 0.2 + 3 * 1.0] * 2)
    assert report.samples["consumed"] == 8
    assert report.engines["tokens"] == 8 * 3


@pytest.mark.parametrize(("actors", "rivals"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_policies_that_take_turns_draw_them_on_engines_of_their_own(actors: int, rivals: int):
    model = played(EnvironmentTimes(wait_s=0.2), small_model(learn_s=0.0, engines=actors))
    own = [replace(model.engines[0], name=f"rival[{i}]", role="rival") for i in range(rivals)]
    lead = "actor" if actors >= rivals else "rival"
    model = replace(
        model,
        lanes=(*model.lanes, *(LaneModel(name=each.name, device=each.name) for each in own)),
        engines=(*model.engines, *(replace(each, lane=each.name) for each in own)),
        rollouts=(replace(model.rollouts[0], role=lead, turns=("actor", "rival")),),
    )
    report = run(model, workload=assumed(Constant(tokens=3)), steps=2)
    # All episodes side by side, in three turns; an engine that serves two others has one wait.
    waits_s = 0.0 if actors == rivals else 1.0
    wall_s = 4 * 0.2 + 3 * 1.0 + waits_s
    assert [step.wall_s for step in report.steps] == pytest.approx([wall_s] * 2)
    assert report.samples["consumed"] == 8
    assert report.engines["tokens"] == 8 * 3
    if actors == rivals:
        busy_s = {lane.lane: lane.busy_s for lane in report.lanes}
        assert busy_s["engine[0]"] == pytest.approx(2 * busy_s["rival[0]"])


class SecondsOfTokens(ConstantStep):
    """A prefill takes a second for each token that it computes, and a decode step none."""

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        return 0.0

    def prefill_s(self, rows: int, tokens: int) -> float:
        return float(tokens)


def test_a_policy_s_cache_ends_with_its_own_last_turn():
    def prefilled(*turns: str) -> float:
        model = played(EnvironmentTimes(), small_model(learn_s=0.0, groups=1, group_size=1))
        (engine,) = model.engines
        actor = replace(engine, times=SecondsOfTokens(), keeps_prefixes=True)
        rival = replace(actor, name="rival", role="rival", lane="trainer")
        rollout = replace(model.rollouts[0], turns=turns)
        model = replace(model, engines=(actor, rival), rollouts=(rollout,))
        return run(model, workload=assumed(Constant(tokens=4)), steps=1).steps[0].wall_s

    # Behind each turn of a token is an observation of one.
    prompt = prefilled("actor") - 3 * 1
    assert prompt > 0
    assert prefilled("actor", "rival") == prompt + (prompt + 2) + 2 * (1 + 1 + 1)


def test_a_step_has_a_row_for_what_its_engines_wait_for():
    model = played(EnvironmentTimes(wait_s=0.2), small_model(learn_s=5.0))
    devices = tuple(replace(lane, num_devices=lane.name != "game") for lane in model.lanes)
    report = run(replace(model, lanes=devices), workload=assumed(Constant(tokens=3)), steps=2)
    assert report.kinds[:2] == ["generate", "environment"]
    for step in report.steps:
        assert step.seconds["generate"] == pytest.approx(3 * 1.0)
        assert step.seconds["environment"] == pytest.approx(4 * 0.2)
        assert sum(step.seconds.values()) == pytest.approx(step.wall_s)
    # Without an environment, engines have work until the batch is there.
    plain = run(small_model(learn_s=5.0), workload=assumed(Constant(tokens=3)), steps=2)
    assert not {"environment", "wait"} & set(plain.kinds)


@pytest.mark.parametrize("apart", [False, True])
def test_every_second_of_a_local_step_is_in_a_row(apart: bool):
    """A driver waits for its environment in `generate`, as that of a run does."""
    host = HostCost(step_s=0.5, offer_s=0.01, sample_s=0.02, answer_s=0.01, row_s=0.1)
    model = replace(small_model(learn_s=5.0), host=host, num_cores=2)
    if not apart:  # all in the driver's process
        engines = tuple(replace(one, lane="main") for one in model.engines)
        ops = tuple(replace(one, lanes=("main",)) for one in model.ops)
        model = replace(model, engines=engines, ops=ops, trainer="main")
    model = played(EnvironmentTimes(call_s=0.01, wait_s=0.2), model)
    report = run(model, workload=assumed(Constant(tokens=3)), steps=3)
    for step in report.steps:
        assert step.seconds["generate"] > 3 * 1.0 + 4 * 0.2
        assert step.seconds["host"] == pytest.approx(0.5 + 4 * 0.1, abs=0.1)
        assert sum(step.seconds.values()) == pytest.approx(step.wall_s)
    assert "environment" not in report.kinds


def test_the_thread_of_an_environment_does_one_call_after_the_other():
    one = small_model(learn_s=0.0, groups=1, group_size=1)
    work = assumed(Constant(tokens=2))
    report = run(played(EnvironmentTimes(call_s=1.0), one), workload=work, steps=1)
    assert report.steps[0].wall_s == 3 * 1.0 + 2 * 1.0
    game = next(lane for lane in report.lanes if lane.lane == "game")
    assert game.busy_s == 3.0
    # Three calls for each of four episodes cannot be over before 12 s.
    four = run(played(EnvironmentTimes(call_s=1.0), small_model(learn_s=0.0)), workload=work)
    assert four.steps[0].wall_s >= 12.0


def test_a_turn_goes_on_from_what_was_said():
    """The prefill of the second turn computes prompt, first turn and observation."""
    shape = EpisodeShape(turn=2, observation=3, max_turns=2)
    model = small_model(learn_s=0.0, groups=1, group_size=1, slots=1)
    engine = replace(model.engines[0], kv_tokens=10 + 2 + 3 + 2)
    fits = played(EnvironmentTimes(), replace(model, engines=(engine,)), shape)
    report = run(fits, workload=assumed(Constant(tokens=4)), steps=1)
    assert report.engines["kv_peak"] == 10 + 2 + 3 + 2


def test_an_aborted_episode_begins_anew():
    settings = SchedulerSettings(
        group_size=2,
        max_staleness=1,
        admission=AgeBudget(groups=2),
        publication=AbortRunning(),
    )
    model = small_model(learn_s=2.5, staleness=1)
    model = replace(model, rollouts=(replace(model.rollouts[0], settings=settings),))
    report = run(
        played(EnvironmentTimes(wait_s=0.1), model),
        workload=assumed(Constant(tokens=4)),
        steps=6,
    )
    assert report.samples["consumed"] == 24
    assert report.samples["admitted"] == sum(
        report.samples[end] for end in ("consumed", "filtered", "dropped")
    )
    assert report.engines["tokens"] > 24 * 4  # some turns were drawn for nothing


def test_episodes_of_a_lost_engine_begin_anew_elsewhere():
    faults = Faults(script=(ScriptedFault(at_s=1.5, engine=1, kind="lost"),))
    model = played(EnvironmentTimes(), small_model(engines=2, slots=2, learn_s=0.0))
    report = run(model, workload=assumed(Constant(tokens=3)), steps=1, faults=faults)
    assert report.samples["consumed"] == 4
    assert report.steps[0].wall_s == 3.0 + 3.0


def test_what_an_environment_says_is_learned_from_too():
    group = GroupDraw(prompt_tokens=10, lengths=(4, 2))
    work = batch_work([group], SHAPE.said)
    assert work.tokens == 2 * 10 + 6 + 3 + 1
    assert work.response_tokens == 6.0
    model = played(EnvironmentTimes(), small_model(learn_s=0.0, groups=1))
    update = replace(model.ops[0], cost=LinearCost(token_s=1.0))
    report = run(
        replace(model, ops=(update, model.ops[1])), workload=assumed(Constant(tokens=4)), steps=1
    )
    assert report.steps[0].seconds["update"] == 2 * (10 + 4 + 3)


@dataclass
class PretendCalls:
    """A call takes the thread for 2 ms and waits for 50 ms beside."""

    timer: Timer
    answers: bool = True
    called: int = 0
    live: set[str] = field(default_factory=set)

    def start(self, start: EpisodeStart) -> None:
        assert start.sample not in self.live
        self.live.add(start.sample)
        self.called += 1

    def submit(self, sample: SampleId, action: object) -> None:
        assert sample in self.live
        self.called += 1

    def settle(self, timeout_s: float) -> bool:
        self.timer.now += 0.002 * self.called + 0.05
        self.called = 0
        return self.answers

    def poll(self) -> list[object]:
        return []

    def end(self, sample: SampleId) -> None:
        self.live.remove(sample)


def start() -> EpisodeStart:
    return EpisodeStart(sample=SampleId("0/0/0"), seed=0, row={}, prompt="", answer="")


def test_a_call_is_told_apart_from_what_it_waits_for():
    timer = Timer()
    calls = PretendCalls(timer)
    times = measure_environment(calls, [start()], ["a"], timer)
    assert times.call_s == pytest.approx(0.002)
    assert times.wait_s == pytest.approx(0.05)
    assert not calls.live


def test_an_environment_without_answers_is_told():
    timer = Timer()
    with pytest.raises(BackendError, match="has not answered"):
        measure_environment(PretendCalls(timer, answers=False), [start()], ["a"], timer)
