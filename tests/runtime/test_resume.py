"""A run that is stopped and goes on ends as if it had never stopped, bit for bit."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl import api
from flowrl.backend.protocols import ScoreRequest
from flowrl.errors import CheckpointError, ConfigError
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.runtime.checkpoint.store import CheckpointInterval
from flowrl.runtime.run import STOPS, _Interrupt
from flowrl.runtime.scoring.pool import ScoringPool
from tests.runtime.killed_runs import run_until_killed
from tests.runtime.many_programs import CONFIGS
from tests.runtime.tiny_runs import (
    CtrlC,
    Outcome,
    WatchedDisplay,
    outcome,
    resumed,
    stopped,
    tiny_config,
    write_config,
)
from tests.sizes import every
from tests.warm_processes import WarmProcess, WarmProcesses

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the tiny run leaves when nobody stops it."""
    result = api.run(None, tiny_config(tmp_path_factory.mktemp("runs")), display=WatchedDisplay())
    left = outcome(result.folder)
    # The comparison means something: both stages learned and groups of both kinds were there.
    assert len(left.metrics) == 8
    assert {row["end"] for row in map(as_row, left.samples.splitlines())} == {
        "consumed",
        "filtered",
    }
    assert all(row["kl"] > 0 for row in left.metrics[5:])  # type: ignore[operator]
    return left


def test_the_summary_counts_the_tokens_of_its_samples_apart_from_those_of_examples(
    straight: Outcome,
):
    drawn = sum(row["num_tokens"] for row in map(as_row, straight.samples.splitlines()))
    whole = sum(int(row["num_tokens"]) for row in straight.metrics)  # type: ignore[call-overload]
    assert straight.counts["num_tokens"] == drawn > 0
    assert straight.counts["num_example_tokens"] == whole - drawn > 0


def as_row(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    return row


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> list[CtrlC]:
    """Has the displays in it told of every batch that goes to the scorers."""
    displays: list[CtrlC] = []
    submit = ScoringPool.submit

    def watched(pool: ScoringPool, requests: Sequence[ScoreRequest]) -> None:
        submit(pool, requests)
        for display in displays:
            display.press(len(requests))

    monkeypatch.setattr(ScoringPool, "submit", watched)
    return displays


def test_a_machine_that_needs_a_third_of_a_second_for_a_token_draws_and_learns_the_same(
    straight: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = itertools.count(step=0.3)  # of the engine alone
    slow = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("flowrl_backends.torch.engine.time", slow)
    result = api.run(None, tiny_config(tmp_path), display=WatchedDisplay())
    assert next(clock) > 10.0  # it was asked
    assert outcome(result.folder) == straight


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        pytest.param("sft", 2, id="in a stop check of the supervised stage"),
        pytest.param("grpo", 0, id="in the evaluation before the last stage"),
        pytest.param("grpo", 1, id="in a rollout"),
        pytest.param("grpo", 2, id="in an evaluation between steps"),
        pytest.param("grpo", 4, id="in the last evaluation"),
    ],
)
def test_a_run_stopped_between_boundaries_ends_as_one_never_stopped(
    straight: Outcome, tmp_path: Path, keyboard: list[CtrlC], stage: str, step: int
):
    ctrl_c = CtrlC(stage, step, in_scoring=True)
    keyboard.append(ctrl_c)
    run = stopped(tmp_path, ctrl_c)
    assert "--resume" in ctrl_c.notes[-1]
    assert not (run / "summary.json").exists()

    resumed(run)

    assert outcome(run) == straight


