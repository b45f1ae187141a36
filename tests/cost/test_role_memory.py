"""The memory of one device under a layout: equal to that of one device alone, divided by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.cost import (
    Experts,
    LatentAttention,
    ModelShape,
    Phase,
    PhaseMemory,
)
from flowrl.cost.activations import AttentionKind, forward_tensors, mlp_kept
from flowrl.cost.layout import Layout
from flowrl.cost.memory import phase_memory, resident_memory
from flowrl.cost.role_memory import (
    MemoryOptions,
    kv_capacity,
    offloadable_bytes,
    resident_bytes,
    role_memory,
    role_peak,
    stage_working,
    working_key,
)
from flowrl.cost.sharding import stage_layers, stage_parameters
from tests.cost.tiny import SHAPE, WORK

MIB = 1 << 20
MODELS = Path(__file__).parents[2] / "configs" / "models"
ON_CPU = MemoryOptions(device_type="cpu")


def named(memory: PhaseMemory) -> dict[str, int]:
    return {part.name: part.nbytes for part in memory.parts}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "full"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_device_has_the_numbers_of_a_device_alone(
    phase: Phase, dtype: str, shard: str, recompute: str
) -> None:
    options = replace(ON_CPU, shard=shard)
    settings = product(
        (True, False),
        (0, 3),
        ("sdpa", "eager"),
        (True, False),
        (SHAPE.with_value_head(), SHAPE, EXPERTS),
    )
    for trainable, slots, attention, shares, shape in settings:
        work = replace(
            WORK,
            dtype=dtype,
            trainable=trainable,
            num_slots=slots,
            attention=attention,
            shares_weights=shares,
            recompute=recompute,
        )
        if phase is Phase.ROLLOUT and not slots:
            continue
        alone = phase_memory("actor", shape, work, phase)
        assert named(role_memory("actor", shape, Layout(), work, phase, options)) == named(alone)
        assert role_peak(shape, Layout(), work, phase, options) == alone.total
        told = replace(options, recompute=recompute)
        unsaid = replace(work, recompute="none")
        assert role_peak(shape, Layout(), unsaid, phase, told) == alone.total
        resident = sum(part.nbytes for part in resident_memory("actor", shape, work))
        assert resident_bytes(shape, Layout(), work, options) == resident


# Of SHAPE a layer has 8 * (8 + 2 * 4) + 8 * 8 for attention, 2 * 8 for norms, 3 * 8 * 24 of MLP.
LAYER, TABLE, NORM = 192 + 16 + 576, 800, 8
EXPERTS = replace(
    SHAPE,
    tied=False,
    num_layers=3,
    experts=Experts(num_experts=8, num_active=2, expert_size=6, shared_size=4, num_dense_layers=1),
)
LATENT = replace(
    EXPERTS,
    num_kv_heads=4,
    latent=LatentAttention(query_rank=6, kv_rank=5, plain_dim=1, rope_dim=1, value_dim=3),
)
TRAINING = replace(WORK, num_slots=0, dtype="bfloat16")
BIG = MemoryOptions(device_type="cpu", kv_tokens=100)


def update(layout: Layout, shape: ModelShape = SHAPE, **options: Any) -> dict[str, int]:
    chosen = MemoryOptions(**{"device_type": "cpu", **options})
    return named(role_memory("actor", shape, layout, TRAINING, Phase.UPDATE, chosen))


def held(shape: ModelShape, **sizes: int) -> list[int]:
    layout = Layout(**sizes)
    stages = stage_parameters(shape, layout.tp, layout.pp, layout.ep)
    return [stage.total for stage in stages]


def test_layers_that_are_left_over_go_to_the_last_stages_but_the_very_last() -> None:
    assert stage_layers(61, 4) == (15, 15, 16, 15)
    assert stage_layers(7, 4) == (2, 2, 2, 1)
    assert stage_layers(28, 1) == (28,)
    with pytest.raises(ValueError, match="2 layers cannot be divided among 3 stages"):
        stage_layers(2, 3)


def test_tensor_parallel_divides_all_but_norms_and_repeats_keys_beyond_their_heads() -> None:
    assert held(SHAPE, tp=1) == [TABLE + 2 * LAYER + NORM]
    # Two query heads and one key head a device.
    assert held(SHAPE, tp=2) == [400 + 2 * (8 * (4 + 2 * 2) + 4 * 8 + 16 + 3 * 8 * 12) + NORM]
    # One query head; the two key heads are on two devices each.
    assert held(SHAPE, tp=4) == [200 + 2 * (8 * (2 + 2 * 2) + 2 * 8 + 16 + 3 * 8 * 6) + NORM]


def test_the_first_stage_has_the_embedding_and_the_last_the_output_layer() -> None:
    assert held(SHAPE, pp=2) == [TABLE + LAYER, LAYER + NORM + TABLE]
    assert held(replace(SHAPE, tied=False), pp=2) == [TABLE + LAYER, LAYER + NORM + TABLE]
    # A value head is a matrix of one row, with a bias.
    assert held(SHAPE.with_value_head(), pp=2) == [TABLE + LAYER, LAYER + NORM + 9]


def test_experts_are_divided_by_the_larger_of_tp_and_ep() -> None:
    def experts(**sizes: int) -> int:
        layout = Layout(**sizes)
        (stage,) = stage_parameters(EXPERTS, layout.tp, 1, layout.ep)
        return stage.experts

    routed = 2 * 8 * 3 * 8 * 6
    assert experts() == routed
    assert experts(tp=2) == experts(ep=2, dp=2) == experts(tp=2, ep=2) == routed // 2
    assert experts(tp=2, ep=4, dp=2) == routed // 4
    # The router is whole on every device, shared experts are divided as any MLP.
    (one,), (two,) = (stage_parameters(EXPERTS, tp, 1, 1) for tp in (1, 2))
    attention, dense = (192 + 16, 112), (576, 288)
    for stage, tp, att, mlp in zip((one, two), (1, 2), attention, dense, strict=True):
        shared = 3 * 8 * (4 // tp) + 8 * 8
        assert stage.dense == 2 * 800 // tp + NORM + 3 * att + mlp + 2 * shared


@pytest.mark.parametrize(
    ("layout", "same", "divided", "replicas"),
    [
        # Devices with the same part of the model, and of them, those with the same experts.
        (Layout(tp=2, dp=6), 6, 2, 6),
        (Layout(tp=2, cp=3), 3, 2, 3),
        (Layout(tp=2, dp=6, ep=2), 6, 2, 6),
        (Layout(tp=2, cp=3, dp=4, ep=4), 12, 4, 6),
        (Layout(tp=4, dp=3, ep=2), 3, 4, 3),
        (Layout(dp=12, ep=4, pp=5), 12, 4, 3),
        (Layout(tp=2, dp=2, ep=4), 2, 4, 1),
    ],
)
def test_experts_are_kept_by_devices_of_every_kind_of_parallelism(
    layout: Layout, same: int, divided: int, replicas: int
) -> None:
    assert (layout.shards, layout.expert_shards, layout.expert_replicas) == (
        same,
        divided,
        replicas,
    )


def test_sizes_of_a_layout_multiply_to_its_devices() -> None:
    layout = Layout(tp=2, pp=3, cp=5, dp=28, ep=14)
    assert (layout.num_devices, layout.model_devices) == (840, 30)
    assert (layout.server_replicas, layout.server_devices) == (7, 210)
    within = Layout(tp=4, dp=3, ep=2)
    assert (within.server_replicas, within.server_devices) == (1, 4)
    assert layout.describe() == "tp 2, pp 3, cp 5, ep 14, dp 28"


def test_latents_are_projected_whole_and_expanded_in_part() -> None:
    def attention(tp: int) -> int:
        (stage,) = stage_parameters(replace(LATENT, experts=None, num_layers=1), tp, 1, 1)
        return stage.dense - 2 * 800 // tp - NORM - 576 // tp

    heads = 4
    whole = 8 * (5 + 1) + 8 * 6 + 2 * 8 + 5 + 6
    assert attention(1) == whole + 5 * heads * (1 + 3) + 6 * heads * 2 + heads * 3 * 8
    assert attention(2) == whole + 5 * 2 * (1 + 3) + 6 * 2 * 2 + 2 * 3 * 8


@given(
    pp=st.integers(1, 4),
    tied=st.booleans(),
    norm=st.booleans(),
    bias=st.booleans(),
    kind=st.sampled_from(["dense", "experts", "latent"]),
    value=st.booleans(),
)
def test_stages_add_up_to_the_model(
    pp: int, tied: bool, norm: bool, bias: bool, kind: str, value: bool
) -> None:
    base = {"dense": replace(SHAPE, num_layers=5), "experts": EXPERTS, "latent": LATENT}[kind]
    latent = kind == "latent"
    shape = replace(
        base,
        num_layers=5,
        tied=tied,
        qk_norm=norm and not latent,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias and kind == "dense",
    )
    shape = shape.with_value_head() if value else shape
    again = TABLE if tied and pp > 1 and not value else 0
    assert sum(held(shape, pp=pp)) == shape.parameters.total + again


def test_optimizer_states_are_divided_over_the_devices_with_the_same_parameters() -> None:
    (count,) = held(SHAPE)
    alone, sharded = update(Layout(), shard="none"), update(Layout(dp=2, cp=2))
    assert alone["optimizer"] == 8 * count
    assert sharded["optimizer"] == 8 * count / 4
    assert sharded["master weights"] == 4 * count / 4
    assert sharded["parameters"] == 2 * count
    # Megatron's distributed optimizer: 6 + 12/d bytes a parameter in bfloat16; and one layer's own.
    assert sharded["gradients"] == 4 * count + 2 * LAYER
    states = ("parameters", "gradients", "optimizer", "master weights")
    assert sum(sharded[name] for name in states) == (6 + 12 / 4) * count + 2 * LAYER
    unsharded = update(Layout(dp=4), shard="none")
    assert unsharded["optimizer"] == 8 * count


def test_experts_states_are_divided_over_the_devices_with_the_same_experts() -> None:
    (stage,) = stage_parameters(EXPERTS, 1, 1, 4)
    parts = update(Layout(dp=8, ep=4), EXPERTS)
    assert parts["optimizer"] == 8 * (-(-stage.dense // 8) + stage.experts // 2)
    assert parts["parameters"] == 2 * (stage.dense + stage.experts)


def test_fully_sharded_parameters_are_gathered_two_layers_at_a_time() -> None:
    (count,) = held(SHAPE)
    parts = update(Layout(dp=4), shard="full")
    assert parts["parameters"] == 2 * count / 4
    assert parts["gradients"] == 4 * count / 4 + 2 * LAYER
    # Parameters and their gradients, in bfloat16.
    assert parts["gathered weights"] == 2 * 2 * (2 * LAYER + TABLE)
    assert "gathered weights" not in update(Layout(tp=2), shard="full")
    reference = replace(TRAINING, trainable=False)
    full = MemoryOptions(device_type="cpu", shard="full")
    memory = role_memory("ref", SHAPE, Layout(dp=4), reference, Phase.LOGPROBS, full)
    assert named(memory)["gathered weights"] == 2 * (2 * LAYER + TABLE)


def test_offloaded_states_leave_the_device_and_need_two_buffers() -> None:
    layout = Layout(dp=2)
    parts = update(layout, offload_optimizer=True)
    assert "optimizer" not in parts
    assert "master weights" not in parts
    assert parts["transfer buffers"] == 1 << 30
    options = MemoryOptions(offload_optimizer=True, device_type="cpu")
    assert resident_bytes(SHAPE, layout, TRAINING, options) == parts["parameters"]


# Of one token and layer without recompute: two norms of h * 4 + 2 h * 2, attention (2 q + 3 v) * 2,
# a float32 number a head, the MLP 4 f * 2.
KEPT = 2 * (8 * 4 + 2 * 8 * 2) + 5 * 8 * 2 + 4 * 4 + 4 * 24 * 2
LAST_NORM = 8 * 4 + 2 * 8 * 2
TOKENS = 5 * 10


def test_activations_are_divided_by_tensor_and_context_parallelism() -> None:
    assert update(Layout())["activations"] == TOKENS * (2 * KEPT + LAST_NORM)
    assert update(Layout(tp=2))["activations"] == TOKENS * (2 * KEPT + LAST_NORM) // 2
    assert update(Layout(cp=2))["activations"] == TOKENS * (2 * KEPT + LAST_NORM) // 2
    assert update(Layout(dp=2))["activations"] == TOKENS * (2 * KEPT + LAST_NORM)


def test_selective_recompute_drops_what_norms_and_the_mlp_can_compute_again() -> None:
    kept = 2 * 8 * 4 + 5 * 8 * 2 + 4 * 4 + 2 * 24 * 2
    parts = update(Layout(), recompute="selective")
    assert parts["activations"] == TOKENS * (2 * kept + LAST_NORM)


def test_full_recompute_keeps_the_input_of_each_layer_and_one_layer_s_tensors() -> None:
    few = replace(SHAPE, vocab_size=8)
    parts = update(Layout(), few, recompute="full")
    assert parts["activations"] == TOKENS * (2 * 8 * 2 + KEPT + LAST_NORM)
    assert "logits" not in parts
    # With many logits, those of the moment before are more than a layer's tensors.
    many = update(Layout(), replace(SHAPE, vocab_size=1000), recompute="full")
    assert many["activations"] == TOKENS * (2 * 8 * 2 + LAST_NORM)
    assert many["logits"] == (2 * 2 + 4 * 4) * 20 * 1000


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    deep = replace(SHAPE, num_layers=16, vocab_size=8)
    first = TOKENS * 4 * 4 * KEPT
    assert update(Layout(pp=4), deep)["activations"] == first
    # 20 rows in micro-batches of 5 make 4; of two replicas each has 2.
    assert update(Layout(pp=4, dp=2), deep)["activations"] == first // 2
    whole = update(Layout(pp=4), deep, recompute="full")["activations"]
    assert whole == TOKENS * (4 * 4 * 8 * 2 + KEPT)


def test_the_stage_with_the_logits_is_the_fullest_where_they_are_most() -> None:
    wide = replace(SHAPE, num_layers=2, vocab_size=100_000, tied=False)
    elements = 5 * 4 * 100_000
    parts = update(Layout(pp=2), wide)
    assert parts["logits"] == 2 * 2 * elements + 4 * 4 * elements
    halved = update(Layout(pp=2, tp=2), wide)
    assert halved["logits"] == parts["logits"] // 2
    deep = replace(SHAPE, num_layers=2, vocab_size=8, intermediate_size=500, tied=False)
    assert "logits" not in update(Layout(pp=2), deep)


def test_a_packed_micro_batch_has_its_tokens_and_each_may_be_of_a_response() -> None:
    parts = update(Layout(), packed_tokens=30)
    assert parts["activations"] == 30 * (2 * KEPT + LAST_NORM)
    assert parts["logits"] == (2 * 2 + 4 * 4) * 30 * 100
    options = MemoryOptions(device_type="cpu", packed_tokens=30)
    wide = replace(SHAPE, vocab_size=1_000_000)
    memory = role_memory("actor", wide, Layout(tp=2), TRAINING, Phase.LOGPROBS, options)
    elements = 30 * 1_000_000 // 2
    # And the last hidden states twice.
    assert named(memory)["logits"] == 2 * elements + 4 * 4 * (1 << 22) + 30 * 2 * 8 * 2 // 2


def test_experts_of_several_devices_meet_more_tokens_on_the_fullest() -> None:
    def experts(**sizes: int) -> float:
        return mlp_kept(EXPERTS, width=2, with_experts=True, layout=Layout(**sizes))

    # 4 f and two copies for each of two experts, 4 f of the shared one, the router's choice.
    routed, rest = 4 * 2 * 6 + 2 * 2 * 8, 4 * 4 + 8
    assert experts() == 2 * (routed + rest)
    assert experts(ep=4, dp=4) == 2 * (int(1.5 * routed) + rest)
    # Divided over two devices, an expert meets its copies on both.
    assert experts(tp=2) == 2 * (4 * 2 * 6 + 2 * (2 * 2 * 8) + rest) / 2
    assert experts(tp=2, ep=2) == 2 * (int(1.5 * routed) + rest) / 2


@pytest.mark.parametrize(
    ("sizes", "engine", "elements"),
    [
        # 3 h, 3 q, and of two experts 3 f and two copies of the token, with 3 f of the shared one.
        ({}, False, 24 + 24 + (3 * 2 * 6 + 32) + 3 * 4),
        # The fullest of several devices with experts has half as many again.
        ({"ep": 2, "dp": 2}, False, 24 + 24 + int(1.5 * (3 * 2 * 6 + 32)) + 3 * 4),
        # An expert that is divided over two devices meets its copies on both.
        ({"tp": 2}, False, (24 + 24 + (3 * 2 * 6 + 2 * 32) + 3 * 4) / 2),
        # 2 h on every device, 3 q and 3 k, and 4 f.
        ({}, True, 16 + 24 + 12 + 4 * 24),
        ({"tp": 2}, True, 16 + (24 + 12 + (4 * 2 * 6 + 2 * 32) + 4 * 4) / 2),
    ],
)
def test_the_largest_tensors_of_a_layer_are_those_of_its_experts(
    sizes: dict[str, int], engine: bool, elements: float
) -> None:
    def found(attention: AttentionKind) -> float:
        layout = Layout(**sizes)
        return forward_tensors(
            EXPERTS, width=2, attention=attention, length=10, layout=layout, engine=engine
        )

    assert found("sdpa") == 2 * elements
    # Eager attention has the probabilities of four heads too.
    assert found("eager") == 2 * (elements + 4 * 10 / sizes.get("tp", 1))


def test_the_cache_is_divided_by_heads_stages_and_context_but_a_latent_is_not() -> None:
    def cache(layout: Layout, shape: ModelShape = SHAPE) -> int:
        return named(role_memory("a", shape, layout, WORK, Phase.ROLLOUT, BIG))["kv cache"]

    # 100 tokens, two layers, keys and values of two heads of two elements, float32.
    assert cache(Layout()) == 100 * 2 * 2 * 2 * 2 * 4
    assert cache(Layout(tp=2)) == cache(Layout(pp=2)) == cache(Layout(cp=2)) == 3200
    assert cache(Layout(tp=4)) == 3200
    assert cache(Layout(tp=2), LATENT) == cache(Layout(), LATENT) == 100 * 3 * (5 + 1) * 4


def test_capacity_is_what_fits_into_the_free_bytes() -> None:
    token = 2 * 2 * 2 * 2 * 2
    assert kv_capacity(SHAPE, Layout(), free_bytes=10 * token + 1) == 10
    assert kv_capacity(SHAPE, Layout(tp=2), free_bytes=10 * token) == 20
    assert kv_capacity(SHAPE, Layout(), free_bytes=10 * token, dtype="float32") == 5
    assert kv_capacity(SHAPE, Layout(), free_bytes=-1) == 0
    options = MemoryOptions(device_type="cpu", kv_tokens=20)
    half = replace(WORK, dtype="bfloat16")
    memory = role_memory("a", SHAPE, Layout(tp=2), half, Phase.ROLLOUT, options)
    assert named(memory)["kv cache"] == 10 * token


def test_on_an_accelerator_an_engine_has_graphs_workspaces_and_buffers() -> None:
    work = replace(WORK, trainable=False, dtype="bfloat16", num_slots=1000)
    layout = Layout(tp=2, dp=2)
    parts = named(role_memory("a", SHAPE, layout, work, Phase.ROLLOUT, MemoryOptions()))
    assert parts["captured graphs"] == 256 * 2 * MIB
    assert parts["workspace"] == 3 << 30
    assert parts["transfer buffers"] == 512 * MIB
    # Of tp alone: engines beside each other do not talk.
    assert parts["communication"] == 384 * MIB
    trained = named(role_memory("a", SHAPE, layout, TRAINING, Phase.UPDATE, MemoryOptions()))
    assert trained["communication"] == 2 * 384 * MIB
    assert "captured graphs" not in trained


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({}, 0),
        ({"tp": 2}, 1),
        ({"pp": 2}, 1),
        ({"cp": 2}, 1),
        ({"dp": 2}, 1),
        ({"dp": 2, "ep": 2}, 2),
        ({"tp": 2, "pp": 2, "cp": 2, "dp": 2}, 4),
    ],
)
def test_a_device_has_buffers_for_each_group_that_it_is_in(
    sizes: dict[str, int], groups: int
) -> None:
    shape = replace(EXPERTS, num_layers=4)
    memory = role_memory("a", shape, Layout(**sizes), TRAINING, Phase.UPDATE, MemoryOptions())
    assert named(memory).get("communication", 0) == groups * 384 * MIB


def test_what_can_be_moved_to_the_host_is_weights_and_states() -> None:
    work = replace(WORK, trainable=True, shares_weights=False, dtype="bfloat16")
    (count,) = held(SHAPE)
    options = MemoryOptions()
    stacked = 2 * 2 * (192 + 576)
    assert offloadable_bytes(SHAPE, Layout(), work, options) == (2 + 12 + 2) * count + stacked
    kept = 2 * 2 * 4 * 30 * 2 + 3 * 2 * MIB + (3 << 30)
    assert resident_bytes(SHAPE, Layout(), work, options) == (16 * count + stacked) + kept


# AIConfigurator 0.12.0, SGLang 0.5.14 on H100: GiB of weights and of the KV cache of 64 sequences
# of 2,048 tokens, on each device.
ENGINE_ROWS = [
    ("qwen3-0.6b", 1, 1, 1.4, 14.014),
    ("qwen3-0.6b", 2, 1, 0.7, 7.007),
    ("qwen3-0.6b", 4, 1, 0.35, 3.503),
    ("qwen3-0.6b", 8, 1, 0.175, 1.752),
    ("qwen3-8b", 1, 1, 15.256, 18.018),
    ("qwen3-8b", 2, 1, 7.628, 9.009),
    ("qwen3-8b", 4, 1, 3.814, 4.504),
    ("qwen3-8b", 8, 1, 1.907, 2.252),
    ("qwen3-32b", 2, 1, 30.511, 16.016),
    ("qwen3-32b", 4, 1, 15.256, 8.008),
    ("qwen3-32b", 8, 1, 7.628, 4.004),
    ("qwen3-30b-a3b", 2, 1, 28.157, 6.006),
    ("qwen3-30b-a3b", 2, 2, 28.157, 6.006),
    ("qwen3-30b-a3b", 4, 4, 14.09, 3.003),
    ("qwen3-30b-a3b", 8, 1, 7.08, 3.003),
    ("qwen3-30b-a3b", 8, 8, 7.08, 3.003),
]


@pytest.mark.parametrize(("model", "tp", "ep", "weights", "cache"), ENGINE_ROWS)
def test_weights_and_cache_are_those_that_an_engine_is_known_to_need(
    model: str, tp: int, ep: int, weights: float, cache: float
) -> None:
    shape = ModelShape.from_hf_config(json.loads((MODELS / f"{model}.json").read_text()))
    work = replace(WORK, num_slots=64, max_length=2048, dtype="bfloat16", trainable=False)
    memory = role_memory("a", shape, Layout(tp=tp, ep=ep), work, Phase.ROLLOUT, MemoryOptions())
    parts = {name: nbytes / (1 << 30) for name, nbytes in named(memory).items()}
    # Their count of a tied model has the table twice, that of experts has one table of two.
    table = shape.vocab_size * shape.hidden_size * 2 / (1 << 30) / tp
    theirs = {"qwen3-0.6b": weights - table, "qwen3-30b-a3b": weights + table}.get(model, weights)
    assert parts["parameters"] == pytest.approx(theirs, rel=0.01)
    assert parts["kv cache"] == pytest.approx(cache, rel=0.002)


def test_a_known_model_fits_where_people_run_it() -> None:
    """GRPO of a 7B model on 8 GPUs of 80 GB, FSDP without offload, 8 x 4,096 tokens at once.

    32B with Megatron: tp 8, pp 2 on 16 GPUs; 671B in bfloat16 does not fit on 64.
    """

    def gib(model: str, layout: Layout, options: MemoryOptions) -> float:
        shape = ModelShape.from_hf_config(json.loads((MODELS / f"{model}.json").read_text()))
        work = replace(
            TRAINING,
            max_length=4096,
            max_prompt_tokens=1024,
            max_response_tokens=3072,
            micro_batch=1,
            num_samples=256,
        )
        return role_peak(shape, layout, work, Phase.UPDATE, options) / (1 << 30)

    packed = MemoryOptions(shard="full", recompute="full", packed_tokens=16384)
    assert gib("qwen2.5-7b", Layout(dp=8), packed) < 60
    assert gib("qwen2.5-7b", Layout(), MemoryOptions(recompute="full")) > 120
    assert gib("qwen2.5-32b", Layout(tp=8, pp=2), MemoryOptions(recompute="full")) < 79
    experts = MemoryOptions(recompute="full")
    assert gib("deepseek-v3", Layout(tp=8, pp=8, ep=8), experts) > 80
    assert gib("deepseek-v3", Layout(tp=8, pp=16, dp=8, ep=64), experts) < 80


@pytest.mark.parametrize("shard", ["optimizer", "full"])
@pytest.mark.parametrize("phase", [Phase.LOGPROBS, Phase.UPDATE])
def test_layouts_of_one_key_work_in_the_same_memory(phase, shard):
    found: dict[object, set[tuple[int, ...]]] = {}
    work = replace(WORK, num_slots=0, num_samples=64, dtype="bfloat16")
    for tp, pp, cp, dp in product((1, 2), (1, 2), (1, 2), (1, 2, 4, 16, 64)):
        layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp)
        for packed, recompute in product((None, 10, 40), ("none", "full")):
            options = MemoryOptions(shard=shard, recompute=recompute, packed_tokens=packed)
            working = stage_working(SHAPE, layout, work, phase, options)
            found.setdefault(working_key(layout, work, options), set()).add(working)
    assert len(found) < 2 * 2 * 2 * 5 * 3 * 2 or shard == "full"
    assert all(len(workings) == 1 for workings in found.values())
