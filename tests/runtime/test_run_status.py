"""The status that a run writes while it goes on, and at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl import api
from flowrl.cli import main
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import RunStatus, report_of, write_status
from flowrl.observe.trace import read_spans
from flowrl.runtime import run
from flowrl.runtime.status_writer import StatusWriter
from tests.runtime.test_rollouts import Engine, World, driver_of, prompts
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config


def one_stage(folder: Path) -> dict[str, Any]:
    config = {**tiny_config(folder), "stages": ["grpo"], "stage": {}}
    config["train"] = {**config["train"], "steps": 2}
    return config


def test_a_rollout_shows_what_its_engine_has_and_who_waits():
    world = World()
    driver = driver_of(world, Engine(world, slots=2))
    driver.offer(prompts(3))
    driver.begin()
    driver.request(1, 3)
    status = driver.status("generate")
    (engine,) = status.engines
    assert engine.state == "ready"
    assert engine.weights == driver.scheduler.version
    assert engine.samples == status.samples["running"]
    assert status.staleness == {0: engine.samples}
    assert "batch 1 waits for 3 groups" in status.waits


def test_a_run_says_what_it_does_that_it_ended_and_what_its_workers_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    seen = []

    class Display(WatchedDisplay):
        def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
            super().step(metrics, eta_s)
            seen.append(report_of(tmp_path / "tiny").state)

    folder = api.run(None, one_stage(tmp_path), display=Display()).folder
    assert seen == ["running", "running"]
    with pytest.raises(SystemExit):
        main(["status", str(folder), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] == "ended"
    assert (shown["status"]["stage"], shown["status"]["step"]) == ("grpo", 2)
    assert shown["last_step"]["step"] == 2
    did: dict[str, set[str]] = {}
    for span in read_spans(folder / "trace.json"):
        assert span.begin_s <= span.end_s
        did.setdefault(span.worker, set()).add(span.operation)
    assert did["driver"] >= {"step 1", "step 2", "evaluate", "checkpoint"}
    assert did["actor.train"] >= {"begin", "update", "save", "export"}
    assert did["actor.generate[0]"] == {"generate"}
    assert did["verifier.score[0]"] == {"score"}
    last = {each["name"]: each["did"] for each in shown["status"]["workers"]}
    assert (last.keys(), last["actor.train"]) == (did.keys(), "export")


def test_a_run_that_writes_a_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looks, seen = [], []

    class Writer(StatusWriter):
        def __init__(self, folder: Path, look: Callable[[], RunStatus], trace_bytes: int) -> None:
            looks.append(look)
            super().__init__(folder, look, trace_bytes)

    def saved(*arguments: object) -> None:
        seen.append(looks[0]())

    monkeypatch.setattr(run, "StatusWriter", Writer)
    monkeypatch.setattr(run.CheckpointStore, "save", saved)
    api.run(None, one_stage(tmp_path), display=WatchedDisplay())
    assert [each.doing for each in seen] == ["a checkpoint is written"]
    assert seen[0].executor == "local, in processes of this machine"


def test_the_folder_of_runs_is_shown_where_no_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    with RunFolder.create(tmp_path / "runs", "mine") as folder:
        folder.write_config("seed: 0\n")
    with pytest.raises(SystemExit):
        main(["status"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["runs/mine", "killed", "-", "-"]


def test_a_run_that_fails_leaves_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object) -> None:
        raise RuntimeError("a part of it broke")

    monkeypatch.setattr(run.Run, "_record", broken)
    with pytest.raises(RuntimeError):
        api.run(None, one_stage(tmp_path), display=WatchedDisplay())
    report = report_of(tmp_path / "tiny")
    assert report.state == "failed"
    assert "a part of it broke" in report.verdict


def test_the_end_is_written_and_its_cause_kept_while_what_is_looked_at_still_changes(
    tmp_path: Path,
):
    looks = iter([RunStatus(pid=1, step=3)])

    def look() -> RunStatus:
        for status in looks:
            return status
        raise RuntimeError("dictionary changed size during iteration")

    writer = StatusWriter(tmp_path, look)
    assert writer._last_look() is not None
    with pytest.raises(ValueError, match="the first cause"), writer:
        raise ValueError("the first cause")
    status = json.loads((tmp_path / "status.json").read_text())
    error = "ValueError: the first cause"
    assert (status["state"], status["error"], status["step"]) == ("failed", error, 3)


def test_a_run_that_ended_without_its_result_was_left_early(tmp_path: Path):
    with RunFolder.create(tmp_path, "eager") as folder:
        folder.write_config("seed: 0\n")
        write_status(folder.path, RunStatus(pid=1, state="ended", stage="grpo", step=1, steps=2))
    report = report_of(folder.path)
    assert (report.state, report.verdict) == ("stopped", "stopped, as it was asked to")


def test_a_run_that_is_being_opened_says_so_and_names_its_newest_whole_checkpoint(tmp_path: Path):
    with RunFolder.create(tmp_path, "opening") as folder:
        folder.write_config("seed: 0\n")
        for name in ("9999-grpo-step1", "10000-grpo-step2", "10001-grpo-step3"):
            (folder.checkpoints / name).mkdir(parents=True)
        for name in ("9999-grpo-step1", "10000-grpo-step2"):
            (folder.checkpoints / name / "MANIFEST.json").touch()
        doing = "workers are being opened"
        write_status(folder.path, RunStatus(pid=os.getpid(), doing=doing, written_s=1, moved_s=1))
        lines = str(report_of(folder.path, now_s=2)).splitlines()
    assert lines[-2:] == [doing, "newest checkpoint: 10000-grpo-step2"]


def test_a_look_that_fails_in_any_way_shows_what_was_seen_before(tmp_path: Path):
    looks = iter([RunStatus(pid=1, step=3)])
    writer = StatusWriter(tmp_path, lambda: next(looks))
    assert writer._last_look() == writer._last_look() == RunStatus(pid=1, step=3)


def test_a_status_that_cannot_be_written_is_warned_of_once_and_written_as_soon_as_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder, waits = tmp_path / "gone", iter([False, False, True, False])
    writer = StatusWriter(folder, lambda: RunStatus(pid=1, step=3))

    def wait(_: float) -> None:
        if next(waits):
            folder.mkdir()

    is_set = iter([False] * 4 + [True]).__next__
    writer._ended = cast(Any, SimpleNamespace(is_set=is_set, wait=wait))
    writer._run()
    (warning,) = caplog.messages
    assert warning.startswith("no status is written: ")
    assert json.loads((folder / "status.json").read_text())["step"] == 3
