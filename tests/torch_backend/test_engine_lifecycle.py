"""Abort, resume, publication, memory and refusals of the engine."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from flowrl.backend.protocols import Finished, FinishReason, Progress, Service
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from tests.policy_contexts import load
from tests.torch_backend.engine_fixtures import (
    VOCAB,
    collect,
    make_engine,
    make_model,
    reference_greedy,
    request,
    run,
)


def test_an_idle_engine_returns_at_once():
    assert make_engine(make_model()).poll(1000.0) == []


def test_a_poll_ends_after_a_bounded_number_of_steps_with_progress():
    engine = make_engine(make_model())
    item = request(1, max_tokens=130)
    engine.submit([item])
    events = engine.poll(1000.0)
    assert [type(e) for e in events] == [Progress]
    assert events[0].sample == item.sample
    assert 1 < events[0].num_tokens <= 33


def test_a_poll_goes_on_for_at_most_eight_steps_after_an_end():
    engine = make_engine(make_model())
    short, long = request(1, max_tokens=3), request(2, max_tokens=130)
    engine.submit([short, long])
    (end,) = engine.poll(1000.0)
    assert isinstance(end, Finished)
    assert (end.sample, len(end.tokens)) == (short.sample, 3)
    engine.abort([long.sample])
    (end,) = engine.poll(1000.0)
    assert isinstance(end, Finished)
    assert (end.sample, end.reason) == (long.sample, FinishReason.ABORT)
    assert 3 <= len(end.tokens) <= 3 + 8


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("polls", [1, 2, 3])
def test_an_aborted_and_resumed_sample_has_the_tokens_of_one_never_stopped(kind, polls):
    model = make_model(kind)
    whole = run(make_engine(model), [request(1, max_tokens=120, repetition_penalty=1.2)])
    expected = whole[SampleId("0/1/0")]
    engine = make_engine(model)
    item = request(1, max_tokens=120, repetition_penalty=1.2)
    engine.submit([item, request(2, max_tokens=100), request(3, max_tokens=110)])
    for _ in range(polls):
        engine.poll(60.0)
    engine.abort([item.sample])
    engine.abort([item.sample])
    (part,) = (e for e in engine.poll(60.0) if isinstance(e, Finished))
    assert part.reason is FinishReason.ABORT
    assert 0 < len(part.tokens) < 120
    elsewhere = make_engine(model, slots=2)
    again = replace(item, attempt=1, response=part.tokens)
    rest = run(elsewhere, [request(4, max_tokens=50), again])[item.sample]
    assert rest.attempt == 1
    assert [*part.tokens, *rest.tokens] == expected.tokens.tolist()
    np.testing.assert_allclose(
        np.concatenate([part.logprobs, rest.logprobs]), expected.logprobs, atol=1e-5
    )
    left = collect(engine, 2)
    alone = run(make_engine(model), [request(3, max_tokens=110)])
    assert left[SampleId("0/3/0")].tokens.tolist() == alone[SampleId("0/3/0")].tokens.tolist()


def test_waiting_requests_are_aborted_without_tokens_and_unknown_ones_ignored():
    engine = make_engine(make_model(), slots=1)
    engine.submit([request(1, max_tokens=5), request(2, max_tokens=5)])
    engine.abort([SampleId("0/2/0"), SampleId("9/9/9")])
    (end,) = engine.poll(60.0)
    assert isinstance(end, Finished)
    assert (end.sample, end.reason, len(end.tokens), end.versions) == (
        "0/2/0",
        FinishReason.ABORT,
        0,
        (),
    )
    assert list(collect(engine, 1)) == ["0/1/0"]
    engine.abort([SampleId("0/1/0")])
    assert engine.poll(0.0) == []


def test_a_response_that_is_complete_already_ends_without_new_tokens():
    engine = make_engine(make_model(), stop=[7])
    ended = run(
        engine,
        [
            request(1, response=[3, 7], max_tokens=9),
            request(2, response=[3, 4], max_tokens=2),
            request(3, response=[3, 4], max_tokens=3, min_tokens=3),
        ],
    )
    assert ended[SampleId("0/1/0")].reason is FinishReason.STOP
    assert ended[SampleId("0/2/0")].reason is FinishReason.LENGTH
    assert [len(ended[SampleId(f"0/{i}/0")].tokens) for i in (1, 2, 3)] == [0, 0, 1]


def test_version_spans_say_which_weights_drew_each_token():
    engine = make_engine(make_model(), slots=2)
    load(engine, 3)
    engine.submit([request(1, max_tokens=100), request(2, max_tokens=140)])
    before = {event.sample: event.num_tokens for event in engine.poll(60.0)}
    assert all(0 < count < 100 for count in before.values())
    load(engine, 4)
    engine.submit([request(3, max_tokens=4)])
    ended = collect(engine, 3)
    for sample, length in ((SampleId("0/1/0"), 100), (SampleId("0/2/0"), 140)):
        drawn = before[sample]
        assert ended[sample].versions == ((3, drawn), (4, length - drawn))
    assert ended[SampleId("0/3/0")].versions == ((4, 4),)


def test_an_aborted_attempt_has_the_tokens_of_each_version_until_then():
    """Those that the host had not read when the weights changed are of the old ones."""
    engine = make_engine(make_model())
    load(engine, 1)
    item = request(1, max_tokens=140)
    engine.submit([item])
    counts = []
    for version in (2, 4):
        (progress,) = engine.poll(60.0)
        counts.append(progress.num_tokens)
        load(engine, version)
    engine.abort([item.sample])
    (end,) = engine.poll(60.0)
    assert end.versions == ((1, counts[0]), (2, counts[1] - counts[0]))
    assert len(end.tokens) == counts[1]


def test_published_weights_are_loaded_from_a_folder(tmp_path):
    model, other = make_model(seed=0), make_model(seed=1)
    other.save_pretrained(tmp_path)
    engine = make_engine(model)
    item = request(1, temperature=0.0, max_tokens=15)
    assert run(engine, [item])[item.sample].tokens.tolist() == reference_greedy(model, item)
    load(engine, 1, tmp_path)
    result = run(engine, [item])[item.sample]
    assert result.tokens.tolist() == reference_greedy(other, item)
    assert result.versions == ((1, 15),)


def test_tied_embeddings_may_be_stored_once(tmp_path):
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1}
    config = hf.Qwen2Config(
        **shape,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=True,
    )
    source = hf.Qwen2ForCausalLM(config)
    source.save_pretrained(tmp_path)
    engine = make_engine(hf.Qwen2ForCausalLM(config))
    load(engine, 1, tmp_path)
    torch.testing.assert_close(engine._model.lm_head.weight, source.lm_head.weight)


def test_weights_with_other_names_or_shapes_are_refused_and_change_nothing(tmp_path):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    engine = make_engine(model)
    good = {name: tensor.clone() for name, tensor in make_model(seed=1).state_dict().items()}
    file = tmp_path / "model.safetensors"

    missing = {k: v for k, v in good.items() if k != "model.norm.weight"}
    save_file({**missing, "model.extra": torch.zeros(2)}, file)
    with pytest.raises(BackendError, match="do not belong") as caught:
        load(engine, 1, tmp_path)
    assert "missing model.norm.weight" in str(caught.value)
    assert "unexpected model.extra" in str(caught.value)

    save_file({**good, "model.norm.weight": torch.zeros(31)}, file)
    with pytest.raises(BackendError) as caught:
        load(engine, 1, tmp_path)
    assert "shape [31]" in str(caught.value)
    assert "shape [32]" in str(caught.value)

    file.write_bytes(b"not safetensors")
    with pytest.raises(BackendError, match="cannot be read"):
        load(engine, 1, tmp_path)
    file.unlink()
    with pytest.raises(BackendError, match="no weights"):
        load(engine, 1, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_key_value_memory_grows_with_use_and_sleep_gives_it_back():
    model = make_model()
    engine = make_engine(model, slots=32, max_length=512)
    assert engine.kv_nbytes == 0
    run(engine, [request(1, prompt=[1, 2, 3], max_tokens=5)])
    small = engine.kv_nbytes
    long = request(2, prompt=[1] * 60, temperature=0.0, max_tokens=100)
    result = run(engine, [long, *(request(i, max_tokens=30) for i in range(3, 20))])
    assert small < engine.kv_nbytes
    full = 2 * 2 * 32 * 2 * 512 * 8 * 4  # keys, values; layers, slots, heads, length, D, bytes
    assert engine.kv_nbytes <= full / 2
    assert result[long.sample].tokens.tolist() == reference_greedy(model, long)
    engine.sleep()
    assert engine.kv_nbytes == 0
    engine.wake()
    engine.wake()
    assert len(run(engine, [request(1, max_tokens=5)])) == 1


def test_an_engine_sleeps_only_when_nothing_runs_and_must_be_woken():
    engine = make_engine(make_model())
    engine.submit([request(1, max_tokens=100)])
    engine.poll(60.0)
    with pytest.raises(BackendError, match="cannot sleep"):
        engine.sleep()
    engine.abort([SampleId("0/1/0")])
    engine.poll(0.0)
    engine.sleep()
    engine.submit([request(2, max_tokens=3)])
    with pytest.raises(BackendError, match="sleeps"):
        engine.poll(1.0)
    engine.wake()
    assert len(collect(engine, 1)) == 1


def test_a_closed_engine_refuses_work():
    engine = make_engine(make_model())
    engine.submit([request(1, max_tokens=100)])
    engine.poll(0.0)
    engine.close()
    engine.close()
    assert engine.kv_nbytes == 0
    with pytest.raises(BackendError, match="closed"):
        engine.submit([request(2)])


@pytest.mark.parametrize(
    ("bad", "numbers"),
    [
        (request(1, prompt=[], max_tokens=5), ["empty"]),
        (request(1, prompt=[1] * 30, max_tokens=140), ["30", "140", "170", "160"]),
        (request(1, prompt=[1] * 161, max_tokens=1), ["161", "160"]),
        (request(1, prompt=[1, VOCAB], max_tokens=5), [str(VOCAB), str(VOCAB - 1)]),
        (request(1, prompt=[1, -1], max_tokens=5), ["-1"]),
        (request(1, max_tokens=0), ["max_tokens=0"]),
    ],
)
def test_impossible_requests_name_the_sample_and_the_numbers(bad, numbers):
    engine = make_engine(make_model())
    with pytest.raises(BackendError) as caught:
        engine.submit([request(2, max_tokens=3), bad])
    assert "sample 0/1/0" in str(caught.value)
    for number in numbers:
        assert number in str(caught.value)
    assert engine.poll(0.0) == [], "a refused submission takes no request"


@pytest.mark.parametrize("stop", [-1, VOCAB])
def test_an_engine_does_not_open_with_a_stop_token_that_the_model_does_not_have(stop):
    with pytest.raises(BackendError, match=rf"a stop token is outside[\s\S]*id {stop}"):
        make_engine(make_model(), stop=(1, stop))


def test_a_sample_is_not_taken_twice():
    engine = make_engine(make_model())
    engine.submit([request(1, max_tokens=5)])
    with pytest.raises(BackendError, match="already"):
        engine.submit([request(1, attempt=1, max_tokens=5)])


def test_logits_that_are_not_finite_are_an_error_with_the_sample():
    model = make_model()
    engine = make_engine(model)
    run(engine, [request(1, max_tokens=3)])
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(BackendError, match="not finite") as caught:
        run(engine, [request(2, max_tokens=3)])
    assert "sample 0/2/0" in str(caught.value)


def test_an_architecture_without_exchangeable_attention_is_refused_by_name():
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(BackendError, match="cannot decode") as caught:
        make_engine(hf.MambaForCausalLM(config))
    assert "MambaForCausalLM" in str(caught.value)


def test_an_architecture_with_unsupported_attention_is_refused_at_its_first_request():
    config = hf.Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
    )
    engine = make_engine(hf.Gemma2ForCausalLM(config).eval())
    with pytest.raises(BackendError, match=re.escape("softcap")):
        run(engine, [request(1, max_tokens=3)])


def test_a_decoder_that_differs_from_its_model_is_found_before_the_first_request():
    model = make_model()
    engine = make_engine(model)
    engine._decoder._scale *= 2.0
    with pytest.raises(BackendError, match="differ"):
        run(engine, [request(1, max_tokens=3)])


def test_the_plugin_declares_what_it_offers_and_scores_nothing():
    from flowrl.backend.plugin import Plugin
    from flowrl.backend.protocols import ScoreContext
    from flowrl.ids import RoleName
    from flowrl_backends.torch import plugin

    assert isinstance(plugin, Plugin)
    assert plugin.capabilities.services == {Service.GENERATE, Service.TRAIN}
    assert plugin.check().usable
    with pytest.raises(BackendError, match="backend 'torch' cannot score"):
        plugin.open_score(ScoreContext(role=RoleName("verifier"), terms=()))


def test_importing_the_plugin_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, flowrl_backends.torch as t; t.plugin.check(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
