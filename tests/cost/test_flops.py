"""FLOPs, against hand-made numbers, operations counted in real modules, and other conventions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.cost import FlopsConvention, ModelShape, flops_per_token, forward_flops, model_flops
from tests.cost.test_models import DEEPSEEK_V3, LLAMA31_8B, TINY, TINY_EXPERTS, TINY_LATENT
from tests.proofs.oracles.case import Case, NotOffered
from tests.proofs.oracles.flops import compute
from tests.proofs.oracles.runner import Passed, judge, load

SQUARE = ModelShape.from_hf_config(
    {
        "model_type": "llama",
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "vocab_size": 10,
    }
)


def test_a_small_model_by_hand() -> None:
    # Per layer: q 4x4, k and v 4x2 each, o 4x4 = 48 weights; mlp 3 x 4 x 6 = 72.
    parts = forward_flops(SQUARE, [5, 2])
    assert parts.projections == 3 * 2 * 7 * 48
    assert parts.mlp == 3 * 2 * 7 * 72
    # 2 heads x (2 + 2) elements x 2 operations x half of the squares.
    assert parts.attention == 3 * 2 * 4 * (25 + 4)
    assert parts.head == 2 * 7 * 40
    assert parts.embedding == parts.router == parts.mtp == 0
    assert parts.total == parts.projections + parts.mlp + parts.attention + parts.head


def test_training_takes_three_forward_passes_and_four_with_recomputation() -> None:
    forward = model_flops(SQUARE, [5, 2])
    assert model_flops(SQUARE, [5, 2], work="training") == 3 * forward
    assert model_flops(SQUARE, [5, 2], work="training_with_recompute") == 4 * forward


def test_sequences_add_up_and_empty_ones_cost_nothing() -> None:
    assert model_flops(SQUARE, [5, 0, 2]) == model_flops(SQUARE, [5]) + model_flops(SQUARE, [2])
    assert model_flops(SQUARE, []) == 0
    with pytest.raises(ValueError, match="-1"):
        model_flops(SQUARE, [3, -1])


def test_the_three_counts_of_pairs_differ_as_they_are_named() -> None:
    def attention(kind: Any) -> int:
        return forward_flops(SQUARE, [8], convention=FlopsConvention(attention=kind)).attention

    assert attention("full") == 2 * attention("causal_half")
    assert attention("causal_exact") * 8 == attention("causal_half") * 9


def test_tokens_one_by_one_cost_what_the_exact_pairs_cost() -> None:
    exact = FlopsConvention(attention="causal_exact")
    one_by_one = sum(flops_per_token(SQUARE, seen) for seen in range(1, 10))
    assert one_by_one == model_flops(SQUARE, [9], convention=exact)


def test_only_the_logits_that_are_computed_are_counted() -> None:
    assert forward_flops(SQUARE, [5, 2], num_logits=3).head == 2 * 3 * 40
    assert forward_flops(SQUARE, [5, 2], convention=FlopsConvention(head="omitted")).head == 0


def test_conventions_change_their_own_part() -> None:
    plain = forward_flops(SQUARE, [5])
    product = forward_flops(SQUARE, [5], convention=FlopsConvention(embedding="product"))
    assert product.embedding == plain.head
    heads = forward_flops(SQUARE, [5], convention=FlopsConvention(key_value_heads="all_heads"))
    assert heads.projections - plain.projections == 3 * 2 * 5 * (2 * 4 * 2)
    experts = ModelShape.from_hf_config(TINY_EXPERTS)
    router = forward_flops(experts, [5]).router
    assert router == 3 * 2 * 5 * 48 * 6
    without = forward_flops(experts, [5], convention=FlopsConvention(router="omitted"))
    assert (without.router, without.total) == (0, forward_flops(experts, [5]).total - router)


def test_the_output_projection_is_not_square_where_heads_are_wider() -> None:
    shape = ModelShape.from_hf_config({"model_type": "qwen3", **TINY, "head_dim": 20})
    hidden = FlopsConvention(output_projection="hidden")
    square = forward_flops(shape, [1], convention=hidden)
    gap = forward_flops(shape, [1]).projections - square.projections
    assert gap == 3 * 2 * 48 * (4 * 20 - 48)


def test_twice_the_active_weights_is_the_forward_pass_of_a_token_without_attention() -> None:
    """The rule of thumb 2 N, with N active parameters less those that multiply nothing."""
    for config in (LLAMA31_8B, DEEPSEEK_V3):
        shape = ModelShape.from_hf_config(config)
        counts = shape.parameters
        weights = counts.active - counts.embedding - counts.norm
        parts = forward_flops(shape, [1])
        assert parts.total - parts.attention == 2 * weights


def test_a_layer_that_predicts_ahead_costs_a_layer_a_projection_and_an_output_layer() -> None:
    shape = ModelShape.from_hf_config(DEEPSEEK_V3)
    counts = shape.parameters
    parts = forward_flops(shape, [1], convention=FlopsConvention(mtp="counted"))
    norms = 5 * shape.hidden_size + 512 + 1536
    one_pair = parts.attention // shape.num_layers
    assert parts.mtp == 2 * (counts.active_mtp - norms + counts.head) + one_pair
    assert forward_flops(shape, [1]).mtp == 0


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model_type": "qwen2", **TINY}, id="qwen2"),
        pytest.param({"model_type": "qwen3", **TINY, "head_dim": 20}, id="qwen3, wide heads"),
        pytest.param(TINY_EXPERTS, id="experts"),
        pytest.param(TINY_LATENT, id="latent"),
        pytest.param({**TINY_LATENT, "q_lora_rank": None}, id="latent, queries without rank"),
    ],
)
def test_counts_equal_the_products_of_a_real_module(config: dict[str, Any]) -> None:
    """Torch counts each product that Transformers' eager attention runs, on all pairs."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    rest = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **rest)
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(14).view(2, 7))
    shape = ModelShape.from_hf_config(config)
    full = FlopsConvention(attention="full")
    assert counter.get_total_flops() == forward_flops(shape, [7, 7], convention=full).total


