"""The planner's closed form of episodes, against the simulator's events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.cost.episode_time import CallSeconds, Episodes, play
from flowrl.cost.lengths import ConstantLengths
from flowrl.cost.rollout_time import rollout_estimate
from flowrl.cost.source import Estimate
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.lengths import Constant
from flowrl.sim.model import EnvironmentModel, LaneModel
from tests.sim.worlds import LinearStep, assumed, run, small_model, with_engine

SLOTS, ENGINES, SAMPLES, TURNS, TURN = 8, 2, 64, 6, 20
STEP = LinearStep(fixed=0.01, row=0.0005)


def simulated_s(call_s: float, wait_s: float) -> float:
    shape = EpisodeShape(turn=TURN, observation=1, max_turns=TURNS)
    model = with_engine(
        small_model(
            engines=ENGINES, slots=SLOTS, groups=SAMPLES, group_size=1, times=STEP, learn_s=0.0
        ),
        capacity=2 * SLOTS,
    )
    environment = EnvironmentModel(
        lane="game", times=EnvironmentTimes(call_s=call_s, wait_s=wait_s), shape=shape
    )
    played = replace(
        model,
        lanes=(*model.lanes, LaneModel(name="game", device="cpu:0")),
        rollouts=tuple(replace(one, environment=environment) for one in model.rollouts),
    )
    return run(played, workload=assumed(Constant(tokens=TURNS * TURN)), steps=1).steps[0].wall_s


def estimated(call_s: float, wait_s: float) -> tuple[float, str]:
    lengths = ConstantLengths(tokens=float(TURNS * TURN))
    drawing = rollout_estimate(
        lambda rows, context: Estimate(seconds=STEP.decode_s(rows, context, context)),
        lambda rows, tokens: Estimate(seconds=0.0),
        replicas=ENGINES,
        samples=SAMPLES,
        group_size=1,
        prompt_tokens=10.0,
        lengths=lengths,
        slots=SLOTS,
        kv_tokens=1_000_000,
    )
    found = play(
        drawing,
        row_s=lambda rows: STEP.decode_s(rows, 0.0, 0.0),
        chunk_s=0.0,
        chunk_tokens=8192,
        replicas=ENGINES,
        samples=SAMPLES,
        slots=SLOTS,
        lengths=lengths,
        episodes=Episodes(turns=float(TURNS), most_turns=TURNS),
        calls=CallSeconds(reset_s=call_s, step_s=call_s, wait_s=wait_s),
        at_once=1.0,
        takes_turns=False,
    )
    return found.estimate.seconds, found.bound


@pytest.mark.parametrize(
    ("call_s", "wait_s", "bound"),
    [
        (0.0, 0.0, "policy"),
        (0.002, 0.0, "policy"),
        (0.05, 0.0, "environment"),
        (0.2, 0.0, "environment"),
        (0.0, 2.0, "episodes in flight"),
        (0.001, 20.0, "episodes in flight"),
    ],
)
def test_the_closed_form_is_near_the_simulated_episodes(call_s: float, wait_s: float, bound: str):
    seconds, found = estimated(call_s, wait_s)
    assert found == bound
    assert seconds == pytest.approx(simulated_s(call_s, wait_s), rel=0.15)
