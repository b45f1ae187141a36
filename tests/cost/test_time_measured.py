"""Measured times replace estimates point by point; AIConfigurator's likewise."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.aiconfigurator import AIConfiguratorCost, packaged_models
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.decode_table import LinearPrefill
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths
from flowrl.cost.measured import BatchLine, MeasuredCost, MeasuredModel
from flowrl.cost.models import ModelShape
from flowrl.errors import BackendError, ConfigError

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
H20 = Machine(spec=device_spec("H20-96GB"), node_size=8)
ANALYTIC = AnalyticCost()
PACKAGE = importlib.util.find_spec("aiconfigurator_core")


@pytest.fixture(scope="module")
def qwen(repository):
    return _shape(repository, "qwen3-8b")


def _shape(repository, name: str) -> ModelShape:
    text = (repository / f"configs/models/{name}.json").read_text("utf-8")
    return ModelShape.from_hf_config(json.loads(text))


@pytest.fixture(scope="module")
def measured(qwen):
    return MeasuredCost(
        [
            MeasuredModel(
                shape=qwen,
                device="H100-SXM-80GB",
                layout=Layout(tp=2, dp=4),
                decode=((1, 500, 0.010), (1, 1500, 0.012), (64, 500, 0.020), (64, 1500, 0.030)),
                prefill=LinearPrefill(call_s=0.1, row_s=0.01, token_s=1e-5),
                train=BatchLine(call_s=1.0, pass_s=0.1, token_s=1e-4),
            )
        ],
        ANALYTIC,
    )


def _both(measured, name, *where, **asked):
    return getattr(measured, name)(*where, **asked), getattr(ANALYTIC, name)(*where, **asked)


def test_between_measured_steps_times_are_linear(measured, qwen):
    found = measured.decode_step(qwen, Layout(tp=2), H100, batch=64, context=1000)
    assert found.seconds == pytest.approx(0.025)
    assert found.source == "measured"
    assert found.notes == ()


def test_beyond_what_was_measured_the_level_stays_and_the_shape_is_estimated(measured, qwen):
    where = (qwen, Layout(tp=2), H100)
    found, asked = _both(measured, "decode_step", *where, batch=256, context=3000)
    there = ANALYTIC.decode_step(*where, batch=64, context=1500)
    assert found.seconds == pytest.approx(0.030 * asked.seconds / there.seconds)
    assert "measured up to 64 rows and 1500 tokens" in found.notes[0]


@pytest.mark.parametrize(
    ("layout", "machine"), [(Layout(tp=4), H100), (Layout(tp=2, pp=2), H100), (Layout(tp=2), H20)]
)
def test_other_layouts_and_devices_are_estimated(measured, qwen, layout, machine):
    found, asked = _both(measured, "decode_step", qwen, layout, machine, batch=64, context=1000)
    assert found == asked
    assert found.source == "analytic"


def test_a_prefill_line_and_what_has_none(measured, qwen):
    found = measured.prefill(qwen, Layout(tp=2, dp=8), H100, rows=3, tokens=1000)
    assert found.seconds == pytest.approx(0.1 + 3 * 0.01 + 3000 * 1e-5)
    found, asked = _both(
        measured,
        "forward",
        *(qwen, Layout(tp=2), H100),
        samples=8,
        prompt_tokens=10,
        lengths=ConstantLengths(tokens=100),
    )
    assert found == asked


def test_a_measured_update_is_divided_among_replicas_which_exchange_gradients(measured, qwen):
    asked = {
        "samples": 64,
        "prompt_tokens": 100,
        "lengths": ConstantLengths(tokens=900),
        "mini_batches": 2,
        "micro_tokens": 4000,
    }
    found, estimated = _both(measured, "train", qwen, Layout(tp=2, dp=4), H100, **asked)
    # 16 samples of 1000 tokens on each replica, in 2 calls of 2 passes.
    line = 2 * 1.0 + 4 * 0.1 + 16_000 * 1e-4
    assert found.source == "measured"
    assert found.seconds == pytest.approx(line + dict(estimated.parts)["gradients"])
    again, estimated = _both(
        measured, "train", qwen, Layout(tp=2, dp=4), H100, **asked, recompute="full"
    )
    assert again.seconds == estimated.seconds
    assert "measured with recompute none" in again.notes[0]


def test_a_rollout_of_measured_steps_is_measured(measured, qwen):
    asked = {
        "samples": 64,
        "group_size": 8,
        "prompt_tokens": 500,
        "lengths": ConstantLengths(tokens=1000),
        "slots": 64,
        "kv_tokens": 10**6,
    }
    found = measured.rollout(qwen, Layout(tp=2), H100, **asked)
    assert found.source == "measured"
    # A thousand steps of 64 rows, from 500 to 1500 tokens; 8 prompts enter.
    expected = 1000 * 0.025 + 0.1 + 8 * 0.01 + 4000 * 1e-5
    assert found.seconds == pytest.approx(expected)
    assert measured.rollout(qwen, Layout(tp=4), H100, **asked).source == "analytic"


def test_one_place_is_measured_once(qwen):
    once = MeasuredModel(shape=qwen, device="H100-SXM-80GB", layout=Layout(tp=2))
    twice = MeasuredModel(shape=qwen, device="H100-SXM-80GB", layout=Layout(tp=2, dp=8))
    with pytest.raises(ConfigError, match="two measurements of one model"):
        MeasuredCost([once, twice], ANALYTIC)


def test_what_a_partial_cost_does_not_know_it_passes_on(measured, qwen):
    sync = {"apart": True, "dtype_bytes": 2, "shard": "full"}
    found, asked = _both(measured, "weight_sync", qwen, Layout(dp=8), Layout(tp=8), H100, **sync)
    assert found == asked
    assert measured.move(10**9, H100) == ANALYTIC.move(10**9, H100)


class _Handle:
    """An engine as the package has it: the same methods, and times that tell what was asked."""

    compiled: list[tuple[str, str, str, dict[str, object]]]

    def __init__(self) -> None:
        self.compiled = []

    def compile(self, model: str, system: str, backend: str, **options: object) -> _Handle:
        if model == "broken/model":
            raise RuntimeError("no such table\nwith details")
        self.compiled.append((model, system, backend, options))
        return self

    def predict_decode_latency(self, bs: int, isl: int) -> float:
        if bs > 512:
            raise RuntimeError("outside of the grid")
        return 1.0 + bs * 0.01 + isl * 0.001

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        return 2.0 * bs * isl / 1000


def test_aiconfigurator_answers_where_it_has_model_and_system(qwen):
    handle = _Handle()
    cost = AIConfiguratorCost(
        ANALYTIC, names={qwen: "Qwen/Qwen3-8B"}, host_s=0.5, compile_engine=handle.compile
    )
    found = cost.decode_step(qwen, Layout(tp=2, dp=4), H100, batch=100, context=1000.4)
    assert found.seconds == pytest.approx(0.5 + 3e-3)
    assert found.source == "aiconfigurator"
    assert found.notes == ()
    prefill = cost.prefill(qwen, Layout(tp=2), H100, rows=2, tokens=1000)
    assert prefill.seconds == pytest.approx(0.5 + 4e-3)
    # One engine for a replica's layout, whatever the number of replicas, in bfloat16.
    ((model, system, backend, options),) = handle.compiled
    assert (model, system, backend) == ("Qwen/Qwen3-8B", "h100_sxm", "sglang")
    assert options["tp_size"] == 2
    assert options["gemm_quant_mode"] == "bfloat16"
    assert "moe_tp_size" not in options


def test_aiconfigurator_is_told_how_experts_lie(repository):
    shape, handle = _shape(repository, "qwen3-30b-a3b"), _Handle()
    cost = AIConfiguratorCost(ANALYTIC, names={shape: "m"}, compile_engine=handle.compile)
    cost.decode_step(shape, Layout(tp=8, ep=4), H100, batch=1, context=10)
    options = handle.compiled[0][3]
    assert (options["moe_tp_size"], options["moe_ep_size"]) == (2, 4)


def test_what_aiconfigurator_lacks_is_estimated_with_the_reason(qwen, repository):
    other = _shape(repository, "qwen2.5-7b")
    broken = _shape(repository, "qwen3-32b")
    cost = AIConfiguratorCost(
        ANALYTIC,
        names={qwen: "Qwen/Qwen3-8B", broken: "broken/model"},
        compile_engine=_Handle().compile,
    )

    def note(shape, layout, machine, batch=8):
        found = cost.decode_step(shape, layout, machine, batch=batch, context=100)
        asked = ANALYTIC.decode_step(shape, layout, machine, batch=batch, context=100)
        assert (found.seconds, found.source) == (asked.seconds, "analytic")
        return found.notes[-1]

    assert note(qwen, Layout(), H20) == "AIConfigurator has no H20-96GB"
    slower = Machine(spec=replace(H100.spec, flops=500e12), node_size=8)
    rated = "AIConfigurator has no H100-SXM-80GB with other rates than the catalogue's"
    assert note(qwen, Layout(), slower) == rated
    assert "no model of these sizes (qwen2)" in note(other, Layout(), H100)
    assert "not asked for cp 2" in note(qwen, Layout(cp=2), H100)
    assert note(qwen, Layout(), H100, batch=513).endswith("no such point: outside of the grid")
    assert note(broken, Layout(), H100).endswith("broken/model on h100_sxm: no such table")


@pytest.mark.skipif(PACKAGE is not None, reason="aiconfigurator-core is installed")
def test_a_missing_package_is_named_with_the_way_to_get_it():
    with pytest.raises(BackendError, match="AIConfigurator is not installed") as caught:
        AIConfiguratorCost(ANALYTIC)
    assert "flowrl[aiconfigurator]" in str(caught.value)
    assert caught.value.where == "plan.engine_times"
    with pytest.raises(BackendError, match="not installed"):
        packaged_models()


@pytest.mark.skipif(PACKAGE is None, reason="aiconfigurator-core is not installed")
def test_the_real_package_gives_its_published_steps(qwen):
    cost = AIConfiguratorCost(ANALYTIC, host_s=0.0)
    found = cost.decode_step(qwen, Layout(tp=4), H100, batch=64, context=2048)
    assert found.source == "aiconfigurator"
    # aiconfigurator-core 0.12.0, h100_sxm, SGLang 0.5.14.
    assert found.seconds == pytest.approx(4.976e-3, rel=1e-3)
    assert cost.prefill(qwen, Layout(tp=4), H100, rows=1, tokens=2048).seconds == pytest.approx(
        21.4174e-3, rel=1e-3
    )


def test_a_measured_line_counts_calls_passes_rows_tokens_and_those_of_one_row_alone():
    line = BatchLine(call_s=1.0, pass_s=10.0, row_s=100.0, token_s=1000.0, distinct_s=10000.0)
    assert line(calls=1, passes=2, rows=3, tokens=4, distinct=5) == 54321.0
