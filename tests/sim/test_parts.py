"""The parts of a simulation one by one: clock, lanes, step times, lengths, workloads, faults."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flowrl.errors import ConfigError, DataError
from flowrl.ids import SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.costs import BatchWork, LinearCost, batch_work
from flowrl.sim.faults import chance, read_faults
from flowrl.sim.fit import fit_line
from flowrl.sim.lanes import Lane
from flowrl.sim.lengths import Constant, Listed, Lognormal, parse_lengths, read_lengths
from flowrl.sim.step_time import (
    ConstantStep,
    DecodeTable,
    LinearPrefill,
    TableStep,
    decode_run_s,
)
from flowrl.sim.workload import (
    Assumed,
    GroupDraw,
    PromptLengths,
    open_workload,
    read_recorded,
)

PROMPTS = PromptLengths(values=(5, 7))


# Clock and lanes


def test_calls_due_at_once_are_made_in_the_order_of_asking():
    clock, heard = Clock(), []
    for name in "abc":
        clock.at(1.0, heard.append, name)
    clock.at(0.5, clock.at, 0.0, heard.append, "at once")
    assert not clock.run_until(lambda: False)
    assert heard == ["at once", "a", "b", "c"]
    assert clock.now == 1.0


def test_the_clock_stops_as_soon_as_it_is_asked_to():
    clock, heard = Clock(), []
    clock.at(1.0, heard.append, 1)
    clock.at(2.0, heard.append, 2)
    assert clock.run_until(lambda: len(heard) == 1)
    assert (clock.now, heard) == (1.0, [1])
    clock.run_to(5.0)
    assert (clock.now, heard) == (5.0, [1, 2])


def test_a_lane_books_what_was_done_and_is_idle_else():
    lane = Lane(name="main", device="cpu:0")
    lane.work("update", 0.0, 2.0)
    begin, end = lane.take(1.0, 4.0)
    assert (begin, end) == (2.0, 6.0)
    lane.shorten(end, 3.0)
    lane.done("generate", begin, 3.0)
    assert (lane.free_s, lane.busy_s, lane.spent("generate")) == (3.0, 3.0, 1.0)
    assert lane.use(0.0, 6.0).idle_share == 0.5


def test_a_lanes_idle_share_is_of_the_part_of_the_time_that_is_asked_for():
    lane = Lane(name="main", device="cpu:0")
    lane.work("update", 0.0, 2.0)
    lane.work("sync", 2.0, 1.0)  # at once after it
    lane.work("update", 5.0, 4.0)
    assert lane.busy_between(1.0, 6.0) == 2.0 + 1.0
    assert [lane.use(2.0, 6.0).idle_share, lane.use(3.0, 5.0).idle_share] == [0.5, 1.0]
    assert lane.use(2.0, 6.0).busy_s == 7.0  # of the whole


# Step times


def test_a_table_is_linear_between_its_points_and_goes_on_beyond():
    table = DecodeTable([(1, 100, 1.0), (1, 300, 2.0), (9, 100, 5.0), (9, 300, 6.0)])
    assert table.at(1, 200) == 1.5
    assert table.at(5, 100) == 3.0
    assert table.at(5, 200) == 3.5
    assert table.at(17, 100) == 9.0
    assert table.at(1, 500) == 3.0
    assert table.at(1, 10) == 1.0


def test_batches_may_be_measured_at_contexts_of_their_own():
    table = DecodeTable([(1, 100, 1.0), (1, 200, 2.0), (4, 100, 8.0)])
    # One context alone: it takes the slope of the batch below, four times as many rows of it.
    assert table.at(4, 100) == 8.0
    assert table.at(4, 200) == pytest.approx(12.0)
    assert table.at(2, 100) == pytest.approx(1 + 7 / 3)


@pytest.mark.parametrize("points", [[], [(1, 1, 1.0), (1, 1, 2.0)], [(0, 1, 1.0)], [(1, 1, -1.0)]])
def test_a_table_of_decode_times_that_says_nothing_is_refused(points):
    with pytest.raises(ConfigError, match=r"decode time"):
        DecodeTable(points)


def test_steps_of_growing_rows_add_up_to_the_steps_one_by_one():
    table = DecodeTable([(1, 0, 1.0), (1, 1000, 3.0), (8, 0, 2.0), (8, 1000, 9.0)])
    step = TableStep(decode=table, prefill=LinearPrefill(), longest_share=0.25)
    singly = sum(step.decode_s(3, 50.0 + i, 90.0 + i) for i in range(40))
    assert decode_run_s(step, 3, 50.0, 90.0, 40) == pytest.approx(singly)
    assert decode_run_s(step, 3, 50.0, 90.0, 0) == 0.0


def test_a_prefill_is_a_line_in_rows_and_tokens():
    assert LinearPrefill(call_s=1.0, row_s=0.5, token_s=0.25)(4, 8) == 5.0
    assert ConstantStep(step_s=2.0).prefill_s(3, 100) == 2.0


# Costs and fits


def test_the_work_of_a_batch_counts_common_beginnings_once():
    groups = [
        GroupDraw(prompt_tokens=10, lengths=(4, 6)),
        GroupDraw(prompt_tokens=2, lengths=(5, 5), distinct=0.5),
    ]
    work = batch_work(groups)
    assert (work.rows, work.tokens, work.response_tokens) == (4, 20 + 10 + 4 + 10, 20)
    assert work.distinct == 10 + (10 - 2) + 2 + 0.5 * (10 - 2)


def test_costs_are_by_calls_passes_rows_and_tokens():
    cost = LinearCost(call_s=100.0, pass_s=10.0, row_s=1.0, token_s=0.1, distinct_s=0.01)
    work = BatchWork(rows=10, tokens=50, distinct=30).scaled(1.0, calls=2, micro_batch=4)
    assert work.passes == 2 * 2
    assert cost(work) == pytest.approx(200 + 40 + 10 + 5 + 0.3)


def test_a_fit_finds_the_line_behind_exact_times():
    features = [[1, rows, tokens] for rows in (1, 8, 64) for tokens in (10, 200, 900)]
    seconds = [0.5 + 0.01 * rows + 0.002 * tokens for _, rows, tokens in features]
    found, error = fit_line(features, seconds)
    assert found == pytest.approx([0.5, 0.01, 0.002], rel=1e-5)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_no_coefficient_of_a_fit_is_negative():
    features = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    found, error = fit_line(features, [3.0, 2.0, 1.0])
    assert min(found) >= 0.0
    assert error > 0.1


# Lengths


def test_words_name_distributions():
    assert parse_lengths("constant:7") == Constant(tokens=7)
    assert parse_lengths("lognormal:mean=300,sigma=1.2") == Lognormal(mean=300.0, sigma=1.2)
    assert parse_lengths("lognormal:300,1.2") == Lognormal(mean=300.0, sigma=1.2)
    assert parse_lengths("runs/base") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("constant:", "tokens of constant lengths is no number"),
        ("constant:0", "tokens of constant lengths is from 1 to 100,000,000"),
        ("constant:1e300", "tokens of constant lengths is from 1 to 100,000,000"),
        ("constant:x", "tokens of constant lengths is no number"),
        ("lognormal:mean=3", "lognormal lengths need sigma too"),
        ("lognormal:sigma=1", "lognormal lengths need mean too"),
        ("lognormal:mean=3,sigma=-1", "sigma of lognormal lengths is from 0 to 5"),
        ("lognormal:mean=3,sigma=6", "sigma of lognormal lengths is from 0 to 5"),
        ("lognormal:mean=3,sigma=1,tail=2", "lognormal lengths have no 'tail', but mean and sigma"),
        ("lognormal:mean=3,mean=4", "lognormal lengths say mean twice"),
        ("lognormal:mean=nan,sigma=1", "mean of lognormal lengths is from 1"),
    ],
)
def test_other_words_are_told_what_there_is(text, said):
    with pytest.raises(ConfigError, match=said) as told:
        parse_lengths(text)
    assert "lognormal:mean=TOKENS,sigma=NUMBER" in str(told.value)


def test_a_lognormal_has_the_mean_that_it_says():
    rng = np.random.default_rng(0)
    drawn = Lognormal(mean=200, sigma=1.0).draw(rng, 200_000)
    assert drawn.mean() == pytest.approx(200, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(1.0, rel=0.02)
    assert drawn.min() >= 1
    assert set(Lognormal(mean=200, sigma=0.0).draw(rng, 5)) == {200}


def test_files_hold_numbers_or_objects(tmp_path):
    numbers, objects = tmp_path / "numbers.txt", tmp_path / "rows.jsonl"
    numbers.write_text("3\n\n5\n0\n")
    objects.write_text('{"num_tokens": 3, "score": 1}\n{"num_tokens": 5}\n')
    assert read_lengths(numbers).values == (3, 5, 1)
    assert read_lengths(objects) == Listed(values=(3, 5), source="rows.jsonl")
    drawn = read_lengths(objects).draw(np.random.default_rng(0), 100)
    assert set(drawn.tolist()) == {3, 5}


def test_a_file_without_lengths_is_told_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"num_tokens": 3}\n{"tokens": 5}\n')
    with pytest.raises(DataError, match="no length") as told:
        read_lengths(path)
    assert told.value.where == f"{path}:2"
    path.write_text("\n")
    with pytest.raises(DataError, match="no lengths"):
        read_lengths(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_lengths(tmp_path / "missing")


# Workloads


def make(seed: int = 0, **more) -> Assumed:
    return Assumed(Lognormal(mean=50, sigma=1.0), seed=seed, prompts=PROMPTS, longest=100, **more)


def test_a_group_is_the_same_whenever_it_is_drawn():
    forwards = [make().group(n, 4) for n in range(600)]
    backwards = make()
    assert [backwards.group(n, 4) for n in reversed(range(600))] == forwards[::-1]
    assert make(seed=1).group(0, 4) != forwards[0]


def test_lengths_stay_within_what_the_rollout_allows():
    groups = [make().group(n, 8) for n in range(200)]
    lengths = [n for group in groups for n in group.lengths]
    assert min(lengths) >= 1
    assert max(lengths) == 100
    assert {group.prompt_tokens for group in groups} == {5, 7}


def row(step: int, sample: str, tokens: int, end: str = "consumed", **more) -> dict:
    return {
        "stage": "grpo",
        "step": step,
        "rollout": "actor.generate",
        "sample": sample,
        "response": more.pop("response", "x" * tokens),
        "num_tokens": tokens,
        "finish": more.pop("finish", "stop"),
        "end": end,
        "reason": more.pop("reason", ""),
        **more,
    }


def write_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_a_run_gives_whole_groups_with_what_became_of_them(tmp_path):
    path = tmp_path / "run" / "samples.jsonl"
    path.parent.mkdir()
    write_rows(
        path,
        [
            row(1, "0/3/0", 4, response="123"),
            row(1, "0/3/1", 4, response="124"),
            row(1, "0/4/0", 2, "filtered", reason="zero_variance"),
            row(1, "0/4/1", 3, "filtered", reason="zero_variance"),
            row(1, "0/5/0", 9, "dropped"),
            row(2, "0/3/0", 7, stage="sft"),
            row(2, "0/6/0", 8, rollout="other"),
        ],
    )
    groups = read_recorded(path, stage="grpo", rollout="actor.generate")
    assert [(g.lengths, g.filtered) for g in groups] == [
        ((4, 4), None),
        ((2, 3), "zero_variance"),
    ]
    assert groups[0].distinct == pytest.approx(4 / 6)
    work = open_workload(
        str(path.parent),
        stage="grpo",
        rollout="actor.generate",
        seed=0,
        prompts=PROMPTS,
        longest=3,
    )
    drawn = [work.group(n, 2) for n in range(300)]
    assert {g.lengths for g in drawn} == {(3, 3), (2, 3)}
    assert 100 < sum(g.filtered is not None for g in drawn) < 200
    assert str(work) == "run/samples.jsonl (2 groups)"
    # Another group size takes the members in turn.
    assert {len(work.group(n, 5).lengths) for n in range(20)} == {5}


def test_the_last_token_of_a_cut_response_is_nobodys_input(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_rows(path, [row(1, "0/0/0", 3, response="123", finish="length")])
    [group] = read_recorded(path, stage="grpo", rollout="actor.generate")
    assert group.distinct == 1.0
    write_rows(
        path,
        [
            row(1, "0/0/0", 3, response="123", finish="length"),
            row(1, "0/0/1", 3, response="12", finish="stop"),
        ],
    )
    [group] = read_recorded(path, stage="grpo", rollout="actor.generate")
    assert group.distinct == 0.5


def test_a_run_of_another_stage_has_nothing_to_take_lengths_from(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_rows(path, [row(1, "0/0/0", 3)])
    with pytest.raises(DataError, match="no samples to take lengths from") as told:
        read_recorded(path, stage="dapo", rollout="actor.generate")
    assert "stage 'dapo'" in str(told.value)


def test_the_right_reader_is_chosen_by_what_is_there(tmp_path):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("4\n6\n")
    common = {"stage": "s", "rollout": "r", "seed": 0, "prompts": PROMPTS, "longest": 10}
    assert str(open_workload("constant:4", **common)) == "constant:4"
    assert str(open_workload(str(lengths), **common)) == "lengths.jsonl (2 lengths)"
    with pytest.raises(ConfigError, match="no such file"):
        open_workload(str(tmp_path / "nothing"), **common)


# Faults


def test_faults_are_read_from_yaml(tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text(
        "engines: {mean_time_between_s: 600, repair_s: 30}\n"
        "rewards: {fail_share: 0.001}\n"
        "script:\n"
        "  - {at_s: 12.5, engine: 3, kind: lost, for_s: 20}\n"
        "  - {at_s: 30, engine: 0, kind: slow, factor: 4}\n"
    )
    faults = read_faults(path, num_engines=4)
    assert faults.engines.mean_time_between_s == 600
    assert [fault.kind for fault in faults.script] == ["lost", "slow"]
    path.write_text("")
    assert read_faults(path, num_engines=1).script == ()


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("engine: {repair_s: 3}", "engine", "unknown key"),
        ("rewards: {fail_share: 2}", "rewards.fail_share", "must be at most 1"),
        (
            "script: [{at_s: 1, engine: 0, kind: gone}]",
            "script.0.kind",
            "kind cannot be 'gone'",
        ),
        ("script: [{at_s: 1, engine: 2, kind: lost}]", "script.0.engine", "no such engine"),
        ("script: [", "faults.yaml", "not YAML"),
    ],
)
def test_a_wrong_file_of_faults_names_the_key(tmp_path, text, where, what):
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what) as told:
        read_faults(path, num_engines=2)
    assert where in told.value.where


def test_chances_depend_on_seed_sample_and_attempt_alone():
    sample = SampleId("0/1/2")
    assert chance(1, "reward", sample) == chance(1, "reward", sample)
    others = {chance(1, "reward", SampleId(f"0/1/{i}")) for i in range(1000)}
    assert len(others) == 1000
    assert 0.45 < sum(others) / 1000 < 0.55
    assert chance(1, "attempt", sample, 0) != chance(1, "attempt", sample, 1)


def test_lengths_that_are_cut_say_what_is_left_of_their_mean(tmp_path):
    prompts = PromptLengths(values=(4,))
    (tmp_path / "lengths.jsonl").write_text("2\n4\n9\n")
    file = str(tmp_path / "lengths.jsonl")
    for text, longest, told in (
        # E min(X, 3) for X lognormal with mu 0, sigma 1, whose mean is exp(1/2):
        # exp(1/2) F(ln 3 - 1) + 3 F(-ln 3) = 1.64872 * 0.53928 + 3 * 0.13597 = 1.297
        ("lognormal:mean=1.64872,sigma=1", 3, ", which cut at 3 is 1.3 on average"),
        ("lognormal:mean=2504.62,sigma=0.8", 8192, ", which cut at 8,192 is 2,400 on average"),
        ("lognormal:mean=300,sigma=0.1", 8192, ""),
        ("constant:4", 8, ""),
        ("constant:10000", 6000, ", which cut at 6,000 is 6,000 on average"),
        (file, 6, " (3 lengths), which cut at 6 is 4.0 on average"),  # (2 + 4 + 6) / 3
        (file, 9, " (3 lengths)"),
    ):
        workload = open_workload(
            text, stage="", rollout="", seed=0, prompts=prompts, longest=longest
        )
        assert str(workload) == text.rpartition("/")[2] + told
