"""`flowrl score`: completions of a file, and where two rewards differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli.score import Fields, run
from flowrl.errors import ConfigError, DataError

ROWS = [
    {"prompt": "2 + 2?", "response": "So #### 4", "answer": "4"},
    {"prompt": "2 + 3?", "response": "The answer is 5.", "answer": "5"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("done.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("mine.py").write_text("def f(solution_str): return {'5.': 1 / 0}[solution_str[-2:]]")


def scored(
    reward: str, compare: str | None = None, *, fields: Fields | None = None, **options: object
) -> None:
    options = {"timeout_s": 30.0, "num": 5, "as_json": False, **options}
    run(Path("done.jsonl"), reward, compare, fields or Fields(), **options)  # type: ignore[arg-type]


def test_two_rewards_are_compared_completion_by_completion(capsys):
    scored("gsm8k", "{use: gsm8k, flexible: true}")
    assert capsys.readouterr().out.splitlines() == [
        "done.jsonl: 2 completions",
        "  gsm8k: mean 0.5 of 2 scores",
        "  {use: gsm8k, flexible: true}: mean 1 of 2 scores",
        "  they differ on 1 of 2 completions",
        "done.jsonl:2: gsm8k 0, {use: gsm8k, flexible: true} 1",
        "  response ends 'The answer is 5.', answer '5'",
    ]


def test_failures_are_reported_and_never_zero(capsys):
    scored("mine.py:f", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["completions"][1]["mine.py:f"]["failure"].startswith("raised ZeroDivisionError")
    scored("mine.py:f")
    assert "no score, 2 failures; the first raised ZeroDivisionError" in capsys.readouterr().out


def test_nested_fields_are_named(capsys):
    row = {"choices": [{"text": "#### 4"}], "label": {"is": "4"}}
    Path("done.jsonl").write_text(json.dumps(row) + "\n")
    scored("gsm8k", fields=Fields(response="choices.0.text", answer="label.is"))
    assert "mean 1 of 1 score" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"done\.jsonl:1: the row has no completion"):
        scored("gsm8k")


def test_an_unknown_reward_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="gsm8k"):
        scored("gsm9k")
    with pytest.raises(ConfigError, match=r"mine\.py has no function 'g'"):
        scored("mine.py:g")


def test_completions_on_which_both_rewards_fail_do_not_differ(capsys):
    Path("other.py").write_text("def f(solution_str): return {}[solution_str]")
    scored("mine.py:f", "other.py:f")
    assert "they differ on 0 of 2 completions" in capsys.readouterr().out


def test_a_file_without_completions_is_refused():
    Path("done.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"done\.jsonl: the file has no completion"):
        scored("gsm8k")
