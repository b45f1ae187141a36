"""The memory model: hand-computed numbers, and what a real forward pass keeps for backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.cost import ModelShape, Phase, PhaseMemory, Workload, format_bytes
from flowrl.cost.memory import activation_bytes, phase_memory, resident_memory, working_memory
from tests.cost.tiny import SHAPE, WORK


def named(memory: PhaseMemory) -> dict[str, int]:
    return {part.name: part.nbytes for part in memory.parts}


def test_parts_equal_the_formulas_by_hand() -> None:
    # Embedding 100*8; per layer attention 8*(8+2*4)+8*8, MLP 3*8*24, norms 2*8; final norm 8.
    count = 800 + 2 * (192 + 576 + 16) + 8
    assert SHAPE.parameters.total == count
    parts = named(phase_memory("actor", SHAPE, WORK, Phase.UPDATE))
    assert parts["parameters"] == 4 * count
    assert parts["optimizer"] == 8 * count
    assert parts["gradients"] == 4 * count
    assert parts["kv cache"] == 2 * 2 * 4 * (3 * 10) * 4
    # Logits and their gradient, and three float32 copies inside softmax.
    assert parts["logits"] == (2 + 3) * 4 * (5 * 4) * 100
    assert parts["engine weights"] == 4 * 2 * (192 + 576)
    # Per token and layer 6h + 5q + 4f elements and one float32 a head; the final norm 3h.
    per_layer = (6 * 8 + 5 * 8 + 4 * 24) * 4 + 4 * 4
    assert parts["activations"] == 50 * (2 * per_layer + 3 * 8 * 4)
    assert "master weights" not in parts


def test_half_precision_halves_parameters_and_cache_and_adds_a_master_copy() -> None:
    full = named(phase_memory("actor", SHAPE, WORK, Phase.UPDATE))
    half = named(phase_memory("actor", SHAPE, replace(WORK, dtype="bfloat16"), Phase.UPDATE))
    assert half["parameters"] * 2 == full["parameters"]
    assert half["kv cache"] * 2 == full["kv cache"]
    assert half["master weights"] == full["parameters"]
    assert half["optimizer"] == full["optimizer"]
    assert half["gradients"] == full["gradients"]
    # At the end of a pass its own gradients are there, and the activations are not.
    short = replace(WORK, dtype="bfloat16", micro_batch=1, max_length=2, max_response_tokens=1)
    least = named(phase_memory("actor", SHAPE, short, Phase.UPDATE))
    assert least["gradients"] == full["gradients"] + half["parameters"]
    assert "activations" not in least


def test_a_frozen_role_that_does_not_generate_holds_parameters_only() -> None:
    work = replace(WORK, trainable=False, num_slots=0)
    assert [part.name for part in resident_memory("reference", SHAPE, work)] == ["parameters"]


def test_eager_attention_adds_probabilities_that_grow_with_the_square_of_the_length() -> None:
    def extra(length: int) -> int:
        fused = replace(WORK, max_length=length)
        eager = replace(fused, attention="eager")
        return activation_bytes(SHAPE, eager) - activation_bytes(SHAPE, fused)

    # 2 layers x 5 rows x length x 4 heads x (length probabilities in place of one statistic).
    assert extra(10) == 2 * 5 * 10 * 4 * (10 - 1) * 4
    assert extra(20) == 2 * 5 * 20 * 4 * (20 - 1) * 4


def test_every_phase_has_a_margin_of_a_tenth_and_at_least_16_mib() -> None:
    small = named(
        PhaseMemory(phase=Phase.UPDATE, parts=working_memory("a", SHAPE, WORK, Phase.UPDATE))
    )
    assert small["margin"] == 16 << 20
    wide = replace(WORK, micro_batch=50_000)
    large = named(
        PhaseMemory(phase=Phase.UPDATE, parts=working_memory("a", SHAPE, wide, Phase.UPDATE))
    )
    margin = large.pop("margin")
    assert margin == sum(large.values()) // 10


def test_an_engine_with_its_own_weights_holds_them_beside_the_trainer_s() -> None:
    big = replace(SHAPE, vocab_size=20_000_000)
    shared = {part.name: part.nbytes for part in resident_memory("a", big, WORK)}
    own = replace(WORK, shares_weights=False)
    apart = {part.name: part.nbytes for part in resident_memory("a", big, own)}
    assert "engine weights" not in shared
    assert apart["engine weights"] == apart["parameters"]


def test_a_forward_only_pass_needs_its_layers_or_its_logits_of_the_rows_there_are() -> None:
    def working(work: Workload, shape: ModelShape = SHAPE) -> dict[str, int]:
        parts = named(
            PhaseMemory(
                phase=Phase.LOGPROBS, parts=working_memory("a", shape, work, Phase.LOGPROBS)
            )
        )
        parts.pop("margin")
        return parts

    few = replace(SHAPE, vocab_size=3)
    # 20 rows of 10 tokens, one layer's 3h + 3q + 3f elements.
    assert working(WORK, few) == {"activations": 200 * (24 + 24 + 72) * 4}
    # Logits and four copies of their pieces, beside the last hidden states of 200 tokens twice.
    logits = (1 + 4) * 4 * 80 * 100 + 200 * 2 * 8 * 4
    assert working(WORK) == {"logits": logits}
    # 128 rows at most.
    logits = (1 + 4) * 4 * 512 * 100 + 1280 * 2 * 8 * 4
    assert working(replace(WORK, num_samples=1000)) == {"logits": logits}


def test_truncated_sampling_needs_more_copies_of_the_logits() -> None:
    wide = replace(SHAPE, vocab_size=10_000)
    few = replace(WORK, max_prompt_tokens=1)

    def logits(work: Workload) -> int:
        parts = working_memory("a", wide, work, Phase.ROLLOUT)
        return next(part.nbytes for part in parts if part.name == "logits")

    assert logits(few) == 4 * 4 * 3 * 10_000
    assert logits(replace(few, truncates=True)) == 11 * 4 * 3 * 10_000


def test_no_grad_phases_need_less_than_an_update() -> None:
    work = replace(WORK, micro_batch=2000)
    update = phase_memory("a", SHAPE, work, Phase.UPDATE).total
    assert phase_memory("a", SHAPE, work, Phase.LOGPROBS).total < update


def test_the_description_names_the_largest_part_first() -> None:
    text = phase_memory("a", SHAPE, replace(WORK, micro_batch=5000), Phase.UPDATE).describe()
    assert text.startswith("activations ")
    assert ", kv cache " in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 KiB"),
        (2048, "2 KiB"),
        (3 << 20, "3.0 MiB"),
        (int(3.25 * (1 << 30)), "3.2 GiB"),
        (200 << 30, "200 GiB"),
        (2 << 40, "2.0 TiB"),
    ],
)
def test_sizes_print_in_binary_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_activations_match_what_a_real_forward_pass_keeps(
    family: str, attention: str, dtype: str
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 50,
        "tie_word_embeddings": True,
    }
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = model.to(getattr(torch, dtype))
    rows, length = 6, 48
    tokens = torch.randint(0, 50, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    # Real batches are padded on the right, and then the kernels get an explicit mask.
    mask[0, length // 2 :] = 0
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=tokens, attention_mask=mask, use_cache=False)
    measured = sum(kept.values())
    assert hidden.last_hidden_state.shape == (rows, length, 64)
    work = Workload(
        num_slots=0,
        max_length=length,
        max_prompt_tokens=length,
        max_response_tokens=0,
        micro_batch=rows,
        num_samples=rows,
        dtype=dtype,
        trainable=True,
        attention="eager" if attention == "eager" else "sdpa",
    )
    shape = ModelShape.from_hf_config({"model_type": family, **sizes})
    predicted = activation_bytes(shape, work)
    assert predicted == pytest.approx(measured, rel=0.1), (predicted, measured)


def test_a_value_head_gives_one_number_a_position() -> None:
    critic, work = SHAPE.with_value_head(), replace(WORK, num_slots=0)
    count = 800 + 2 * (192 + 576 + 16) + 8 + (8 + 1)
    parts = named(phase_memory("critic", critic, work, Phase.UPDATE))
    assert parts["parameters"] == 4 * count
    # Values and their gradient, and three float32 copies, as the logits of a vocabulary of one.
    assert parts["logits"] == (2 + 3) * 4 * (5 * 4)
    assert "kv cache" not in parts


@pytest.mark.parametrize("phase", [Phase.VALUES, Phase.SCORES])
def test_values_and_scores_are_a_forward_pass_that_keeps_nothing(phase: Phase) -> None:
    critic = SHAPE.with_value_head()
    assert working_memory("critic", critic, WORK, phase) == working_memory(
        "critic", critic, WORK, Phase.LOGPROBS
    )
