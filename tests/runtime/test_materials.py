"""Data of a run before its first step: pairs, what fits, what is left out and said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.load import load_config
from flowrl.data import PromptCursor, RowNeeds
from flowrl.errors import DataError
from flowrl.ids import RoleName, sample_id
from flowrl.runtime.driver.payloads import Payload, sequence_batch
from flowrl.runtime.setup.prepared_inputs import PreparedInputs, prepare_inputs
from tests.data.tokenizer_kinds import VOCABULARY, llama_2, saved
from tests.runtime.tiny_runs import tiny_config

ACTOR = RoleName("actor")


def prepare(
    folder: Path,
    rows: Any = None,
    *,
    max_length: int = 16,
    model: str | None = None,
    **data: object,
) -> PreparedInputs:
    config = tiny_config(folder / "runs")
    if model is not None:
        config["roles"]["actor"] = {"backend": "torch", "model": model}
    if rows is not None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config["data"] = {"train": str(path), "max_prompt_tokens": 8}
    config["data"] |= data
    return prepare_inputs(
        load_config(None, base=config).config,
        folder,
        roles=[ACTOR],
        policy=ACTOR,
        supervised=False,
        needs=RowNeeds(rejected=True),
        max_length=max_length,
    )


def pair(prompt: str, preferred: str, rejected: str | None = None) -> Mapping[str, str]:
    row = {"prompt": prompt, "answer": preferred}
    return row if rejected is None else {**row, "rejected": rejected}


def test_a_pair_becomes_a_group_of_two_samples_the_preferred_one_first(tmp_path):
    prepared_inputs = prepare(tmp_path, [pair("1+1=", "2", "13"), pair("2+2=", "4", "5")])
    pairs = prepared_inputs.pairs
    assert pairs is not None
    assert prepared_inputs.solutions is None
    decode = prepared_inputs.models[ACTOR].tokenizer.decode
    items = PromptCursor(prepared_inputs.pair_prompts, seed=0).take(2)
    rows = [
        (sample_id(item.group, member), Payload(item=item, tokens=tokens))
        for item in items
        for member, tokens in enumerate(pairs.of(item))
    ]
    batch = sequence_batch(rows, [payload.item.group for _, payload in rows])
    assert batch.groups.tolist() == [0, 0, 1, 1]
    texts = [decode(payload.tokens) for _, payload in rows]
    expected = {0: ["2", "13"], 1: ["4", "5"]}
    assert texts == expected[items[0].index] + expected[items[1].index]
    end = prepared_inputs.models[ACTOR].tokenizer.end_id
    assert all(payload.tokens[-1] == end for _, payload in rows)
    assert pairs.of(items[0])[1] is rows[1][1].tokens


def test_sums_come_with_wrong_ones(tmp_path):
    prepared_inputs = prepare(tmp_path)
    assert prepared_inputs.pairs is not None
    decode = prepared_inputs.models[ACTOR].tokenizer.decode
    for item in prepared_inputs.pair_prompts.items()[:20]:
        preferred, rejected = prepared_inputs.pairs.of(item)
        assert decode(preferred) == item.row.answer
        assert decode(rejected) == item.row.rejected != item.row.answer


@pytest.mark.parametrize("long", [("2", "123456"), ("123456", "2")])
def test_a_pair_that_does_not_fit_is_left_out_as_a_whole_and_said(tmp_path, long):
    prepared_inputs = prepare(tmp_path, [pair("1+1=", "2", "3"), pair("1+1=", *long)], max_length=8)
    assert [prompt.row.index for prompt in prepared_inputs.pair_prompts.prompts] == [0]
    assert len(prepared_inputs.train) == 2
    (note,) = prepared_inputs.notes
    assert "1 pairs left out, prompt and the longer response longer than 8 tokens" in note


def test_pairs_that_are_all_too_long_end_the_run_with_the_shortest(tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, [pair("1+1=", "2", "345")], max_length=7)
    assert "no pair is short enough for the model" in str(caught.value)
    assert "the shortest has 8 tokens" in str(caught.value)


def test_a_row_without_a_rejected_response_ends_the_run_with_its_line(tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, [pair("1+1=", "2", "3"), pair("1+1=", "2")])
    assert f"{tmp_path / 'rows.jsonl'}:2: the row has no field 'rejected'" in str(caught.value)


def test_rows_outside_the_band_of_difficulty_are_counted_in_a_note(tmp_path):
    rows = [{**pair("1+1=", "2", "3"), "rate": rate} for rate in (0.0, 0.5, 1.0)]
    band = {"field": "rate", "low": 0.25, "high": 0.75}
    prepared_inputs = prepare(tmp_path, rows, difficulty=band)
    assert len(prepared_inputs.train) == 1
    (note,) = prepared_inputs.notes
    assert note.endswith("2 rows left out, rate outside 0.25 to 0.75 (data.difficulty)")


def test_prompts_get_a_bos_answers_nothing_and_a_second_bos_is_said_once_with_the_way_out(tmp_path):
    folder = saved(tmp_path / "model", llama_2())
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32}))
    (folder / "model.safetensors").write_bytes(b"")
    rows = [pair(prompt, "2", "3") for prompt in ("x=", "<s>x=", "<s> 4=")]
    prepared_inputs = prepare(tmp_path, rows, model=str(folder))
    (note,) = prepared_inputs.notes
    assert prepared_inputs.pairs is not None
    preferred, rejected = prepared_inputs.pairs.of(prepared_inputs.train.items()[0])
    assert preferred.tolist() == [VOCABULARY["2"], 2]  # no space in front of the answer
    assert rejected.tolist() == [VOCABULARY["3"], 2]
    path = tmp_path / "rows.jsonl"
    assert note.startswith(f"{path}: 2 prompts with '<s>' in front of the text get another one")
    assert f"the first is {path}:2" in note
    assert "take '<s>' out of data.prompt" in note
    assert prepare(tmp_path, rows[:1], model=str(folder)).notes == ()
