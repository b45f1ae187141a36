"""Simulated steps: times that one can work out by hand, and books that add up."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.engines import (
    AbortRunning,
    FinishRunning,
    LeastLoaded,
    LongestFirst,
    Quarantine,
    RepackTail,
)
from flowrl.rollout.policies.limits import Patience
from flowrl.rollout.policies.prompts import AgeBudget, AskByKeepRate, OverSampling
from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.engine import PollRule
from flowrl.sim.faults import EngineFaults, Faults, RewardFaults, SampleFaults, ScriptedFault
from flowrl.sim.lengths import Constant, Listed, Lognormal
from flowrl.sim.model import LaneModel, OpModel, ScorerModel
from flowrl.sim.report import report_json, report_text
from flowrl.sim.scorers import ScoreTimes
from flowrl.sim.step_time import ConstantStep
from flowrl.sim.trace import Trace
from tests.sim.worlds import assumed, run, small_model, with_engine


def walls(report):
    return [step.wall_s for step in report.steps]


def test_a_synchronous_step_is_generation_then_learning():
    report = run(small_model(learn_s=5.0))
    # 4 samples in 4 slots: the prefill draws the first of 8 tokens in a second, each step another.
    assert walls(report) == [13.0, 13.0, 13.0]
    assert report.steps[0].seconds == {"generate": 8.0, "update": 5.0, "sync": 0.0}
    assert report.samples == {"admitted": 12, "consumed": 12, "filtered": 0, "dropped": 0}
    assert report.ages == {0: 12}
    assert [step.version for step in report.steps] == [0, 1, 2]
    assert report.tokens_per_s == pytest.approx(12 * 8 / 39)


def test_samples_beyond_the_slots_take_a_second_round():
    assert walls(run(small_model(slots=2, learn_s=0.0), steps=1)) == [16.0]


def test_two_engines_share_the_samples():
    report = run(small_model(engines=2, slots=2, learn_s=0.0), steps=1)
    assert walls(report) == [8.0]
    assert [lane.busy_s for lane in report.lanes[:2]] == [8.0, 8.0]


def test_an_asynchronous_run_draws_while_it_learns():
    report = run(small_model(slots=4, learn_s=8.0, staleness=1), steps=5)
    # Step 1: 8 s of drawing, 8 of learning. From then on a batch is ready when one is learned from.
    assert walls(report) == [16.0, 8.0, 8.0, 8.0, 8.0]
    assert set(report.ages) <= {0, 1}
    assert report.ages[1] > 0
    # The first two steps fill what is drawn ahead: no share and no mean is of them.
    idle = {lane.lane: lane.idle_share for lane in report.lanes}
    assert (idle["engine[0]"], idle["trainer"]) == (0.0, 0.0)
    busy = {lane.lane: lane.busy_s for lane in report.lanes}
    assert (report.sim_s, busy["trainer"]) == (48.0, 40.0)
    assert report.samples_per_s == 4 / 8
    live_at_the_end = report.reasons["dropped: stopped"]
    assert report.samples["admitted"] == report.samples["consumed"] + live_at_the_end


def test_with_too_few_steps_to_leave_some_out_idle_shares_are_of_all():
    report = run(small_model(slots=4, learn_s=8.0, staleness=1), steps=4)
    idle = {lane.lane: lane.idle_share for lane in report.lanes}
    assert idle["trainer"] == pytest.approx(8 / 40)


def test_a_simulation_whose_filter_takes_all_says_so():
    model = small_model(staleness=1, judges=True)
    settings = replace(model.rollouts[0].settings, admission=AgeBudget(groups=2))
    model = replace(model, rollouts=(replace(model.rollouts[0], settings=settings),))
    with pytest.raises(SchedulerError, match="the filter took every group of step 2, so") as caught:
        run(model, workload=assumed(Constant(tokens=8), filtered=1.0), steps=3)
    assert "batch 3 waits for 2 groups" in str(caught.value)
    assert "train.refill=true" in str(caught.value)


def test_what_shares_a_lane_takes_turns():
    report = run(small_model(learn_s=8.0, staleness=1, shared=True), steps=4)
    assert report.sim_s >= 4 * (8.0 + 8.0) - 8.0
    assert report.lanes[0].idle_share < 0.02


def test_a_trainer_that_shares_lanes_has_them_with_the_next_step():
    # A batch is ready at 8; the other samples of the engine have drawn 8 of 20 tokens by then.
    work = assumed(Listed(values=(8, 20), source="two"), seed=1)
    model = small_model(learn_s=5.0, staleness=1, shared=True, groups=1, group_size=1, slots=2)
    report = run(model, workload=work, steps=6)
    assert report.sim_s < 6 * 5.0 + sum(step.length_max for step in report.steps) + 6


def test_filtered_groups_are_not_learned_from_and_are_counted():
    model = small_model(groups=8, judges=True, slots=16)
    per_row = tuple(
        replace(op, cost=LinearCost(row_s=1.0)) if op.op == "update" else op for op in model.ops
    )
    work = assumed(Constant(tokens=4), filtered=0.5)
    report = run(replace(model, ops=per_row), workload=work, steps=6)
    for step in report.steps:
        assert step.num_samples + step.num_filtered == 16
        assert step.wall_s == 4.0 + step.num_samples
    assert report.samples["filtered"] == sum(s.num_filtered for s in report.steps) > 0
    assert report.reasons["filtered: assumed"] == report.samples["filtered"]


def test_a_step_without_a_sample_learns_nothing_and_publishes_nothing():
    work = assumed(Constant(tokens=4), filtered=1.0)
    report = run(small_model(judges=True), workload=work)
    assert walls(report) == [4.0, 4.0, 4.0]
    assert [step.version for step in report.steps] == [0, 0, 0]


def scored(model, times: ScoreTimes, *, processes: int = 1):
    names = tuple(f"verifier[{i}]" for i in range(processes))
    scorer = ScorerModel(name="verifier.score", lanes=names, times=times)
    return replace(
        model,
        lanes=(*model.lanes, *(LaneModel(name=n, device="cpu:0") for n in names)),
        rollouts=tuple(replace(r, scorers=(scorer,)) for r in model.rollouts),
    )


def test_rewards_queue_for_their_processes_and_answers_travel():
    model = scored(small_model(learn_s=0.0), ScoreTimes(sample_s=0.5, latency_s=2.0))
    report = run(model, steps=1)
    assert walls(report) == [8.0 + 4 * 0.5 + 2.0]
    assert report.steps[0].seconds["score"] == 4.0
    two = scored(small_model(learn_s=0.0), ScoreTimes(sample_s=0.5), processes=2)
    assert walls(run(two, steps=1)) == [9.0]


def test_rewards_of_samples_that_end_early_are_there_when_the_last_one_ends():
    work = assumed(Listed(values=(2, 30), source="two"), seed=3)
    model = scored(small_model(learn_s=0.0, groups=8, slots=16), ScoreTimes(sample_s=0.5))
    report = run(model, workload=work, steps=1)
    # 30 s of drawing; of those that end together at its end at most a few wait.
    assert report.steps[0].seconds["score"] < 16 * 0.5
    assert report.steps[0].wall_s == 30.0 + report.steps[0].seconds["score"]


def test_a_driver_takes_its_time_for_steps_samples_and_rows():
    model = replace(
        small_model(shared=True, learn_s=0.0),
        driver="engine[0]",
        host=HostCost(step_s=1.0, sample_s=0.25, row_s=0.5),
    )
    report = run(model, steps=2)
    assert walls(report) == [8.0 + 1.0 + 4 * 0.25 + 4 * 0.5] * 2
    assert report.seconds("collect") == 1.0
    assert report.seconds("host") == 3.0


def test_rewards_are_asked_for_when_the_driver_has_taken_the_samples():
    model = scored(small_model(learn_s=0.0), ScoreTimes(sample_s=0.5))
    report = run(replace(model, host=HostCost(sample_s=0.25)), steps=1)
    # All end at 8; the driver has them in hand for 4 quarters, then they are scored.
    assert walls(report) == [8.0 + 4 * 0.25 + 4 * 0.5]
    assert (report.seconds("collect"), report.seconds("score")) == (1.0, 2.0)


def test_samples_that_the_driver_has_in_hand_outlive_their_engine():
    model = replace(small_model(learn_s=0.0), host=HostCost(sample_s=1.0))
    faults = Faults(script=(ScriptedFault(at_s=9.0, engine=0, kind="lost"),))
    report = run(model, steps=1, faults=faults)
    assert report.engines["lost"] == 1
    assert report.samples["consumed"] == 4
    assert report.engines["tokens"] == 4 * 8


def test_a_trainer_stands_still_while_the_driver_in_its_process_works():
    model = replace(
        small_model(learn_s=20.0, staleness=1),
        driver="rollout",
        trainer="trainer",
        host=HostCost(sample_s=0.5),
    )
    model = replace(model, lanes=(*model.lanes, LaneModel(name="rollout", device="cpu:0")))
    apart = run(model, steps=4)
    lanes = tuple(
        replace(lane, process="trainer") if lane.name in ("trainer", "rollout") else lane
        for lane in model.lanes
    )
    together = run(replace(model, lanes=lanes, num_cores=8), steps=4)
    # In each update the four samples of the next batch end, half a second of the driver each.
    assert walls(apart)[1:] == [20.0] * 3
    assert walls(together)[1:3] == [22.0] * 2
    assert together.steps[1].seconds["update"] == 22.0
    assert together.steps[1].seconds["wait"] == 0.0


def test_a_polled_engine_waits_for_its_driver_between_polls():
    model = replace(
        small_model(shared=True, learn_s=0.0, slots=1, group_size=1),
        driver="engine[0]",
        host=HostCost(sample_s=1.0),
    )
    model = with_engine(model, poll=PollRule(steps=100, after_end=1, overhead_s=0.5))
    # Each sample: its poll's half second, prefill, 7 steps, then a second of the driver.
    assert walls(run(model, steps=1)) == [2 * (0.5 + 8.0 + 1.0)]


def test_loading_weights_is_part_of_the_way_to_the_next_step():
    model = with_engine(small_model(learn_s=5.0), load_s=2.0)
    assert walls(run(model, steps=3)) == [13.0, 15.0, 15.0]


def test_operations_wait_for_what_they_read_and_for_their_lanes():
    model = small_model(learn_s=5.0)
    reference = OpModel(
        name="reference.logprobs",
        op="logprobs",
        lanes=("other",),
        cost=LinearCost(call_s=7.0),
        rollout="actor.generate",
    )
    critic = replace(reference, name="critic.values", op="values", cost=LinearCost(call_s=3.0))
    update = replace(model.ops[0], after=("reference.logprobs", "critic.values"))
    model = replace(
        model,
        lanes=(*model.lanes, LaneModel(name="other", device="other")),
        ops=(reference, critic, update, model.ops[1]),
    )
    # Both passes are on one lane, and the update waits for both.
    assert walls(run(model, steps=1)) == [8.0 + 7.0 + 3.0 + 5.0]


def test_an_operation_of_every_third_step_is_done_in_those():
    model = small_model(learn_s=0.0)
    refresh = OpModel(
        name="reference.sync",
        op="sync",
        lanes=("main",),
        cost=LinearCost(call_s=4.0),
        every=3,
    )
    report = run(replace(model, ops=(*model.ops, refresh)), steps=6)
    assert walls(report) == [8.0, 8.0, 12.0, 8.0, 8.0, 12.0]


def test_the_collector_of_cycles_is_as_it_was_behind_a_simulation():
    assert gc.isenabled()
    run(small_model())
    with pytest.raises(KeyError):
        run(replace(small_model(), rollouts=()))
    assert gc.isenabled()


# Faults


def test_samples_of_a_lost_engine_are_drawn_anew_elsewhere():
    faults = Faults(script=(ScriptedFault(at_s=4.0, engine=1, kind="lost"),))
    report = run(small_model(engines=2, slots=2, learn_s=0.0), steps=2, faults=faults)
    assert report.engines["lost"] == 1
    assert report.samples["consumed"] == 8
    # The two samples that were lost at 4 begin anew at 8, when the other engine is free.
    assert walls(report) == [16.0, 16.0]


def test_a_lost_engine_comes_back():
    faults = Faults(script=(ScriptedFault(at_s=4.0, engine=0, kind="lost", for_s=10.0),))
    report = run(small_model(learn_s=0.0), steps=1, faults=faults)
    assert walls(report) == [4.0 + 10.0 + 8.0]


def test_nothing_moves_when_the_only_engine_is_gone_for_good():
    faults = Faults(script=(ScriptedFault(at_s=4.0, engine=0, kind="lost"),))
    with pytest.raises(SchedulerError, match="nothing moves any more") as told:
        run(small_model(), faults=faults)
    assert "no engine" in str(told.value)
    assert "step 1" in str(told.value)


def test_a_slow_engine_holds_the_batch_up():
    fault = ScriptedFault(at_s=0.0, engine=0, kind="slow", factor=3.0)
    report = run(small_model(learn_s=0.0), steps=1, faults=Faults(script=(fault,)))
    assert report.sim_s == 1.0 + 7 * 3.0  # the prefill had begun


@pytest.mark.parametrize("staleness", [0, 2])
def test_runs_end_under_random_faults_and_every_sample_has_one_end(staleness):
    faults = Faults(
        engines=EngineFaults(mean_time_between_s=60.0, repair_s=15.0),
        samples=SampleFaults(fail_share=0.05),
        rewards=RewardFaults(fail_share=0.02, slow_share=0.1, slow_s=20.0),
    )
    model = scored(
        small_model(engines=4, slots=4, groups=8, judges=True, staleness=staleness),
        ScoreTimes(sample_s=0.1),
    )
    work = assumed(Lognormal(mean=20, sigma=1.0), filtered=0.2)
    report = run(model, steps=12, workload=work, faults=faults, seed=5)
    ends = report.samples
    assert report.engines["lost"] > 0
    assert ends["admitted"] == ends["consumed"] + ends["filtered"] + ends["dropped"]
    assert sum(report.ages.values()) == ends["consumed"]
    assert max(report.ages) <= staleness
    assert ends["dropped"] + ends["filtered"] == sum(report.reasons.values())


def test_a_silent_engine_goes_on_where_it_was():
    fault = ScriptedFault(at_s=3.5, engine=0, kind="silent", for_s=10.0)
    model = with_policies(small_model(learn_s=0.0), patience=Patience(heartbeat_s=100.0))
    # It hushes with the step that ends at 4, and has four left at 13.5.
    assert walls(run(model, steps=1, faults=Faults(script=(fault,)))) == [13.5 + 4.0]


def test_a_silent_engine_is_given_up_when_patience_ends():
    fault = ScriptedFault(at_s=3.0, engine=0, kind="silent", for_s=50.0)
    model = with_policies(
        small_model(engines=2, slots=2, learn_s=0.0), patience=Patience(heartbeat_s=2.0)
    )
    report = run(model, steps=2, faults=Faults(script=(fault,)))
    # The other engine ends its two at 8, then draws the lost ones anew.
    assert walls(report) == [16.0, 16.0]


def test_attempts_that_stand_still_are_tried_elsewhere():
    fault = ScriptedFault(at_s=3.0, engine=0, kind="silent")
    model = with_policies(
        small_model(engines=2, slots=4, learn_s=0.0),
        patience=Patience(heartbeat_s=1000.0, stall_s=4.0),
    )
    report = run(model, steps=1, faults=Faults(script=(fault,)))
    assert report.samples["consumed"] == 4
    assert 8.0 < report.sim_s < 30.0


# Policies of the scheduler


def with_policies(model, **policies):
    [rollout] = model.rollouts
    settings = replace(rollout.settings, **policies)
    return replace(model, rollouts=(replace(rollout, settings=settings),))


POLICIES = {
    "redundant members": {"over_sampling": OverSampling(members=2)},
    "redundant prompts": {
        "over_sampling": OverSampling(prompts=3),
        "admission": AgeBudget(groups=8),
        "refill": True,
    },
    "age budget": {"admission": AgeBudget(groups=8, queue=2)},
    "longest first": {"order": LongestFirst()},
    "least loaded": {"routing": LeastLoaded()},
    "repacked tail": {"repack": RepackTail()},
    "aborted at publications": {"publication": AbortRunning()},
    "finished at publications": {"publication": FinishRunning()},
    "quarantine": {"quarantine": Quarantine()},
    "refill by rate": {"refill": True, "refill_by": AskByKeepRate()},
}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_simulated_and_its_books_add_up(name, staleness):
    base = small_model(engines=4, slots=4, groups=8, group_size=4, judges=True, staleness=staleness)
    model = with_engine(with_policies(base, **POLICIES[name]), load_s=2.0)
    faults = Faults(
        engines=EngineFaults(mean_time_between_s=200.0, repair_s=20.0),
        samples=SampleFaults(fail_share=0.02),
    )
    work = assumed(Lognormal(mean=20, sigma=1.0), filtered=0.2)
    report = run(model, steps=10, workload=work, faults=faults, seed=3)
    ends = report.samples
    assert ends["admitted"] == ends["consumed"] + ends["filtered"] + ends["dropped"]
    assert sum(report.ages.values()) == ends["consumed"] > 0
    assert max(report.ages) <= staleness
    if POLICIES[name].get("refill"):
        assert {step.num_samples for step in report.steps} == {32}


def test_redundant_members_shorten_the_tail():
    work = assumed(Lognormal(mean=40, sigma=1.2), seed=1)
    base = small_model(engines=4, slots=16, groups=8, group_size=4, learn_s=0.0)
    plain = run(base, steps=8, workload=work)
    spare = run(with_policies(base, over_sampling=OverSampling(members=2)), steps=8, workload=work)
    assert spare.step_s < plain.step_s
    assert spare.reasons["dropped: redundant"] == 8 * 8 * 2


def test_longest_first_with_known_lengths_is_near_the_lower_bound():
    work = assumed(Lognormal(mean=40, sigma=1.2), seed=2)
    base = with_engine(
        small_model(
            engines=1,
            slots=16,
            groups=128,
            group_size=1,
            learn_s=0.0,
            times=ConstantStep(step_s=1.0, prefill=0.0),
        )
    )
    [rollout] = with_policies(base, order=LongestFirst()).rollouts
    known = replace(base, rollouts=(replace(rollout, tells_lengths=True),))
    first, longest = run(base, steps=1, workload=work), run(known, steps=1, workload=work)
    lengths = [n - 1 for g in range(128) for n in work.group(g, 1).lengths]
    least = max(sum(lengths) / 16, max(lengths))
    assert longest.sim_s <= first.sim_s
    assert longest.sim_s < 1.05 * least


def test_engines_that_finish_first_load_weights_when_they_are_empty():
    model = with_engine(
        with_policies(
            small_model(engines=1, slots=2, groups=1, learn_s=4.0, staleness=1),
            publication=FinishRunning(),
        ),
        load_s=3.0,
    )
    report = run(model, steps=4, workload=assumed(Constant(tokens=8)))
    # Nothing mixes versions: every sample is of one age, and loading costs its seconds each time.
    assert set(report.ages) <= {0, 1}
    assert min(walls(report)[1:]) >= 8.0 + 3.0 - 4.0


# The report


def test_equal_seeds_give_equal_bytes_and_another_seed_gives_others():
    model = small_model(engines=2, groups=8, staleness=1)
    faults = Faults(engines=EngineFaults(mean_time_between_s=30.0, repair_s=5.0))

    def text(seed: int) -> str:
        work = assumed(Lognormal(mean=30, sigma=1.0), seed=seed)
        return report_json(run(model, workload=work, faults=faults, seed=seed, steps=5))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_the_json_report_adds_up():
    told = json.loads(report_json(run(small_model(staleness=1), steps=4)))
    assert told["format"] == "flowrl simulation"
    assert sum(told["ages"].values()) == told["samples"]["consumed"]
    assert len(told["steps"]) == 4
    # Drawn ahead, all but the first batch are of the weights before.
    assert [step["staleness/max"] for step in told["steps"]] == [0, 1, 1, 1]
    learned = sum(step["staleness/mean"] * step["num_samples"] for step in told["steps"])
    assert learned == pytest.approx(sum(int(age) * n for age, n in told["ages"].items()))
    assert told["sim_s"] == pytest.approx(sum(step["wall_s"] for step in told["steps"]))
    for device in told["devices"]:
        assert 0 <= device["idle_share"] <= 1


def test_the_report_for_people():
    model = small_model(engines=6, slots=2, groups=6, judges=True, staleness=1)
    work = assumed(Constant(tokens=8), filtered=0.25)
    report = run(model, workload=work, steps=4)
    assert report.ahead == 1
    text = report_text(report)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "simulation of small: 4 steps, 6 engines, seed 0"
    assert "  lengths  constant:8" in lines
    assert any(line.startswith("step time: ") for line in lines)
    head = lines.index("idle") + 1
    assert lines[head].split() == ["device", "resource", "idle", "(min", "to", "max)"]
    [row] = [line for line in lines if line.startswith("  6 devices  engine[0] to engine[5]")]
    assert row.index(" %") > lines[head].index("idle")
    assert row.index("(") == lines[head].index("(")
    samples = next(line for line in lines if line.startswith("samples: "))
    total, parts = samples.removeprefix("samples: ").split(" = ")
    assert int(total) == sum(int(part.split()[0]) for part in parts.split(" + "))


def test_a_trace_is_what_perfetto_reads(tmp_path):
    trace = Trace()
    faults = Faults(script=(ScriptedFault(at_s=4.0, engine=1, kind="lost"),))
    run(small_model(engines=2, slots=2), steps=2, faults=faults, trace=trace)
    trace.write(tmp_path / "t" / "trace.json")
    events = json.loads((tmp_path / "t" / "trace.json").read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["tid"]}
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in slices} >= {"generate", "update", "0/0/0"}
    assert all(e["dur"] >= 0 and (e["pid"], e["tid"]) in names for e in slices)
    moments = [e["name"] for e in events if e["ph"] == "i"]
    assert moments == ["engine[1] lost", "actor version 1", "actor version 2"]
    # Slices of one thread do not overlap, or a viewer nests them.
    by_thread: dict = {}
    for e in slices:
        by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_a_trace_keeps_no_more_events_than_it_may(tmp_path):
    trace = Trace(limit=10)
    run(small_model(), steps=5, trace=trace)
    assert trace.num_left_out > 0
    trace.write(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())) < 40


def test_the_prefill_of_constant_steps_can_be_free():
    model = small_model(times=ConstantStep(step_s=2.0, prefill=0.0), learn_s=0.0)
    assert walls(run(model, steps=1)) == [7 * 2.0]


def test_samples_of_steps_without_an_update_count_as_throughput():
    model = small_model()
    report = run(replace(model, ops=()))
    assert [step.num_samples for step in report.steps] == [4, 4, 4]
