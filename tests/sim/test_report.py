"""Reports of simulations: which seconds stand beside a plan's."""

import json
from dataclasses import replace

import pytest

from flowrl.sim.lanes import LaneUse
from flowrl.sim.report import Planned, SimReport, SimStep, report_json, report_text


def _report(seconds: list[float], ages: dict[int, int]) -> SimReport:
    steps = [
        SimStep(
            step=number,
            version=number,
            begin_s=0.0,
            wall_s=wall_s,
            seconds={},
            num_samples=1,
            num_filtered=0,
            num_tokens=1,
            length_max=1,
        )
        for number, wall_s in enumerate(seconds)
    ]
    return SimReport(
        name="grpo",
        seed=0,
        workload="",
        times="",
        num_engines=1,
        sim_s=sum(seconds),
        steps=steps,
        lanes=[LaneUse(lane="main", device="cpu:0", busy_s=0.0, idle_share=1.0)],
        ages=ages,
        samples={},
        reasons={},
        engines={},
        num_events=0,
    )


def test_beside_a_plan_stands_the_mean_of_steps_that_take_turns_in_being_long() -> None:
    # Two publications behind: three steps until samples are so old; then pairs of 90 and 50 s.
    report = _report([150.0, 100.0, 80.0, 90.0, 50.0, 90.0, 50.0], ages={0: 1, 1: 1, 2: 5})
    assert report.step_s == 90.0
    assert report.period_s == 70.0
    planned = Planned(step_s=56.0)
    assert "simulated 70.00 s on average after 3 steps: +25.0 %" in report_text(report, planned)
    told = json.loads(report_json(report, planned))
    assert told["left_out_steps"] == 3
    told = told["planned"]
    assert (told["simulated_s"], told["difference"]) == (70.0, pytest.approx(0.25))
    text = report_text(report)  # a sample and a token a step
    assert "\nthroughput after 3 steps: 0.0 samples/s, 0 tokens/s\n" in text
    assert "\nidle after 3 steps\n" in text
    assert report.samples_per_s == report.tokens_per_s == 4 / 280
    some = [replace(step, num_filtered=1, num_tokens=700) for step in report.steps]
    # 4 samples learned from, and 2,800 tokens of these and of 4 others, in 280 s
    assert (
        "\nthroughput after 3 steps: 0.0 samples/s consumed, 10 tokens/s generated\n"
    ) in report_text(replace(report, steps=some))


def test_all_steps_count_where_samples_are_as_young_as_can_be_or_steps_are_few() -> None:
    assert _report([3.0, 1.0, 2.0], ages={0: 3}).period_s == 2.0
    assert _report([9.0, 9.0, 1.0, 1.0], ages={0: 1, 1: 3}).period_s == 5.0


def test_other_lengths_than_the_plans_are_told_in_place_of_a_difference() -> None:
    report = replace(_report([2.0, 2.0], ages={0: 2}), workload="constant:8")
    planned = Planned(step_s=1.0, lengths="constant:4")
    said = "the plan is for lengths constant:4, simulated were constant:8"
    text = report_text(report, planned)
    assert f"the plan predicts 1.00 s a step, simulated 2.00 s on average: {said}\n" in text
    told = json.loads(report_json(report, planned))["planned"]
    assert (told["difference"], told["not_compared"]) == (None, said)
    same = json.loads(report_json(report, Planned(step_s=1.0)))["planned"]
    assert (same["difference"], same["not_compared"]) == (1.0, None)


@pytest.mark.parametrize(("steps", "ages", "enough"), [(1, 0, 7), (4, 1, 7), (6, 2, 7), (7, 2, 0)])
def test_steps_that_fill_what_is_drawn_ahead_are_not_compared(
    steps: int, ages: int, enough: int
) -> None:
    """Samples up to 2 publications old: three steps fill, and more than three have to follow."""
    report = replace(_report([2.0] * steps, ages={ages: steps}), ahead=2)
    planned = Planned(step_s=1.0, idle_share=0.5)
    told = json.loads(report_json(report, planned))["planned"]
    if enough:
        assert told["difference"] is None
        assert f"--steps {enough} is enough\n" in report_text(report, planned)
    else:
        assert told["difference"] == 1.0
        assert "on average after 3 steps: +100.0 %" in report_text(report, planned)


def test_the_heading_says_where_kinds_of_work_overlap() -> None:
    report = _report([4.0, 4.0], ages={0: 2})
    turns, beside = {"generate": 3.0, "update": 1.0}, {"generate": 4.0, "wait": 1.0, "update": 3.0}
    head = "step time: 4.00 s median, 4.00 s to 4.00 s"
    for seconds, said in (
        (turns, ""),
        (beside, "; kinds of work overlap, so shares add up to 200 %"),
    ):
        steps = [replace(step, seconds=seconds) for step in report.steps]
        assert f"\n{head}{said}\n" in report_text(replace(report, steps=steps))


def test_device_time_that_is_idle_is_told_in_the_words_of_plans() -> None:
    used = LaneUse(lane="a:[0-2]", device="a:[0-2]", busy_s=3.0, idle_share=0.25, num_devices=3)
    spare = replace(used, lane="a:3", device="a:3", idle_share=1.0, num_devices=1, in_use=False)
    report = replace(_report([2.0, 2.0], ages={0: 2}), lanes=[used])
    assert "\n  25.0 % of device time is idle\n" in report_text(report)
    text = report_text(replace(report, lanes=[used, spare]), Planned(step_s=2.0, idle_share=0.2))
    assert "\n  25.0 % of device time is idle, of the 3 of 4 that are used\n" in text
    assert "\nit predicts that 20.0 % of device time is idle, simulated 25.0 %\n" in text


def test_faults_that_the_plan_has_not_are_named_beside_it() -> None:
    text = report_text(_report([2.0, 2.0], ages={0: 2}), Planned(step_s=1.0, faults=True))
    assert "predicts 1.00 s a step without faults, simulated 2.00 s on average with them: " in text


def test_nothing_stands_beside_a_plan_where_no_step_was_made() -> None:
    assert "the plan predicts" not in report_text(_report([], ages={}), Planned(step_s=1.0))


def test_lanes_of_accelerators_are_counted_alike_and_lanes_without_work_left_out() -> None:
    def lane(name: str, devices: int, busy_s: float, device: str | None = None) -> LaneUse:
        return LaneUse(
            lane=name,
            device=device or name,
            busy_s=busy_s,
            idle_share=1.0 - busy_s / 4.0,
            num_devices=devices,
        )

    report = replace(
        _report([2.0, 2.0], ages={0: 2}),
        lanes=[
            *(lane(f"a-{node}/cuda:[0-3]", 4, 1.0) for node in range(5)),
            lane("b-0/cuda:[0-7]", 8, 0.0),
            lane("main", 0, 0.0, "driver"),
            lane("judge", 0, 2.0, "a-0/cpu:0"),
        ],
    )
    text = report_text(report)
    rows = text[text.index("idle\n") :].splitlines()[1:5]
    assert [" ".join(row.split()) for row in rows] == [
        "device resource idle (min to max)",
        "20 devices a-0/cuda:[0-3] to a-4/cuda:[0-3] 75.0 % (75.0 % to 75.0 %)",
        "8 devices b-0/cuda:[0-7] 100.0 %",
        "a-0/cpu:0 judge 50.0 %",
    ]
    assert "driver" not in text
