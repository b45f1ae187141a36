"""The same row in other people's words, and what no prediction takes in."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from flowrl.testing.published_rows import read_document, rows_of
from flowrl.testing.published_stages import predict_row
from flowrl.testing.published_syncs import predict_syncs

DATA = Path(__file__).parents[1] / "data"
MODELS = Path(__file__).parents[2] / "configs" / "models"

ROW = read_document(DATA / "stage_times_small.yaml")["rows"][0]


def one(changes, *without):
    row = {key: value for key, value in copy.deepcopy(ROW).items() if key not in without}
    (found,) = predict_row({**row, **changes}, MODELS)
    return found


@pytest.mark.parametrize(
    ("without", "changes"),
    [
        ("devices", {"devices": "8xH100"}),
        ("devices", {"devices": "H100 x 8"}),
        ("devices", {"devices": "8 H100 GPUs"}),
        ("devices", {"devices": {"type": "DGX-H100", "nnodes": 1, "n_gpus_per_node": 8}}),
        ("devices", {"hardware": {"gpu": "NVIDIA H100 80GB HBM3", "num_gpus": 8}}),
        ("devices", {"devices": {"name": "H100-SXM-80GB", "nodes": "1"}}),
        ("num_sequences", {"num_sequences": "512"}),
        ("num_sequences", {"num_prompts": 32}),
        ("group_size", {"n_samples_per_prompt": 16.0}),
        ("mean_response_tokens", {"mean-response-length": "13,975"}),
        ("mean_response_tokens", {"tokens_per_step": "7.2064e6"}),
        ("mean_response_tokens", {"avg_seq_len": 14075}),
        ("mean_response_tokens", {"avg_response_length": 13975}),
        ("mean_prompt_tokens", {"avg_prompt_length": 100}),
        ("group_size", {"rollout.n": 16}),
        ("model", {"model": {"name": "Qwen/Qwen2.5-1.5B-Instruct"}}),
        ("model", {"model_name": "qwen2.5-1.5b"}),
        ("model", {"model": "Qwen2.5_Coder_1.5B"}),
        ("train_parallel", {"train_parallel": {"TP": "2", "DP": 4.0}}),
        ("train_parallel", {"actor_parallel": {"tensor-model-parallel-size": 2, "vpp": 2}}),
        ("train_parallel", {"train_parallel": {"tensor_parallel_size": 2, "data_parallel": 4}}),
        ("rollout_parallel", {"rollout_parallel": {"tp": 2, "num_engines": 4}}),
        ("rollout_parallel", {"rollout_parallel": "TP=2, DP=4"}),
        ("train_parallel", {"train_parallel": "tp2pp1cp1"}),
        ("engine", {"engine": {"backend": "sglang", "slots": "128"}}),
        ("max_context", {"max_context": "28_672", "recompute": "Full"}),
        ("", {"recompute": "yes", "asynchronous": "false", "offload": "on"}),
        ("", {"precision": "float16", "algorithm": "GRPO", "lora": None, "ppo_epochs": 1}),
        ("", {"engine": {**ROW["engine"], "enforce_eager": False, "quantization": "none"}}),
    ],
)
def test_a_row_in_other_words_has_the_same_prediction(without, changes):
    found = one(changes, without)
    assert found.missing == ()
    assert found.counts
    assert found.step.predicted_s == pytest.approx(one({}).step.predicted_s, rel=1e-4)


@pytest.mark.parametrize(
    "given",
    [{"dp": 8, "zero": "3"}, {"dp": 8, "zero_stage": 3}, {"fsdp": -1}, {"strategy": "FSDP2"}],
)
def test_all_words_for_everything_divided_among_data_ranks_mean_the_same(given):
    ours = one({"train_parallel": {"fsdp": 8}}).step.predicted_s
    assert one({"train_parallel": given}).step.predicted_s == ours
    assert one({"train_parallel": {"dp": 8}, "train_backend": "fsdp"}).step.predicted_s == ours


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 64}, "adapters"),
        ({"algorithm": "PPO"}, "a critic"),
        ({"critic": True}, "a critic"),
        ({"optimizer_cpu_offload": True}, "an optimizer on the host"),
        ({"ppo_epochs": 2}, "several passes of training over a batch"),
        ({"turns": "3"}, "turns of an environment"),
        ({"partial_rollout": True}, "responses continued in a later step"),
        ({"engine": {"name": "vllm", "enforce_eager": True}}, "an engine without graphs"),
        ({"engine": {"name": "vllm", "speculative": "eagle"}}, "drafted tokens"),
        ({"engine": {"name": "vllm", "quantization": "fp8"}}, "only bfloat16 is modelled: engine"),
        ({"engine": {"kv_cache_dtype": "fp8_e5m2"}}, "only bfloat16 is modelled: engine"),
        ({"train_dtype": "fp8"}, "only bfloat16 is modelled: train_dtype"),
        ({"train_parallel": {"tp": 2, "dp": 4, "islands": 2}}, "no known way to divide a model"),
        ({"prompts_per_step": 64}, "num_sequences 512 is not 64 prompts_per_step"),
        ({"samples_per_step": 1024}, "num_sequences is given twice: 512 and 1024"),
        ({"placement": "disaggregated"}, "each has devices of its own"),
        ({"colocated": False}, "each has devices of its own"),
        ({"asynchronous": "partly"}, "asynchronous is true or false"),
        ({"devices": 8}, "devices.type is missing"),
    ],
)
def test_what_is_not_modelled_or_contradicts_itself_does_not_count(changes, message):
    found = one(changes)
    assert message in "\n".join(found.missing)
    assert not found.counts


def test_what_is_passed_over_is_told():
    told = "\n".join(
        one(
            {
                "reward": "math",
                "mini_batch_size": 128,
                "tokens_per_step": 1_000_000,
                "engine": {**ROW["engine"], "port": 1},
                "measured": {**ROW["measured"], "accuracy": 0.5, "reward_s": 2, "total_s": 9},
            }
        ).notes
    )
    for note in (
        *("ignored: reward, mini_batch_size, accuracy", "engine: port ignored"),
        *("measured.reward_s is no stage", "tokens_per_step 1e+06 not taken"),
        "measured: 346.3 s taken of several steps",
    ):
        assert note in told


@pytest.mark.parametrize(
    ("changes", "flagged"),
    [
        ({"complete": "true"}, ""),
        ({"complete": True, "missing": "nothing of weight"}, ""),
        ({"complete": "no"}, "its file says of it: complete no"),
        ({"complete": 0, "missing": ["lengths", "layouts"]}, "lengths, layouts"),
        ({"complete": "partly"}, "its file says of it: complete partly"),
        ({"missing": "per die or per card"}, "per die or per card"),
    ],
)
def test_only_rows_whose_file_calls_them_complete_or_nothing_count(changes, flagged):
    found = one(changes)
    assert found.flagged == flagged
    assert found.counts is not bool(flagged)


@pytest.mark.parametrize(
    "measured",
    [
        {"step_ms": 346_300, "gen_s": 266.1},
        {"total_min": 346.3 / 60, "generation_time_s": "266.1"},
        {"step": 346.3, "generate": 266.1},
        {"timing_s/step": 346.3, "timing_s/gen": 266.1},
        {"step_s": {"mean": 346.3, "std": 2}, "stages": {"rollout_s": 266.1}},
        {"tokens_per_second_per_gpu": 512 * 14075 / 346.3 / 8, "gen_s": 266.1},
        {"tokens/s": 512 * 14075 / 346.3, "gen_s": 266.1},
        [{"step_s": 346.3, "gen_s": 266.1}],
        {"perf/step_time": 346.3, "perf/rollout_time": 266.1},
        {"timing/all": 346.3, "timing/rollout": 266.1},
        {"step": "346.3 s", "generate": "4.435 min"},
        {"step": "~5m46.3s", "generate_h": 266.1 / 3600},
        {"throughput_tok_s": 512 * 14075 / 346.3, "gen_s": 266.1},
        {"TGS": 512 * 14075 / 346.3 / 8, "gen_s": 266.1},
        {"samples_per_s": 512 / 346.3, "gen_s": 266.1},
        {"step_s": 346.3, "generate_tok_s_per_device": 512 * 13975 / 266.1 / 8},
        {"step_s": 346.3, "rollout_throughput (tokens/s)": 512 * 13975 / 266.1},
    ],
)
def test_times_in_other_units_and_words_are_read_as_seconds(measured):
    found = one({"measured": measured})
    assert found.counts
    assert found.step.measured_s == pytest.approx(346.3)
    (stage,) = found.stages
    assert stage.measured_s == pytest.approx(266.1)
    assert stage.predicted_s == one({}).stages[0].predicted_s
    bare = isinstance(measured, dict) and measured.get("step") == 346.3
    assert ("measured.generate taken for seconds" in found.notes) is bare


def test_rates_of_a_trainer_are_of_all_tokens_and_of_its_own_devices():
    apart = {"rollout_devices": 8, "train_devices": 8, "staleness": 1}
    rates = {"train_samples_per_s": 8, "update_actor_tok_s_per_device": 14075}
    found = one({**apart, "devices": {"type": "H100", "num": 16}, "measured": rates})
    assert [stage.measured_s for stage in found.stages] == pytest.approx([64, 64])
    assert found.stages[0].predicted_s == one({}).stages[2].predicted_s
    assert found.step.measured_s is None
    none = one({"measured": {"train_tok_s": 0, "sync_tok_s": 5, "step_s": 300}})
    assert none.stages == ()
    assert "measured.train_tok_s is no number above 0: 0" in none.notes
    assert "measured.sync_tok_s is no stage that is predicted" in none.notes


def test_runs_below_their_stages_are_runs():
    below = {"step_s": {"ours": 346.3, "theirs": "363.5"}, "generate_s": {"ours": 266.1}}
    ours, theirs = predict_row({**ROW, "measured": below}, MODELS)
    assert [ours.name, theirs.name] == [f"{ROW['name']}/ours", f"{ROW['name']}/theirs"]
    assert [stage.measured_s for stage in ours.stages] == [266.1]
    assert theirs.stages == ()
    assert (ours.step.measured_s, theirs.step.measured_s) == (346.3, 363.5)


@pytest.mark.parametrize(
    "says",
    [
        {"async": True},
        {"fully_async": "yes"},
        {"policy": "one-step off"},
        {"max_off_policyness": 4},
        {"staleness_threshold": 0.5},
    ],
)
def test_a_run_that_overlaps_by_any_word_does_not_count_as_one_on_policy(says):
    found = one(says)
    assert "stages of this run overlap over steps" in "\n".join(found.missing)
    assert one({**dict.fromkeys(says, 0)}).counts


def test_no_pass_of_logprobs_is_a_number_of_passes():
    step = {"measured": {"step_s": 346.3}}
    logprobs = one({}).stages[1].predicted_s
    none, single = one({**step, "logprob_passes": 0}), one(step)
    assert none.step.predicted_s == pytest.approx(single.step.predicted_s - logprobs)
    assert "logprob_passes is no whole number" in one({"logprob_passes": -1}).missing[0]


def test_passes_of_logprobs_count_as_often_as_the_row_says_or_measured():
    once, seconds = one({}).step.predicted_s, one({}).stages[1].predicted_s
    assert one({"logprob_passes": 2}).step.predicted_s == pytest.approx(once + seconds)
    both = {"old_logprob_s": 17, "ref_logprob_s": 17, "step_s": 360}
    assert one({"measured": both}).step.predicted_s == pytest.approx(once + seconds)
    # A rollout under two names is still one rollout.
    twice = {**ROW["measured"], "rollout_s": 266.1}
    assert one({"measured": twice}).step.predicted_s == pytest.approx(once)


def test_logprobs_by_a_name_that_does_not_say_whose_are_all_passes_of_a_row():
    once = one({}).stages[1].predicted_s
    assert ROW["measured"].keys() >= {"logprob_s"}
    assert one({"logprob_passes": 2}).stages[1].predicted_s == pytest.approx(2 * once)
    own = {"logprob_passes": 2, "measured": {"ref_logprob_s": 17}}
    assert one(own).stages[0].predicted_s == pytest.approx(once)
    # Names that say both need no number of passes beside them.
    both = one({"measured": {"timing/fwd_logprobs_values_reward": 35}})
    assert both.stages[0].predicted_s == pytest.approx(2 * once)
    assert both.step.predicted_s == pytest.approx(one({}).step.predicted_s + once)
    said = one({"logprob_passes": 1, "measured": {"policy_and_reference_logprobs": 35}})
    assert said.stages[0].predicted_s == pytest.approx(once)


def test_a_refit_is_a_sync_and_the_way_of_a_trainers_state_to_its_host():
    names = {"measured": {"sync_s": 1, "refit_s": 1}}
    sync, refit = (stage.predicted_s for stage in one(names).stages)
    # As of the test of a trainer that goes to the host: at 2.41 GiB a second.
    gone = 1_543_714_304 / 2 * (2 + 12 / 4)
    assert refit - sync == pytest.approx(gone / (2.41 * 2**30), rel=1e-3)
    sync, refit = (stage.predicted_s for stage in one({**names, "offload": False}).stages)
    assert refit == sync


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"measured": "about 100 s"}, "measured is no object: 'about 100 s'"),
        ({"measured": [{"step_s": 9}, 3]}, "measured: 3 is no object"),
        ({"measured": {"step_s": "100 parsecs"}}, "measured.step_s is no number above 0"),
        ({"train_parallel": "fsdp"}, "train_parallel is no object: 'fsdp'"),
        ({"rollout_parallel": [2, 1]}, "rollout_parallel is no object: [2, 1]"),
        ({"train_parallel": {}}, "train_parallel is missing"),
    ],
)
def test_what_is_written_in_no_known_way_is_told_as_it_stands(changes, told):
    found = one(changes)
    assert told in "\n".join((*found.missing, *found.notes))


def test_a_run_replaces_what_its_row_says_in_other_words():
    measured = {"long": {"mean_response_length": 13975, "samples_per_step": 256, "step_s": 1}}
    found = one({"measured": measured, "tokens_per_step": 10**7}, "mean_response_tokens")
    assert found.missing == ()
    assert found.step.predicted_s == pytest.approx(one({"num_sequences": 256}).step.predicted_s)


@pytest.mark.parametrize(
    ("engine", "device", "slots"),
    [
        ("vllm", "H100", 1024),
        ("vLLM 0.10", "A100", 256),
        ({"name": "vllm"}, "Ascend-A3-die", 256),
        ("sglang", "A100", 2048),
        ("other", "H100", 256),
    ],
)
def test_an_engine_that_does_not_say_runs_as_many_rows_as_by_default(engine, device, slots):
    found = one({"engine": engine, "devices": {"type": device, "num": 8}})
    assert f"engine.max_running_requests taken for {slots}" in found.notes


def test_rows_are_found_in_other_forms_of_a_file(tmp_path):
    nameless = {key: value for key, value in ROW.items() if key not in ("name", "devices")}
    document = {"defaults": {"devices": ROW["devices"]}, "rows": {ROW["name"]: nameless, "b": 7}}
    assert rows_of(document) == [ROW, 7]
    sizes = {"Nobody-1B": {"hidden": 64}}
    (row,) = rows_of({"rows": [{"model": "Nobody-1B"}], "model_shapes": sizes})
    assert row["model_shape"] == {"hidden": 64}
    alone = tmp_path / "rows.yaml"
    alone.write_text(yaml.safe_dump([ROW]), encoding="utf-8")
    assert rows_of(read_document(alone)) == [ROW]


def test_a_weight_sync_in_other_words_has_the_same_prediction():
    path = MODELS.parents[1] / "benchmarks" / "published" / "weight_sync.yaml"
    first = read_document(path)["weight_syncs"][0]
    devices = f"{first['devices']['num']}x{first['devices']['type']}"
    words = {**first, "devices": devices, "sync_s": str(first["sync_s"])}
    ours, theirs = predict_syncs({"weight_syncs": [first, words]}, MODELS)
    assert ours.step == theirs.step
    (refused,) = predict_syncs({"weight_syncs": [{**first, "precision": "fp8"}]}, MODELS)
    assert "only bfloat16" in refused.missing[0]
