"""The planner's closed form of episodes, against the simulator's events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cost.episode_time import CallSeconds, Episodes, Pace, PlayedEstimate, play
from flowrl.cost.lengths import lognormal_before_cut
from flowrl.cost.occupancy import EngineBatch
from flowrl.cost.source import Estimate
from flowrl.plan.sizing import pool_of_devices
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EnvironmentModel, LaneModel
from flowrl.sim.workload import Assumed, PromptLengths
from tests.sim.cluster_jobs import Planned, model_of, simulated
from tests.sim.worlds import LinearStep, run, small_model, with_engine

ENGINES, TURN, MEAN, MOST = 2, 40, 400.0, 1600
STEP = LinearStep(fixed=0.01, row=0.0005)


def simulated_s(call_s: float, wait_s: float, sigma: float, slots: int, samples: int) -> float:
    """Seconds of a rollout, on average of some seeds."""
    shape = EpisodeShape(turn=TURN, observation=1, max_turns=MOST // TURN)
    model = with_engine(
        small_model(
            engines=ENGINES, slots=slots, groups=samples, group_size=1, times=STEP, learn_s=0.0
        ),
        capacity=2 * slots,
    )
    environment = EnvironmentModel(
        lane="game", times=EnvironmentTimes(call_s=call_s, wait_s=wait_s), shape=shape
    )
    played = replace(
        model,
        lanes=(*model.lanes, LaneModel(name="game", device="cpu:0")),
        rollouts=tuple(replace(one, environment=environment) for one in model.rollouts),
    )
    lengths, prompts = Lognormal(mean=MEAN, sigma=sigma), PromptLengths(values=(10,))
    walls = [
        run(played, workload=Assumed(lengths, seed=seed, prompts=prompts, longest=MOST), steps=1)
        .steps[0]
        .wall_s
        for seed in (0, 1)
    ]
    return sum(walls) / len(walls)


def estimated(
    call_s: float, wait_s: float, sigma: float, slots: int, samples: int
) -> tuple[float, str]:
    found, _ = played(call_s, wait_s, sigma, slots, samples)
    return found.estimate.seconds, found.bound


def played(
    call_s: float,
    wait_s: float,
    sigma: float,
    slots: int,
    samples: int,
    *,
    takes_turns: bool = False,
) -> tuple[PlayedEstimate, float]:
    """The closed form, and the turns of an episode."""
    lengths = lognormal_before_cut(mean=MEAN, sigma=sigma, maximum=float(MOST))
    # The last turn of an episode is half as long as the others.
    turns = lengths.mean / TURN + 0.5
    found = play(
        Estimate(seconds=0.0),
        EngineBatch(
            replicas=ENGINES,
            samples=samples,
            group_size=1,
            prompt_tokens=10.0,
            slots=slots,
            kv_tokens=10_000_000,
        ),
        pace=Pace(lambda rows, context: STEP.decode_s(rows, context, context), slots, (10.0, 1e3)),
        chunk_s=0.0,
        chunk_tokens=8192,
        lengths=lengths,
        episodes=Episodes(turns=turns, most_turns=MOST // TURN),
        calls=CallSeconds(reset_s=call_s, step_s=call_s, wait_s=wait_s),
        at_once=1.0,
        takes_turns=takes_turns,
    )
    return found, turns


@pytest.mark.parametrize(("slots", "samples"), [(16, 128), (64, 128), (32, 256)])
@pytest.mark.parametrize(
    ("call_s", "wait_s", "bound"),
    [
        (0.0, 0.0, "policy"),
        (0.1, 0.0, "environment"),
        (0.0, 3.0, "each episode's own way"),
        (0.005, 0.5, None),
        (0.02, 0.0, None),
    ],
)
@pytest.mark.parametrize("sigma", [0.0, 0.6])
def test_the_closed_form_is_near_the_simulated_episodes(
    call_s: float, wait_s: float, bound: str | None, sigma: float, slots: int, samples: int
):
    seconds, found = estimated(call_s, wait_s, sigma, slots, samples)
    assert bound in (None, found)
    assert seconds == pytest.approx(simulated_s(call_s, wait_s, sigma, slots, samples), rel=0.2)


@pytest.mark.parametrize("sigma", [0.0, 0.6, 1.2])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_rollout_takes_no_less_than_the_work_of_those_who_share_it(
    sigma: float, takes_turns: bool
):
    """128 episodes of 10 turns or more, at one call of 0.2 s at a time, also where batches follow
    each other without a gap."""
    found, turns = played(0.2, 0.0, sigma, 16, 128, takes_turns=takes_turns)
    calls_s = 128 * 0.2 * (turns + 1)
    assert found.environment_s == pytest.approx(calls_s)
    least = calls_s + (found.policy_s if takes_turns else 0.0)
    assert found.estimate.seconds >= least * (1 - 1e-9)
    assert found.estimate.steady_s is not None
    # Without a tail the policy needs less; the environment as much.
    assert found.estimate.steady_s >= calls_s * (1 - 1e-9)
    assert found.bound == ("both in turns" if takes_turns else "environment")


@pytest.mark.parametrize(
    "words",
    [(), ("plan.environments.world.step_s=10",), ("plan.environments.world.concurrency=8",)],
)
def test_a_plan_of_episodes_is_simulated_near_what_it_predicts(words: tuple[str, ...]):
    data = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
    overrides = [f"data.train={data}", "train.prompts_per_step=32", *words]
    overrides += [f"plan.pins.{task}.devices=0-15" for task in ("rollout", "actor")]
    pool = pool_of_devices(device_spec("H100-SXM-80GB"), 16)
    compiled = api.compile(None, "configs/agent_qwen25_7b.yaml", overrides=overrides, pool=pool)
    (stage,) = compiled.stages
    planned = Planned(stage=stage, config=compiled.config.plan)
    (rollout,) = model_of(planned).rollouts
    assert rollout.environment is not None
    # 6,000 tokens in 10 turns, of which 200 are said before each.
    assert rollout.environment.shape.turn == 400
    assert simulated(planned, steps=2).step_s == pytest.approx(planned.step_s, rel=0.2)
