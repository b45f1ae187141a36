"""Rows with a preferred and a rejected response, and rows kept by their solve rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.config.data import ArithmeticData, DataConfig, DifficultyConfig, FileData
from flowrl.data import RowNeeds, Rows, load_rows
from flowrl.errors import ConfigError, DataError

PAIRS = RowNeeds(rejected=True)
PAIR = {"prompt": "p", "answer": "good", "rejected": "bad"}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_pairs(source: str, split: str = "train", **options: object) -> Rows:
    data = DataConfig(train=source, **options)
    return load_rows(data.train, data, split=split, needs=PAIRS)


def test_a_pair_is_the_solution_and_the_rejected_response_by_their_templates(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "a", "w": "wrong", "c": "right"})
    (row,) = read_pairs(path, solution="<{c}>", rejected="<{w}>")
    assert (row.solution, row.rejected) == ("<right>", "<wrong>")


def test_a_mapping_has_its_own_template_of_rejected_responses(tmp_path):
    path = Path(write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "a", "w": "wrong"}))
    source = FileData(kind="jsonl", path=path, rejected="{w}!")
    data = DataConfig(train=source, rejected="{none}")
    (row,) = load_rows(source, data, split="train", needs=PAIRS)
    assert row.rejected == "wrong!"


def test_rejected_responses_are_not_looked_at_where_no_stage_learns_from_pairs(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "a", "rejected": ["odd"]})
    data = DataConfig(train=path, rejected="{")
    assert load_rows(path, data, split="train")[0].rejected is None
    with pytest.raises(ConfigError, match=r"data\.rejected: a single"):
        load_rows(path, data, split="train", needs=PAIRS)


def test_held_out_rows_are_pairs_where_they_have_two_responses(tmp_path):
    path = write(tmp_path / "d.jsonl", PAIR, {"prompt": "p", "answer": "a"})
    assert [row.rejected for row in read_pairs(path, "eval")] == ["bad", None]
    alike = write(tmp_path / "e.jsonl", {**PAIR, "rejected": "good"})
    with pytest.raises(DataError, match="are the same"):
        read_pairs(alike, "eval")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": None}, "neither text nor a number"),
        ({"rejected": " \n"}, "the rejected response of the pair is empty"),
        ({"answer": ""}, "the preferred response of the pair is empty"),
        ({"rejected": "good"}, "the preferred and the rejected response are the same"),
    ],
)
def test_a_pair_that_prefers_nothing_is_a_bad_row_with_its_line(tmp_path, change, reason):
    path = write(tmp_path / "d.jsonl", PAIR, PAIR | change)
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4
    rows = read_pairs(path, max_bad_rows=1)
    assert [row.index for row in rows] == [0]
    assert reason in rows.problems[0].reason


def test_a_row_without_a_rejected_response_names_its_line_its_fields_and_the_key(tmp_path):
    path = write(tmp_path / "d.jsonl", PAIR, {"prompt": "p", "answer": "good", "worse": "bad"})
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    text = str(caught.value)
    assert f"{path}:2: the row has no field 'rejected', which data.rejected reads" in text
    assert "prompt, answer, worse" in text


@pytest.mark.parametrize(("digits", "most"), [(1, 9), (2, 25), (3, 250)])
def test_a_wrong_sum_is_off_by_a_little_and_never_changes(digits, most):
    source = ArithmeticData(kind="arithmetic", split="train", digits=digits, held_out=1)
    data = DataConfig(train=source)
    rows, again = (load_rows(source, data, split="train", needs=PAIRS) for _ in range(2))
    errors = set()
    for row, same in zip(rows[:2000], again[:2000], strict=True):
        assert row.rejected == same.rejected
        assert row.solution == row.answer
        assert row.rejected.isdecimal()
        assert len(row.rejected) == len(row.answer)
        assert row.rejected[0] in "01"
        errors.add(int(row.rejected) - int(row.answer))
    assert 0 not in errors
    assert (min(errors), max(errors)) == (-most, most)
    assert load_rows(source, data, split="train")[0].rejected is None


def test_each_sum_stands_among_the_pairs_with_several_wrong_answers():
    source = ArithmeticData(kind="arithmetic", split="train", digits=2)
    data = DataConfig(train=source)
    pairs = load_rows(source, data, split="train", needs=PAIRS)
    sums = load_rows(source, data, split="train")
    assert len(pairs) == 4 * len(sums)
    same = [pairs[5 + time * len(sums)] for time in range(4)]
    assert [row.index for row in same] == [5, 9005, 18005, 27005]
    assert {row.prompt for row in same} == {sums[5].prompt}
    assert len({row.rejected for row in same}) > 1
    assert pairs[9000:9003][1].index == 9001
    held_out = ArithmeticData(kind="arithmetic", split="eval")
    rows = load_rows(held_out, data, split="eval", needs=PAIRS)
    assert len(rows) == held_out.held_out
    assert all(row.rejected not in (None, row.solution) for row in rows[:50])


def test_the_wrong_sums_are_as_they_were():
    source = ArithmeticData(kind="arithmetic", split="train")
    rows = load_rows(source, DataConfig(train=source), split="train", needs=PAIRS)
    assert [row.rejected for row in rows[:4]] == WRONG


WRONG = ["065", "072", "024", "113"]


# data.difficulty


def rated(path: Path, *rates: object) -> str:
    return write(path, *({"prompt": "p", "answer": "1", "solve_rate": rate} for rate in rates))


def read_band(source: str, split: str = "train", **band: object) -> Rows:
    data = DataConfig(train=source, difficulty=DifficultyConfig(**band))
    return load_rows(data.train, data, split=split)


def test_rows_outside_the_band_are_left_out_and_counted_and_keep_their_places(tmp_path):
    path = rated(tmp_path / "d.jsonl", 0, 0.2, 0.5, 0.8, 1.0)
    rows = read_band(path, low=0.2, high=0.8)
    assert [row.index for row in rows] == [1, 2, 3]
    assert rows.num_out_of_band == 2
    assert rows.problems == ()


def test_held_out_rows_are_taken_whatever_their_difficulty(tmp_path):
    path = rated(tmp_path / "d.jsonl", 0, "none at all")
    assert len(read_band(path, "eval", low=0.2, high=0.8)) == 2


@pytest.mark.parametrize("rate", ["0.5", None, True, [0.5], 10**400])
def test_a_solve_rate_that_is_no_number_is_a_bad_row(tmp_path, rate):
    path = rated(tmp_path / "d.jsonl", 0.5, rate)
    with pytest.raises(DataError) as caught:
        read_band(path)
    assert f"{path}:2: field 'solve_rate', which data.difficulty.field reads, is no number" in str(
        caught.value
    )


def test_a_band_without_rows_says_where_the_rows_lie(tmp_path):
    path = rated(tmp_path / "d.jsonl", 0.0, 0.125)
    with pytest.raises(DataError) as caught:
        read_band(path, low=0.2, high=0.8)
    text = str(caught.value)
    assert f"{path}: data.difficulty leaves none of the 2 rows" in text
    assert "solve_rate from 0 to 0.125" in text
    assert "from 0.2 to 0.8" in text


def test_a_band_is_refused_for_sums_also_inside_a_mixture():
    sums = {"kind": "arithmetic", "split": "train"}
    mixture = {"kind": "mixture", "sources": {"sums": sums, "rows": "d.jsonl"}}
    for train in (sums, mixture):
        with pytest.raises(ValueError, match="built-in sums carry no solve rate"):
            DataConfig.model_validate({"train": train, "difficulty": {}})
