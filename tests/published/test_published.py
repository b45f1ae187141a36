"""Published times are read in one form and predicted; rows that lack something say what."""

from __future__ import annotations

import copy
import json
import runpy
import statistics

import pytest
import yaml

from flowrl.errors import ConfigError
from published.schema import EngineSteps, StageTimes, WeightSyncs, read
from published.stages import predict_row, predict_sync
from published.steps import predict_steps

FILES = ("ascend", "nemo_rl", "nemo_rl_gb200", "others", "stages", "verl_dapo")


@pytest.fixture(scope="module")
def models(repository):
    return repository / "configs" / "models"


@pytest.fixture(scope="module")
def row(repository):
    path = repository / "tests" / "data" / "stage_times_small.yaml"
    return yaml.safe_load(path.read_text("utf-8"))["rows"][0]


@pytest.fixture(scope="module")
def main(repository):
    return runpy.run_path(str(repository / "benchmarks" / "predict_published.py"))["main"]


@pytest.fixture
def predict(row, models):
    """Predicts the row with changes; a key that becomes None is left out."""

    def runs(**changes):
        changed = {k: v for k, v in {**copy.deepcopy(row), **changes}.items() if v is not None}
        (read_row,) = StageTimes.model_validate({"rows": [changed]}).rows
        return predict_row(read_row, models)

    return runs


def test_two_published_runs_are_predicted_within_the_stated_errors(repository, models):
    for given in read(repository / "tests" / "data" / "stage_times_small.yaml").rows:
        (found,) = predict_row(given, models)
        assert [stage.stage for stage in found.stages] == ["generate_s", "logprob_s", "train_s"]
        assert abs(found.step.error) < 0.15
        assert all(abs(stage.error) < 0.25 for stage in found.stages)


def test_complete_reference_rows_are_predicted_and_others_say_what_they_lack(
    reference_data, models
):
    for given in read(reference_data / "anchors" / "stage_times.yaml").rows:
        for found in predict_row(given, models):
            assert found.counts is given.complete
            assert bool(found.missing) is not given.complete
            assert found.step is None or abs(found.step.error) < 0.15


def test_reference_steps_of_engines_are_predicted_within_the_stated_errors(reference_data, models):
    errors, refused = predict_steps(read(reference_data / "anchors" / "engine_steps.json"), models)
    assert not refused
    for kind, most in (("decode", 0.05), ("prefill", 0.08)):
        assert statistics.median(abs(e.error) for e in errors if e.kind == kind) < most


def test_published_files_are_predicted_as_their_table_says(repository, models):
    errors = {}
    for name in FILES:
        for given in read(repository / "benchmarks" / "published" / f"{name}.yaml").rows:
            for found in predict_row(given, models):
                assert found.counts or found.flagged, found.missing
                errors[found.name] = found.step.error
                errors |= {f"{found.name}/{stage.stage}": stage.error for stage in found.stages}
    # Rows that calibrated nothing: other releases, devices, pools apart, and stages of trainers.
    for name in ("128xh100/0.6", "256xh100/0.6", "256xh100/0.7", "256xh100_off/0.7"):
        assert abs(errors[f"nemo_qwen3_235b_{name}"]) < 0.15
    for name in ("30b_a3b_16xgb200/0.7", "235b_64xgb200/0.7", "235b_128xgb200_off/0.7"):
        assert abs(errors[f"nemo_qwen3_{name}"]) < 0.10
    assert abs(errors["nemo_llama31_70b_64xh100/article/generate_s"]) < 0.15
    trainers = [
        error
        for name, error in errors.items()
        if "h20/" in name and name.endswith(("/train_s", "/old_logprob_s"))
    ]
    assert len(trainers) == 19
    assert max(map(abs, trainers)) < 0.25


def test_weight_syncs_lie_around_the_published_ones(repository, models):
    syncs = read(repository / "benchmarks" / "published" / "weight_sync.yaml").weight_syncs
    ratios = [1 + predict_sync(given, models).step.error for given in syncs]
    assert 0.8 < statistics.median(ratios) < 1.25


