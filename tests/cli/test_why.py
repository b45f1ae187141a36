"""`flowrl why` tells one sample's story, and helps who asks for one that there is not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.cli import why
from flowrl.errors import CheckpointError, ConfigError
from flowrl.files import read_json_lines
from flowrl.observe.rows import SampleRow
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with filtered groups."""
    config = {**tiny_config(tmp_path_factory.mktemp("runs")), "stages": ["grpo"], "stage": {}}
    config["train"] = {**config["train"], "steps": 2}
    return api.run(None, config, display=WatchedDisplay()).folder


def rows(run: Path, end: str) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run / "samples.jsonl") if row["end"] == end]


def test_a_consumed_sample_is_told_from_its_offer_to_its_batch(
    made: Path, capsys: pytest.CaptureFixture[str]
):
    row = next(row for row in rows(made, "consumed") if row["step"] == 2 and row["num_tokens"] > 1)
    why.run(made, row["sample"], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "grpo, actor.generate"
    assert lines[1].startswith(f"sample {row['sample']}: consumed (in a journal of ")
    assert f"tokens: {row['num_tokens']} by version 1; 0 versions old when consumed" in lines[1]
    told = [line.partition(": ")[2] for line in lines[2:] if "event" in line]
    assert told == [
        "offered",
        "attempt 0 starts on actor.generate[0], weights 1",
        "attempt 0 finished on actor.generate[0]",
        "waits for its score",
        f"its score is {row['score']:g}",
        "is ready",
        "consumed: batch 2, trained on at version 1",
    ]
    assert f"step 2: consumed; {row['num_tokens']} tokens, score {row['score']:g}" in lines[-3]
    assert lines[-2].endswith(repr(row["prompt"]))
    assert lines[-1].endswith(repr(row["response"]))


def test_a_filtered_sample_says_by_what(made: Path, capsys: pytest.CaptureFixture[str]):
    row = rows(made, "filtered")[0]
    why.run(made, row["sample"], as_json=False)
    out = capsys.readouterr().out
    assert "filtered: zero_variance" in out
    assert f"step {row['step']}: filtered (zero_variance)" in out


def test_json_holds_the_same_for_scripts(made: Path, capsys: pytest.CaptureFixture[str]):
    row = rows(made, "consumed")[0]
    why.run(made, row["sample"], as_json=True)
    value = json.loads(capsys.readouterr().out)
    (told,) = value["told"]
    assert (told["state"], told["age"], told["spans"]) == ("consumed", 0, row["versions"])
    assert told["row"]["response"] == row["response"]
    assert [moment["event"] for moment in told["moments"]] == sorted(
        moment["event"] for moment in told["moments"]
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("{group}/9", "has no member 9"),
        ("0/9999999/0", "no such sample"),
        ("0/9999999", "no such group"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is_near(made: Path, asked: str, message: str):
    group = rows(made, "consumed")[0]["sample"].rpartition("/")[0]
    with pytest.raises(ConfigError, match=message) as caught:
        why.run(made, asked.format(group=group), as_json=False)
    told = str(caught.value)
    assert str(made) in told
    if "group" in asked:
        assert f"{group}/0 to {group}/3" in told
    else:
        offered = {
            row["sample"].split("/")[1]
            for end in ("consumed", "filtered")
            for row in rows(made, end)
        }
        member = "/0" if asked.endswith("/0") else ""
        nearest = [f"0/{prompt}{member}" for prompt in sorted(map(int, offered), reverse=True)[:3]]
        assert f"the nearest are {', '.join(nearest)}\n" in f"{told}\n"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("asked", ["abc", "0", "-1/0/0", "0//1", "0/1/", "0/1/x"])
def test_what_names_no_sample_is_refused_with_the_form(made: Path, asked: str):
    with pytest.raises(ConfigError, match="this names no sample") as caught:
        why.run(made, asked, as_json=False)
    assert "EPOCH/PROMPT/MEMBER" in str(caught.value)


def test_the_nearest_are_found_where_only_the_rows_go_back_to_them(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    row = SampleRow(
        stage="grpo", step=1, sample="", prompt="", response='"0/4/0"', answer="", score=None,
        terms={}, num_tokens=1, finish="stop", versions=((3, 1),), end="consumed",
    )  # fmt: skip
    names = [f"{epoch}/{prompt}/0" for epoch in (0, 9) for prompt in (3, 5, 700)]
    (tmp_path / "samples.jsonl").write_text(
        "".join(json.dumps(replace(row, sample=name).to_json()) + "\n" for name in names)
    )
    with pytest.raises(ConfigError, match="the nearest are 0/3/0, 0/5/0, 0/700/0"):
        why.run(tmp_path, "0/4/0", as_json=False)


def test_samples_that_were_not_logged_are_told_from_samples_that_there_are_none_of(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    group = rows(made, "consumed")[0]["sample"].rpartition("/")[0]
    (tmp_path / "config.yaml").write_text("runtime: {log_samples: 2}")
    logged = [
        row for row in read_json_lines(made / "samples.jsonl") if row["sample"][:-1] == f"{group}/"
    ]
    text = "".join(json.dumps(row) + "\n" for row in logged[:2])
    (tmp_path / "samples.jsonl").write_text(text)
    why.run(tmp_path, group, as_json=False)
    out = capsys.readouterr().out
    assert f"group {group}: 2 logged samples" in out
    with pytest.raises(ConfigError, match="has no member 3") as caught:
        why.run(tmp_path, f"{group}/3", as_json=False)
    assert "runtime.log_samples" in str(caught.value)
    # The journal knows how large the group is.
    shutil.copytree(made / "journal", tmp_path / "journal")
    with pytest.raises(ConfigError, match="has no member 9") as caught:
        why.run(tmp_path, f"{group}/9", as_json=False)
    assert f"{group}/0 to {group}/3" in str(caught.value)


def test_a_group_is_told_by_its_samples(made: Path, capsys: pytest.CaptureFixture[str]):
    row = rows(made, "filtered")[0]
    group = row["sample"].rpartition("/")[0]
    why.run(made, group, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "grpo, actor.generate",
        f"group {group}: 4 logged samples of prompt {row['prompt']!r}",
    ]
    assert [line.split()[0] for line in lines[2:6]] == [f"{group}/{member}" for member in range(4)]
    assert all("filtered (zero_variance)" in line and "by version" in line for line in lines[2:6])
    assert lines[6] == f"history of one: flowrl why {made} {group}/0"
    why.run(made, group, as_json=True)
    (told,) = json.loads(capsys.readouterr().out)["told"]
    assert [row["sample"] for row in told["rows"]] == [f"{group}/{member}" for member in range(4)]


def test_where_the_journal_does_not_go_back_the_row_is_told_and_what_would_have_kept_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(made, run)
    (run / "config.yaml").write_text("runtime: {journal_mb: 2}", encoding="utf-8")
    folder = run / "journal" / "grpo" / "actor.generate"
    for number in (2, 3):  # those before have gone, and what is left tells of none of its samples
        (folder / f"{number:06d}.jsonl").write_bytes(
            (folder / "000001.jsonl").read_bytes().splitlines(keepends=True)[0]
        )
    (folder / "000001.jsonl").unlink()
    head = (folder / "000002.jsonl").read_bytes()
    (folder / "000002.jsonl").write_bytes(head.rstrip() + b" " * (1 << 20) + b"\n")
    row = rows(made, "filtered")[0]
    why.run(run, row["sample"], as_json=False)
    out = capsys.readouterr().out
    assert f"sample {row['sample']}: filtered; tokens: {row['num_tokens']} by version" in out
    assert f"step {row['step']}: filtered (zero_variance)" in out
    assert "when and where it ran is not known: the journal does not go back to it" in out
    assert "(runtime.journal_mb limits its size)" in out


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no run folder"):
        why.run(tmp_path, "0/0/0", as_json=False)


def test_without_a_journal_the_row_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {**tiny_config(tmp_path), "stages": ["grpo"], "stage": {}}
    config["train"] = {**config["train"], "steps": 1}
    config["runtime"]["journal_mb"] = 0
    run = api.run(None, config, display=WatchedDisplay()).folder
    assert not (run / "journal").exists()
    row = rows(run, "consumed")[0]
    why.run(run, row["sample"], as_json=False)
    out = capsys.readouterr().out
    assert "this rollout has no journal (runtime.journal_mb=0 writes none)" in out
    assert "step 1: consumed" in out
    (run / "samples.jsonl").unlink()
    with pytest.raises(ConfigError, match="no such sample") as caught:
        why.run(run, row["sample"], as_json=False)
    assert "journal_mb" in str(caught.value)