def test_a_run_stopped_after_every_step_ends_as_one_never_stopped(
    straight: Outcome, tmp_path: Path
):
    run = stopped(tmp_path, CtrlC("sft", 0))  # a step that has begun is finished
    moments = [("sft", 2), ("sft", 3), ("sft", 4), *(("grpo", step) for step in range(1, 5))]
    for stage, step in moments:
        display = CtrlC(stage, step)
        with pytest.raises(KeyboardInterrupt):
            resumed(run, display=display)
        assert display.steps == [(stage, step)]
    summary = resumed(run).summary
    assert outcome(run) == straight

    # The seconds of every stage are those of all its steps and evaluations, whoever made them.
    folder = RunFolder.open(run)
    for name in ("sft", "grpo"):
        steps = [row for row in folder.steps() if row.stage == name]
        measured = [row.seconds for row in folder.evaluations() if row.stage == name]
        spent = summary.seconds[name]
        assert spent["step"] == pytest.approx(math.fsum(row.wall_s for row in steps))
        assert spent["evaluate"] == pytest.approx(math.fsum(measured))
        for kind in steps[0].seconds:
            expected = math.fsum(row.seconds[kind] for row in steps)
            assert spent[kind] == pytest.approx(expected)


def test_killed_runs_go_on_from_the_last_periodic_checkpoint(
    straight: Outcome, tmp_path: Path, warm: WarmProcesses
):
    config = tiny_config(tmp_path)
    config["runtime"]["checkpoint_every"] = 2
    run = run_until_killed(warm, config, "grpo", 4)
    # One step was logged past the checkpoint; it is made again, not logged twice.
    assert [row.step for row in RunFolder.open(run).steps()][-1] in (3, 4)

    display = WatchedDisplay()
    resumed(run, display=display)

    assert display.steps == [("grpo", 3), ("grpo", 4)]
    assert outcome(run) == straight


