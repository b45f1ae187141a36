"""Rows of published runs as different people would write them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.testing.published_rows import read_document, rows_of
from flowrl.testing.published_stages import predict_row
from flowrl.testing.published_syncs import predict_syncs

DATA = Path(__file__).parents[1] / "data"
MODELS = Path(__file__).parents[2] / "configs" / "models"
FILES = (
    *("nemo_rl.yaml", "others.yaml", "nemo_rl_gb200.yaml", "stages.yaml", "verl_dapo.yaml"),
    "ascend.yaml",
)

ROW = read_document(DATA / "stage_times_small.yaml")["rows"][0]


@pytest.fixture
def row():
    return copy.deepcopy(ROW)


def one(row):
    (found,) = predict_row(row, MODELS)
    return found


def step(row) -> float:
    found = one(row)
    assert found.missing == ()
    return found.step.predicted_s


PUBLISHED = [
    # veRL: everything sharded, Ulysses inside, seconds of each pass of logprobs.
    {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "devices": {"type": "A100-SXM-80GB", "num": 32},
        "train_parallel": {"fsdp": 32, "ulysses_sp": 4},
        "rollout_parallel": {"tp": 2},
        "engine": {"name": "vllm", "gpu_memory_utilization": 0.6, "max_num_seqs": 512},
        "measured": {
            "gen_s": 300,
            "old_log_prob_s": 20,
            "ref_log_prob_s": 21,
            "update_actor_s": 90,
        },
    },
    # Megatron and experts on ranks; nodes in place of devices.
    {
        "model": "Qwen3-30B-A3B-Base",
        "devices": {"type": "H20", "nodes": 4, "per_node": 8},
        "train_parallel": {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "dp": 4, "etp": 1, "vpp": 2},
        "rollout_parallel": {"tp": 4, "dp": 8},
        "engine": "sglang",
        "measured": {"generation_s": 100, "training_s": 50, "total_s": 170},
    },
    # MLA, one run a group, lengths of its own.
    {
        "model": "DeepSeek-V3.1",
        "devices": {"type": "H200-SXM-141GB", "num": 256},
        "train_parallel": {"pp": 16, "ep": 16, "dp": 16, "zero": 1},
        "rollout_parallel": {"tp": 32, "dp": 8},
        "measured": {
            "short": {"mean_response_tokens": 645, "step_s": 100},
            "long": {"mean_response_tokens": 6450, "step_s": 300},
        },
    },
    # 32B on Ascend, whole layouts filled up, throughput a device.
    {
        "model": "Qwen2.5-32B",
        "devices": {"type": "Ascend-A3-die", "num": 32, "node_size": 16},
        "train_parallel": {"tp": 8},
        "rollout_parallel": {"tp": 4},
        "measured": {"e2e_tok_s_per_device": 220},
    },
    # Pools apart, one step off.
    {
        "model": "DeepSeek-R1-Distill-Qwen-7B",
        "devices": {"type": "H100", "num": 24},
        "rollout_devices": 8,
        "train_devices": {"num": 16},
        "train_parallel": {"fsdp": True},
        "rollout_parallel": {"dp": 8},
        "schedule": "one_step_off",
        "measured": {"step_s": 200},
    },
]


@pytest.mark.parametrize("change", PUBLISHED, ids=lambda change: change["model"])
def test_rows_of_other_frameworks_models_and_devices_are_predicted(row, change):
    for found in predict_row({**row, **change}, MODELS):
        assert found.missing == ()
        assert found.notes
        assert found.step.predicted_s > 0
        assert found.counts


def test_every_default_is_told(row):
    for key in ("engine", "model"):
        row.pop(key)
    found = one({**row, "model": "Qwen2.5-Math-1.5B"})
    told = "\n".join(found.notes)
    for word in (
        *("max_running_requests taken for 256", "85% of the memory", "recompute taken for full"),
        *("mini_batches: one", "packed to 28672 tokens", "logprob_passes: one"),
        *("optimizer divided among data ranks", "Qwen2.5-Math-1.5B: sizes of qwen2.5-1.5b"),
    ):
        assert word in told
    said = {"recompute": False, "mini_batches": 4, "micro_tokens": 8192, "logprob_passes": 2}
    fewer = one({**row, "model": "Qwen2.5-1.5B", **said, "train_parallel": {"dp": 8, "zero": 1}})
    assert not any(word in note for note in fewer.notes for word in (*said, "optimizer", "packed"))


def test_a_model_that_no_folder_has_is_predicted_with_its_config(row):
    config = json.loads((MODELS / "qwen2.5-1.5b.json").read_text("utf-8"))
    unknown = {**row, "model": "Mine-2B", "model_shape": config}
    assert step(unknown) == pytest.approx(step(row))
    del config["hidden_size"]
    assert "the sizes of 'Mine-2B' lack 'vocab'" in one(unknown).missing
    config |= {"hidden_size": "wide"}
    assert "the config of 'Mine-2B'" in one(unknown).missing[0]


def test_totals_stand_for_mean_lengths(row):
    asked = step(row)
    del row["mean_response_tokens"]
    total = 512 * (100 + 13975)
    assert step({**row, "tokens_per_step": total}) == pytest.approx(asked)
    assert step({**row, "mean_total_tokens": 100 + 13975}) == pytest.approx(asked)
    assert "no room for responses" in one({**row, "tokens_per_step": 512 * 90}).missing[0]


def test_prompts_times_group_stand_for_sequences(row):
    asked = step(row)
    del row["num_sequences"]
    assert step({**row, "num_prompts": 32}) == pytest.approx(asked)
    assert step({**row, "samples_per_step": 512.0}) == pytest.approx(asked)


def test_layouts_in_other_words_are_the_same(row):
    assert step({**row, "train_parallel": {"tp_size": 2, "replicas": 4}}) == pytest.approx(
        step(row)
    )
    sharded = {**row, "train_parallel": {"fsdp": 8}}
    assert step({**row, "train_parallel": {"dp": 8, "zero": 3}}) == pytest.approx(step(sharded))
    inside = one({**row, "train_parallel": {"fsdp": 8, "ulysses": 2}})
    assert step({**row, "train_parallel": {"fsdp": 4, "cp": 2}}) == pytest.approx(
        inside.step.predicted_s
    )
    assert any("counts all devices" in note for note in inside.notes)


def test_layouts_that_fill_the_devices_together_are_pools_apart(row):
    half = {"train_parallel": {"tp": 2, "dp": 2}, "rollout_parallel": {"tp": 2, "dp": 2}}
    found = one({**row, **half})
    assert found.missing == ()
    assert any("taken to be apart, on 4 and 4" in note for note in found.notes)
    told = one({**row, **half, "rollout_devices": 4, "train_devices": 4})
    assert told.step == found.step
    assert one({**row, **half, "devices": {**row["devices"], "rollout": 4}}).step == found.step


def test_a_run_off_policy_is_as_long_as_its_longer_side(row):
    half = {
        **row,
        "measured": {"generate_s": 1, "logprob_s": 1, "train_s": 1, "sync_s": 1, "step_s": 1},
        "train_parallel": {"tp": 2, "dp": 2},
        "rollout_parallel": {"tp": 2, "dp": 2},
        "rollout_devices": 4,
    }
    for said in ({"asynchronous": True}, {"staleness": 1}, {"mode": "async"}):
        found = one({**half, **said})
        times = {stage.stage: stage.predicted_s for stage in found.stages}
        longer = max(times["generate_s"], times["logprob_s"] + times["train_s"])
        # What these frameworks do besides takes them 4 s.
        assert found.step.predicted_s == pytest.approx(longer + times["sync_s"] + 4)
    assert one({**half, "staleness": 0}).step.predicted_s == pytest.approx(sum(times.values()))


def test_batches_under_way_together_hide_the_tail(row):
    half = {**row, "rollout_devices": 4, "train_parallel": {"dp": 4}, "rollout_parallel": {"dp": 4}}
    half["measured"] = {"generate_s": 1, "train_s": 1, "step_s": 1}
    off = one({**half, "staleness": 1})
    times = {stage.stage: stage.predicted_s for stage in off.stages}
    assert off.step.predicted_s > times["generate_s"] > times["train_s"]
    eight = one({**half, "staleness": 8}).step.predicted_s
    assert times["train_s"] < eight < off.step.predicted_s
    for said in ("8_step_off", "8-step off", "async 8off"):
        assert one({**half, "schedule": said}).step.predicted_s == eight
    assert any("staleness taken for 1" in note for note in one({**half, "mode": "async"}).notes)


def test_a_trainer_on_shared_devices_goes_to_the_host_and_back(row):
    # Qwen2.5-1.5B with tp 2: half of the 1,543.7 million parameters on a device (head tied, norms
    # and biases of keys and values whole) in bfloat16, and a quarter of 12 bytes each.
    kept = step({**row, "offload": False})
    moved = (step(row) - kept) / (1 / 2.41 + 1 / 5.32)
    assert moved * 2**30 == pytest.approx(1_543_714_304 / 2 * (2 + 12 / 4), rel=1e-3)
    assert "offload: the trainer's state to the host and back each step" in one(row).notes
    assert not any("offload" in note for note in one({**row, "offload": True}).notes)
    assert "offload is true or false" in one({**row, "offload": "cpu"}).missing[0]
    apart = {**row, "devices": {**row["devices"], "num": 16}, "rollout_devices": 8}
    assert step(apart) == step({**apart, "offload": True})
    assert not any("offload" in note for note in one(apart).notes)


def test_a_trainer_that_divides_everything_has_modules_that_are_not_fused(row):
    row["train_parallel"] = {"fsdp": 8}
    row["measured"] = {"logprob_s": 1, "train_s": 1}
    fused = {stage.stage: stage.predicted_s for stage in one({**row, "compiled": True}).stages}
    eager = {stage.stage: stage.predicted_s for stage in one(row).stages}
    # Of 28 layers: hidden size 1536, 12 heads and 2 of keys of 128, intermediate size 8960; an
    # eighth of 512 samples of 14,075 tokens; 0.93 of 3 TB/s.
    nbytes = 28 * (68 * 1536 + 20 * (12 + 2) * 128 + 4 * 8960)
    once = 512 * 14_075 / 8 * nbytes / (0.93 * 3.0e12)
    assert eager["logprob_s"] - fused["logprob_s"] == pytest.approx(once, rel=1e-3)
    # Forward, again, and twice that backward.
    assert eager["train_s"] - fused["train_s"] == pytest.approx(4 * once, rel=1e-3)
    kept = {**row, "recompute": "none"}
    spared = one(kept).stages[1].predicted_s - one({**kept, "compiled": True}).stages[1].predicted_s
    assert spared == pytest.approx(3 * once, rel=1e-3)
    assert "train_parallel: modules of transformers, not compiled" in one(row).notes
    assert one({**row, "train_backend": "Megatron-FSDP"}).stages[1].predicted_s == fused["train_s"]
    # Megatron's are fused, whatever the row says, and others are not, however they divide.
    row["train_parallel"] = {"tp": 2, "dp": 4}
    assert one({**row, "compiled": False}).stages == one(row).stages
    other = {**row, "train_backend": "deepspeed", "train_parallel": {"tp": 2, "dp": 4, "zero": 2}}
    assert one(other).stages[1].predicted_s > one(row).stages[1].predicted_s


def test_pools_of_different_devices_take_their_own_times(row):
    pools = {
        "train_parallel": {"tp": 2, "dp": 2},
        "rollout_parallel": {"tp": 2, "dp": 2},
        "train_devices": {"type": "H100", "num": 4},
        "measured": {"generate_s": 1, "train_s": 1},
    }
    del row["devices"]
    fast = one({**row, **pools, "rollout_devices": {"type": "H100", "num": 4}})
    slow = one({**row, **pools, "rollout_devices": {"type": "A100", "num": 4}})
    assert slow.stages[0].predicted_s > fast.stages[0].predicted_s
    assert slow.stages[1] == fast.stages[1]
    assert "A100 taken for A100-SXM-80GB" in slow.notes


def test_a_run_of_several_may_differ_from_its_row(row):
    row["measured"] = {
        "on_policy": {"step_s": 346},
        "offload": {"step_s": 400, "mini_batches": 4},
        "one_step_off": {
            "step_s": 200,
            "rollout_devices": 4,
            "train_parallel": {"dp": 4},
            "rollout_parallel": {"dp": 4},
        },
    }
    found = {item.name.partition("/")[2]: item for item in predict_row(row, MODELS)}
    assert all(item.counts for item in found.values())
    assert found["on_policy"].step.predicted_s == pytest.approx(step(ROW))
    assert found["offload"].step.predicted_s > found["on_policy"].step.predicted_s
    assert any("mini_batches" in note for note in found["on_policy"].notes)


def test_seconds_beside_groups_are_a_run_of_their_own(row):
    row["measured"] = {"step_s": 346, "again": {"step_s": 350}}
    assert [item.name for item in predict_row(row, MODELS)] == [
        "rlinf_1p5b_8xh100",
        "rlinf_1p5b_8xh100/again",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": {"type": "B900", "num": 8}}, "no such device in the catalogue: 'B900'"),
        ({"model": "Unknown-7B"}, "unknown model 'Unknown-7B'"),
        ({"group_size": None}, "group_size is missing"),
        ({"mean_response_tokens": None}, "mean_response_tokens is missing"),
        ({"devices": {"type": "H100"}}, "devices.num is missing"),
        ({"rollout_devices": 4, "train_devices": 8}, "are 12, not 8"),
        ({"rollout_devices": 8}, "no devices are left"),
        ({"rollout_devices": "half"}, "rollout_devices is no whole number"),
        ({"asynchronous": True}, "rollout_devices and train_devices are missing"),
        ({"precision": "fp8"}, "only bfloat16 is modelled"),
        ({"rollout_parallel": {"tp": 8, "dp_attention": True}}, "attention by data ranks"),
        ({"train_parallel": {"dp": 8, "zero": 9}}, "zero is one of 0, 1, 2, 3"),
        ({"engine": {"mem_fraction_static": 1.5}}, "share of the memory"),
        ({"train_parallel": {"tp": 3}}, "train_parallel is for 3 devices, not for 8"),
    ],
)
def test_rows_called_complete_that_are_not_say_what_is_missing(row, change, message):
    found = one({**row, "complete": True, **change})
    assert message in "\n".join(found.missing)
    assert found.stages == ()
    assert not found.counts


def test_a_row_that_its_file_calls_incomplete_is_shown_and_does_not_count(row):
    found = one({**row, "complete": False, "missing": "per die or per card"})
    assert found.step is not None
    assert found.flagged == "per die or per card"
    assert not found.counts


def test_what_nobody_measured_does_not_count(row):
    assert not one({**row, "measured": {}}).counts
    wrong = one({**row, "measured": {"step_s": "fast", "reward_s": 3}})
    assert not wrong.counts
    told = "\n".join(wrong.notes)
    assert "measured.step_s is no number above 0: 'fast'" in told
    assert "measured.reward_s is no stage that is predicted" in told


JUNK = st.sampled_from([None, "x", 0, -1, 1.5, float("nan"), [], {}, True, 10**12, [1, 2]])
SIZES = st.dictionaries(
    st.sampled_from(["tp", "pp", "dp", "cp", "ep", "fsdp", "zero", "sp"]),
    st.one_of(st.sampled_from([1, 2, 4, 8]), JUNK),
    max_size=4,
)

WORDS = [
    *("rollout_devices", "staleness", "tokens_per_step", "hardware", "complete", "precision"),
    *("offload", "asynchronous", "placement", "lora", "ppo_epochs", "algorithm", "missing"),
]
SECTIONS = st.dictionaries(
    st.sampled_from(["type", "gpu", "num", "name", "nodes", "slots", "step_s", "gen", "stages"]),
    st.one_of(JUNK, st.just({"mean": "3"}), st.just("8xH100")),
    max_size=3,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.dictionaries(st.sampled_from([*ROW, *WORDS]), st.one_of(JUNK, SECTIONS), max_size=3),
    train=SIZES,
    rollout=SIZES,
)
def test_no_row_makes_the_program_fail(changes, train, rollout):
    row = {**ROW, "train_parallel": train, "rollout_parallel": rollout, **changes}
    for found in predict_row(row, MODELS):
        assert bool(found.missing) is (found.step is None)


@pytest.mark.parametrize("size", [0, -1, 2.5, "64", None, [1], 10**400])
def test_sizes_of_a_model_that_are_none_are_told(row, size):
    given = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16}
    given |= {"intermediate": 128, "tied_embeddings": True}
    found = one({**row, "model": "Nobody-1B", "model_shape": {**given, "vocab": size}})
    assert "the sizes of 'Nobody-1B': vocab is no whole number above 0" in found.missing[0]
    found = one({**row, "model": "Nobody-1B", "model_shape": {**given, "layers": 28}})
    assert found.missing == ("the sizes of 'Nobody-1B' lack 'vocab'",)


@pytest.fixture(scope="module")
def weight_syncs():
    return read_document(MODELS.parents[1] / "benchmarks" / "published" / "weight_sync.yaml")


def test_weight_syncs_lie_around_the_published_ones(weight_syncs):
    found = predict_syncs(weight_syncs, MODELS)
    assert all(item.counts for item in found)
    ratios = sorted(1 + item.step.error for item in found)
    assert 0.8 < ratios[len(ratios) // 2] < 1.25


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("apart", None, "apart is missing"),
        ("sync_s", 0, "sync_s is no number"),
        ("devices", None, "no such device"),
        ("train_parallel", {"tp": 3}, "is for 3 devices"),
        ("model", "Nobody-1B", "unknown model"),
    ],
)
def test_a_weight_sync_that_lacks_something_says_what(weight_syncs, key, value, message):
    first = weight_syncs["weight_syncs"][0]
    (wrong,) = predict_syncs({"weight_syncs": [{**first, key: value}]}, MODELS)
    assert message in wrong.missing[0]


def test_the_published_files_are_predicted_as_their_table_says():
    folder = MODELS.parents[1] / "benchmarks" / "published"
    errors = {}
    for name in FILES:
        for row in rows_of(read_document(folder / name)):
            for found in predict_row(row, MODELS):
                assert found.counts or found.flagged, found.missing
                errors[found.name] = found.step.error
                errors |= {f"{found.name}/{stage.stage}": stage.error for stage in found.stages}
    # Held out: the same model in other releases, on twice the devices, and one step off.
    for name in ("128xh100/0.6", "256xh100/0.6", "256xh100/0.7", "256xh100_off/0.7"):
        assert abs(errors[f"nemo_qwen3_235b_{name}"]) < 0.15
    assert abs(errors["verl_7b_64xh100"]) < 0.15
    assert abs(errors["rlinf_7b_128xh100"]) < 0.15
    # On devices that no row was calibrated on, of another maker of trainers, and stages of others.
    for name in ("30b_a3b_16xgb200/0.7", "235b_64xgb200/0.7", "235b_128xgb200_off/0.7"):
        assert abs(errors[f"nemo_qwen3_{name}"]) < 0.10
    assert abs(errors["prime_sft_qwen3_4b_8x/h100/train_s"]) < 0.10
    assert abs(errors["nemo_llama31_70b_64xh100/article/generation_s"]) < 0.15
    # On H20: stages of trainers of 14 and 32 billion parameters, and steps of another framework.
    trainers = [
        error
        for name, error in errors.items()
        if "h20/" in name and name.endswith(("/update_actor_s", "/old_logprob_s"))
    ]
    assert len(trainers) == 19
    assert max(abs(error) for error in trainers) < 0.25
    for band in ("200", "300", "400", "500"):
        assert abs(errors[f"unirl_qwen3_4b_32xh20/to_{band}"]) < 0.10
        assert abs(errors[f"verl_qwen3_4b_32xh20/to_{band}"]) < 0.10
