"""Rows in the layouts of published data sets: nested fields, conversations, pairs, presets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.config.data import PRESETS, DataConfig
from flowrl.data import Row, RowNeeds, Rows, load_rows
from flowrl.data.templates import Template, field_value
from flowrl.errors import DataError

USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Be short."}
ANSWER = {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7, "answer": "1+1 is 2 #### 2"},
}


def read(tmp_path: Path, *rows: object, needs: RowNeeds | None = None, **options: object) -> Rows:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=str(path), **options)
    return load_rows(data.train, data, split="train", needs=needs)


def one(tmp_path: Path, row: object, **options: object) -> Row:
    (found,) = read(tmp_path, row, **options)
    return found


def refusal(tmp_path: Path, row: object, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row, **options)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'd.jsonl'}:1: ")
    return text


def test_a_field_inside_others_is_named_by_its_path():
    fields = {"a": {"b": [{"c": 1}, {"c": 2}]}, "a.b": "whole", "x": {"1": "one"}}
    for name, value in (("a.b.0.c", 1), ("a.b.-1.c", 2), ("a.b", "whole"), ("x.1", "one")):
        assert field_value(fields, name, key="data.answer") == value
    assert Template.parse("{a.b.1.c}: {x.1}", key="data.prompt").render(fields) == "2: one"


@pytest.mark.parametrize(
    ("name", "what", "found"),
    [
        ("info.idx", "info has no 'idx'", "fields index in it"),
        ("tags.2", "tags has no '2'", "a list of 2"),
        ("tags.-3", "tags has no '-3'", "a list of 2"),
        ("n.x", "n has no 'x'", "a int 5"),
        ("inf.x", "no field 'inf.x'", "fields info, tags, n"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(name, what, found):
    fields = {"info": {"index": 1}, "tags": ["a", "b"], "n": 5}
    with pytest.raises(DataError) as caught:
        field_value(fields, name, key="data.answer")
    assert what in str(caught.value)
    assert f"found: {found}" in str(caught.value)


def test_nested_fields_are_named_wherever_a_field_is(tmp_path):
    row = one(
        tmp_path,
        VERL,
        prompt="prompt.0.content",
        answer="reward_model.ground_truth",
        solution="{extra_info.index}: {extra_info.answer}",
        difficulty={"field": "extra_info.index", "low": 7, "high": 7},
    )
    assert (row.prompt, row.messages, row.answer) == ("1+1?", (), "2")
    assert row.solution == "7: 1+1 is 2 #### 2"


def test_the_bare_name_of_a_field_is_the_field(tmp_path):
    assert one(tmp_path, {"question": "q", "answer": "a"}, prompt="question").prompt == "q"


def test_a_field_with_messages_is_a_conversation(tmp_path):
    row = one(tmp_path, {"prompt": [SYSTEM, USER, ANSWER, USER], "answer": "2"})
    assert row.prompt == "1+1?"
    assert row.messages == (SYSTEM, USER, ANSWER, USER)


def test_an_answer_at_the_end_of_a_conversation_is_the_response_and_not_the_prompt(tmp_path):
    row = one(
        tmp_path,
        {"messages": [SYSTEM, USER, ANSWER]},
        preset="openai_chat",
        needs=RowNeeds(answer=False),
    )
    assert row.messages == (SYSTEM, USER)
    assert row.solution == "2"


def test_system_message_and_examples_are_put_before_the_prompt(tmp_path):
    options = {"system": "Add.", "few_shot": [{"prompt": "2+2?", "response": "4"}]}
    shots = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})
    system = {"role": "system", "content": "Add."}
    text = one(tmp_path, {"prompt": "1+1?", "answer": "2"}, **options)
    assert (text.prompt, text.messages) == ("1+1?", (system, *shots, USER))
    chat = one(tmp_path, {"prompt": [SYSTEM, USER], "answer": "2"}, **options)
    assert chat.messages == (SYSTEM, *shots, USER)


def test_tools_are_a_list_or_its_json_text_or_none(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": None, "b": 1}}}
    clean = {"type": "function", "function": {"name": "add", "parameters": {"b": 1}}}
    for value in ([tool], json.dumps([tool])):
        row = {"prompt": [USER], "answer": "2", "tools": value}
        assert one(tmp_path, row, tools="tools").tools == (clean,)
    assert one(tmp_path, {"prompt": [USER], "answer": "2"}, tools="tools").tools == ()
    text = {"prompt": "1+1?", "answer": "2", "tools": [{"name": "add"}]}
    assert one(tmp_path, text, tools="tools").tools == ({"name": "add"},)
    said = refusal(tmp_path, {"prompt": [USER], "answer": "2", "tools": "add"}, tools="tools")
    assert "the field that data.tools reads is no list of tools" in said


def test_messages_lose_nulls_and_openais_forms(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    row = one(tmp_path, {"prompt": prompt, "answer": "2"})
    assert row.messages == (
        {"role": "user", "content": "1?"},
        {
            "role": "assistant",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    )


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([{"from": "human", "value": "q"}], "rename `from` to role"),
        ([{"role": "user"}], "has no text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a part that is no text"),
        ([], "the conversation that data.prompt reads is empty"),
        ([ANSWER], "nothing before the assistant's answer"),
        ([{"role": "user", "content": " "}], "the prompt is empty"),
        (["q"], "neither text nor a number"),
    ],
)
def test_what_is_no_conversation_is_a_bad_row(tmp_path, prompt, what):
    assert what in refusal(tmp_path, {"prompt": prompt, "answer": "2"})


HH = "\n\nHuman: 1+1?\n\nAssistant: Which base?\n\nHuman: Ten.\n\nAssistant:"

PAIRS = {
    "trl_preference": [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
    ],
    "trl_preference_implicit": [{"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}],
    "hh_rlhf": [{"chosen": f"{HH} 2", "rejected": f"{HH} 3"}],
}


@pytest.mark.parametrize(("preset", "row"), [(p, row) for p, rows in PAIRS.items() for row in rows])
def test_presets_of_pairs_read_prompt_and_both_responses(tmp_path, preset, row):
    needs = RowNeeds(answer=False, rejected=True)
    found = one(tmp_path, row, preset=preset, needs=needs)
    assert (found.solution, found.rejected) == ("2", "3")
    assert found.prompt == ("Ten." if preset == "hh_rlhf" else "1+1?")
    if preset == "hh_rlhf":
        assert [message["role"] for message in found.messages] == ["user", "assistant", "user"]
        assert found.messages[1]["content"] == "Which base?"


def test_a_pair_of_different_conversations_is_a_bad_row(tmp_path):
    row = {"chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]}
    needs = RowNeeds(answer=False, rejected=True)
    said = refusal(tmp_path, row, preset="trl_preference_implicit", needs=needs)
    assert "answer different conversations" in said


def test_a_text_without_turns_is_a_bad_row(tmp_path):
    needs = RowNeeds(answer=False, rejected=True)
    said = refusal(tmp_path, {"chosen": "Hi", "rejected": "Ho"}, preset="hh_rlhf", needs=needs)
    assert "begins with no turn" in said


ROWS = {
    "gsm8k": ({"question": "1+1?", "answer": "so\n#### 2"}, "so\n#### 2", "so\n#### 2"),
    "math": (
        {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"\boxed{2}"},
        r"\boxed{2}",
        r"\boxed{2}",
    ),
    "deepscaler": ({"problem": "1+1?", "answer": "2", "solution": "so 2"}, "2", "so 2"),
    "verl_parquet": (VERL, "2", "2"),
    "dapo_math_17k": (VERL, "2", "2"),
    "trl_prompt": ({"prompt": "1+1?", "answer": "2", "completion": "so 2"}, "2", "so 2"),
    "trl_conversational": (
        {"prompt": [USER], "completion": [ANSWER], "answer": "2"},
        "2",
        "2",
    ),
    "openai_chat": ({"messages": [USER, ANSWER], "answer": "2"}, "2", "2"),
}


def test_there_is_a_row_for_every_preset():
    assert PRESETS.keys() == ROWS.keys() | PAIRS.keys()


@pytest.mark.parametrize("preset", ROWS)
def test_a_preset_reads_prompt_answer_and_solution(tmp_path, preset):
    row, answer, solution = ROWS[preset]
    found = one(tmp_path, row, preset=preset)
    assert (found.prompt, found.answer, found.solution) == ("1+1?", answer, solution)


def test_a_key_that_is_written_wins_over_the_preset(tmp_path):
    row = one(tmp_path, ROWS["gsm8k"][0], preset="gsm8k", prompt="Q: {question}")
    assert (row.prompt, row.answer) == ("Q: 1+1?", "so\n#### 2")


@pytest.mark.parametrize("preset", ["gsm8k", "math", "deepscaler", "hh_rlhf", "openai_chat"])
def test_rows_that_fit_a_preset_are_recognised_where_a_field_is_missing(tmp_path, preset):
    row = ROWS[preset][0] if preset in ROWS else PAIRS[preset][0]
    said = refusal(tmp_path, row, prompt="prompt")
    assert said.endswith(f"the row has the columns of data.preset={preset}")


def test_a_preset_that_leaves_the_missing_key_alone_is_not_proposed(tmp_path):
    row = {"messages": ROWS["openai_chat"][0]["messages"]}
    said = refusal(tmp_path, row, preset="openai_chat")
    assert "no field 'answer', which data.answer reads" in said
    assert "data.preset" not in said


def test_where_no_row_is_usable_the_first_says_why_and_what_to_do(tmp_path):
    said = refusal(tmp_path, ROWS["gsm8k"][0], prompt="promt", max_bad_rows=9)
    assert "the data file has no usable row" in said
    assert "no field 'promt', which data.prompt reads" in said
    assert said.endswith("the row has the columns of data.preset=gsm8k")
