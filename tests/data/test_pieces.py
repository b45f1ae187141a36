"""Text in the middle of a sample, with tokenizers that do something where a text begins."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, processors

from flowrl.config.data import DataConfig
from flowrl.data import Row, RowNeeds, Tokenizer, encode_prompts
from flowrl.data.tokenizer_files import tokenizer_of_pieces
from flowrl.errors import DataError
from tests.data.tokenizer_kinds import KINDS, VOCABULARY, byte_level, llama_2, saved, with_bos

TEXTS = ["3", " 3", "  3", "3 ", "\n3", "x3", " x 42", "", " ", "3</s>3", "é"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_prompt_and_piece_decode_to_their_joined_texts(tmp_path, kind):
    tokenizer = Tokenizer.load(saved(tmp_path, KINDS[kind]()))
    prompt = tokenizer.encode_prompt("x+3=")
    before = tokenizer.decode(prompt)
    assert before.lstrip() == "x+3="  # GPT-2's decoder leaves the space that was put in front
    for text in TEXTS:
        piece = tokenizer.encode(text)
        visible = text.replace("</s>", "")
        assert tokenizer.decode([*prompt, *piece]) == before + visible
        assert tokenizer.decode_many([piece]) == [visible]
        assert tokenizer.encode_response(text).tolist() == [*piece, 2]
    turns = ["4", " 2", "\n", "3"]
    together = np.concatenate([prompt, *map(tokenizer.encode, turns)])
    assert tokenizer.decode(together) == before + "4 2\n3"


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_has_the_tokens_of_its_own_text(tmp_path, kind):
    folder = saved(tmp_path, KINDS[kind]())
    tokenizer = Tokenizer.load(folder)
    written = FastTokenizer.from_file(str(folder / "tokenizer.json")).id_to_token
    assert [written(token) for token in tokenizer.encode("3")] == ["3"]
    (spaced,) = tokenizer.encode(" 3")
    assert written(spaced) in ("▁3", "Ġ3")
    assert 1 not in tokenizer.encode("3")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_stay_as_autotokenizer_makes_them(tmp_path, kind):
    from transformers import AutoTokenizer

    folder = saved(tmp_path, KINDS[kind](), tokenizer_class="PreTrainedTokenizerFast")
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("x+3=", " x", "3 </s> x"):
        ids = theirs(text)["input_ids"]
        assert ours.encode_prompt(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tokenizer_puts_behind_a_text_is_not_put_behind_a_prompt(tmp_path, kind):
    plain = Tokenizer.load(saved(tmp_path / "plain", with_bos(KINDS[kind]())))
    fast = KINDS[kind]()
    fast.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
            ),
        ]
    )
    closing = Tokenizer.load(saved(tmp_path / "closing", fast))
    for text in ("x+3=", "x</s>", "</s>"):
        assert closing.encode_prompt(text).tolist() == plain.encode_prompt(text).tolist()
        assert closing.encode(text).tolist() == plain.encode(text).tolist()


def up_to(num_tokens: int) -> DataConfig:
    return DataConfig(train="x", max_prompt_tokens=num_tokens)


def test_a_tokenizer_that_does_nothing_where_a_text_begins_is_not_copied():
    fast = byte_level(prefix=False)
    assert tokenizer_of_pieces(fast) is fast
    assert tokenizer_of_pieces(byte_level(prefix=True)) is not fast


def test_tokens_that_the_tokenizer_does_not_have_are_decoded_by_a_name(tmp_path):
    tokenizer = Tokenizer.load(saved(tmp_path, llama_2()))
    four, two, spaced = VOCABULARY["4"], VOCABULARY["2"], VOCABULARY["▁3"]
    cases = {
        (900, four, 700, two): "<unused900>4<unused700>2",
        (four, two, 900): "42<unused900>",
        (900, spaced, 900, 901): "<unused900> 3<unused900><unused901>",
        (four, 2, two): "42",
        (len(VOCABULARY),): f"<unused{len(VOCABULARY)}>",
        (): "",
    }
    assert tokenizer.decode_many(list(cases)) == list(cases.values())
    assert [tokenizer.decode(ids) for ids in cases] == list(cases.values())
    assert tokenizer.decode_many([]) == []


def test_a_gap_in_the_tokenizers_ids_is_no_token_of_it(tmp_path):
    fast = FastTokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 5}, "<unk>"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"vocab_size": 8}))
    tokenizer = Tokenizer.load(saved(tmp_path / "m", fast))
    assert tokenizer.without_token(np.arange(-1, 9)).tolist() == [
        *(True, False, False, False, True, True, False, True, True, True)
    ]
    assert (tokenizer.vocab_size, tokenizer.model_vocab_size, tokenizer.names_all) == (6, 8, False)
    assert tokenizer.decode_many([[5, 3]]) == ["a<unused3>"]


def rows_of(*pairs: tuple[str, str]) -> list[Row]:
    return [
        Row(index=i, prompt=p, answer="", solution=s, rejected=s, fields={}, where=f"d.jsonl:{i}")
        for i, (p, s) in enumerate(pairs)
    ]


@pytest.mark.parametrize("solution", ["3</s>", "</s>3", "3 </s> ", "<s>3"])
@pytest.mark.parametrize("needs", [RowNeeds(), RowNeeds(solution=False, rejected=True)])
def test_a_response_with_a_token_that_is_put_around_it_is_a_bad_row(tmp_path, solution, needs):
    tokenizer = Tokenizer.load(saved(tmp_path, llama_2()))
    rows = rows_of(("x=", "3"), ("x=", solution))
    with pytest.raises(DataError) as caught:
        encode_prompts(rows, tokenizer, up_to(9), needs=needs)
    assert str(caught.value).startswith("d.jsonl:1: the response has the token '")
    assert "take it out of data.solution" in str(caught.value)


def test_a_stop_token_that_is_an_ordinary_one_ends_no_response_in_its_middle(tmp_path):
    folder = saved(tmp_path, llama_2())
    config = {"eos_token_id": [2, VOCABULARY["\n"]]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_response("3")
    with pytest.raises(DataError, match=r"the token '\\n' in its text, which ends a response"):
        tokenizer.check_response("3\n4")


@pytest.mark.parametrize(
    ("prompt", "template", "said"),
    [
        ("<s>x=", None, "<s>"),
        (" <s> x=", None, "<s>"),
        ("x=", None, ""),
        ("x<s>=", None, ""),
        ("x=", "{{ bos_token }}{{ messages[0]['content'] }}", ""),
        ("<s>x=", "{{ bos_token }}{{ messages[0]['content'] }}", "<s>"),
        ("<s>x=", "{{ messages[0]['content'] }}", ""),
    ],
)
def test_a_prompt_that_begins_with_the_bos_that_it_gets_is_told(tmp_path, prompt, template, said):
    config = {} if template is None else {"chat_template": template}
    tokenizer = Tokenizer.load(saved(tmp_path, llama_2(), **config))
    assert tokenizer.repeats_bos(prompt, tokenizer.encode_prompt(prompt)) == said


def test_a_bos_that_only_the_post_processor_names_is_one(tmp_path):
    tokenizer = Tokenizer.load(saved(tmp_path / "bos", llama_2(), bos_token=None))
    assert tokenizer.repeats_bos("<s>x=", tokenizer.encode_prompt("<s>x=")) == "<s>"
    fast = byte_level(prefix=False)
    fast.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    ending = Tokenizer.load(saved(tmp_path / "eos", fast, bos_token=None))
    assert ending.repeats_bos("</s></s>", ending.encode_prompt("</s></s>")) == ""


def test_without_a_bos_no_prompt_repeats_it(tmp_path):
    tokenizer = Tokenizer.load(saved(tmp_path, byte_level(prefix=False), bos_token=None))
    assert tokenizer.repeats_bos("<s>", tokenizer.encode_prompt("<s><s>")) == ""