class SlowRun(WatchedDisplay):
    """Shows a run in which opening takes an hour and each step five minutes, by its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("checkpoints: "):  # before the workers are opened
            self.now += 3600.0

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        self.now += 300.0


def test_checkpoints_by_the_clock_change_nothing_whatever_step_they_fall_on(
    straight: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config(tmp_path)
    config["runtime"] |= {"checkpoint_minutes": 15, "keep_checkpoints": 9}
    display = SlowRun()
    timed = partial(CheckpointInterval, clock=lambda: display.now)
    monkeypatch.setattr("flowrl.runtime.run.CheckpointInterval", timed)
    run = api.run(None, config, display=display).folder
    told = "checkpoints: every 15 minutes, at the end of each stage and at Ctrl-C"
    assert display.notes[0] == told
    written = sorted((run / "checkpoints").iterdir())
    names = [path.name.partition("-")[2] for path in written]
    # Each also begins the next quarter of an hour, also the one at the end of a stage.
    assert names == ["sft-step3", "sft-step4", "grpo-step3", "grpo-step4"]
    assert outcome(run) == straight

    shutil.rmtree(written[-1])  # as if it had been killed in its last step
    (run / "summary.json").unlink()
    again = WatchedDisplay()
    resumed(run, display=again)
    assert again.steps == [("grpo", 4)]
    assert outcome(run) == straight


def test_ctrl_c_at_the_terminal_ends_with_130_and_the_run_goes_on(
    tmp_path: Path, warm: WarmProcesses
):
    config = write_config(tmp_path)
    run = tmp_path / "runs" / "tiny"
    # A constant schedule, so that the number of steps asked for changes nothing before the stop.
    words = ["run", str(config), "train.steps=1000000", "train.optimizer.schedule=constant"]
    paths = [tmp_path / "out", tmp_path / "err"]
    with paths[0].open("w") as out_file, paths[1].open("w") as err_file:
        streams = (subprocess.DEVNULL, out_file, err_file)
        process = warm.start("flowrl.cli", words, streams=streams)
        try:
            wait_for_rows(run / "metrics.jsonl", 6, process)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
            process.wait(DEADLINE_S)
        finally:
            process.kill()
    out, err = (path.read_text() for path in paths)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert re.search(r"stopped after step \d+ of grpo; go on with: flowrl run --resume", out)

    made = max(row.step for row in RunFolder.open(run).steps() if row.stage == "grpo")
    steps = f"train.steps={made + 2}"
    display = WatchedDisplay()
    resumed(run, steps, display=display)
    assert display.steps == [("grpo", made + 1), ("grpo", made + 2)]

    never = api.run(
        None,
        config,
        overrides=[steps, "train.optimizer.schedule=constant"],
        display=WatchedDisplay(),
    )
    assert outcome(run) == outcome(never.folder)


def wait_for_rows(path: Path, number: int, process: WarmProcess) -> None:
    """Until a log has so many rows."""
    end = time.monotonic() + DEADLINE_S
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None
        assert time.monotonic() < end, f"no {number} rows in {path}"
        time.sleep(0.02)


def test_a_scheduler_s_sigterm_leaves_a_checkpoint_too(
    tmp_path: Path, straight: Outcome, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flowrl.runtime.run.STOPS", STOPS)
    run = stopped(tmp_path, CtrlC("grpo", 2, number=signal.SIGTERM))
    resumed(run)
    assert outcome(run) == straight


def test_signals_ask_a_run_to_stop_and_then_end_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    before = [signal.getsignal(number) for number in STOPS]
    with _Interrupt().installed(lambda: None):
        assert signal.getsignal(signal.SIGTERM) == before[1]  # in tests it is pytest's own
    monkeypatch.setattr("flowrl.runtime.run.STOPS", STOPS)
    for number in STOPS:
        interrupt = _Interrupt()
        with interrupt.installed(lambda: None):
            assert not interrupt()
            signal.raise_signal(number)
            assert (interrupt(), interrupt.forced) == (True, False)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            assert interrupt.forced
    assert [signal.getsignal(number) for number in STOPS] == before
    assert capfd.readouterr().err.count("stopping at the next step boundary") == 2


def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(tmp_path: Path):
    display = CtrlC("grpo", 2, times=2)
    run = stopped(tmp_path, display)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["0001-sft-step4"]
    assert display.notes == [  # and none of how to go on
        "checkpoints: every 10 minutes, at the end of each stage and at Ctrl-C",
        "sft ends before that when digit reaches 2 on held-out data",
    ]


@pytest.mark.parametrize(
    ("program", "step"),
    every(
        3,
        [
            ("actor_critic", 2),
            ("slow_actor", 1),
            ("summed", 1),
            ("moving_reference", 2),
            ("self_play", 2),
            ("two_learners", 1),
            ("guessing", 1),
            ("generation", 1),
            ("replaying", 2),
            ("debate", 2),
        ],
    ),
)
def test_programs_of_several_models_go_on_bit_by_bit(tmp_path: Path, program: str, step: int):
    """Critics, references and rivals that were just refreshed, two rollouts a step, episodes."""
    make = CONFIGS[program]
    never = api.run(None, make(tmp_path / "never"), display=WatchedDisplay())
    runs = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        api.run(None, make(runs), display=CtrlC(program, step))
    resumed(runs / "tiny")
    assert outcome(runs / "tiny") == outcome(never.folder)


def test_a_run_stopped_in_the_second_rollout_of_a_step_makes_both_again(
    tmp_path: Path, keyboard: list[CtrlC]
):
    """The first one's samples were delivered, and the second one's are with the scorers."""
    make = CONFIGS["greedy_baseline"]
    never = api.run(None, make(tmp_path / "never"), display=WatchedDisplay())
    runs = tmp_path / "stopped"
    display = CtrlC("greedy_baseline", 1, in_scoring=True, after=16)
    keyboard.append(display)
    with pytest.raises(KeyboardInterrupt):
        api.run(None, make(runs), display=display)
    resumed(runs / "tiny")
    assert outcome(runs / "tiny") == outcome(never.folder)


def test_resuming_a_finished_run_says_so_and_tells_its_numbers_again(tmp_path: Path):
    result = api.run(None, tiny_config(tmp_path), display=WatchedDisplay())
    before = {path: path.read_bytes() for path in result.folder.rglob("*") if path.is_file()}

    display = WatchedDisplay()
    again = resumed(result.folder, display=display)

    assert "finished" in display.notes[0]
    assert display.summary is not None
    assert again.summary.headline == display.summary.headline == result.summary.headline
    after = {path: path.read_bytes() for path in result.folder.rglob("*") if path.is_file()}
    assert after == before


def test_a_finished_run_goes_on_to_more_steps_and_remembers_them(tmp_path: Path):
    result = api.run(None, tiny_config(tmp_path), display=WatchedDisplay())
    more = WatchedDisplay()
    resumed(result.folder, "train.steps=6", display=more)
    assert more.steps == [("grpo", 5), ("grpo", 6)]
    assert more.summary is not None
    assert more.summary.steps == {"sft": 4, "grpo": 6}
    assert more.summary.before == result.summary.before

    # The larger number is the run's own now.
    again = WatchedDisplay()
    resumed(result.folder, display=again)
    assert again.steps == []
    with pytest.raises(ConfigError, match="has made 6 steps of 'grpo' already"):
        resumed(result.folder, "train.steps=5")

    # Without its checkpoints it is not made a second time in the same folder.
    summary = (result.folder / "summary.json").read_bytes()
    shutil.rmtree(result.folder / "checkpoints")
    with pytest.raises(CheckpointError, match="is finished, and its checkpoints are gone"):
        resumed(result.folder)
    assert (result.folder / "summary.json").read_bytes() == summary


def test_a_stage_that_a_stop_criterion_ended_is_not_taken_up_again(tmp_path: Path):
    config = tiny_config(tmp_path)
    config["stage"]["sft"]["stop"]["at_least"] = 0.0
    config["stop"] = {"metric": "digit", "at_least": 0.0, "check_every": 3, "num": 8}
    first = CtrlC("grpo", 1)
    with pytest.raises(KeyboardInterrupt):
        api.run(None, config, display=first)
    assert first.steps == [("sft", 1), ("sft", 2), ("grpo", 1)]
    second = WatchedDisplay()
    resumed(tmp_path / "tiny", display=second)
    assert second.steps == [("grpo", 2), ("grpo", 3)]
    third = WatchedDisplay()
    resumed(tmp_path / "tiny", "train.steps=9", display=third)
    assert third.steps == []
    assert "finished" in third.notes[0]


def test_a_killed_run_without_a_checkpoint_begins_again_in_its_folder(
    straight: Outcome, tmp_path: Path
):
    run = stopped(tmp_path, CtrlC("sft", 3, times=2))
    assert not list((run / "checkpoints").glob("*"))
    display = WatchedDisplay()
    resumed(run, display=display)
    assert "starts again" in display.notes[0]
    assert outcome(run) == straight


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    straight: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = stopped(tmp_path, CtrlC("grpo", 1))
    newest = max((run / "checkpoints").iterdir(), key=lambda path: path.name)
    weights = newest / "actor" / "trainer.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    resumed(run)
    assert str(weights) in caplog.text
    assert outcome(run) == straight


def test_a_reference_whose_kept_weights_are_gone_is_not_made_of_trained_ones(tmp_path: Path):
    run = stopped(tmp_path, CtrlC("grpo", 1))
    kept = run / "copies" / "grpo" / "reference"
    shutil.rmtree(kept)
    with pytest.raises(CheckpointError, match="'reference' has kept since stage 'grpo'") as caught:
        resumed(run)
    assert str(kept) in str(caught.value)
    assert not kept.exists()


def test_a_run_goes_on_where_its_graph_costs_something_else(tmp_path: Path, straight: Outcome):
    run = stopped(tmp_path, CtrlC("grpo", 1))
    written = run / "graph.grpo.json"
    text = written.read_text()
    written.write_text(re.sub(r'"flops": \d+', '"flops": 1', text))
    assert written.read_text() != text
    resumed(run)
    assert outcome(run) == straight
