"""Reading data rows: templates, bad rows, arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.config.data import ArithmeticData, DataConfig, FileData
from flowrl.data import RowNeeds, Rows, load_rows
from flowrl.data.templates import Template
from flowrl.errors import ConfigError, DataError

HERE = Path(__file__).parent


def write(path: Path, *lines: object) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


def read(source: str, split: str = "train", **options: object) -> Rows:
    data = DataConfig(train=source, **options)
    return load_rows(data.train, data, split=split)


def test_gsm8k_reads_with_its_own_field_names():
    rows = read(
        str(HERE / "gsm8k_train.jsonl"), prompt="Question: {question}\n", solution="{answer}"
    )
    assert len(rows) == 60
    assert rows.problems == ()
    assert rows[0].prompt.startswith("Question: Natalia sold clips to 48")
    assert rows[0].solution.endswith("#### 72")
    assert rows[0].where.endswith("gsm8k_train.jsonl:1")
    assert [row.index for row in rows] == list(range(60))


def test_a_row_keeps_every_field_for_the_users_reward(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": 7, "extra": {"deep": [1]}})
    (row,) = read(path)
    assert (row.prompt, row.answer, row.solution) == ("p", "7", "7")
    assert row.fields == {"prompt": "p", "answer": 7, "extra": {"deep": [1]}}


def test_a_row_may_lack_what_nobody_reads(tmp_path):
    path = write(
        tmp_path / "d.jsonl", {"prompt": "p"}, {"prompt": "q", "answer": ["odd"]}, {"answer": "1"}
    )
    data = DataConfig(train=path, max_bad_rows=1)
    rows = load_rows(path, data, split="train", needs=RowNeeds(answer=False, solution=False))
    assert [(row.prompt, row.answer, row.solution) for row in rows] == [
        ("p", "", ""),
        ("q", "", ""),
    ]
    assert [problem.where for problem in rows.problems] == [f"{path}:3"]
    with pytest.raises(DataError, match=r"which data\.answer reads"):
        load_rows(path, data, split="train", needs=RowNeeds(solution=False))
    with pytest.raises(DataError, match=r"which data\.solution reads"):
        load_rows(path, data, split="train", needs=RowNeeds(answer=False))


def test_a_row_without_a_field_that_a_map_reads_is_a_bad_row(tmp_path):
    path = write(
        tmp_path / "d.jsonl", {"prompt": "p", "meta": {"topic": "a"}}, {"prompt": "q", "meta": {}}
    )
    needs = RowNeeds(answer=False, solution=False, fields=("meta.topic",))
    data = DataConfig(train=path, max_bad_rows=1)
    rows = load_rows(path, data, split="train", needs=needs)
    assert [row.prompt for row in rows] == ["p"]
    with pytest.raises(DataError, match=r":2: the row has no field 'meta\.topic', which a map"):
        load_rows(path, DataConfig(train=path), split="train", needs=needs)


def test_an_answer_that_is_not_one_number_is_a_bad_row_where_a_reward_needs_a_number(tmp_path):
    answers = ("#### -3/4", "7 apples", "3 or 5", "so 7 #### 1.5.2", "blue", 12)
    path = write(tmp_path / "d.jsonl", *({"prompt": "p", "answer": a} for a in answers))
    data = DataConfig(train=path, max_bad_rows=3)
    needs = RowNeeds(number=True, solution=False)
    rows = load_rows(path, data, split="train", needs=needs)
    assert [row.answer for row in rows] == ["#### -3/4", "7 apples", "12"]
    assert [problem.where for problem in rows.problems] == [f"{path}:{n}" for n in (3, 4, 5)]
    assert len(load_rows(path, data, split="train", needs=RowNeeds())) == 6
    with pytest.raises(DataError, match=r":3: field 'answer', which data\.answer reads, cannot be"):
        load_rows(path, DataConfig(train=path), split="train", needs=needs)


def test_a_mapping_source_uses_its_own_templates_and_stops_at_max_rows(tmp_path):
    path = write(tmp_path / "d.jsonl", *({"q": f"{i}?", "a": str(i)} for i in range(9)))
    source = FileData(
        kind="jsonl", path=Path(path), prompt="{q}", answer="a", solution="={a}", max_rows=4
    )
    rows = load_rows(source, DataConfig(train=source, prompt="{other}"), split="train")
    assert [(r.prompt, r.answer, r.solution) for r in rows] == [
        (f"{i}?", str(i), f"={i}") for i in range(4)
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "p"', "not JSON"),
        ("[1, 2]", "no JSON object"),
        ('{"answer": "1"}', "no field 'prompt', which data.prompt reads"),
        ('{"prompt": "p"}', "no field 'answer', which data.answer reads"),
        ('{"prompt": ["p"], "answer": "1"}', "neither text nor a number"),
        ('{"prompt": null, "answer": "1"}', "neither text nor a number"),
        ('{"prompt": true, "answer": "1"}', "neither text nor a number"),
        ('{"prompt": "  ", "answer": "1"}', "the prompt is empty"),
        ('{"prompt": "p", "answer": NaN}', "NaN is no JSON number"),
        ('{"prompt": "p", "answer": 1e999}', "neither text nor a number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "p", "answer": ' + "1" * 5000 + "}", "not usable JSON"),
    ],
)
def test_a_bad_row_stops_with_its_file_and_line_or_is_kept_as_a_problem(tmp_path, line, reason):
    good = {"prompt": "p", "answer": "1"}
    path = write(tmp_path / "d.jsonl", good, line, good)
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4
    rows = read(path, max_bad_rows=1)
    assert [row.index for row in rows] == [0, 2]
    (problem,) = rows.problems
    assert problem.where == f"{path}:2"
    assert reason in problem.reason


def test_the_error_past_the_limit_counts_the_bad_rows_and_names_the_earlier_ones(tmp_path):
    path = write(tmp_path / "d.jsonl", "x", {"prompt": "p", "answer": "1"}, "y", "z")
    with pytest.raises(DataError) as caught:
        read(path, max_bad_rows=2)
    text = str(caught.value)
    assert f"{path}:4: " in text
    assert "at most 2 bad rows" in text
    assert "bad row 3" in text
    assert f"{path}:1, {path}:3" in text


def test_a_missing_field_lists_the_rows_fields_and_the_nearest(tmp_path):
    path = write(tmp_path / "d.jsonl", {"question": "q", "answer": "1"})
    with pytest.raises(DataError) as caught:
        read(path, prompt="{qestion}")
    assert "fields question, answer" in str(caught.value)
    assert "did you mean 'question'?" in str(caught.value)


def test_a_line_that_is_not_utf8_is_a_bad_row(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "p\xff", "answer": "1"}\n{"prompt": "p", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:1: not UTF-8 at byte 14") as caught:
        read(str(path))
    assert "iconv -f" in str(caught.value.hint)


def test_where_no_row_is_usable_and_none_says_what_to_do_the_rows_are_to_be_corrected(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "p", "answer": NaN}\n')
    with pytest.raises(DataError, match="NaN is no JSON number") as caught:
        read(str(path), max_bad_rows=9)
    assert caught.value.hint == "correct the rows of the file"


def test_blank_lines_a_byte_order_mark_and_line_separators_inside_strings_are_no_trouble(tmp_path):
    path = tmp_path / "d.jsonl"
    row = json.dumps({"prompt": "a\u2028b", "answer": "1"}, ensure_ascii=False)
    path.write_text(f"\ufeff{row}\n\n  \r\n{row}", encoding="utf-8")
    rows = read(str(path))
    assert [(r.prompt, r.where) for r in rows] == [
        ("a\u2028b", f"{path}:1"),
        ("a\u2028b", f"{path}:4"),
    ]


@pytest.mark.parametrize(("content", "what"), [("", "is empty"), ("x\n", "no usable row")])
def test_a_file_without_rows_is_an_error(tmp_path, content, what):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataError, match=what):
        read(str(tmp_path / "d.jsonl"), max_bad_rows=5)


def test_a_missing_file_and_a_folder_name_the_config_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.train: no such data file"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"data\.train: this is a folder without data files"):
        read(str(tmp_path))


def test_held_out_rows_need_no_solution_and_training_rows_do(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"})
    assert read(path, "eval", solution="{worked}")[0].solution == ""
    with pytest.raises(DataError, match="no field 'worked'"):
        read(path, "train", solution="{worked}")


def test_data_without_reference_answers_says_so_with_an_empty_key(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p"})
    assert read(path, "eval", answer="", solution="")[0].answer == ""
    with pytest.raises(ConfigError, match=r"data\.solution: this template names no field"):
        read(path, "train", solution="")


def test_a_whole_number_beyond_all_floats_is_a_number_like_others(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": 10**400})
    assert read(path)[0].answer == "1" + "0" * 400


def test_templates_substitute_fields_and_nothing_else():
    template = Template.parse("{{{a}}} {b.c} {d!r:>9}", key="data.prompt")
    assert template.names == ("a", "b.c", "d!r:>9")
    fields = {"a": "{x}", "b.c": 2.5, "d!r:>9": "z"}
    assert template.render(fields) == "{{x}} 2.5 z"
    with pytest.raises(DataError, match=r"no field 'a\.__class__'"):
        Template.parse("{a.__class__}", key="data.prompt").render({"a": "x"})


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("{{ prompt }}", "{prompt}"),
        ("{{prompt}}", "{prompt}"),
        ("{{- prompt | trim -}}", "{prompt}"),
        ("Q: {{ row.prompt }}\n", "Q: {row}\n"),
        ("{system}\n{{ question }}", "{system}\n{question}"),
        ("%(prompt)s", "{prompt}"),
        ("$prompt", "{prompt}"),
        ("<prompt>", "{prompt}"),
        ("[prompt]", "{prompt}"),
    ],
)
@pytest.mark.parametrize("key", ["prompt", "solution", "rejected"])
def test_a_template_in_another_form_is_refused_with_the_right_one(tmp_path, key, text, right):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1", "rejected": "2"})
    data = DataConfig(train=path, **{key: text})
    with pytest.raises(ConfigError, match=rf"data\.{key}: this .* every row") as caught:
        load_rows(path, data, split="train", needs=RowNeeds(rejected=True))
    assert f"write data.{key}={right!r}" in str(caught.value)


def test_a_template_without_any_field_says_how_one_is_written():
    with pytest.raises(ConfigError, match=r"names no field.*\n.*\n.*as \{prompt\}"):
        Template.parse("What is 1 + 1?", key="data.eval.prompt")


def test_braces_that_no_field_is_meant_by_are_braces():
    text = r"{q}: reply with {{answer}} in \boxed{{}}, as {{ 'a': 1 }}"
    assert Template.parse(text, key="data.prompt").render({"q": "x"}) == (
        r"x: reply with {answer} in \boxed{}, as { 'a': 1 }"
    )


@pytest.mark.parametrize("text", ["{", "a } b", "{}", r"\boxed{}", "{a{b}}"])
def test_a_brace_that_names_no_field_is_a_config_error(text):
    with pytest.raises(ConfigError, match=r"data\.prompt: a single"):
        Template.parse(text, key="data.prompt")


def test_two_digit_sums_are_all_pairs_once_and_split_for_ever():
    data = DataConfig(train=ArithmeticData(kind="arithmetic", split="train"))
    train = load_rows(data.train, data, split="train")
    held = load_rows(ArithmeticData(kind="arithmetic", split="eval"), data, split="eval")
    assert (len(train), len(held)) == (9000, 1000)
    pairs = [(row.fields["a"], row.fields["b"]) for rows in (train, held) for row in rows]
    assert sorted(pairs) == [(a, b) for a in range(100) for b in range(100)]
    for row in held:
        a, b = row.fields["a"], row.fields["b"]
        assert row.prompt == f"{a:02d}+{b:02d}="
        assert row.answer == row.solution == f"{a + b:03d}"
    # The order is part of the data set: a change here changes every published number.
    assert [row.prompt for row in train[:3]] == FIRST_TRAIN
    assert [row.prompt for row in held[:3]] == FIRST_HELD


FIRST_TRAIN = ["65+08=", "20+53=", "09+03="]
FIRST_HELD = ["02+30=", "99+61=", "45+96="]


def test_three_digit_sums_are_made_when_asked_for():
    source = ArithmeticData(kind="arithmetic", split="train", digits=3, held_out=1)
    rows = load_rows(source, DataConfig(train=source), split="train")
    assert len(rows) == 999_999
    row = rows[123_456]
    assert row.answer == f"{row.fields['a'] + row.fields['b']:04d}"
    assert rows[-1].index == 999_998


def test_holding_out_every_sum_is_refused_with_the_numbers():
    source = ArithmeticData(kind="arithmetic", split="train", digits=1, held_out=100)
    with pytest.raises(DataError, match="fewer than the 100 sums"):
        load_rows(source, DataConfig(train=source), split="train")