def test_the_example_of_the_schema_is_read_and_predicted(models):
    import published.schema

    text = published.schema.__doc__.split("An example:\n\n")[1].split("\n\n`measured`")[0]
    (given,) = StageTimes.model_validate(yaml.safe_load(text)).rows
    (found,) = predict_row(given, models)
    assert found.counts


@pytest.mark.parametrize(
    "changes",
    [
        {"mean_response_length": 13975},
        {"engine": {"name": "sglang", "slots": 128}},
        {"engine": {"name": "trt"}},
        {"train_parallel": {"tensor_parallel": 2}},
        {"measured": {"rollout_s": 266.1}},
        {"measured": {"step_s": "5m46s"}},
        {"devices": "8xH100"},
        {"group_size": 0},
        {"recompute": "some"},
    ],
)
def test_a_key_or_value_that_the_schema_does_not_know_is_an_error(row, changes, tmp_path, main):
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump({"rows": [{**row, **changes}]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rows\.0\.") as told:
        read(path)
    assert next(iter(changes)) in str(told.value)
    assert main([str(path)]) == 2


def test_a_row_names_everything_that_it_lacks(predict):
    (found,) = predict(group_size=None, mean_response_tokens=None, train_parallel=None)
    assert found.missing == (
        "train_parallel is missing",
        "group_size is missing",
        "mean_response_tokens is missing",
    )
    assert not found.counts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_parallel": {"tp": 4, "dp": 4}}, "train_parallel is for 16 devices, not for 8"),
        ({"mean_response_tokens": 30_000}, "the longest response is"),
        ({"model": "Nobody-1B"}, "unknown model 'Nobody-1B'"),
        ({"devices": {"type": "H900", "num": 8}}, "H900"),
        ({"model": "Qwen2.5-72B", "rollout_parallel": {"dp": 8}}, "no room for a cache"),
        ({"train_parallel": {"tp": 8}}, "tp 8 does not divide 12 attention heads"),
        ({"staleness": 1}, "stages of this run overlap over steps"),
        ({"measured": {"one_step_off": {"step_s": 3}}}, "stages of this run overlap over steps"),
        ({"rollout_devices": 4, "train_devices": 2}, "are 6, not 8"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(predict, changes, message):
    (found,) = predict(**changes)
    assert message in "\n".join(found.missing)
    assert found.step is None


def test_a_run_replaces_keys_of_its_row_and_alternatives_of_them(predict):
    runs = {"same": {"step_s": 9}, "more": {"prompts_per_step": 64, "step_s": 9}}
    same, more = predict(measured=runs)
    assert same.step.predicted_s == predict()[0].step.predicted_s
    assert more.step.predicted_s == predict(num_sequences=1024)[0].step.predicted_s


def test_defaults_hold_where_a_row_does_not_say_otherwise(row):
    defaults = {"devices": row["devices"], "group_size": 4, "num_sequences": 8}
    given = {key: value for key, value in row.items() if key not in ("devices", "num_sequences")}
    document = {"defaults": defaults, "rows": [{**given, "prompts_per_step": 32}]}
    (found,) = StageTimes.model_validate(document).rows
    assert (found.devices.num, found.group_size, found.num_sequences) == (8, 16, None)


def test_totals_and_rates_stand_for_lengths_and_steps(predict):
    (plain,) = predict()
    for total in ({"mean_total_tokens": 14075}, {"tokens_per_step": 512 * 14075}):
        (found,) = predict(mean_response_tokens=None, **total)
        assert found.step == plain.step
    rate = 512 * 14075 / 346.3 / 8
    (found,) = predict(measured={"tok_s_per_device": rate})
    assert found.step.measured_s == pytest.approx(346.3)


def test_logprobs_count_once_a_pass(predict):
    once = predict()[0]
    twice = predict(logprob_passes=2)[0]
    assert twice.stages[1].predicted_s == pytest.approx(2 * once.stages[1].predicted_s)
    passes = {"old_logprob_s": 17, "ref_logprob_s": 17, "step_s": 346}
    named = predict(measured=passes)[0]
    assert named.stages[0].predicted_s == once.stages[1].predicted_s
    assert named.step.predicted_s == pytest.approx(twice.step.predicted_s)


def test_a_refit_has_the_offload_of_the_trainer_and_a_sync_has_not(predict):
    # Weights and a divided optimizer of 1.5 billion parameters, at 2.41 GiB a second.
    measured = {"sync_s": 1, "refit_s": 1}
    sync, refit = (stage.predicted_s for stage in predict(measured=measured)[0].stages)
    offloaded = 1_543_714_304 / 2 * (2 + 12 / 4)
    assert refit - sync == pytest.approx(offloaded / (2.41 * 2**30), rel=1e-3)
    sync, refit = (s.predicted_s for s in predict(measured=measured, offload=False)[0].stages)
    assert refit == sync


def test_a_run_off_policy_is_as_long_as_its_longer_side(predict):
    pools = {"rollout_devices": 8, "train_devices": 8, "staleness": 1}
    (off,) = predict(devices={"type": "H100-SXM-80GB", "num": 16}, **pools)
    generate, logprob, train = (stage.predicted_s for stage in off.stages)
    longest = max(generate, logprob + train)
    assert longest < off.step.predicted_s < 1.05 * longest


@pytest.mark.parametrize(
    ("says", "counts"),
    [
        ({"complete": True, "missing": "little"}, True),
        ({"complete": False}, False),
        ({"missing": "per die or per card"}, False),
    ],
)
def test_a_row_that_its_file_calls_incomplete_is_shown_and_does_not_count(predict, says, counts):
    (found,) = predict(**says)
    assert found.step is not None
    assert found.counts is counts


def test_engine_steps_that_cannot_be_predicted_are_counted_by_reason(models):
    step = {"system": "h100_sxm", "model": "Qwen/Qwen3-8B", "tp": 2, "batch": 8}
    step |= {"context": 512, "step_ms": 4.3}
    document = {"decode": [step, {**step, "model": "Nobody-1B"}, {**step, "system": "b900"}]}
    errors, refused = predict_steps(EngineSteps.model_validate(document), models)
    assert len(errors) == 1
    assert sorted(refused.values()) == [1, 1]


def test_a_weight_sync_that_cannot_be_predicted_says_why(repository, models):
    path = repository / "benchmarks" / "published" / "weight_sync.yaml"
    first = yaml.safe_load(path.read_text("utf-8"))["weight_syncs"][0]
    wrong = WeightSyncs.model_validate({"weight_syncs": [{**first, "train_parallel": {"tp": 3}}]})
    (missing,) = predict_sync(wrong.weight_syncs[0], models).missing
    assert "train_parallel is for 3 devices, not for 16" in missing


def test_the_command_prints_and_writes_every_kind_of_file(main, repository, tmp_path, capsys):
    out = tmp_path / "out.json"
    data = repository / "tests" / "data"
    syncs = repository / "benchmarks" / "published" / "weight_sync.yaml"
    files = [data / "stage_times_small.yaml", data / "engine_steps_small.json", syncs]
    assert main([*map(str, files), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    for shown in ("steps: 2 of 2 within 15%", "decode   all", "weight syncs: 10 of 17"):
        assert shown in text
    stages, steps, _ = json.loads(out.read_text("utf-8"))
    assert set(stages["rows"][0]["errors"]) == {"generate_s", "logprob_s", "train_s", "step_s"}
    assert len(steps["rows"]) == 15


def test_the_command_ends_with_1_where_nothing_counts_and_2_where_nothing_is_read(
    main, tmp_path, capsys
):
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump({"rows": [{"name": "nothing", "measured": {}}]}))
    assert main([str(path)]) == 1
    assert "nothing: not counted" in capsys.readouterr().out
    path.write_text("[1]\n")
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "absent.json")]) == 2
