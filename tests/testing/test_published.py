"""Published times are predicted row by row; rows that lack something say what."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from flowrl.errors import ConfigError
from flowrl.testing.published_rows import median, read_document, share_below
from flowrl.testing.published_stages import predict_row
from flowrl.testing.published_steps import group_errors, predict_steps

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def models(repository):
    return repository / "configs" / "models"


@pytest.fixture(scope="module")
def script(repository):
    path = repository / "benchmarks" / "predict_published.py"
    spec = importlib.util.spec_from_file_location("predict_published", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rlinf():
    return copy.deepcopy(read_document(DATA / "stage_times_small.yaml")["rows"][0])


@pytest.fixture
def step():
    row = {"system": "h100_sxm", "model": "Qwen/Qwen3-8B", "tp": 2, "moe": None, "batch": 8}
    return {**row, "context": 512, "step_ms": 4.3}


def test_stage_times_of_two_published_runs(models):
    for row in read_document(DATA / "stage_times_small.yaml")["rows"]:
        (found,) = predict_row(row, models)
        assert found.missing == ()
        assert [stage.stage for stage in found.stages] == ["generate_s", "logprob_s", "train_s"]
        assert found.step is not None
        assert abs(found.step.error) < 0.15
        assert all(abs(stage.error) < 0.25 for stage in found.stages)


def test_engine_steps_of_published_kernels(models):
    errors, refused = predict_steps(read_document(DATA / "engine_steps_small.json"), models)
    assert refused == {}
    assert len(errors) == 15
    # Largest errors stand for whole groups: experts on ranks of their own at 10 %.
    assert max(abs(found.error) for found in errors) < 0.15
    assert {group.num for group in group_errors(errors, "kind")} == {11, 4}


def test_all_reference_rows_are_within_the_stated_errors(reference_data, models):
    document = read_document(reference_data / "anchors" / "engine_steps.json")
    errors, refused = predict_steps(document, models)
    assert refused == {}
    overall = {group.name[0]: group for group in group_errors(errors, "kind")}
    assert overall["decode"].median < 0.05
    assert overall["prefill"].median < 0.08
    held = [e for e in errors if e.system != "h100_sxm" or e.model != "Qwen/Qwen3-8B"]
    for group in group_errors(held, "kind", "system", "model", "layout"):
        assert group.median < 0.25, group


def test_complete_reference_rows_are_predicted_and_others_say_what_they_lack(
    reference_data, models
):
    rows = read_document(reference_data / "anchors" / "stage_times.yaml")["rows"]
    found = {row["name"]: predict_row(row, models)[0] for row in rows}
    for row in rows:
        assert bool(found[row["name"]].missing) is not row["complete"]
    assert "mean_response_tokens is missing" in found["mindspeed_rl_qwen25_7b_a3"].missing
    for row in rows:
        step = found[row["name"]].step
        assert step is None or abs(step.error) < 0.15


def test_a_row_names_everything_that_it_lacks(models, rlinf):
    for key in ("group_size", "mean_response_tokens", "train_parallel"):
        del rlinf[key]
    rlinf["devices"] = {"type": "H900", "num": 8}
    rlinf["model"] = "Nobody-1B"
    (found,) = predict_row(rlinf, models)
    assert found.stages == ()
    assert found.step is None
    text = "\n".join(found.missing)
    for word in ("group_size is missing", "mean_response_tokens is missing", "'H900'"):
        assert word in text
    assert "unknown model 'Nobody-1B': no nobody-1b.json" in text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train_parallel", {"tp": 4, "dp": 4}, "train_parallel is for 16 devices, not for 8"),
        ("rollout_parallel", {"tp": "two"}, "rollout_parallel.tp is no whole number above 0"),
        ("mean_response_tokens", 30_000, "is above the longest"),
        ("mean_response_tokens", "many", "mean_response_tokens is no number above 0"),
        ("max_context", 90, "no room beside the prompt"),
        ("recompute", "some", "recompute is one of none, selective, full"),
        ("rollout_parallel", {"tp": 1, "pp": 1, "ep": 3, "dp": 8}, "ep=3 does not divide"),
        ("train_parallel", {"pp": 29}, "train_parallel is for 29 devices, not for 8"),
        ("devices", None, "devices is missing"),
        ("mini_batches", "four", "mini_batches is no whole number above 0"),
        ("max_response_tokens", [1], "max_response_tokens is no whole number above 0"),
        ("engine", {"max_running_requests": 0}, "max_running_requests is no whole number"),
        ("model", 7, "model is missing"),
        ("num_sequences", 10**40, "num_sequences is above 10,000,000"),
        ("group_size", 10**400, "group_size is above 10,000,000"),
        ("mean_prompt_tokens", 10**400, "mean_prompt_tokens is no number above 0"),
    ],
)
def test_wrong_inputs_are_told_and_not_counted(models, rlinf, key, value, message):
    (found,) = predict_row({**rlinf, key: value}, models)
    assert found.stages == ()
    assert message in "\n".join(found.missing)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"pp": 32}, "train_parallel: pp 32 is more than the 28 layers"),
        ({"tp": 8, "dp": 4}, "train_parallel: tp 8 does not divide 12 attention heads"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_told(models, rlinf, layout, why):
    row = {**rlinf, "train_parallel": layout, "devices": {"type": "H100", "num": 32}}
    (found,) = predict_row({**row, "rollout_parallel": {"dp": 32}}, models)
    assert found.missing == (why,)


def test_a_model_that_leaves_no_room_for_a_cache_is_told(models, rlinf):
    row = {**rlinf, "model": "Qwen2.5-72B", "rollout_parallel": {"dp": 8}}
    (found,) = predict_row(row, models)
    assert "leaves no room for a cache" in found.missing[0]


def test_layouts_of_every_kind_are_predicted(models, rlinf):
    for train in (
        {"fsdp": 8},
        {"fsdp": 4},
        {"tp": 2, "pp": 2},
        {"cp": 4, "dp": 2},
        {"tp": 2, "fsdp": 4},
        {"fsdp": 4, "ulysses": 2},
        {"dp": 8, "zero": 0},
    ):
        for rollout in ({"tp": 4}, {"tp": 2, "pp": 2, "dp": 2}):
            row = {**rlinf, "train_parallel": train, "rollout_parallel": rollout}
            (found,) = predict_row(row, models)
            assert len(found.stages) == 3, found.missing
    sparse = {
        **rlinf,
        "model": "Qwen3-30B-A3B",
        "train_parallel": {"ep": 8, "dp": 8},
        "rollout_parallel": {"tp": 4, "ep": 4, "dp": 2},
    }
    (found,) = predict_row(sparse, models)
    assert len(found.stages) == 3, found.missing


@pytest.mark.parametrize(
    "device",
    [
        *("H200-SXM-141GB", "A100-SXM-80GB", "H20-96GB", "Ascend-A3-die"),
        *("H800-SXM-80GB", "a800_80gb", "B200_SXM", "GB200"),
    ],
)
def test_every_device_of_the_catalogue_is_predicted(models, rlinf, device):
    row = {**rlinf, "model": "Qwen2.5-7B", "devices": {"type": device, "num": 8}}
    (found,) = predict_row(row, models)
    assert len(found.stages) == 3, found.missing


def test_several_runs_of_a_row_are_predicted_apart_and_overlapping_ones_not(models, rlinf):
    measured = rlinf["measured"]
    rlinf["measured"] = {"one": measured, "two": {"step_s": 300}, "one_step_off": {"step_s": 200}}
    one, two, off = predict_row(rlinf, models)
    assert [one.name, two.name] == ["rlinf_1p5b_8xh100/one", "rlinf_1p5b_8xh100/two"]
    assert one.step is not None
    assert two.step is not None
    # A step is its stages and the sync, whichever of them are given.
    assert one.step.predicted_s == pytest.approx(two.step.predicted_s)
    assert "overlap" in off.missing[0]


def test_a_rate_stands_for_a_step(models, rlinf):
    step = rlinf["measured"]["step_s"]
    rate = 512 * (100 + 13975) / 8 / step
    (found,) = predict_row({**rlinf, "measured": {"tok_s_per_device": rate}}, models)
    assert found.step is not None
    assert found.step.measured_s == pytest.approx(step)


def test_prompts_and_longest_parts_stand_for_sequences_and_context(models, rlinf):
    row = {
        key: value for key, value in rlinf.items() if key not in ("num_sequences", "max_context")
    }
    row |= {"prompts_per_step": 32, "max_prompt_tokens": 100, "max_response_tokens": 28572}
    assert predict_row(row, models)[0].step == predict_row(rlinf, models)[0].step


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("system", "b900_sxm", "no such device in the catalogue: 'b900_sxm'"),
        ("model", "Nobody/Nothing-1B", "unknown model 'Nobody/Nothing-1B'"),
        ("batch", None, "batch is missing"),
        ("step_ms", 0, "step_ms is no number above 0"),
        ("moe", {"moe_tp": 1, "moe_ep": 2}, "has no experts to divide"),
        ("precision", "fp8", "only bfloat16"),
        ("attention_dp", 2, "attention by data ranks"),
        ("moe", "ep 4", "moe is no object"),
        ("pp", -1, "pp is no number above 0"),
        ("pp", 10**9, "is more than the 36 layers"),
    ],
)
def test_step_rows_that_cannot_be_predicted_are_counted_by_reason(
    models, step, key, value, message
):
    errors, refused = predict_steps({"decode": [step, {**step, key: value}, "no row"]}, models)
    assert len(errors) == 1
    ((reason, count),) = refused.items()
    assert message in reason
    assert count == 1


def test_medians_and_shares_by_hand():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert share_below([float(n) for n in range(1, 11)], 0.9) == 9.0
    assert share_below([5.0], 0.9) == 5.0


def test_the_benchmark_prints_and_writes_both_kinds_of_files(script, tmp_path, capsys):
    out = tmp_path / "out.json"
    files = [str(DATA / "stage_times_small.yaml"), str(DATA / "engine_steps_small.json")]
    assert script.main([*files, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "steps: 2 of 2 within 15%" in text
    assert "decode   all" in text
    stages, steps = json.loads(out.read_text("utf-8"))
    assert set(stages["rows"][0]["errors"]) == {"generate_s", "logprob_s", "train_s", "step_s"}
    assert len(steps["rows"]) == 15


def test_the_benchmark_refuses_files_that_hold_no_rows(script, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text("devices: {}\n", encoding="utf-8")
    assert script.main([str(other)]) == 2
    assert "neither `rows` nor" in capsys.readouterr().err
    assert script.main([str(tmp_path / "absent.json")]) == 2
    lacking = tmp_path / "lacking.yaml"
    lacking.write_text(yaml.safe_dump({"rows": [{"name": "nothing"}, "x"]}), encoding="utf-8")
    assert script.main([str(lacking)]) == 1
    printed = capsys.readouterr().out
    assert "nothing: not counted" in printed
    assert "1 entries of rows that are no objects" in printed
    other.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not an object"):
        read_document(other)


def test_a_row_that_stands_twice_counts_once(script, rlinf, tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(
        json.dumps({"rows": [rlinf, {**rlinf, "name": "other"}, rlinf]}), encoding="utf-8"
    )
    assert script.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "2 predicted, 1 not counted" in printed
    assert "the same row stands before it" in printed
