"""Responses that are held to a grammar: every finished one matches, byte by byte."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf
from tokenizers import decoders, models, pre_tokenizers

from flowrl.backend.protocols import Finished, GenerateRequest
from flowrl.config.roles import BpeTokenizer, CharTokenizer
from flowrl.data import Tokenizer
from flowrl.data.model_folder import build_tokenizer
from flowrl.data.rows import Row
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import FinishReason, Sampling
from flowrl.specs.grammar import Grammar, json_schema, regex
from flowrl_backends.torch.engine import TorchEngine
from flowrl_backends.torch.grammar import Grammars, token_bytes
from flowrl_backends.torch.noise import uniforms
from flowrl_backends.torch.sampler import inverse_cdf
from tests.policy_contexts import policy_context
from tests.torch_backend.engine_fixtures import collect, forward_logprobs

ALPHABET = '0123456789+-=. ab{}[]":,truefalsn'
TEXTS = (
    "naïve café, 23 + 45 = 68",
    '{"name": "日本", "age": 7}',
    "a b a b aab 😀 né",
    "true false",
)


def row(text: str) -> Row:
    return Row(index=0, prompt=text, answer="", solution="", fields={}, where="rows:1")


@pytest.fixture(scope="module", params=["char", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("char", tmp_path_factory.mktemp("characters"))


def folder_of(kind: str, folder: Path) -> Path:
    if kind == "char":
        alphabet = "".join(dict.fromkeys(ALPHABET))
        spec: CharTokenizer | BpeTokenizer = CharTokenizer(kind="char", alphabet=alphabet)
        rows = []
    else:
        spec = BpeTokenizer(kind="bpe", vocab_size=320)
        rows = [row(text) for text in TEXTS]
    for name, text in build_tokenizer(spec, rows, max_length=128).items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text("{}")
    return folder


class World:
    """A random model over the tokenizer of a folder, and its engine.

    Args:
        std: Of the weights; 0.05 leaves distributions wide.
    """

    def __init__(self, folder: Path, *, std: float = 0.05, slots: int = 4) -> None:
        self.tokenizer = Tokenizer.load(folder)
        torch.manual_seed(0)
        config = hf.Qwen2Config(
            vocab_size=self.tokenizer.vocab_size + 3,  # rows that no token belongs to
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            max_position_embeddings=160,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=std)
        self.context = policy_context(
            folder, num_slots=slots, max_length=160, stop_token_ids=self.tokenizer.stop_ids
        )
        self.engine = TorchEngine(self.context, self.model, shares_weights=False)

    def ask(
        self, number: int, grammar: Grammar | None, *, response: Sequence[int] = (), **changes: Any
    ) -> GenerateRequest:
        fields = {"grammar_from": changes.pop("grammar_from", 0)}
        return GenerateRequest(
            sample=SampleId(f"0/{number}/0"),
            attempt=0,
            prompt=self.tokenizer.encode("23+45="),
            response=np.asarray(response, np.int64),
            sampling=Sampling(**{"max_tokens": 60, **changes}),
            seed=number,
            shares_prompt="0/0",
            grammar=grammar,
            **fields,
        )

    def run(self, requests: Sequence[GenerateRequest]) -> list[Finished]:
        self.engine.submit(requests)
        ended = collect(self.engine, len(requests))
        return [ended[request.sample] for request in requests]

    def raw(self, end: Finished) -> bytes:
        """The bytes of a response; its stop token has none."""
        words, _ = token_bytes(self.context.model)
        stop = end.reason is FinishReason.STOP
        tokens = end.tokens[:-1] if stop else end.tokens
        if stop:
            assert int(end.tokens[-1]) in self.tokenizer.stop_ids
        return b"".join(words[token] for token in tokens.tolist())


PATTERNS = [
    r"[0-9]+",
    r"-?[0-9]{1,3}(\.[0-9]+)?",
    r"(a|b)*=(true|false)",
    r"[0-9]{2}\+[0-9]{2}=[0-9]{3}",
    r"a{0,4}b?",
    r"[^0-9\s]{3}",
    r"(0|1(01*0)*1)+",
    r".{2,5}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_finished_response_matches_the_expression(pattern: str, folder: Path) -> None:
    world = World(folder)
    requests = [world.ask(i, regex(pattern), temperature=1.5) for i in range(12)]
    ends = world.run(requests)
    finished = [end for end in ends if end.reason is FinishReason.STOP]
    assert len(finished) >= 6
    texts = set()
    for end in finished:
        text = world.raw(end).decode()  # never half a character
        assert re.fullmatch(pattern, text), text
        assert world.tokenizer.decode(end.tokens) == text
        texts.add(text)
    assert len(texts) > 1


def test_characters_of_several_bytes_are_whole(tmp_path: Path) -> None:
    world = World(folder_of("bpe", tmp_path))
    pattern = r"(é|日本|😀|ï){2,4}"
    for end in world.run([world.ask(i, regex(pattern), temperature=1.5) for i in range(8)]):
        assert end.reason is FinishReason.STOP
        assert re.fullmatch(pattern, world.raw(end).decode())


SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["aa", "ab"]},
        "t": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_every_finished_response_is_of_the_json_schema(folder: Path) -> None:
    world = World(folder)
    ends = world.run([world.ask(i, json_schema(SCHEMA), temperature=1.3) for i in range(12)])
    values = []
    for end in ends:
        assert end.reason is FinishReason.STOP
        text = world.raw(end).decode()
        value = json.loads(text)
        assert text == json.dumps(value, separators=(",", ":"))
        assert {"a", "b"} <= set(value) <= {"a", "b", "t"}
        assert type(value["a"]) is int
        assert 0 <= value["a"] <= 99
        assert value["b"] in ("aa", "ab")
        items = value.get("t", [])
        assert len(items) <= 2
        assert all(type(item) is bool for item in items)
        values.append(text)
    assert len(set(values)) > 3


def test_a_response_that_meets_its_greatest_length_is_the_beginning_of_a_match(
    characters: Path,
) -> None:
    world = World(characters)
    pattern = r"[0-9]{2}\+[0-9]{2}=[0-9]{3}"
    for end in world.run([world.ask(i, regex(pattern), max_tokens=5) for i in range(4)]):
        assert end.reason is FinishReason.LENGTH
        assert re.fullmatch(r"[0-9]{2}\+[0-9]{2}", world.raw(end).decode())


def test_tokens_are_draws_of_the_distribution_over_what_the_grammar_allows(
    characters: Path,
) -> None:
    world = World(characters, std=0.2)
    request = world.ask(3, regex("[0-9]{6}"), temperature=0.7)
    (end,) = world.run([request])
    digits = [int(world.tokenizer.encode(digit)[0]) for digit in "0123456789"]
    ids = torch.from_numpy(np.concatenate([request.prompt, end.tokens]))[None]
    with torch.no_grad():
        logits = world.model(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
    draws = torch.from_numpy(uniforms([request.seed], [0], 6)[0])
    for t in range(6):
        held = torch.full_like(logits[t], -torch.inf)
        held[digits] = logits[t, digits] / 0.7
        token = inverse_cdf(held.softmax(-1)[None], draws[t : t + 1])
        assert int(token) == int(end.tokens[t])
    # Then nothing but the end is left, and logprobs are those before the grammar.
    assert len(end.tokens) == 7
    want = forward_logprobs(world.model, request, end.tokens, 0.7)
    np.testing.assert_allclose(end.logprobs, want, atol=1e-4)


def test_truncation_comes_after_the_grammar(characters: Path) -> None:
    world = World(characters, std=0.2)
    requests = [
        world.ask(i, regex("[0-9]{4}"), **options)
        for i, options in enumerate(({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}))
    ]
    greedy, *others = [end.tokens.tolist() for end in world.run(requests)]
    assert others == [greedy, greedy]


def test_rows_with_grammars_and_rows_without_do_not_touch_each_other(characters: Path) -> None:
    world = World(characters, std=0.2)
    grammars = [regex("[0-9]+"), None, regex("(a|b)+"), json_schema(SCHEMA), None, regex("a*")]
    requests = [world.ask(i, each, max_tokens=20 + i) for i, each in enumerate(grammars)]
    together = world.run(requests)
    for request, end in zip(requests, together, strict=True):
        (alone,) = World(characters, std=0.2).run([request])
        assert alone.tokens.tolist() == end.tokens.tolist()
        assert alone.reason is end.reason


def test_an_aborted_response_goes_on_in_the_middle_of_its_grammar(characters: Path) -> None:
    world = World(characters, std=0.2)
    request = world.ask(1, regex("[0-9]{45}"))
    (whole,) = world.run([request])
    world.engine.submit([request])
    world.engine.poll(0.0)
    world.engine.abort([request.sample])
    first = collect(world.engine, 1)[request.sample]
    assert 0 < len(first.tokens) < 45
    (second,) = world.run([replace(request, attempt=1, response=first.tokens)])
    assert np.concatenate([first.tokens, second.tokens]).tolist() == whole.tokens.tolist()


def test_what_stands_before_the_grammar_is_not_of_it(characters: Path) -> None:
    world = World(characters)
    before = world.tokenizer.encode("ab=")
    request = world.ask(0, regex("[0-9]{3}"), response=before, grammar_from=len(before))
    (end,) = world.run([request])
    assert re.fullmatch("[0-9]{3}", world.raw(end).decode())
    with pytest.raises(BackendError, match="a token is not of the grammar") as caught:
        world.run([replace(request, grammar_from=0, sample=SampleId("0/9/0"))])
    assert caught.value.where == "sample 0/9/0"


# What cannot be held to.


def test_an_expression_beyond_the_library_is_refused_when_it_is_submitted(
    characters: Path,
) -> None:
    world = World(characters)
    with pytest.raises(BackendError, match=r"the grammar \(regex\) cannot be held to") as caught:
        world.engine.submit([world.ask(0, regex("(?=a)b"))])
    assert "look-around" in caught.value.hint
    assert caught.value.where == "roles.actor"
    with pytest.raises(BackendError, match="json_schema") as caught:
        world.engine.submit([world.ask(0, json_schema({"type": "text"}))])
    assert "Invalid type: text" in caught.value.found
    assert world.engine.poll(0.0) == []


@pytest.mark.parametrize("pattern", ["x", "[ab]x"])
def test_characters_that_the_tokenizer_lacks_are_told(pattern: str, characters: Path) -> None:
    world = World(characters)
    with pytest.raises(BackendError, match="no token goes on with what the grammar") as caught:
        world.run([world.ask(4, regex(pattern))])
    assert caught.value.where == "sample 0/4/0"


@pytest.mark.parametrize("changes", [{"min_tokens": 3}, {"top_k": 4, "logprobs": "sampler"}])
def test_options_that_a_grammar_excludes_are_refused(
    changes: dict[str, Any], characters: Path
) -> None:
    world = World(characters)
    with pytest.raises(BackendError, match="a grammar cannot be combined"):
        world.engine.submit([world.ask(0, regex("a"), **changes)])


def test_a_grammar_needs_a_stop_token(characters: Path) -> None:
    context = replace(World(characters).context, stop_token_ids=())
    with pytest.raises(BackendError, match="ends with a stop token, and there is none"):
        Grammars(context, 40)


def test_a_missing_library_is_told_with_what_to_install(
    characters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(characters)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BackendError, match="grammars need the llguidance library") as caught:
        world.engine.submit([world.ask(0, regex("a"))])
    assert caught.value.hint == "pip install 'flowrl[grammar]'"


# The bytes of tokens.


def test_the_bytes_of_tokens_are_those_that_the_tokenizer_decodes(folder: Path) -> None:
    words, fast = token_bytes(folder)
    tokenizer = Tokenizer.load(folder)
    assert set(words) == set(range(tokenizer.vocab_size)) - set(tokenizer.stop_ids)
    for token, raw in words.items():
        assert fast.decode([token]) == raw.decode(errors="replace")
    for text in TEXTS if tokenizer.vocab_size == 320 else ("23+45=68", '{"a": true}'):
        ids = tokenizer.encode(text).tolist()
        assert b"".join(words[token] for token in ids) == text.encode()


def written(tmp_path: Path, model: Any, decoder: Any) -> Path:
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoder
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_pieces_with_byte_fallback_are_joined(tmp_path: Path) -> None:
    vocab = {"▁a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3}
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    folder = written(tmp_path, models.BPE(vocab, [], byte_fallback=True), decoder)
    words, fast = token_bytes(folder)
    assert words == {0: b" a", 1: b"b", 2: b"\xc3", 3: b"\xa9"}
    assert fast.decode([0, 2, 3, 1]) == (b" a" + b"\xc3\xa9" + b"b").decode()


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Strip(" ", 1, 0)])
def test_decoders_that_do_more_than_join_bytes_are_refused(tmp_path: Path, decoder: Any) -> None:
    folder = written(tmp_path, models.WordLevel({"a": 0, "b": 1}, unk_token="a"), decoder)
    with pytest.raises(BackendError, match="bytes of this tokenizer's tokens are not known"):
        token_bytes(folder)


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="the tokenizer cannot be read") as caught:
        token_bytes(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")
