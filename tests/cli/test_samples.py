"""`flowrl samples` prints the samples that are asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.observe.rows import SampleRow
from tests.cli.command_line import Run, runner

ROW = SampleRow(
    stage="grpo", step=1, rollout="actor.generate", sample="0/0/0", prompt="1+1=", response="2",
    answer="2", score=1.0, terms={"exact": 1.0, "format": 0.5}, num_tokens=1, finish="stop",
    versions=((1, 1),), end="consumed",
)  # fmt: skip
ROWS = [
    ROW,
    replace(ROW, sample="0/0/1", response="3\x1b[2J", score=0.25),
    replace(ROW, step=2, sample="0/1/0", prompt="20+2=", answer="22", score=-0.5),
    replace(ROW, step=2, sample="0/1/1", score=None, terms={}, end="dropped", reason="hung"),
]


@pytest.fixture
def flowrl(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/config.yaml").touch()
    write(ROWS)
    return runner(capsys, "samples", "a")


def write(rows: list[SampleRow]) -> None:
    lines = (json.dumps(row.to_json()) + "\n" for row in rows)
    Path("a/samples.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["0/1/0", "0/1/1"]),
        (["--step", "1"], ["0/0/0", "0/0/1"]),
        (["--worst", "2"], ["0/1/0", "0/0/1"]),
        (["--step", "1", "--contains", "1+1", "--worst", "1"], ["0/0/1"]),
        (["--step", "2", "--contains", "1+1"], ["0/1/1"]),
        (["--step", "1", "--worst", "1"], ["0/0/1"]),
        (["--contains", "0+2"], ["0/1/0"]),
        (["--contains", "22"], ["0/1/0"]),
        (["--contains", "2", "--worst", "9"], ["0/1/0", "0/0/1", "0/0/0"]),
        (["--contains", "no such"], []),
    ],
)
def test_the_samples_are_those_asked_for(flowrl: Run, words: list[str], names: list[str]):
    code, out, _ = flowrl(*words, "--json")
    assert (code, [row["sample"] for row in json.loads(out)]) == (0, names)
    code, out, _ = flowrl(*words)
    heads = [line.split()[0] for line in out.splitlines() if "actor.generate" in line]
    assert (code, heads) == (0, names)


def test_a_sample_is_printed_with_its_end_its_texts_and_its_rewards(flowrl: Run):
    assert flowrl("--step", "1")[1].splitlines()[6:] == [
        "0/0/1  grpo, actor.generate",
        "  step 1: consumed; 1 token, score 0.25",
        "  prompt '1+1='",
        "  response '3\\x1b[2J'",
        "  answer '2'",
        "  rewards exact 1, format 0.5",
    ]


def test_json_has_all_samples_and_text_the_first_twenty(flowrl: Run):
    write([replace(ROW, sample=f"0/0/{member}") for member in range(23)])
    assert len(json.loads(flowrl("--json")[1])) == 23
    lines = flowrl()[1].splitlines()
    assert sum("actor.generate" in line for line in lines) == 20
    assert lines[-1].startswith("3 samples more: ")


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (ROWS, ["--step", "3"], "expected: a step from 1 to 2"),
        ([], [], "this run has no samples"),
        ([], ["--step", "1"], "this run has no samples"),
    ],
)
def test_samples_that_there_are_none_of_are_an_error(flowrl: Run, rows, words, said: str):
    write(rows)
    code, out, err = flowrl(*words)
    assert (code, out) == (2, "")
    assert said in err
