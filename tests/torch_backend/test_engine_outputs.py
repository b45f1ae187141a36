"""What the engine generates, against Transformers and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.backend.protocols import Finished, FinishReason, GenerateBackend
from flowrl_backends.torch.attention import ModelDecoder
from flowrl_backends.torch.fused import FusedDecoder, is_llama_like
from tests.torch_backend.engine_fixtures import (
    CONFIGS,
    VOCAB,
    collect,
    forward_logprobs,
    make_engine,
    make_model,
    reference_greedy,
    request,
    run,
)

FAST = {"qwen2", "qwen2_window", "qwen3", "llama", "llama3_rope", "mistral"}


def lengths(number: int) -> int:
    return int(np.random.default_rng(100 + number).integers(1, 80))


def greedy(number: int) -> object:
    return request(number, temperature=0.0, max_tokens=lengths(number))


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_greedy_tokens_equal_transformers_with_more_requests_than_slots(kind):
    model = make_model(kind)
    assert is_llama_like(model) == (kind in FAST)
    requests = [greedy(i) for i in range(7)]
    ended = run(make_engine(model, slots=3), requests)
    for item in requests:
        assert ended[item.sample].tokens.tolist() == reference_greedy(model, item)
        assert ended[item.sample].reason is FinishReason.LENGTH


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_greedy_tokens_do_not_depend_on_the_number_of_slots(slots):
    model = make_model()
    requests = [greedy(i) for i in range(6)]
    ended = run(make_engine(model, slots=slots), requests)
    for item in requests:
        assert ended[item.sample].tokens.tolist() == reference_greedy(model, item)


def test_greedy_tokens_are_the_same_when_requests_arrive_one_poll_apart():
    model = make_model()
    engine = make_engine(model, slots=3)
    requests = [greedy(i) for i in range(6)]
    ended = {}
    for item in requests:
        engine.submit([item])
        ended |= {e.sample: e for e in engine.poll(0.0) if isinstance(e, Finished)}
    ended |= collect(engine, len(requests) - len(ended))
    for item in requests:
        assert ended[item.sample].tokens.tolist() == reference_greedy(model, item)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_a_shared_prompt_gives_each_member_what_it_gets_alone(kind):
    model = make_model(kind)
    prompt = [5, 9, 2, 40, 17]
    members = [request(i, prompt=prompt, group="g", max_tokens=20) for i in range(5)]
    others = [request(i, max_tokens=30) for i in range(10, 13)]
    together = run(make_engine(model, slots=8), [*members, *others])
    for item in [*members, *others]:
        alone = run(make_engine(model, slots=1), [item])
        assert together[item.sample].tokens.tolist() == alone[item.sample].tokens.tolist()
    assert len({tuple(together[m.sample].tokens) for m in members}) == len(members)


def test_equal_keys_with_different_prompts_are_not_mixed_up():
    model = make_model()
    requests = [request(i, group="same", temperature=0.0, max_tokens=9) for i in range(3)]
    ended = run(make_engine(model), requests)
    for item in requests:
        assert ended[item.sample].tokens.tolist() == reference_greedy(model, item)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gpt_neox"])
def test_sampled_tokens_depend_on_seed_and_prompt_alone(kind):
    model = make_model(kind)
    requests = [request(i, max_tokens=lengths(i)) for i in range(9)]
    crowd = run(make_engine(model, slots=4), requests)
    for item in requests[::3]:
        alone = run(make_engine(model, slots=1), [item])[item.sample]
        assert crowd[item.sample].tokens.tolist() == alone.tokens.tolist()
        other = run(make_engine(model), [replace(item, seed=item.seed + 1)])[item.sample]
        assert other.tokens.tolist() != alone.tokens.tolist() or len(alone.tokens) < 3


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "phi"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_full_forward_pass(kind, temperature):
    model = make_model(kind, std=0.15)  # logits of a few units, as trained models have
    requests = [request(i, temperature=temperature, max_tokens=lengths(i)) for i in range(6)]
    ended = run(make_engine(model, slots=3), requests)
    for item in requests:
        result = ended[item.sample]
        assert result.logprobs.dtype == np.float32
        expected = forward_logprobs(model, item, result.tokens, temperature)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)


def test_logprobs_are_those_before_truncation_and_penalties_in_a_mixed_batch():
    model = make_model(std=0.15)
    options = [
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2, "temperature": 1.5},
        {"repetition_penalty": 1.7},
        {},
    ]
    requests = [request(i, max_tokens=25, **option) for i, option in enumerate(options)]
    together = run(make_engine(model, slots=6), requests)
    for item in requests:
        result = together[item.sample]
        temperature = item.sampling.temperature or 1.0
        expected = forward_logprobs(model, item, result.tokens, temperature)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)
        alone = run(make_engine(model, slots=1), [item])[item.sample]
        assert result.tokens.tolist() == alone.tokens.tolist()


def test_greedy_with_a_repetition_penalty_equals_transformers():
    model = make_model()
    item = request(3, temperature=0.0, repetition_penalty=1.4, max_tokens=40)
    ids = torch.from_numpy(item.prompt)[None]
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        repetition_penalty=1.4,
        pad_token_id=0,
    )[0, len(item.prompt) :]
    crowd = [request(i, max_tokens=10 * i + 1) for i in range(4, 8)]
    ended = run(make_engine(model, slots=3), [*crowd, item])
    assert ended[item.sample].tokens.tolist() == expected.tolist()


def test_a_response_ends_with_its_stop_token_and_that_has_a_logprob():
    model = make_model()
    items = [request(i, max_tokens=60) for i in range(5)]
    free = run(make_engine(model), items)
    for item in items:
        stop = int(free[item.sample].tokens[7])
        first = free[item.sample].tokens.tolist().index(stop)
        result = run(make_engine(model, stop=[stop]), [item])[item.sample]
        assert result.reason is FinishReason.STOP
        assert result.tokens.tolist() == free[item.sample].tokens[: first + 1].tolist()
        np.testing.assert_allclose(
            result.logprobs, free[item.sample].logprobs[: first + 1], atol=1e-5
        )


def test_stop_tokens_are_forbidden_before_min_tokens_and_allowed_after():
    model = make_model(std=0.15)
    stops = list(range(0, VOCAB, 2))
    items = [request(i, max_tokens=40, min_tokens=4 + i) for i in range(6)]
    ended = run(make_engine(model, slots=4, stop=stops), items)
    for item in items:
        tokens = ended[item.sample].tokens
        assert len(tokens) > item.sampling.min_tokens or tokens[-1] in stops
        assert len(tokens) >= item.sampling.min_tokens
        assert not set(tokens[: item.sampling.min_tokens - 1].tolist()) & set(stops)
        expected = forward_logprobs(model, item, tokens)
        np.testing.assert_allclose(ended[item.sample].logprobs, expected, atol=1e-5)
    assert any(e.reason is FinishReason.STOP for e in ended.values())


def test_both_decoders_give_the_same_logits():
    from flowrl_backends.torch.slots import KVSlots

    for kind in sorted(FAST):
        model = make_model(kind)
        results = []
        for decoder_of in (FusedDecoder, ModelDecoder):
            slots = KVSlots(num_slots=3, max_length=64)
            decoder = decoder_of(model, slots)
            slots.reserve(3, 14)
            tokens = torch.arange(36).view(3, 12) % VOCAB
            lengths = torch.tensor([12, 5, 1])
            with torch.no_grad(), decoder.active():
                first = decoder.prefill(tokens, lengths, torch.arange(3))
                second = decoder.decode(tokens[:, 3], lengths, 13, False)
            results.append((first, second))
        for fast, general in zip(*results, strict=True):
            torch.testing.assert_close(fast, general, atol=2e-5, rtol=1e-5)


def test_the_stacked_copies_follow_an_update_of_the_parameters_in_place():
    model = make_model()
    engine = make_engine(model)
    item = request(1, temperature=0.0, max_tokens=20)
    before = run(engine, [item])[item.sample].tokens.tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    after = run(engine, [item])[item.sample].tokens.tolist()
    assert after == reference_greedy(model, item)
    assert after != before


def test_training_goes_on_after_generation_with_the_same_parameters():
    model = make_model("gpt_neox").train()
    engine = make_engine(model)
    run(engine, [request(1, max_tokens=5)])
    assert model.training
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_half_precision_parameters_decode():
    model = make_model().to(torch.bfloat16)
    items = [request(i, max_tokens=12) for i in range(4)]
    ended = run(make_engine(model), items)
    for item in items:
        expected = forward_logprobs(model, item, ended[item.sample].tokens)
        np.testing.assert_allclose(ended[item.sample].logprobs, expected, atol=0.3)


def test_the_engine_is_a_generate_backend():
    assert isinstance(make_engine(make_model()), GenerateBackend)
