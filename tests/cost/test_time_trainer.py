"""Passes of a trainer, weight sync and moves, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost import efficiency
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.collectives import Ranks, all_gather_s, all_reduce_s, reduce_scatter_s
from flowrl.cost.forward_pass import Tokens, forward_parts
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths, LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.sharding import stage_parameters
from flowrl.cost.switching import saved_s
from flowrl.cost.trainer_time import _largest_stage, _passes, batch_of
from tests.cost.tiny import SHAPE

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
COST = AnalyticCost()
TOKENS = ConstantLengths(tokens=4096)


@pytest.fixture(scope="module")
def qwen(repository):
    config = json.loads((repository / "configs/models/qwen2.5-7b.json").read_text("utf-8"))
    return ModelShape.from_hf_config(config)


def _forward(shape, layout, **options):
    asked = {"samples": 32, "prompt_tokens": 0, "lengths": TOKENS, "micro_tokens": 4096, **options}
    return COST.forward(shape, layout, H100, **asked)


def _train(shape, layout, **options):
    asked = {"samples": 32, "prompt_tokens": 0, "lengths": TOKENS, "micro_tokens": 4096, **options}
    return COST.train(shape, layout, H100, **asked)


def test_a_forward_pass_is_its_kernels_over_what_a_trainer_reaches(qwen):
    tokens = Tokens(count=4096, pairs=4096**2 / 2, cached=False, num_logits=4096, training=True)
    kernels = forward_parts(qwen, Layout(), H100, tokens)
    attention = kernels.pop("attention")
    expected = 32 / 4 * (sum(kernels.values()) / efficiency.TRAINER_SHARE + attention)
    assert _forward(qwen, Layout(dp=4)).seconds == pytest.approx(expected)


def test_attention_of_a_trainer_reaches_what_is_published_of_its_kernels(qwen):
    """FlashAttention 2, of the data sheet: 335 of 989 TFLOP/s on an H100; of 312 on an A100 73 %
    forward and 63 % backward, with 2.5 times the operations."""
    pairs = 32 * 32768**2 / 2
    operations = 28 * 4 * 28 * 128 * pairs
    lengths = ConstantLengths(tokens=32768)
    asked = {"samples": 32, "prompt_tokens": 0, "lengths": lengths, "micro_tokens": 32768}
    forward_share, backward_share = 0.73, 0.63
    both = 3.5 / (1 / forward_share + 2.5 / backward_share)
    for name, rate in (("H100-SXM-80GB", 335e12), ("A100-SXM-80GB", both * 312e12)):
        machine = Machine(spec=device_spec(name), node_size=8)
        parts = dict(COST.train(qwen, Layout(), machine, **asked).parts)
        assert parts["attention"] == pytest.approx(3.5 * operations / rate, rel=0.05)


def test_a_trainer_pays_for_float32_logits_and_a_value_head_does_not(qwen):
    policy = dict(_forward(qwen, Layout()).parts)["head"]
    critic = dict(_forward(qwen.with_value_head(), Layout()).parts)["head"]
    logits = 32 * 4096 * 152064 * 4 * efficiency.LOGIT_PASSES
    assert policy > logits / efficiency.rates(H100.spec).nbytes
    assert critic < policy / 20


def test_training_is_three_passes_and_four_with_recompute(qwen):
    forward = dict(_forward(qwen, Layout(dp=4)).parts)
    plain = dict(_train(qwen, Layout(dp=4)).parts)
    again = dict(_train(qwen, Layout(dp=4), recompute="full").parts)
    selective = dict(_train(qwen, Layout(dp=4), recompute="selective").parts)
    for part, passes in (("mlp", 3), ("projections", 3), ("attention", 3.5)):
        assert plain[part] == pytest.approx(passes * forward[part])
        assert again[part] == pytest.approx((passes + 1) * forward[part])
        assert selective[part] == pytest.approx(plain[part])
    assert again["head"] == pytest.approx(3 * forward["head"])
    assert selective["norms"] == pytest.approx(4 * forward["norms"])


def test_what_tensor_ranks_exchange_is_as_much_backward_as_forward(qwen):
    forward = dict(_forward(qwen, Layout(tp=4)).parts)["tensor parallel"]
    assert dict(_train(qwen, Layout(tp=4)).parts)["tensor parallel"] == pytest.approx(2 * forward)
    once = all_reduce_s(4096 * 3584 * 2, Ranks(size=4), H100)
    assert forward == pytest.approx(32 * (2 * 28 + 1) * once)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch(qwen):
    one = dict(_forward(qwen, Layout(dp=1)).parts)["mlp"]
    staged = dict(_forward(qwen, Layout(pp=4)).parts)["mlp"]
    # 32 micro-batches: 32 + 3 turns of a quarter of the layers.
    assert staged == pytest.approx(one / 32 * 35 / 4)


def test_stages_of_several_replicas_send_to_another_node_so_that_gradients_do_not(qwen):
    """Of tp 4, pp 2, dp 2 each stage fills a node of 8, whose two replicas share its links."""
    slow = replace(H100, spec=replace(H100.spec, inter_bytes_per_s=1e7))
    asked = {"samples": 32, "prompt_tokens": 0, "lengths": TOKENS, "micro_tokens": 4096}
    times = {
        (machine is slow, layout): dict(COST.train(qwen, layout, machine, **asked).parts)
        for machine in (H100, slow)
        for layout in (Layout(tp=4, pp=2, dp=2), Layout(tp=4, dp=4), Layout(tp=4, pp=2, dp=1))
    }
    two, one = Layout(tp=4, pp=2, dp=2), Layout(tp=4, pp=2, dp=1)
    assert times[True, two]["gradients"] == times[False, two]["gradients"]
    assert times[True, two]["pipeline"] > 1000 * times[False, two]["pipeline"]
    assert times[True, one]["pipeline"] == times[False, one]["pipeline"]  # all in a node
    flat = Layout(tp=4, dp=4)
    assert times[True, flat]["gradients"] > 1000 * times[False, flat]["gradients"]


def test_attention_grows_with_the_square_of_lengths(qwen):
    def parts(tokens: int) -> dict[str, float]:
        lengths = ConstantLengths(tokens=tokens)
        samples = 2**17 // tokens
        return dict(_forward(qwen, Layout(), samples=samples, lengths=lengths).parts)

    # Twice the pairs for the same tokens; what is in both is their bytes.
    third, second, first = (parts(tokens)["attention"] for tokens in (4096, 2048, 1024))
    assert third - second == pytest.approx(2 * (second - first), rel=0.05)
    assert parts(4096)["mlp"] == pytest.approx(parts(1024)["mlp"], rel=0.02)


def test_a_replica_has_its_share_of_the_tokens_and_of_the_pairs_that_attend():
    lengths = ConstantLengths(tokens=20)
    batch = batch_of(32.0, 10.0, lengths, 1000)
    passes = _passes(Layout(dp=2), batch)
    assert passes.number == 1
    assert (passes.tokens.count, passes.tokens.pairs) == (16 * 30, 16 * 30**2 / 2)
    # Packed rows leave half of a mean one free: 100 - 15 tokens a pass, for 480.
    several = _passes(Layout(dp=2), batch_of(32.0, 10.0, lengths, 100))
    assert several.number == 6
    assert several.tokens.count == 80
    assert several.tokens.pairs == 16 * 30**2 / 2 / 6
    # Fewer than eight rows are whole ones.
    few = _passes(Layout(dp=5), batch_of(32.0, 10.0, lengths, 1000))
    assert few.tokens.count == 7 * 30


def test_gradients_travel_once_an_optimizer_step(qwen):
    whole = qwen.parameters.total
    ranks = Ranks(size=8)
    expected = reduce_scatter_s(4 * whole, ranks, H100) + all_gather_s(2 * whole, ranks, H100)
    once = dict(_train(qwen, Layout(dp=8)).parts)
    twice = dict(_train(qwen, Layout(dp=8), mini_batches=2).parts)
    assert once["gradients"] == pytest.approx(expected)
    assert twice["gradients"] == pytest.approx(2 * expected)
    passes = set(once) - {"gradients", "optimizer"}
    assert passes
    for part in passes:  # each optimizer step has half of the samples
        assert twice[part] == pytest.approx(once[part]), part
    none = dict(_train(qwen, Layout(dp=8), shard="none").parts)
    assert none["gradients"] == pytest.approx(all_reduce_s(4 * whole, ranks, H100))
    stepped = 30 * whole / efficiency.rates(H100.spec).nbytes
    assert none["optimizer"] == pytest.approx(stepped)
    assert once["optimizer"] == pytest.approx(stepped / 8)


def test_the_stage_with_most_parameters_decides_what_is_exchanged():
    # With a value head the first of two stages has the embedding, with a tied table both have it.
    shape = SHAPE.with_value_head()
    first, last = stage_parameters(shape, 1, 2, 1)
    assert first.total > last.total
    assert _largest_stage(shape, Layout(pp=2)) == (0, first.total)
    first, last = stage_parameters(SHAPE, 1, 2, 1)
    assert last.total > first.total
    assert _largest_stage(SHAPE, Layout(pp=2)) == (0, last.total)


def test_an_offloaded_optimizer_streams_its_state_both_ways(qwen):
    there = dict(_train(qwen, Layout(dp=8)).parts)["optimizer"]
    away = dict(_train(qwen, Layout(dp=8), offload_optimizer=True).parts)["optimizer"]
    link = 54e9 * efficiency.HOST_LINK_SHARE
    assert away - there == pytest.approx(24 * qwen.parameters.total / 8 / link)


def test_sharded_parameters_cost_what_kernels_do_not_hide(qwen):
    near = dict(_train(qwen, Layout(dp=8), shard="full").parts)
    assert near.get("sharded parameters", 0) == 0
    tiny = ConstantLengths(tokens=16)
    bare = _train(qwen, Layout(dp=64), samples=64, lengths=tiny, shard="full")
    parts = dict(bare.parts)
    gathered = 2 * all_gather_s(2 * qwen.parameters.total, Ranks(size=64), H100)
    gathered += reduce_scatter_s(4 * qwen.parameters.total, Ranks(size=64), H100)
    hidden = sum(s for name, s in parts.items() if name not in ("sharded parameters", "optimizer"))
    assert parts["sharded parameters"] == pytest.approx(gathered - hidden)


def test_no_step_is_shorter_than_its_longest_sample(qwen):
    lengths = LognormalLengths(mean=1000, sigma=1.0, maximum=30_000)
    many = _forward(qwen, Layout(dp=8), samples=8, lengths=lengths, micro_tokens=32_768).seconds
    more = _forward(qwen, Layout(dp=64), samples=8, lengths=lengths, micro_tokens=32_768).seconds
    assert more == pytest.approx(many)
    mean = _forward(qwen, Layout(dp=8), samples=8, lengths=ConstantLengths(tokens=1000)).seconds
    assert many > 2 * mean


def test_more_replicas_are_faster_while_there_are_samples(qwen):
    times = [_train(qwen, Layout(dp=dp), samples=256).seconds for dp in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times, reverse=True)


def test_context_ranks_share_tokens_and_pass_keys_around(qwen):
    parts = dict(_forward(qwen, Layout(cp=4), lengths=ConstantLengths(tokens=32768)).parts)
    alone = dict(_forward(qwen, Layout(), lengths=ConstantLengths(tokens=32768)).parts)
    assert parts["attention"] == pytest.approx(alone["attention"] / 4, rel=0.01)
    assert parts["mlp"] == pytest.approx(alone["mlp"] / 4, rel=0.01)


def test_weights_of_equal_layouts_are_copied_in_place(qwen):
    found = dict(
        COST.weight_sync(qwen, Layout(tp=2, dp=4), Layout(tp=2, dp=4), H100, apart=False).parts
    )
    assert "weights" not in found
    half = qwen.parameters.total
    assert found["copy"] == pytest.approx(2 * half / efficiency.rates(H100.spec).nbytes)


def test_a_device_fetches_what_its_trainer_does_not_have(qwen):
    link = 450e9 * efficiency.LINK_SHARE
    whole = 2 * qwen.parameters.total

    def seconds(source, destination, **options):
        found = COST.weight_sync(qwen, source, destination, H100, apart=False, **options)
        return dict(found.parts)["weights"]

    # tp 4 to tp 1: three quarters are with the others; to tp 8 nothing is.
    assert seconds(Layout(tp=4, dp=2), Layout(dp=8)) == pytest.approx(whole * 3 / 4 / link)
    assert seconds(Layout(dp=8), Layout(tp=2, dp=4), shard="full") == pytest.approx(
        whole * (1 / 2 - 1 / 8) / link
    )
    # 64 data ranks divide the parameters: most come over the network.
    far = 50e9 * efficiency.NETWORK_SHARE
    assert seconds(Layout(dp=64), Layout(tp=2, dp=32), shard="full") == pytest.approx(
        whole * (1 / 2 - 1 / 64) / far
    )


def test_engines_apart_receive_their_part_over_the_network(qwen):
    whole = 2 * qwen.parameters.total
    far = 50e9 * efficiency.NETWORK_SHARE
    found = COST.weight_sync(qwen, Layout(tp=8, dp=2), Layout(tp=2, dp=8), H100, apart=True)
    assert dict(found.parts)["weights"] == pytest.approx(whole / 2 / far)
    slow = COST.weight_sync(qwen, Layout(dp=16), Layout(tp=2, dp=8), H100, apart=True)
    assert dict(slow.parts)["weights"] == pytest.approx(whole / far)


def test_each_tensor_of_the_checkpoint_takes_its_time(qwen):
    # 28 layers of 12 tensors, two tables and the last norm.
    for apart, each in ((False, 0.40e-3), (True, 0.15e-3)):
        found = COST.weight_sync(qwen, Layout(tp=8), Layout(tp=8), H100, apart=apart)
        assert dict(found.parts)["tensors"] == pytest.approx(339 * each)


def test_a_move_goes_over_the_host_link():
    assert COST.move(54 * 10**9, H100).seconds == pytest.approx(1 / efficiency.HOST_LINK_SHARE)


@pytest.mark.parametrize(
    ("device", "share"),
    [
        # 0.52 of an H100, which reaches 266 operations a byte; what is left of it takes as long
        # however fast products are: 1 / (1 + (1 / 0.52 - 1) balance / 266).
        ("H100", 0.52),
        ("H800", 0.52),
        ("H200", 0.6050),  # 790 / 4.2
        ("A100", 0.6747),  # 0.8 x 312 / (0.88 x 2.04)
        ("H20", 0.8849),  # 132 / (0.88 x 4.0)
        ("GB200", 0.5036),  # 0.8 x 2500 / (0.88 x 8.0)
        ("CPU", 0.52),
    ],
)
def test_what_kernels_leave_of_a_trainers_time_is_bound_by_memory(device, share):
    assert efficiency.rates(device_spec(device)).trainer_share == pytest.approx(share, rel=1e-3)


def test_a_trainers_attention_is_as_fast_as_measured_where_the_catalogue_says_it():
    known = efficiency.rates(device_spec("H20"))
    assert known.trainer_attention_flops == 84e12
    assert known.flops == pytest.approx(132e12 * 0.93)
    # Of a device with other products nothing is measured, nor where the catalogue says nothing.
    other = replace(device_spec("H20"), measured_flops=None, measured_attention_flops=None)
    assert efficiency.rates(other).trainer_attention_flops == pytest.approx(0.42 * 0.8 * 148e12)
    assert efficiency.rates(device_spec("H100")).trainer_attention_flops == 0.42 * 798e12


def test_an_a100_trains_in_as_many_times_the_seconds_of_an_h100_as_published(repository):
    # llm-foundry's 7B on 8 devices, tokens a second and device: 10,643 and 4,641.
    config = json.loads((repository / "configs/models/llama-3.1-8b.json").read_text("utf-8"))
    shape = ModelShape.from_hf_config(config)
    seconds = [
        COST.train(
            shape,
            Layout(dp=8),
            Machine(spec=device_spec(device), node_size=8),
            samples=96,
            prompt_tokens=1,
            lengths=ConstantLengths(tokens=2047),
            mini_batches=1,
            micro_tokens=12288,
            recompute="none",
            shard="full",
        ).seconds
        for device in ("H100", "A100")
    ]
    assert seconds[1] / seconds[0] == pytest.approx(10_643 / 4_641, rel=0.05)


def test_what_a_framework_saves_goes_out_and_comes_back_at_its_own_rates():
    # 2.41 and 5.32 GiB a second.
    assert saved_s(2**30) == pytest.approx(0.60291, rel=1e-4)


def test_experts_are_trained_without_skew_and_with_their_exchange(repository):
    config = json.loads((repository / "configs/models/qwen3-30b-a3b.json").read_text("utf-8"))
    shape = ModelShape.from_hf_config(config)
    parts = dict(_train(shape, Layout(dp=8, ep=8)).parts)
    assert parts["expert parallel"] > 0
    fewer = replace(shape, experts=replace(shape.experts, num_active=4))
    assert dict(_train(fewer, Layout(dp=8, ep=8)).parts)["experts"] < parts["experts"]


def test_products_shared_out_evenly_by_hand(qwen):
    # A layer: queries, keys, values and output, and three products of the MLP; and the head.
    layer = 3584 * (28 + 2 * 4) * 128 + 28 * 128 * 3584 + 3 * 3584 * 18944
    each = 2 * (28 * layer + 3584 * 152064)
    rates = efficiency.rates(H100.spec)
    rate = 8 * rates.flops * rates.trainer_share
    asked = {"devices": 8, "tokens": 1000.0}
    assert efficiency.rates(H100.spec).expert_flops <= efficiency.rates(H100.spec).flops
    forward = COST.least_passes_s(qwen, H100, training=False, **asked)
    assert forward == pytest.approx(1000 * each / rate)
    assert COST.least_passes_s(qwen, H100, training=True, **asked) == pytest.approx(3 * forward)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-32b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("device", ["H100-SXM-80GB", "A100-SXM-80GB", "Ascend-A2-910B-376T"])
def test_no_layout_is_faster_than_products_shared_out_evenly(model, device, repository):
    shape = ModelShape.from_hf_config(
        json.loads((repository / f"configs/models/{model}.json").read_text("utf-8"))
    )
    machine = Machine(spec=device_spec(device), node_size=8)
    lengths = LognormalLengths(mean=900, sigma=0.8, maximum=4096)
    asked = {"prompt_tokens": 100, "lengths": lengths, "samples": 256, "micro_tokens": 16384}
    experts = 8 if shape.experts is not None else 1
    for shape_of in (shape, shape.with_value_head()):
        for sizes in ({"dp": 16}, {"tp": 2, "pp": 2, "dp": 4}, {"cp": 2, "dp": 8}, {"pp": 16}):
            layout = Layout(**sizes, ep=experts if sizes == {"dp": 16} else 1)
            bound = {"devices": 16, "tokens": 256 * 1000.0}
            least = COST.least_passes_s(shape_of, machine, training=False, **bound)
            assert 0 < least <= COST.forward(shape_of, layout, machine, **asked).seconds
            least = COST.least_passes_s(shape_of, machine, training=True, **bound)
            assert least <= COST.train(shape_of, layout, machine, mini_batches=2, **asked).seconds
