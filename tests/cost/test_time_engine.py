"""Steps of an engine: kernels and passes by hand, and what must grow with what."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost import efficiency, kernels
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.efficiency import rates
from flowrl.cost.engine_steps import decode_parts, prefill_parts, sends_s
from flowrl.cost.forward_pass import Tokens, forward_parts
from flowrl.cost.layout import Layout
from flowrl.cost.models import Experts, ModelShape

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
A100 = Machine(spec=device_spec("A100-SXM-80GB"), node_size=8)
RATES = rates(H100.spec)

DENSE = ModelShape(
    family="qwen3",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tied=False,
)
SPARSE = replace(DENSE, experts=Experts(num_experts=8, num_active=2, expert_size=32))


@pytest.fixture(scope="module")
def qwen(repository):
    config = json.loads((repository / "configs/models/qwen3-8b.json").read_text("utf-8"))
    return ModelShape.from_hf_config(config)


@pytest.fixture(scope="module")
def deepseek(repository):
    config = json.loads((repository / "configs/models/deepseek-v3.json").read_text("utf-8"))
    return ModelShape.from_hf_config(config)


def test_rates_are_shares_of_what_was_measured_or_else_of_the_data_sheet():
    assert RATES.flops == pytest.approx(0.93 * 798e12)
    assert RATES.nbytes == pytest.approx(0.93 * 3.0e12)
    assert RATES.decode_attention_bytes == pytest.approx(3.0e12)
    a100 = rates(A100.spec)
    assert a100.flops == pytest.approx(0.80 * 0.93 * 312e12)
    assert a100.decode_attention_bytes == pytest.approx(0.88 * 0.58 * 2.04e12)


def test_a_small_product_waits_for_its_weights_and_a_large_one_computes():
    weights = 4096 * 12288
    small = kernels.matmul_s(RATES, 1, 4096, 12288, 2)
    assert small == pytest.approx(4e-6 + 2 * (weights + 4096 + 12288) / RATES.nbytes)
    large = kernels.matmul_s(RATES, 8192, 4096, 12288, 2)
    assert large == pytest.approx(4e-6 + 2 * 8192 * weights / RATES.flops)


def test_a_decode_step_of_a_dense_model_by_hand():
    parts = decode_parts(DENSE, Layout(), H100, batch=3, context=9)
    mm, el = kernels.matmul_s, kernels.elementwise_s
    assert parts["projections"] == pytest.approx(
        2 * (mm(RATES, 3, 64, 64 + 2 * 32, 2) + mm(RATES, 3, 64, 64, 2))
    )
    mlp = mm(RATES, 3, 64, 256, 2) + mm(RATES, 3, 128, 64, 2) + el(RATES, 3 * 3 * 128 * 2)
    assert parts["mlp"] == pytest.approx(2 * mlp)
    assert parts["norms"] == pytest.approx(2 * 2 * el(RATES, 4 * 3 * 64 * 2))
    assert parts["head"] == pytest.approx(mm(RATES, 3, 64, 1000, 2))
    # 3 rows of 10 tokens; keys and values of 2 heads of 16, in 2 bytes.
    cached = 3 * 10 * 2 * 2 * 16 * 2
    assert parts["attention"] == pytest.approx(2 * (12e-6 + cached / 3.0e12))
    assert parts["tensor parallel"] == parts["pipeline"] == 0


def test_prefill_attention_counts_pairs_under_the_causal_mask():
    parts = prefill_parts(DENSE, Layout(), H100, rows=2, tokens=100)
    pairs = 2 * 100 * 101 / 2
    operations = 2 * pairs * 4 * (16 + 16)
    nbytes = 200 * (4 + 2) * 32 * 2
    expected = 52e-6 + operations / (0.75 * 798e12) + nbytes / RATES.nbytes
    assert parts["attention"] == pytest.approx(2 * expected)


def test_key_heads_are_repeated_where_there_are_fewer_than_ranks():
    four = forward_parts(DENSE, Layout(tp=4), H100, _decoding(1e6, 1e9))
    two = forward_parts(DENSE, Layout(tp=2), H100, _decoding(1e6, 1e9))
    assert four["attention"] == pytest.approx(two["attention"])


def test_experts_read_the_distinct_ones_that_are_hit():
    parts = decode_parts(SPARSE, Layout(), H100, batch=4, context=9)
    hit = 8 * (1 - (1 - 2 / 8) ** 4)
    weights = hit * 3 * 64 * 32 * 2 / 3.0e12
    copies = 5 * 4 * 2 * 64 * 2 / 3.0e12
    assert parts["experts"] == pytest.approx(2 * (20e-6 + weights + copies))
    assert parts["router"] == pytest.approx(2 * kernels.matmul_s(RATES, 4, 64, 8, 2))


def test_whole_experts_on_ranks_are_skewed_and_do_not_exchange_inside_a_replica():
    big = replace(SPARSE, hidden_size=2048, experts=replace(SPARSE.experts, expert_size=4096))
    divided = forward_parts(big, Layout(tp=4), H100, _decoding(65536, 1))
    whole = forward_parts(big, Layout(tp=4, ep=4), H100, _decoding(65536, 1))
    products = 2 * 65536 * 2 / 4 * 3 * 2048 * 4096 / (0.8 * 798e12)
    assert whole["experts"] - divided["experts"] == pytest.approx(
        2 * products * (4**0.65 - 1), rel=1e-6
    )
    assert whole["expert parallel"] == 0


def test_experts_over_several_replicas_are_reached_by_two_all_to_alls():
    parts = forward_parts(SPARSE, Layout(tp=1, dp=8, ep=8), H100, _decoding(1000, 1))
    sent = 1000 * 64 * 2 * 2
    once = 2e-6 + 8 * 0.2e-6 + sent * 7 / 8 / (450e9 * 0.7)
    assert parts["expert parallel"] == pytest.approx(2 * 2 * once)


def test_a_latent_cache_is_read_whole_by_every_tensor_rank(deepseek):
    one = decode_parts(deepseek, Layout(tp=8), H100, batch=64, context=32_000)
    cached = 64 * 32_001 * (512 + 64) * 2
    operations = 64 * 32_001 * 2 * 128 / 8 * (576 + 512)
    slower = max(cached / 3.0e12, operations / (0.75 * 798e12))
    assert one["attention"] == pytest.approx(61 * (12e-6 + slower))


def test_a_pipeline_keeps_a_part_of_the_batch_on_each_stage(qwen):
    whole = decode_parts(qwen, Layout(), H100, batch=16, context=1000)
    staged = decode_parts(qwen, Layout(pp=2), H100, batch=32, context=1000)
    assert sum(whole.values()) == pytest.approx(sum(staged.values()) - staged["pipeline"])
    # Two stages are next to each other; 16 rows of 4096 elements go once between them.
    assert staged["pipeline"] == pytest.approx(2e-6 + 16 * 4096 * 2 / (450e9 * 0.7))


def test_sends_between_stages_leave_the_node_where_stages_do(qwen):
    nbytes = 4096 * 4096 * 2 / 4
    near, far = 2e-6 + nbytes / (450e9 * 0.7), 35e-6 + nbytes / (50e9 * 0.8)
    # Stages of 4 devices: two fit a node, so of 5 steps between 6 stages 2 go across.
    assert sends_s(qwen, Layout(tp=4, pp=6), H100, 4096) == pytest.approx(3 * near + 2 * far)
    assert sends_s(qwen, Layout(tp=8, pp=3), H100, 8192) == pytest.approx(2 * far)


def test_prompts_fill_and_drain_a_pipeline(qwen):
    # 8 rows of one chunk each: 8 + 4 - 1 chunk times of a quarter of the layers.
    rows = prefill_parts(qwen, Layout(pp=4), H100, rows=8, tokens=8192, chunk_tokens=8192)
    one = prefill_parts(qwen, Layout(), H100, rows=1, tokens=8192)
    assert rows["mlp"] == pytest.approx(one["mlp"] * 11 / 4)


def test_the_host_is_a_part_of_its_own(qwen):
    step = AnalyticCost().decode_step(qwen, Layout(), H100, batch=1, context=100)
    bare = AnalyticCost(host_s=0).decode_step(qwen, Layout(), H100, batch=1, context=100)
    assert dict(step.parts)["host"] == efficiency.ENGINE_HOST_S
    assert step.seconds - bare.seconds == pytest.approx(efficiency.ENGINE_HOST_S)
    assert step.source == "analytic"


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 512),
    context=st.integers(1, 32_000),
)
def test_more_rows_and_longer_contexts_never_take_less(qwen, tp, batch, context):
    cost, layout = AnalyticCost(), Layout(tp=tp)

    def seconds(batch: int, context: int, layout: Layout = layout) -> float:
        return cost.decode_step(qwen, layout, H100, batch=batch, context=context).seconds

    assert seconds(batch + 1, context) >= seconds(batch, context)
    assert seconds(batch, context + 1) >= seconds(batch, context)
    assert seconds(2 * batch, context) <= 2 * seconds(batch, context)


@settings(max_examples=40, deadline=None)
@given(tp=st.sampled_from([1, 2, 4]), batch=st.integers(64, 512), context=st.integers(2000, 16_000))
def test_more_devices_are_faster_where_bandwidth_binds(qwen, tp, batch, context):
    fewer = decode_parts(qwen, Layout(tp=tp), H100, batch=batch, context=context)
    more = decode_parts(qwen, Layout(tp=2 * tp), H100, batch=batch, context=context)
    for part in ("attention", "mlp", "head", "projections"):
        assert more[part] <= fewer[part]
    assert sum(more.values()) < sum(fewer.values())


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 16), tokens=st.integers(1, 8192), tp=st.sampled_from([1, 2, 8]))
def test_more_prompts_never_enter_faster(qwen, rows, tokens, tp):
    cost, layout = AnalyticCost(), Layout(tp=tp)

    def seconds(rows: int, tokens: int) -> float:
        return cost.prefill(qwen, layout, H100, rows=rows, tokens=tokens).seconds

    assert seconds(rows + 1, tokens) >= seconds(rows, tokens) * (1 - 1e-9)
    assert seconds(rows, tokens + 1) >= seconds(rows, tokens) * (1 - 1e-9)
    assert math.isfinite(seconds(rows, tokens))


def test_older_devices_are_slower_at_everything(qwen):
    for layout in (Layout(), Layout(tp=8)):
        new = decode_parts(qwen, layout, H100, batch=64, context=2048)
        old = decode_parts(qwen, layout, A100, batch=64, context=2048)
        assert all(old[part] >= new[part] for part in new)


def _decoding(count: float, pairs: float) -> Tokens:
    return Tokens(count=count, pairs=pairs, cached=True, num_logits=0)
