"""Breakpoints in programs that run line by line, in their rewards, and on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import yaml

import flowrl as fl
from tests.runtime.eager_programs import rewarded, session_of
from tests.runtime.tiny_runs import WatchedDisplay, outcome
from tests.warm_processes import WarmProcesses


class Debugger:
    """Takes the place of pdb: remembers where it was called, and what the frame had then."""

    def __init__(self, quits_at: int | None = None) -> None:
        self.stops: list[tuple[str, dict[str, object]]] = []
        self._quits_at = quits_at

    def __call__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        assert frame is not None
        shown = {name: repr(value) for name, value in frame.f_locals.items()}
        self.stops.append((frame.f_code.co_name, shown))
        if len(self.stops) == self._quits_at:
            from bdb import BdbQuit

            raise BdbQuit


def test_breakpoints_stop_in_the_program_and_in_its_rewards_with_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    debugger = Debugger()
    monkeypatch.setattr(sys, "breakpointhook", debugger)
    with session_of("stopping_often", tmp_path, "stopping") as session:
        assert debugger.stops == []  # tracing has no values to stop at
        session.step()
    assert sys.breakpointhook is debugger
    names = [name for name, _ in debugger.stops]
    assert names == ["stopping_often"] * 2 + ["stopping"] * 16 + ["stopping_often"] * 3
    before, drawn, scored, kept, learned = (
        shown for name, shown in debugger.stops if name == "stopping_often"
    )
    assert "rollout" not in before
    assert "16 samples of 4 prompts" in drawn["rollout"]
    assert "scores" not in drawn
    assert scored["scores"].startswith("<Scores of verifier.score: score float32[16], mean ")
    assert kept["rollout"].startswith("<Rollout of filter: ")
    assert learned["rollout"] == kept["rollout"]
    inside = [shown for name, shown in debugger.stops if name == "stopping"]
    assert all(set(shown) == {"response", "score"} for shown in inside)


def test_breakpoints_of_a_compiled_run_stop_in_its_tracing_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    debugger = Debugger()
    monkeypatch.setattr(sys, "breakpointhook", debugger)
    fl.compile(None, rewarded("stopping_often", tmp_path))
    assert [name for name, _ in debugger.stops] == ["stopping_often"] * 5


def test_breakpoints_in_rewards_leave_evaluations_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    debugger = Debugger()
    monkeypatch.setattr(sys, "breakpointhook", debugger)
    config = rewarded("looking", tmp_path, "stopping")
    config["data"]["eval"] = config["data"]["train"]
    with fl.eager(None, config, display=WatchedDisplay()) as session:
        assert debugger.stops == []
        session.step()
        assert [name for name, _ in debugger.stops] == ["stopping"] * 16
    assert (session.folder / "evaluations.jsonl").read_text()


@pytest.mark.parametrize("place", [1, 5, 21])
def test_leaving_the_debugger_stops_the_step_and_the_next_call_makes_it_anew(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the program, in a reward, and behind the update, where the step cannot be made anew."""
    monkeypatch.setattr(sys, "breakpointhook", Debugger())
    whole = fl.run(None, rewarded("stopping_often", tmp_path), display=WatchedDisplay())
    debugger = Debugger(quits_at=place)
    monkeypatch.setattr(sys, "breakpointhook", debugger)
    with session_of("stopping_often", tmp_path, "stopping") as session:
        with pytest.raises(KeyboardInterrupt):
            session.step()
        if place == 21:
            with pytest.raises(fl.ConfigError, match="had changed weights already"):
                session.step()
            return
        session.finish()
    left, expected = outcome(session.folder), outcome(whole.folder)
    assert (left.weights, left.metrics) == (expected.weights, expected.metrics)


def test_a_real_debugger_reads_values_through_the_command_line(tmp_path: Path, warm: WarmProcesses):
    config = rewarded("stopping_often", tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "executor": "eager"}))
    commands = ["p rollout", "n", "n", "p rollout.value.lengths.sum() > 15", "c", "q"]
    done = warm.run("flowrl.cli", "run", str(path), text="\n".join(commands))
    assert "> " in done.stdout
    assert "NameError" in done.stdout  # before its line, a name has no value
    assert "True" in done.stdout
    assert done.stderr.strip().endswith("stopped")
    assert done.returncode == 130
