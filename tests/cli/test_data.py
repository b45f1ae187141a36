"""`flowrl data show` and `flowrl data check` on rows of a new character model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli import data
from flowrl.errors import ConfigError, DataError
from tests.runtime.tiny_runs import tiny_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config whose data is yet to be written."""
    monkeypatch.chdir(tmp_path)
    values = {**tiny_config(tmp_path), "stages": ["grpo"], "stage": {}}
    values["data"] = {"train": "rows.jsonl", "eval": "rows.jsonl", "max_prompt_tokens": 8}
    values["rewards"] = {"terms": [{"kind": "exact_match", "name": "accuracy"}]}
    values["eval"] = {"metric": "accuracy"}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    return tmp_path / "config.yaml"


def write(*lines: object) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("rows.jsonl").write_text("\n".join(texts) + "\n")


def row(prompt: str, answer: str = "2", **more: object) -> dict[str, object]:
    return {"prompt": prompt, "answer": answer, **more}


def checked(config: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    code = data.check(config, overrides, as_json=False)
    return code, capsys.readouterr().out


def test_show_prints_prompts_as_the_model_reads_them_and_what_rewards_get(config, capsys):
    write(row("1+1=", topic="sums"), row("2+2="), row("3+3="), row("4+4="))
    data.show(config, ["data.prompt=0{prompt}"], split="train", skip=0, num=2, as_json=False)
    first, second = capsys.readouterr().out.rstrip().split("\n\n")
    assert first.splitlines() == [
        "rows.jsonl:1: a prompt of 5 tokens",
        "  | 01+1=",
        "  a reward gets",
        "    prompt: '01+1='",
        "    answer: '2'",
        "    row['prompt']: '1+1='",
        "    row['answer']: '2'",
        "    row['topic']: 'sums'",
    ]
    assert second.startswith("rows.jsonl:2: ")


def test_show_can_skip_rows_and_gives_tokens_as_json(config, capsys):
    write(row("1+1="), row("2+2="), row("3+3="), "broken")
    data.show(config, [], split="eval", skip=2, num=5, as_json=True)
    value = json.loads(capsys.readouterr().out)
    (shown,) = value["rows"]
    assert (shown["where"], shown["prompt"], shown["num_tokens"]) == ("rows.jsonl:3", "3+3=", 4)
    assert len(shown["tokens"]) == 4
    assert [problem["where"] for problem in value["problems"]] == ["rows.jsonl:4"]


def test_show_looks_for_rows_behind_those_that_are_left_out(config, capsys):
    write("broken", row("1+1=", rate=0.1), row("2+2=", rate=0.5), row("3+3=", rate=0.5))
    data.show(
        config,
        ["data.difficulty={field: rate, low: 0.4}"],
        split="train",
        skip=0,
        num=1,
        as_json=False,
    )
    shown = capsys.readouterr().out
    assert shown.startswith("rows.jsonl:3: ")
    assert "rows.jsonl:1: not JSON" in shown
    assert "3+3=" not in shown


def test_show_names_the_data_that_there_is(config):
    write(row("1+1="))
    with pytest.raises(ConfigError, match=r"--split tset.*no such data") as caught:
        data.show(config, [], split="tset", skip=0, num=1, as_json=False)
    assert "one of train, eval" in str(caught.value)


def test_check_counts_each_kind_of_mistake_with_its_lines(config, capsys):
    write(
        row("1+1="),
        "{broken",
        row(" "),
        row("1+1="),
        row("111111+1="),
        row("a+1="),
        row("2+2=", answer=" "),
        "[1]",
    )
    code, text = checked(config, capsys)
    assert code == 2
    train = text.split("data.eval: ")[0].splitlines()
    assert train[0] == "data.train: rows.jsonl: 8 rows, 3 usable"
    for line in (
        "    rows.jsonl:2",
        "    rows.jsonl:3",
        "    rows.jsonl:4 (as rows.jsonl:1)",
        "    rows.jsonl:5 (9 tokens)",
        "    rows.jsonl:6",
        "    rows.jsonl:7",
        "    rows.jsonl:8",
    ):
        assert line in train
    kinds = [line.split()[1].rstrip(":") for line in train if line.startswith("  1 ")]
    assert sorted(kinds) == sorted(
        ["unreadable", "unreadable", "empty", "empty", "too", "duplicate", "unusable"]
    )
    assert train[-1] == "  a run refuses this: 4 bad rows, at most 0 (data.max_bad_rows)"
    assert checked(config, capsys, "data.max_bad_rows=4")[0] == 0


def test_check_shows_the_first_places_and_counts_the_rest(config, capsys):
    write(*["x"] * 9, row("1+1="))
    _, text = checked(config, capsys, "data.max_bad_rows=9")
    assert "  9 unreadable: not JSON" in text
    assert "rows.jsonl:4, rows.jsonl:5 and 4 more" in text
    assert "prompt tokens: 4 to 4, mean 4.0, p95 4" in text
    assert "  a run takes this" in text


def test_check_as_json_has_every_place(config, capsys):
    write(*["x"] * 9, row("1+1="))
    assert data.check(config, [], as_json=True) == 2
    report = json.loads(capsys.readouterr().out)["data.train"]
    (finding,) = report["findings"]
    assert (finding["kind"], len(finding["places"])) == ("unreadable", 9)
    assert (report["num_read"], report["num_usable"], report["num_bad"]) == (10, 1, 9)
    assert report["prompt_tokens"]["max"] == 4
    assert report["refused"].startswith("9 bad rows")


def test_check_counts_responses_that_stages_on_examples_leave_out(config, capsys):
    write(row("1+1=", "2"), row("2+2=", "44444444"), row("3+3=", "666666"))
    code, text = checked(config, capsys, "stages=[sft]", "args=null", "train.sampling.max_tokens=4")
    assert code == 0
    assert "data.train: rows.jsonl: 3 rows, 3 usable" in text
    assert "  1 too long response: prompt and response longer than 12 tokens" in text
    assert "    rows.jsonl:2 (13 tokens)" in text
    _, without = checked(config, capsys, "train.sampling.max_tokens=4")
    assert "too long response" not in without  # grpo reads no response of the data


def test_show_says_why_none_of_the_rows_can_be_used(config, capsys):
    write(row("letters"), row("more"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no row that can be used") as caught:
        data.show(config, [], split="train", skip=0, num=2, as_json=False)
    assert "flowrl data check" in str(caught.value)
