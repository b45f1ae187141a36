"""A run folder has one writer, is found by its config, and can be cut back to a checkpoint."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowrl.errors import CheckpointError, ConfigError, DataError
from flowrl.observe import run_folder
from flowrl.observe.rows import EvaluationRow, SampleRow, StepMetrics, Summary
from flowrl.observe.run_folder import RunFolder

STAGES = ("sft", "grpo")


def sample(stage: str, step: int, number: int) -> SampleRow:
    return SampleRow(
        stage=stage,
        step=step,
        sample=f"0/{number}/0",
        prompt="1+1=",
        response="2",
        answer="2",
        score=1.0,
        terms={},
        num_tokens=2,
        finish="stop",
        versions=((step, 2),),
        end="consumed",
    )


def write_steps(folder: RunFolder, stage: str, first: int, last: int) -> None:
    for step in range(first, last + 1):
        folder.write_step(StepMetrics(stage=stage, step=step, loss=1 / step))
        folder.write_samples(sample(stage, step, n) for n in range(3))
        if step % 2 == 0:
            folder.write_evaluation(
                EvaluationRow(stage=stage, step=step, num=8, temperature=1.0, metrics={"a": step})
            )


def logs(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.glob("*.jsonl")}


def new(parent: Path) -> RunFolder:
    folder = RunFolder.create(parent, "quickstart")
    folder.write_config("seed: 0\n")
    return folder


def test_runs_of_one_name_are_numbered(tmp_path):
    names = []
    for _ in range(3):
        with new(tmp_path / "runs") as folder:
            names.append(folder.path.name)
    assert names == ["quickstart", "quickstart-2", "quickstart-3"]


def test_runs_made_at_once_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(tmp_path, "run"), range(32)))
    assert len({folder.path for folder in folders}) == 32
    for folder in folders:
        folder.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="a run's name becomes a folder"):
        RunFolder.create(tmp_path, name)


def test_a_place_that_cannot_be_written_is_a_config_error_with_the_way_out(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"set runtime\.runs to a folder") as caught:
        RunFolder.create(tmp_path / "runs", "quickstart")
    assert str(tmp_path / "runs" / "quickstart") in str(caught.value)


def test_what_is_no_run_folder_cannot_be_opened(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        RunFolder.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"a folder without config\.yaml"):
        RunFolder.resume(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_run_is_told_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with new(tmp_path / "runs"), pytest.raises(CheckpointError) as caught:
        RunFolder.open(Path("quickstart"))
    assert caught.value.hint == "did you mean runs/quickstart?"


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_READERS_S", 0.0)
    with new(tmp_path) as folder:
        with pytest.raises(ConfigError, match=f"found: process {os.getpid()}\n"):
            RunFolder.resume(folder.path)
        assert RunFolder.open(folder.path).config_path.read_text() == "seed: 0\n"
    with RunFolder.resume(folder.path) as again:
        assert again.path == folder.path


def test_who_only_asks_for_the_process_of_a_run_refuses_no_writer(tmp_path, monkeypatch):
    new(tmp_path).close()
    reader = os.open(tmp_path / "quickstart" / "lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: os.close(reader))
    RunFolder.resume(tmp_path / "quickstart").close()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with new(tmp_path) as folder:
        folder.write_step(StepMetrics(stage="grpo", step=1))
    assert "has no locks (No locks available), so nothing keeps a second writer out" in caplog.text


def test_the_lock_of_a_dead_process_does_not_stay(tmp_path):
    child = os.fork()
    if child == 0:
        new(tmp_path)
        os._exit(9)
    os.waitpid(child, 0)
    with RunFolder.resume(tmp_path / "quickstart") as folder:
        assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_open_for_reading_cannot_be_written(tmp_path):
    with new(tmp_path) as folder:
        reader = RunFolder.open(folder.path)
        with pytest.raises(AssertionError, match="reading only"):
            reader.write_step(StepMetrics(stage="grpo", step=1))


def test_graph_plan_and_summary_lie_where_the_layout_says(tmp_path):
    with new(tmp_path) as folder:
        folder.write_graph("grpo", "graph text\n", {"nodes": []})
        folder.write_plan("grpo", {"version": 1}, "version: 1\n")
        assert folder.read_summary() is None
        summary = Summary(
            name="quickstart",
            folder="runs/quickstart",
            seed=0,
            metric="accuracy",
            temperature=1.0,
            before=0.41,
            after=0.94,
        )
        folder.write_summary(summary)
        assert folder.read_summary() == summary
        assert json.loads((folder.path / "summary.json").read_text())["after"] == 0.94
        names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "config.yaml",
        "graph.grpo.txt",
        "graph.grpo.json",
        "plan.grpo.json",
        "plan.grpo.yaml",
        "summary.json",
        "lock",
    }


def test_a_damaged_summary_is_an_error_that_names_it(tmp_path):
    with new(tmp_path) as folder:
        (folder.path / "summary.json").write_text('{"name": "x"}')
        with pytest.raises(CheckpointError, match=r"summary\.json: this summary cannot be read"):
            folder.read_summary()


def test_an_export_that_fails_leaves_the_earlier_model(tmp_path):
    with new(tmp_path) as folder:
        folder.export_model(lambda path: (path / "weights").write_text("1") and None)

        def fail(path: Path) -> None:
            (path / "weights").write_text("2")
            raise RuntimeError

        with pytest.raises(RuntimeError):
            folder.export_model(fail)
        assert (folder.model / "weights").read_text() == "1"


def test_logs_of_a_resumed_run_equal_those_of_one_that_never_stopped(tmp_path):
    with new(tmp_path) as whole:
        write_steps(whole, "sft", 1, 4)
        write_steps(whole, "grpo", 1, 6)
    with new(tmp_path) as folder:
        write_steps(folder, "sft", 1, 4)
        write_steps(folder, "grpo", 1, 5)
        folder.sync()
    with (folder.path / "samples.jsonl").open("a") as stream:
        stream.write('{"stage":"grpo","st')  # what a crash in the middle of a write leaves
    with RunFolder.resume(folder.path) as again:
        assert again.truncate_after(STAGES, "grpo", 2) == 3 + 3 * 3 + 1
        write_steps(again, "grpo", 3, 6)
    assert logs(again) == logs(whole)
    assert [row.step for row in again.evaluations()] == [2, 4, 2, 4, 6]
    assert len(list(again.samples())) == 30


def test_cutting_back_to_an_earlier_stage_removes_the_later_ones(tmp_path):
    with new(tmp_path) as folder:
        write_steps(folder, "sft", 1, 3)
        write_steps(folder, "grpo", 1, 2)
        folder.truncate_after(STAGES, "sft", 3)
        assert [(row.stage, row.step) for row in folder.steps()] == [("sft", n) for n in (1, 2, 3)]
        before = logs(folder)
        assert folder.truncate_after(STAGES, "sft", 3) == 0
        assert logs(folder) == before
        assert folder.truncate_after(STAGES, "sft", 0) == 3 + 9 + 1
        assert list(folder.steps()) == []


def test_a_run_that_goes_on_has_no_summary_of_an_earlier_end(tmp_path):
    with new(tmp_path) as folder:
        (folder.path / "summary.json").write_text("{}")
        folder.truncate_after(STAGES, "sft", 0)
        assert folder.read_summary() is None


def test_resuming_clears_what_a_killed_writer_left(tmp_path):
    with new(tmp_path) as folder:
        pass
    (folder.path / ".summary.json.writing-1-ab").write_text("half")
    (folder.path / ".model.writing-1-ab").mkdir()
    (folder.path / ".model.previous-1-ab").mkdir()
    (folder.path / ".mine").write_text("a person's own")
    with RunFolder.resume(folder.path):
        names = {path.name for path in folder.path.iterdir()}
    assert names == {"config.yaml", "lock", "model", ".mine"}


@pytest.mark.parametrize("row", ['{"step": 1}', '{"stage": "a"}', '{"stage": "a", "step": "1"}'])
def test_a_row_that_says_no_step_of_a_stage_is_an_error_that_names_the_log(tmp_path, row):
    with new(tmp_path) as folder:
        (folder.path / "samples.jsonl").write_text(row + "\n")
        with pytest.raises(DataError, match=r"samples\.jsonl: this row of a log is damaged"):
            folder.truncate_after(["a"], "a", 1)


def test_a_log_that_was_removed_is_told_at_the_end_and_the_lock_is_free(tmp_path):
    folder = new(tmp_path)
    write_steps(folder, "a", 1, 2)
    (folder.path / "samples.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"samples\.jsonl"):
        folder.close()
    RunFolder.resume(folder.path).close()


def test_samples_of_some_steps_are_read_without_the_others(tmp_path):
    with new(tmp_path) as folder:
        assert folder.sample_steps() == []
        write_steps(folder, "sft", 1, 2)
        write_steps(folder, "grpo", 1, 2)
        with (folder.path / "samples.jsonl").open("a") as stream:
            stream.write('{"stage":"grpo","step":3,"samp')  # torn
        places = [("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2)]
        assert folder.sample_steps() == places
        rows = list(folder.samples_at({("sft", 2), ("grpo", 1)}))
        assert rows == [sample(*place, n) for place in (("sft", 2), ("grpo", 1)) for n in range(3)]
