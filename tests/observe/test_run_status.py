"""`flowrl status`: what a run does, and how one ended that does nothing any more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import CheckpointError
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import (
    EngineStatus,
    RolloutStatus,
    RunReport,
    RunStatus,
    WorkerStatus,
    list_reports,
    report_of,
    write_status,
)

NOW_S = 1000.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that this process holds."""
    with RunFolder.create(tmp_path, "quickstart") as held:
        held.write_config("seed: 0\n")
        yield held


def status(**changes: object) -> RunStatus:
    engines = [
        EngineStatus(name="actor.generate[0]", weights=12, samples=64, capacity=512, state="ready"),
        EngineStatus(
            name="actor.generate[1]", weights=11, samples=0, capacity=512, state="updating"
        ),
    ]
    rollout = RolloutStatus(
        name="actor.generate",
        samples={"queued": 40, "running": 64},
        staleness={0: 60, 1: 4},
        engines=engines,
        waits=["batch 13 waits for 64 groups", "a long wait " * 20],
    )
    known = RunStatus(
        pid=os.getpid(),
        stage="grpo",
        step=13,
        steps=60,
        doing="a batch is collected",
        written_s=NOW_S - 1,
        moved_s=NOW_S - 2,
        stall_timeout_s=300.0,
        rollouts=[rollout],
        executor="ray, on a cluster of its own at 127.0.0.1:6379",
        workers=[WorkerStatus(name="actor.train", node="a", did="update", ended_s=NOW_S - 4)],
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def seen(folder: RunFolder, **changes: object) -> RunReport:
    write_status(folder.path, status(**changes))
    return report_of(folder.path, now_s=NOW_S)


def test_a_running_run_shows_its_engines_queues_and_ages_within_a_hundred_columns(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    folder.write_step(
        StepMetrics(
            stage="grpo",
            step=12,
            num_tokens=4096,
            seconds={"generate": 2.0},
            wall_s=3.0,
            reward_mean=0.5,
        )
    )
    monkeypatch.chdir(folder.path.parent)
    report = seen(folder)
    lines = str(report).splitlines()
    assert report.state == "running"
    assert lines[0].startswith("run: quickstart: running, process ")
    assert lines[0].endswith("; something moved 2.0s ago")
    assert lines[1:7] == [
        "executor: ray, on a cluster of its own at 127.0.0.1:6379",
        "stage grpo, step 13 of 60: a batch is collected",
        "rollout actor.generate",
        "  samples: 40 queued  64 running",
        "  versions old: 0: 60 samples  1: 4 samples",
        "  engine             weights  samples now  at most  state",
    ]
    assert lines[8] == "  actor.generate[1]  11       0            512      updating"
    assert "worker       node  did last  until" in lines
    assert "actor.train  a     update    3.0s ago" in lines
    assert "last step: grpo 12: 3.0s  reward 0.500  4096 tokens  tokens/s generate 2.0k" in lines
    assert lines[-1] == "newest checkpoint: none"
    assert max(map(len, lines)) <= 100
    assert json.loads(json.dumps(report.to_json()))["status"]["rollouts"][0]["samples"] == {
        "queued": 40,
        "running": 64,
    }


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({"moved_s": NOW_S - 160}, "stalled", "nothing moved for 2m 40s, and it gives up after 5m"),
        ({"written_s": NOW_S - 60}, "silent", "has written no status for 1m 00s"),
        ({"pid": 1}, "running", "it is being opened"),  # what a process before it wrote
    ],
)
def test_a_process_that_is_there_may_do_nothing(
    folder: RunFolder, changes: dict[str, object], state: str, said: str
):
    report = seen(folder, **changes)
    assert report.state == state
    assert said in report.verdict


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({}, "killed", "is gone and said nothing"),
        ({"state": "stopped"}, "stopped", "as it was asked to"),
        ({"state": "failed", "error": "no\nroom"}, "failed", "failed: no\nroom"),
    ],
)
def test_a_run_without_a_process_says_how_it_ended(
    folder: RunFolder, changes: dict[str, object], state: str, said: str
):
    write_status(folder.path, status(**changes))
    folder.close()
    report = report_of(folder.path, now_s=NOW_S)
    assert report.state == state
    assert said in report.verdict
    assert "  engine" not in str(report)
    assert f"\ngo on with: flowrl run --resume {folder}" in str(report)


def row(stage: str, step: int) -> StepMetrics:
    return StepMetrics(stage=stage, step=step, wall_s=1.0)


def test_a_failed_run_shows_its_whole_error_and_how_to_go_on_with_a_file_that_was_mended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.path.parent)
    error = f"mine.py:3: score raised\n  found: {'word ' * 60}\n  to fix: mend \x1bscore"
    write_status(folder.path, status(state="failed", error=error))
    folder.close()
    lines = str(report_of(folder.path, now_s=NOW_S)).splitlines()
    assert lines[0].endswith("failed: mine.py:3: score raised")
    assert lines[1].startswith("  found: word word")
    assert sum(line.count("word") for line in lines) == 60
    assert r"  to fix: mend \x1bscore" in lines
    assert lines[-1].endswith("(add --accept-changes if you change a file that it reads)")
    assert max(map(len, lines[:-1])) <= 100


def test_steps_that_were_made_since_the_status_was_written_are_shown(folder: RunFolder):
    folder.write_step(row("grpo", 12))
    assert "stage grpo, step 13 of 60: a batch is collected" in str(seen(folder))
    folder.write_step(row("grpo", 15))
    assert "stage grpo, step 15 of 60: made" in str(seen(folder))
    folder.close()
    assert "stage grpo, step 15 of 60 made" in str(report_of(folder.path, now_s=NOW_S))


def test_a_killed_run_that_was_about_to_begin_a_stage_shows_the_last_step_that_it_made(
    folder: RunFolder,
):
    folder.write_step(row("sft", 20))
    write_status(folder.path, status())
    folder.close()
    text = str(report_of(folder.path, now_s=NOW_S))
    assert "stage sft, step 20 made" in text
    assert "grpo" not in text


def test_several_runs_are_listed_with_their_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        with RunFolder.create(tmp_path, name) as held:
            held.write_config("seed: 0\n")
            if name == "a":
                held.write_step(row("grpo", 12))
                write_status(held.path, status(state="stopped"))
    reports = [report_of(tmp_path / name, now_s=NOW_S) for name in ("a", "b")]
    assert list_reports(reports).splitlines() == [
        "run  state    progress                   newest checkpoint",
        "a    stopped  stage grpo, step 12 of 60  -",
        "b    killed   -                          -",
    ]


def test_a_damaged_status_is_refused_with_its_file(folder: RunFolder):
    (folder.path / "status.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"status\.json"):
        report_of(folder.path)