def recorded(library: str, config: dict[str, Any], **given: Any) -> Case:
    value = {
        "name": f"small__{library}",
        "source": {"function": given.pop("function", "")},
        "inputs": {"config": config, "batch_seqlens": [5, 2]},
        "options": given,
        "expected": {},
        "rtol": 0.0,
        "atol": 0.0,
        "compare": "all",
    }
    return Case.from_json(value, "flops", "here")


def test_recorded_counts_of_other_libraries_are_reproduced(reference_data: Path) -> None:
    cases = load([reference_data / "oracles" / "flops.json"])
    verdicts = {case.name: judge(case) for case in cases}
    assert len(verdicts) > 60
    assert {name: said for name, said in verdicts.items() if said != Passed()} == {}


def test_libraries_differ_as_the_adapter_says() -> None:
    config = {"model_type": "llama", **TINY, "head_dim": 20}
    shape = ModelShape.from_hf_config(config)

    def by_hand(heads: int, output: int, vocab: int) -> int:
        """With 5 + 2 tokens, 25 + 4 halves of pairs twice, 3 layers; 2 of 4 heads have keys."""
        layer = 2 * 7 * (48 * heads * (4 + 2 * 2) + output + 3 * 48 * 100)
        return 3 * (layer + 4 * 2 * heads * 29) + vocab * 2 * 7 * 37 * 48

    def count(library: str, **given: Any) -> Any:
        result = compute(recorded(library, config, **given))
        assert not isinstance(result, NotOffered)
        return result["flops"]

    assert count("slime") == by_hand(20, 48 * 48, vocab=1)
    assert count("verl") == 3 * by_hand(20, 80 * 48, vocab=2)
    assert count("verl", embedding_counted=False) == 3 * model_flops(shape, [5, 2])
    # Its formula of this family divides the hidden size by the heads.
    assert count("nemo", function="llama") == 3 * by_hand(12, 48 * 48, vocab=1)
    assert count("nemo", function="qwen3") == 3 * by_hand(20, 80 * 48, vocab=1)
    full = forward_flops(shape, [5, 2], convention=FlopsConvention(attention="full")).total
    given = {"causal": False, "embedding_counted": False, "pass": "fwd"}
    assert count("verl", **given) == full


def test_a_library_without_a_known_convention_is_not_offered() -> None:
    result = compute(recorded("another", {"model_type": "llama", **TINY}))
    assert result == NotOffered("no convention of another is known")


def test_a_value_head_multiplies_one_column() -> None:
    critic = SQUARE.with_value_head()
    assert forward_flops(critic, [5, 2]).head == 2 * 7 * 4
    assert forward_flops(critic, [5, 2], num_logits=3).head == 2 * 3 * 4
    assert forward_flops(critic, [5]).projections == forward_flops(SQUARE, [5]).projections
    product = FlopsConvention(embedding="product")
    assert forward_flops(critic, [5], convention=product).embedding == 2 * 5 * 40
