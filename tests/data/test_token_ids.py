"""Token ids in the files of a model folder, against the rows of the model's embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as FastTokenizer

from flowrl.data import Tokenizer
from flowrl.errors import DataError

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}


def folder_of(
    folder: Path,
    files: dict[str, dict[str, object]],
    *,
    vocab: dict[str, int] | None = None,
    post_processor: object = None,
    rows: object = 8,
) -> Path:
    fast = FastTokenizer(models.WordLevel(WORDS if vocab is None else vocab, "a"))
    fast.add_special_tokens([AddedToken("</s>", special=True)])
    if post_processor is not None:
        fast.post_processor = post_processor
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": rows, "eos_token_id": 1}
    tokenizer = {"eos_token": "</s>"}
    (folder / "config.json").write_text(json.dumps(config | files.get("config.json", {})))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | files.get("tokenizer_config.json", {}))
    )
    if "generation_config.json" in files:
        content = json.dumps(files["generation_config.json"])
        (folder / "generation_config.json").write_text(content)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "name", "token"),
    [
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id", -1),
        ("generation_config.json", {"eos_token_id": [1, 8]}, "eos_token_id", 8),
        ("generation_config.json", {"eos_token_id": 1, "pad_token_id": 9}, "pad_token_id", 9),
        ("generation_config.json", {"forced_bos_token_id": 10**12}, "forced_bos_token_id", 10**12),
        ("config.json", {"eos_token_id": 8}, "eos_token_id", 8),
        ("config.json", {"bos_token_id": -1}, "bos_token_id", -1),
        ("config.json", {"text_config": {"eos_token_id": [-2]}}, "text_config.eos_token_id", -2),
        ("tokenizer_config.json", {"pad_token_id": 8}, "pad_token_id", 8),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"-1": {"content": "a"}}},
            "added_tokens_decoder['-1']",
            -1,
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"8": {"content": "<t>"}}},
            "added_tokens_decoder['8']",
            8,
        ),
    ],
)
def test_an_id_in_a_config_that_is_none_of_the_models_names_file_id_and_limit(
    tmp_path, file, content, name, token
):
    folder = folder_of(tmp_path / "m", {file: content})
    with pytest.raises(DataError) as caught:
        Tokenizer.load(folder)
    assert caught.value.where == str(folder / file)
    assert caught.value.what == f"{name} is no token of the model"
    assert caught.value.found == f"id {token}"
    assert caught.value.expected == "an id from 0 to 7 (vocab_size 8 in config.json)"


def test_the_last_row_of_the_embedding_and_null_are_taken(tmp_path):
    content: dict[str, object] = {"eos_token_id": [7, 0], "pad_token_id": None}
    tokenizer = Tokenizer.load(folder_of(tmp_path / "m", {"generation_config.json": content}))
    assert tokenizer.stop_ids == (1, 7, 0)
    assert (tokenizer.vocab_size, tokenizer.model_vocab_size, tokenizer.names_all) == (4, 8, False)
    assert Tokenizer.load(folder_of(tmp_path / "n", {}, rows=4)).names_all


def test_a_negative_id_is_refused_where_nothing_says_how_many_rows_there_are(tmp_path):
    folder = folder_of(tmp_path / "m", {"generation_config.json": {"eos_token_id": -1}}, rows=None)
    with pytest.raises(DataError, match=r"eos_token_id is no token[\s\S]*an id from 0 up"):
        Tokenizer.load(folder)
    content = {"text_config": {"vocab_size": 5}}
    folder = folder_of(tmp_path / "n", {"config.json": content}, rows=None)
    assert Tokenizer.load(folder).model_vocab_size == 5


@pytest.mark.parametrize("value", ["</s>", 1.0, True, [1, None], [[1]], {"id": 1}])
def test_what_is_no_id_is_refused_and_not_passed_over(tmp_path, value):
    folder = folder_of(tmp_path / "m", {"generation_config.json": {"eos_token_id": value}})
    with pytest.raises(DataError, match=r"generation_config\.json: eos_token_id is no token id"):
        Tokenizer.load(folder)
    content = {"added_tokens_decoder": {"x": {"content": "<t>"}}}
    with pytest.raises(DataError, match=r"added_tokens_decoder\['x'\] is no token id"):
        Tokenizer.load(folder_of(tmp_path / "n", {"tokenizer_config.json": content}))


@pytest.mark.parametrize("rows", [0, -4, 4.0, "8", True])
def test_a_vocabulary_that_is_no_number_of_rows_is_refused(tmp_path, rows):
    with pytest.raises(DataError, match=r"config\.json: vocab_size is no number of tokens"):
        Tokenizer.load(folder_of(tmp_path / "m", {}, rows=rows))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        Tokenizer.load(folder_of(tmp_path / "m", {}, vocab=WORDS | {"far": 8}))
    assert caught.value.where == str(tmp_path / "m" / "tokenizer.json")
    assert (caught.value.what, caught.value.found) == (
        "the token 'far' is no token of the model",
        "id 8",
    )
    added = {"pad_token": "<pad>"}
    with pytest.raises(DataError) as caught:
        Tokenizer.load(folder_of(tmp_path / "n", {"tokenizer_config.json": added}, rows=4))
    assert caught.value.where == str(tmp_path / "n" / "tokenizer_config.json")
    assert (caught.value.what, caught.value.found) == (
        "the token '<pad>' is no token of the model",
        "id 4",
    )


def test_an_added_token_is_checked_by_the_id_that_its_file_says(tmp_path):
    folder = folder_of(tmp_path / "m", {})
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"][0]["id"] = 8
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        DataError, match=r"tokenizer\.json: the token '</s>' is no token[\s\S]*id 8"
    ):
        Tokenizer.load(folder)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m", {"tokenizer_config.json": {"eos_token": None}})
    FastTokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer has no tokens"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "post_processor",
    [
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)]),
        processors.Sequence([processors.RobertaProcessing(("</s>", 1), ("<s>", 8))]),
        processors.BertProcessing(("</s>", 8), ("<s>", 0)),
    ],
)
def test_a_token_that_a_post_processor_adds_is_one_of_the_models(tmp_path, post_processor):
    with pytest.raises(DataError, match=r"a token of post_processor is no token of the model"):
        Tokenizer.load(folder_of(tmp_path / "m", {}, post_processor=post_processor))
    assert Tokenizer.load(folder_of(tmp_path / "n", {}, post_processor=post_processor, rows=9))
