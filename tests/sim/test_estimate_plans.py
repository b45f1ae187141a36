"""Plans for this machine are ranked by assumed times where nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import api
from flowrl.plan.local import LocalRequest, engines_of, local_choice, local_choices
from flowrl.sim.choose_plan import choose_plan, predicted_choices, workloads_of
from flowrl.sim.costs import LinearCost
from flowrl.sim.episodes import EnvironmentTimes
from flowrl.sim.estimate_plans import WIRE_S, estimate_model, estimated_plan
from flowrl.sim.of_plan import model_of_stage
from flowrl.sim.times import assumed_times
from tests.runtime.tiny_runs import tiny_config
from tests.sim.test_choose_plan import LENGTHS, stage_of, times_of, two_cores

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_step_is_drawing_and_loading_and_learning_in_turns(tmp_path: Path):
    stage = stage_of(tmp_path)
    times = times_of(stage, update_s=3.0, export_s=2.0)
    workloads = workloads_of(stage, times, LENGTHS, 0)
    assert stage.local is not None
    found = {}
    for choice in stage.local.choices():
        plan = stage.local.plan(stage.graph, choice)
        model = model_of_stage(replace(stage, plan=plan), times)
        found[str(choice)] = estimate_model(model, workloads)
    # 32 samples of 6 tokens, a second for each row of a step in 8 slots; two updates of 3 s.
    here = found["generated in the main process"]
    assert here.draw_s == {"actor.generate": pytest.approx(32 * 6.0)}
    assert here.step_s == pytest.approx(32 * 6.0 + 2 * 3.0)
    # Two engines draw half of it each; then weights are written, and samples are sent.
    two = found["2 engine processes"]
    assert two.step_s == pytest.approx(16 * 6.0 + 32 * WIRE_S + 2 * 3.0 + 2.0)
    one = found["1 engine process"]
    assert one.step_s == pytest.approx(32 * 6.0 + 32 * WIRE_S + 2 * 3.0 + 2.0)


def test_what_is_drawn_ahead_takes_the_longer_of_two_halves(tmp_path: Path):
    stage = stage_of(tmp_path, train=tiny_config(tmp_path)["train"] | {"max_staleness": 1})
    assert stage.local is not None
    ahead = next(one for one in stage.local.choices() if one.kind == "asynchronous")
    for update_s in (10.0, 200.0):
        times = times_of(stage, update_s=update_s, export_s=0.0)
        plan = stage.local.plan(stage.graph, ahead)
        model = model_of_stage(replace(stage, plan=plan), times)
        made = estimate_model(model, workloads_of(stage, times, LENGTHS, 0))
        drawing = made.draw_s["actor.generate"]
        assert drawing == pytest.approx(32 * 6.0 + 32 * WIRE_S)
        assert made.step_s == pytest.approx(max(drawing, sum(made.ops_s.values())))


def test_what_is_estimated_to_be_faster_is_told_and_not_taken(tmp_path: Path):
    stage = stage_of(tmp_path)
    # In place 192 s and two updates, with two engines 96 s and those.
    times = times_of(stage, update_s=50.0, export_s=0.0)
    plan = estimated_plan(stage, LENGTHS, 0, times).plan
    assert engines_of(plan, "actor").processes == 0
    faster = plan.alternatives[0]
    assert faster.summary == "2 engine processes"
    assert faster.why_not == "estimated 1.49 times as fast, but nothing is measured"
    assert {one.source for one in plan.prediction.confidence} == {"assumed"}
    why = next(one for one in plan.reasons if one.subject == "actor.generate")
    assert "nothing that was measured speaks for another" in why.why


def test_max_staleness_asks_to_draw_ahead_where_nothing_is_measured(tmp_path: Path):
    train = tiny_config(tmp_path)["train"] | {"max_staleness": 1}
    stage = stage_of(tmp_path, train=train)
    # One engine draws 192 s beside two updates of a moment, two in turns with them half of that.
    times = times_of(stage, update_s=0.5, export_s=0.0)
    plan = estimated_plan(stage, LENGTHS, 0, times).plan
    assert (plan.kind, engines_of(plan, "actor").processes) == ("asynchronous", 1)
    assert plan.alternatives[0].summary == "2 engine processes"
    assert plan.alternatives[0].why_not == "estimated 1.98 times as fast, but nothing is measured"
    why = next(one.why for one in plan.reasons if one.subject == "actor.generate")
    assert "; max_staleness asks to generate ahead of the trainer, this is the plainest way" in why
    # The plan of a run for which nothing is even estimated says the same.
    assert stage.plan.kind == "asynchronous"
    why = next(one.why for one in stage.plan.reasons if one.subject == "actor.generate")
    assert why.startswith(
        "max_staleness asks to generate ahead of the trainer, and nothing is measured"
    )
    # What is measured decides: the fastest is taken, whatever it is.
    assert choose_plan(stage, times, LENGTHS, 0).plan.kind == "temporal"
    turns = stage_of(tmp_path, train=train, plan={"kind": "temporal"})
    assert estimated_plan(turns, LENGTHS, 0, times).plan.kind == "temporal"


def test_the_estimate_is_near_what_the_simulator_says_of_the_same_times():
    compiled = api.compile(None, CONFIGS / "quickstart.yaml", pool=two_cores())
    stage, plan = compiled.stages[-1], compiled.config.plan
    times = assumed_times(stage)
    simulated, _ = predicted_choices(stage, times, plan, 0)
    made = estimated_plan(stage, plan, 0, times).plan
    by_summary = {one.summary: one.step_s for one in made.alternatives}
    by_summary[str(local_choice(made))] = made.prediction.step_s
    assert len(by_summary) == len(simulated) == 4
    for one in simulated:
        # The messages of processes are estimated, and not simulated.
        sent = 512 * WIRE_S if any(n for _, n in one.choice.engines) else 0.0
        assert by_summary[str(one.choice)] == pytest.approx(one.step_s + sent, rel=0.05)


def test_an_engine_waits_for_its_environment(tmp_path: Path):
    compiled = api.compile(None, CONFIGS / "guess.yaml", pool=two_cores())
    stage = compiled.stages[-1]
    free = assumed_times(stage)
    played = {"game": EnvironmentTimes(call_s=1e-3, wait_s=0.5)}
    workloads = workloads_of(stage, free, LENGTHS, 0)
    plain, slow = (
        estimate_model(model_of_stage(stage, times), workloads).step_s
        for times in (free, replace(free, environments=played))
    )
    # 32 x 16 episodes of as many turns as they may have, a reset and a step behind each.
    turns = stage.graph.node("game.interact").attr("max_turns")
    assert isinstance(turns, int)
    assert slow - plain == pytest.approx((turns + 1) * (512 * 1e-3 + 0.5))


@pytest.mark.parametrize(("reset", "reset_s"), [("", 0.001), (", reset_s: 0.025", 0.025)])
def test_what_the_configuration_says_of_an_environment_is_taken(reset: str, reset_s: float):
    # Responses have as many tokens as they may, in as many turns.
    longest = ["plan.mean_response_tokens=8"]
    words = [f"plan.environments.game={{step_s: 0.001, wait_s: 0.5{reset}}}"]
    plans = []
    for overrides in (longest, [*longest, *words]):
        compiled = api.compile(None, CONFIGS / "guess.yaml", pool=two_cores(), overrides=overrides)
        plans.append(estimated_plan(compiled.stages[-1], compiled.config.plan, 0).plan)
    plain, slow = (plan.prediction.step_s or 0.0 for plan in plans)
    assert slow - plain == pytest.approx(512 * (4 * 1e-3 + reset_s) + 5 * 0.5)


def test_forward_passes_wait_for_the_batch_and_the_plan_says_why(tmp_path: Path):
    stage = stage_of(tmp_path, args={"kl": 0.1})
    assert stage.local is not None
    spatial = next(one for one in stage.local.choices() if one.kind == "spatial")
    made = stage.local.plan(stage.graph, spatial)
    (reason,) = [one for one in made.reasons if one.subject == "reference.logprobs"]
    assert reason.choice == "on the whole batch, when all samples are generated"
    assert "depend on which ends first" in reason.rejected[0].constraint
    assert made.operation("reference.logprobs").start == "batch"
    plain = stage.local.plan(stage.graph, stage.local.choices()[0])
    assert not [one for one in plain.reasons if one.subject == "reference.logprobs"]


def test_of_many_cores_not_every_number_of_engines_is_looked_at():
    request = LocalRequest(roles=("actor",), fixed={}, num_cores=96)
    temporal = [one.engines[0][1] for one in local_choices(request) if one.kind == "temporal"]
    assert temporal == [0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 96]


def test_export_is_assumed_to_write_all_weights(tmp_path: Path):
    stage = stage_of(tmp_path)
    times = assumed_times(stage)
    cost = stage.context.costs["actor"]
    stored = 4 * cost.shape.parameters.total
    assert times.ops["actor", "export"] == LinearCost(call_s=2e-3 + stored / 1e9)
    assert times.engines["actor"].load_folder_s == pytest.approx(2e-3 + stored / 2e9)
