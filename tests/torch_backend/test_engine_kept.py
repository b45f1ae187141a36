"""What the engine reports of its own truncation: the tokens that were left at each one drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers as hf

from flowrl.backend.batch import KeptTokens
from flowrl.backend.protocols import Finished, GenerateRequest
from tests.torch_backend.engine_fixtures import (
    VOCAB,
    collect,
    forward_logprobs,
    make_engine,
    make_model,
    request,
    run,
)

NUCLEUS: dict[str, Any] = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "temperature": 1.3,
    "logprobs": "sampler",
    "max_tokens": 12,
}


def sets(kept: KeptTokens) -> list[list[int]]:
    return [
        kept.ids[begin:end].tolist()
        for begin, end in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)
    ]


def assert_kept(model: hf.PreTrainedModel, item: GenerateRequest, end: Finished) -> None:
    """The sets are those of a forward pass, and logprobs are renormalised over them."""
    assert end.kept is not None
    ids = torch.from_numpy(np.concatenate([item.prompt, end.tokens]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(item.prompt) - 1 : -1].double()
    probs = torch.softmax(logits / item.sampling.temperature, -1)
    for t, left in enumerate(sets(end.kept)):
        assert int(end.tokens[t]) in left
        assert left == sorted(left)
        assert len(left) <= item.sampling.top_k
        # Whatever was left is likelier than whatever was not.
        out = sorted(set(range(VOCAB)) - set(left))
        assert float(probs[t, left].min()) >= float(probs[t, out].max()) - 1e-6
        share = probs[t, end.tokens[t]] / probs[t, left].sum()
        assert abs(float(share.log()) - float(end.logprobs[t])) < 1e-4


def test_each_row_reports_what_was_left_of_its_own_distribution() -> None:
    model = make_model(std=0.15)
    # Six requests in four slots, of unequal lengths: rows end, move, and begin beside others.
    items = [request(i, **{**NUCLEUS, "max_tokens": 4 + 3 * i}) for i in range(6)]
    ended = run(make_engine(model), items)
    for item in items:
        assert_kept(model, item, ended[item.sample])


def test_rows_that_do_not_ask_report_nothing_beside_rows_that_do() -> None:
    model = make_model(std=0.15)
    asks = [request(i, **NUCLEUS) for i in (0, 1)]
    others = [
        request(2, top_p=0.5, max_tokens=9),
        request(3, logprobs="sampler", repetition_penalty=1.3, max_tokens=9),
    ]
    ended = run(make_engine(model), [others[0], asks[0], others[1], asks[1]])
    for item in asks:
        assert_kept(model, item, ended[item.sample])
    assert [ended[item.sample].kept for item in others] == [None, None]
    plain = ended[others[0].sample]
    want = forward_logprobs(model, others[0], plain.tokens)
    np.testing.assert_allclose(plain.logprobs, want, atol=1e-4)


def test_tokens_do_not_depend_on_which_logprobs_are_asked_for() -> None:
    model = make_model(std=0.15)
    item = request(0, **NUCLEUS)
    plain = replace(item, sampling=replace(item.sampling, logprobs="model"))
    one, other = (run(make_engine(model), [each])[item.sample] for each in (item, plain))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.logprobs >= other.logprobs - 1e-6).all()
    assert other.kept is None


def test_options_that_cut_nothing_off_report_that_all_was_left() -> None:
    item = request(0, top_k=VOCAB + 5, logprobs="sampler", max_tokens=7)
    end = run(make_engine(make_model()), [item])[item.sample]
    assert end.kept is not None
    assert sets(end.kept) == [[]] * 7


def test_an_aborted_request_joins_with_its_continuation() -> None:
    model = make_model(std=0.15)
    item = request(0, **NUCLEUS)
    whole = run(make_engine(model), [item])[item.sample]
    engine = make_engine(model)
    engine.submit([item])
    engine.poll(0.0)
    engine.abort([item.sample])
    first = collect(engine, 1)[item.sample]
    assert first.kept is not None
    assert 0 < len(first.kept) == len(first.tokens) < 12
    again = replace(item, attempt=1, response=first.tokens)
    second = run(engine, [again])[item.sample]
    assert second.kept is not None
    assert whole.kept is not None
    assert sets(KeptTokens.joined([first.kept, second.kept])) == sets(whole.kept)


def test_a_request_that_draws_nothing_reports_no_place() -> None:
    engine = make_engine(make_model(), stop=[5])
    complete = request(0, response=[3, 5], **NUCLEUS)
    waiting = request(1, **NUCLEUS)
    engine.submit([complete, waiting])
    engine.abort([waiting.sample])
    ended = collect(engine, 2)
    for end in ended.values():
        assert end.kept is not None
        assert len(end.kept) == len(end.tokens) == 0
