"""Profiles as files, and what a stage's times are with one and without."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flowrl import api
from flowrl.config.load import load_config
from flowrl.errors import ConfigError
from flowrl.observe.rows import StepMetrics
from flowrl.plan.local import engines_of
from flowrl.sim.calibrate import (
    Calibration,
    calibrated,
    calibration_of,
    calibration_values,
    can_calibrate,
)
from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.engine import PollRule
from flowrl.sim.measure_beside import told
from flowrl.sim.profile import (
    PROFILE_VERSION,
    DecodePoint,
    EngineProfile,
    MachineNote,
    OpProfile,
    Profile,
    ScorerProfile,
    load_profile,
    model_notes,
    profile_times,
    save_profile,
)
from flowrl.sim.profile_text import profile_text
from flowrl.sim.scorers import ScoreTimes
from flowrl.sim.sharing import Beside
from flowrl.sim.step_time import LinearPrefill
from flowrl.sim.times import assumed_times
from tests.runtime.tiny_runs import tiny_config

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return api.compile(None, tiny_config(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def stage(compiled):
    return compiled.stages[-1]


def profile_of(stage) -> Profile:
    return Profile(
        version=PROFILE_VERSION,
        name="tiny",
        engines=(
            EngineProfile(
                role="actor",
                decode=(
                    DecodePoint(batch=1, context=10, seconds=0.001),
                    DecodePoint(batch=8, context=10, seconds=0.0024),
                ),
                prefill=LinearPrefill(call_s=0.002, token_s=0.0001),
                leave_s=0.0005,
                poll=PollRule(steps=32, after_end=8),
                kv_tokens=4096,
            ),
        ),
        ops=(
            OpProfile(role="actor", op="update", cost=LinearCost(call_s=0.01, row_s=0.001)),
            OpProfile(role="reference", op="logprobs", cost=LinearCost(token_s=1e-5), fit=0.03),
        ),
        scorers=(ScorerProfile(role="verifier", times=ScoreTimes(sample_s=1e-5)),),
        host=HostCost(step_s=0.001, sample_s=2e-5),
        prompts=(6, 6, 7),
        models=model_notes(stage),
        machine=MachineNote(devices=("a CPU",), num_cores=2, load=(0.5, 3.5)),
    )


def test_a_profile_is_read_as_it_was_written(stage, tmp_path):
    profile = profile_of(stage)
    path = tmp_path / "runs" / "tiny.profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert json.loads(path.read_text())["version"] == PROFILE_VERSION


def test_the_times_of_a_stage_are_the_profiles(stage):
    times = profile_times(profile_of(stage), stage, source="here")
    assert times.engines["actor"].step.decode_s(8, 10, 10) == 0.0024
    assert times.engines["actor"].step.leave_s() == 0.0005
    assert times.engines["actor"].poll == PollRule(steps=32, after_end=8)
    assert times.engines["actor"].kv_tokens == 4096
    assert times.ops["reference", "logprobs"] == LinearCost(token_s=1e-5)
    assert times.scorers["verifier"].sample_s == 1e-5
    assert times.prompts.values == (6, 6, 7)


def test_a_profile_of_another_model_is_refused(stage):
    other = replace(profile_of(stage), models={"actor": "torch on cuda, bfloat16, 7 parameters"})
    with pytest.raises(ConfigError, match="another model for role 'actor'") as told:
        profile_times(other, stage, source="other.json")
    assert told.value.found == "torch on cuda, bfloat16, 7 parameters"
    assert "parameters" in told.value.expected


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        ({"version": 99}, "version", "not a profile of this format"),
        ({"colour": "red"}, "colour", "unknown key"),
        ({"engines": 3}, "engines", "must be a list"),
    ],
)
def test_a_file_that_is_no_profile_names_the_key(stage, tmp_path, change, where, what):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(profile_of(stage)) | change))
    with pytest.raises(ConfigError, match=what) as told:
        load_profile(path)
    assert told.value.where == f"{path}: {where}"


def test_a_missing_profile_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as told:
        load_profile(tmp_path / "nothing.json")
    assert "flowrl profile" in told.value.hint
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_profile(tmp_path / "bad.json")


def test_a_profile_for_people(stage):
    lines = profile_text(profile_of(stage)).splitlines()
    assert lines[0] == "profile of tiny"
    assert any("the machine was busy" in line for line in lines)
    assert "  rows          10" in lines
    assert "     8      2.4 ms" in lines
    assert "  reference.logprobs  10 us a token  (at most 3 % off what was measured)" in lines
    assert "driver: 0 to offer, 20 us to take, 0 to score a sample" in lines
    assert "trainer besides its operations: 1.0 ms a step, 0 a sample" in lines


def test_what_operations_take_from_a_driver_is_told_in_words_or_that_it_could_not_be(stage):
    profile = profile_of(stage)
    first, *others = profile.ops
    measured = replace(first, beside=Beside(loses=0.6, lets=0.9))
    text = profile_text(replace(profile, ops=(measured, *others)))
    name = f"{first.role}.{first.op}"
    assert (
        f"  {name} with a busy driver: takes 600 ms longer for each second that the driver works "
        "meanwhile, and the driver works at 90 % of its speed"
    ) in text
    untold = profile_text(replace(profile, ops=(replace(first, beside_told=False), *others)))
    assert f"  {name} with a busy driver: could not be measured" in untold
    assert "with a busy driver" not in profile_text(profile)
    # Where its times are used it is said too.
    quiet = replace(profile, machine=MachineNote())
    times = replace(quiet, ops=(replace(first, beside_told=False), *others))
    assert profile_times(times, stage, source="p.json").source == (
        f"p.json, what {name} loses to a busy driver could not be measured, and counts as stopped"
    )
    assert profile_times(quiet, stage, source="p.json").source == "p.json"


@pytest.mark.parametrize(
    ("loses", "lets", "expected"),
    [
        (0.6, 0.9, Beside(loses=0.6, lets=0.9)),
        (-0.1, 1.2, Beside(loses=0.0, lets=1.0)),
        (3.2, 1.0, None),
        (-0.7, 1.0, None),
        (1.0, 0.05, None),
    ],
)
def test_what_a_busy_machine_makes_of_threads_beside_each_other_is_not_believed(
    loses, lets, expected
):
    assert told(loses=loses, lets=lets) == expected


def test_times_that_a_busy_machine_gave_say_so_where_they_are_used(stage):
    profile = profile_of(stage)
    busy = replace(profile, machine=MachineNote(num_cores=2, load=(0.5, 3.9)))
    assert profile_times(busy, stage, source="p.json").source == (
        "p.json, measured on a busy machine (load 3.9 on 2 cores), so perhaps too long"
    )
    quiet = replace(profile, machine=MachineNote(num_cores=2, load=(0.5, 2.1)))
    assert profile_times(quiet, stage, source="p.json").source == "p.json"


def test_plans_for_other_machines_warn_of_a_profile_of_a_busy_one(tmp_path, caplog):
    path = tmp_path / "p.json"
    machine = MachineNote(num_cores=8, load=(9.0, 1.0))
    save_profile(Profile(version=PROFILE_VERSION, name="p", engines=(), machine=machine), path)
    loaded = load_config(QUICKSTART, [f"plan.profile={path}"])
    assert api.measured_costs(loaded) is not None
    assert f"(plan.profile={path}): the profile's times were measured on a busy" in caplog.text


def test_without_a_profile_larger_models_are_assumed_to_take_longer(stage, tmp_path):
    config = tiny_config(tmp_path)
    config["roles"]["actor"]["model"] |= {"hidden_size": 64, "num_layers": 4}
    small = assumed_times(stage)
    large = assumed_times(api.compile(None, config).stages[-1])
    assert small.source == "assumed, not measured (cpu)"
    for rows in (1, 64):
        step, larger = small.engines["actor"].step, large.engines["actor"].step
        assert larger.decode_s(rows, 100, 100) > step.decode_s(rows, 100, 100)
    assert large.ops["actor", "update"].token_s > small.ops["actor", "update"].token_s
    assert small.ops["actor", "update"].token_s == 3 * small.ops["reference", "logprobs"].token_s


# Calibration


def test_a_calibration_runs_the_same_program_at_two_sizes(compiled, stage, tmp_path):
    values = calibration_values(compiled.config, stage, tmp_path)
    made = api.compile(None, values)
    small, large = (s.plan.sizes for s in made.stages)
    assert large.prompts_per_step == 8
    assert small.prompts_per_step == 2
    assert [s.workflow.name for s in made.stages] == ["grpo", "grpo"]
    assert made.config.data.eval is None
    ops = [[op.op for op in s.plan.operations] for s in (*made.stages, stage)]
    assert ops[0] == ops[1] == ops[2]
    assert can_calibrate(stage)


def metrics(stage: str, step: int, samples: int, **seconds: float) -> StepMetrics:
    wall = seconds.pop("wall")
    return StepMetrics(
        stage=stage,
        step=step,
        num_tokens=4 * samples,
        length_mean=4.0,
        seconds=seconds,
        wall_s=wall,
    )


def test_the_drivers_time_and_what_is_left_of_a_step_are_lines_through_two_sizes():
    small = {"generate": 1.0, "score": 0.2, "dispatch": 0.1, "collect": 0.3, "wall": 2.0}
    large = {"generate": 3.0, "score": 0.5, "dispatch": 0.4, "collect": 0.9, "assemble": 0.24}
    rows = [
        # The first steps warm up, and are not looked at.
        *(metrics("calibrate_small", n, 16, generate=9.0, wall=20.0) for n in (1, 2, 3)),
        *(metrics("calibrate_small", n, 16, assemble=0.06, **small) for n in (4, 5)),
        *(metrics("calibrate_large", n, 64, wall=5.5, **large) for n in (4, 5)),
    ]
    found = calibration_of(rows)
    assert found.host.offer_s == pytest.approx(0.3 / 48, rel=1e-4)
    assert found.host.sample_s == pytest.approx(0.6 / 48, rel=1e-4)
    assert found.host.answer_s == pytest.approx(0.18 / 48, rel=1e-4)
    # Left over: 0.34 s of 16 samples, 0.46 s of 64.
    assert found.host.row_s == pytest.approx(0.12 / 48, rel=1e-4)
    left_s = 0.0 + (0.3 - 16 * 0.6 / 48) + 0.0 + (0.46 - 64 * 0.12 / 48)
    assert found.host.step_s == pytest.approx(left_s, rel=1e-4)
    # The larger size has one batch of rewards.
    assert found.score_s == pytest.approx(0.5 / 64, rel=1e-4)
    assert found.steps["generate"] == 3.0
    assert found.num_samples == 64
    assert found.drawn == ((16, 1.0), (64, 3.0))


@pytest.mark.parametrize(
    ("answer_s", "waited_s"),
    [
        (1e-5, 128 * (2e-5 + 3 * (2e-5 - 1e-5))),  # batches take longer than answers
        (1e-4, 128 * 2e-5),  # and shorter: the driver waits for the first one only
    ],
)
def test_rewards_of_several_batches_are_told_from_what_the_driver_waits(answer_s, waited_s):
    rows = []
    for stage, samples, score in (("calibrate_small", 64, 0.0), ("calibrate_large", 512, waited_s)):
        rows += [
            metrics(stage, n, samples, score=score, assemble=answer_s * samples, wall=1.0)
            for n in (4, 5)
        ]
    assert calibration_of(rows).score_s == pytest.approx(2e-5, rel=1e-3)


def test_an_engine_of_its_own_takes_what_drawing_takes_longer_there(stage):
    def drawn(small_s: float, large_s: float) -> Calibration:
        rows = [metrics("calibrate_small", 4, 16, generate=small_s, dispatch=0.1, wall=9.0)]
        large = {"generate": large_s, "dispatch": 0.4, "sync": 0.5, "wall": 9.0}
        rows += [metrics("calibrate_large", 4, 64, **large)]
        return calibration_of(rows)

    here, apart = drawn(1.0, 3.0), drawn(1.3, 3.78)
    profile = profile_of(stage)
    export = OpProfile(role="actor", op="export", cost=LinearCost(call_s=0.3))
    found = calibrated(replace(profile, ops=(*profile.ops, export)), here, apart)
    # To publish is more than to write the weights.
    assert found.ops == (*profile.ops, replace(export, cost=LinearCost(call_s=0.5)))
    [engine] = found.engines
    assert engine.apart.row_s == pytest.approx(0.01)
    assert engine.apart.call_s == pytest.approx(0.14)
    assert found.host_apart.offer_s == pytest.approx(0.3 / 48, rel=1e-4)
    assert found.host_apart.step_s == found.host.step_s
    assert calibrated(profile_of(stage), here, None).host_apart is None


def test_a_calibration_apart_draws_in_a_process_of_its_own(compiled, stage, tmp_path):
    values = calibration_values(compiled.config, stage, tmp_path, apart=True)
    for made in api.compile(None, values, measured=False).stages:
        assert engines_of(made.plan, "actor").processes == 1
        assert made.plan.kind == "spatial"
    values = calibration_values(compiled.config, stage, tmp_path)
    for made in api.compile(None, values, measured=False).stages:
        assert engines_of(made.plan, "actor").processes == 0
