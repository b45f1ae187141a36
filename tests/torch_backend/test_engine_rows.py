"""What rows take from each other, and which of them attend together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl_backends.torch import order
from flowrl_backends.torch.attention import ModelDecoder
from flowrl_backends.torch.engine import TorchEngine
from flowrl_backends.torch.fused import FusedDecoder
from flowrl_backends.torch.order import RowOrder, split_rows
from flowrl_backends.torch.slots import KVSlots, RowSpan
from tests.policy_contexts import load
from tests.torch_backend.engine_fixtures import (
    collect,
    make_engine,
    make_model,
    reference_greedy,
    request,
    run,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def counted(engine: TorchEngine) -> list[int]:
    """Prompts of each prefill call that follows."""
    decoder, counts = engine._decoder, []
    prefill = decoder.prefill

    def counting(tokens, lengths, targets):
        counts.append(len(tokens))
        return prefill(tokens, lengths, targets)

    decoder.prefill = counting
    return counts


def member(number: int, max_tokens: int, prompt: list[int] = PROMPT, **more: float):
    return request(
        number, prompt=prompt, group="0/0", temperature=0.0, max_tokens=max_tokens, **more
    )


# Prompts that are there already


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_window", "gpt2"])
def test_a_member_that_enters_beside_another_needs_no_forward_pass(kind):
    model = make_model(kind)
    engine = make_engine(model, slots=3)
    items = [member(n, 5 + 9 * n) for n in range(7)]
    warm = run(engine, [request(99, max_tokens=2)])  # the check of the decoder is behind
    counts = counted(engine)
    ended = run(engine, items)
    assert len(warm) == 1
    assert counts == [1]
    for item in items:
        assert ended[item.sample].tokens.tolist() == reference_greedy(model, item)


def test_sampled_members_get_the_tokens_and_logprobs_they_get_alone():
    model = make_model()
    items = [request(n, prompt=PROMPT, group="0/0", max_tokens=4 + 7 * n) for n in range(8)]
    together = run(make_engine(model, slots=2), items)
    for item in items:
        alone = run(make_engine(model), [item])[item.sample]
        assert together[item.sample].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(together[item.sample].logprobs, alone.logprobs, atol=1e-5)


def test_a_prompt_is_computed_again_once_nobody_runs_that_has_it():
    engine = make_engine(make_model(), slots=2)
    counts = counted(engine)
    run(engine, [member(0, 4)])
    run(engine, [member(1, 4)])
    assert counts[-2:] == [1, 1]


def test_another_prompt_under_the_same_key_is_computed():
    model = make_model()
    engine = make_engine(model, slots=2)
    other = member(2, 12, prompt=[7, *PROMPT[1:]])
    items = [member(0, 30), member(1, 3), other]
    counts = counted(engine)
    ended = run(engine, items)
    assert sum(counts[-2:]) == 2
    assert ended[other.sample].tokens.tolist() == reference_greedy(model, other)


def shift(model: torch.nn.Module) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)


def announced(engine: TorchEngine, model: torch.nn.Module) -> None:
    shift(model)
    load(engine, 1)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("change", [announced, lambda engine, model: shift(model)])
def test_new_weights_share_no_prompt_of_old_ones(kind: str, change: Callable[..., None]):
    model = make_model(kind)
    engine = make_engine(model, slots=2)
    engine.submit([member(0, 120)])
    engine.poll(60.0)
    change(engine, model)
    late = [member(1, 10), member(2, 10)]
    engine.submit(late)
    ended = collect(engine, 3)
    for item in late:
        assert ended[item.sample].tokens.tolist() == reference_greedy(model, item)


# Rows of unequal length


def test_rows_split_where_two_products_read_fewest_tokens():
    # 2 * 100 + 3 * 9 against 1 * 100 + 4 * 80 and others.
    assert split_rows(np.array([100, 80, 9, 9, 8])) == (2, 227)
    # The long row behind: 4 * 9 + 1 * 100.
    assert split_rows(np.array([9, 8, 9, 7, 100])) == (4, 136)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=40))
def test_no_order_of_rows_reads_less_than_the_longest_first(lengths):
    rows = np.array(lengths, np.int64)
    row, read = split_rows(rows)
    assert read == row * rows[:row].max() + (len(rows) - row) * rows[row:].max()
    assert split_rows(np.sort(rows)[::-1])[1] <= read <= len(rows) * rows.max()


def test_rows_move_once_what_was_read_in_vain_has_paid_for_it():
    rows = RowOrder()
    stored = np.array([10, 10, 1000, 10, 10, 10, 1000, 10])
    rows.follow(stored, 1000)
    # 2 * 10 + 6 * 1000 now, in order 2 * 1000 + 6 * 10: 3960 in vain. To move 7 rows as far as the
    # longest of them costs 2 * 7 * 1000, and 1000 more for the calls.
    assert rows.step(8) == (RowSpan(0, 2, 11), RowSpan(2, 8, 1001))
    for step in range(2, 4):
        assert rows.step(8) == (RowSpan(0, 2, 10 + step), RowSpan(2, 8, 1000 + step))
        assert rows.moves(stored, 1000) == ([], [])
    rows.step(8)
    assert rows.wasted == 4 * 3960
    assert rows.moves(stored, 1000) == ([2, 6, 0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6])
    rows.follow(stored[[2, 6, 0, 1, 3, 4, 5, 7]], 1000)
    assert rows.step(8) == (RowSpan(0, 2, 1001), RowSpan(2, 8, 11))
    assert rows.wasted == 0


def test_small_or_equal_rows_attend_together():
    rows = RowOrder()
    for stored in (np.array([5, 9, 7, 30]), np.full(16, 300), np.array([4000])):
        rows.follow(stored, 1000)
        assert rows.step(len(stored)) == ()
        assert rows.wasted == 0


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_window", "mistral"])
def test_spans_of_rows_give_the_logits_of_all_rows_together(kind):
    model = make_model(kind)
    results = []
    for spans in ((), (RowSpan(0, 1, 13), RowSpan(1, 4, 7))):
        for decoder_of in (FusedDecoder, ModelDecoder):
            slots = KVSlots(num_slots=4, max_length=64)
            decoder = decoder_of(model, slots)
            slots.reserve(4, 14)
            tokens = torch.arange(48).view(4, 12)
            lengths = torch.tensor([12, 5, 1, 6])
            with torch.no_grad(), decoder.active():
                decoder.prefill(tokens, lengths, torch.arange(4))
                results.append(decoder.decode(tokens[:, 3], lengths, 13, False, spans))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_tokens_are_those_of_each_sample_alone_when_rows_split_and_move(kind, monkeypatch):
    monkeypatch.setattr(order, "_SPLIT_NBYTES", 0)
    monkeypatch.setattr(order, "_MOVE_NBYTES", 0)
    moved, split = [], []
    moves, step = RowOrder.moves, RowOrder.step
    monkeypatch.setattr(
        RowOrder, "moves", lambda self, *rows: moved.append(moves(self, *rows)) or moved[-1]
    )
    monkeypatch.setattr(RowOrder, "step", lambda self, n: split.append(step(self, n)) or split[-1])
    model = make_model(kind)
    rng = np.random.default_rng(3)
    items = [
        request(n, temperature=0.0 if n % 2 else 0.8, max_tokens=int(rng.integers(1, 90)))
        for n in range(30)
    ]
    ended = run(make_engine(model, slots=6), items)
    assert any(targets for _, targets in moved)
    assert any(split)
    for item in items:
        alone = run(make_engine(model), [item])[item.sample]
        assert ended[item.sample].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(ended[item.sample].logprobs, alone.logprobs, atol=1e-5)
