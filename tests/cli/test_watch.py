"""`flowrl watch` shows a run until it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.observe.run_status import RunReport
from tests.cli.command_line import runner

RUNNING = RunReport(
    folder="runs/a",
    state="running",
    verdict="running, process 7",
    status=None,
    last=None,
    checkpoint=None,
)
ENDED = replace(RUNNING, state="ended", verdict="ended; all steps are made")


def test_a_run_is_looked_at_until_it_ends(capsys, monkeypatch: pytest.MonkeyPatch):
    reports, slept = [RUNNING, RUNNING, ENDED], []
    monkeypatch.setattr("flowrl.cli.watch.report_of", lambda folder: reports.pop(0))
    monkeypatch.setattr("time.sleep", slept.append)
    code, out, err = runner(capsys, "watch", "runs/a")("--every", "2.5")
    assert (code, err, reports, slept) == (0, "", [], [2.5, 2.5])
    # The output is no terminal: only the end is printed.
    assert out == f"{ENDED}\n"


def test_ctrl_c_ends_the_watching_and_not_more(capsys, monkeypatch: pytest.MonkeyPatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flowrl.cli.watch.report_of", lambda folder: RUNNING)
    monkeypatch.setattr("time.sleep", interrupted)
    code, out, _ = runner(capsys, "watch", "runs/a")()
    assert code == 0
    assert out == f"{RUNNING}\n"


def test_a_folder_without_a_run_is_an_error(capsys, tmp_path: Path):
    code, out, err = runner(capsys, "watch", str(tmp_path))()
    assert (code, out) == (2, "")
    assert "this is no run folder" in err
