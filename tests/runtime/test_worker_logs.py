"""What workers print: a file for each, whenever the run's folder is known."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowrl.backend.protocols import ScoreContext
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RuntimeConfig
from flowrl.ids import RoleName
from flowrl.runtime import worker_logs
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.worker_logs import WorkerLogs


def printed(logs: WorkerLogs, worker: str, text: str) -> None:
    with logs.output(worker) as output:
        subprocess.run(["echo", text], stdout=output, check=True)
    logs.close()


def test_a_worker_that_replaces_another_has_a_file_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    logs = WorkerLogs()
    printed(logs, "actor.generate[0]", "before the run has a folder")
    logs.begin(tmp_path)
    printed(logs, "actor.generate[0]", "in it")
    texts = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert texts == {
        "actor.generate[0].log": "before the run has a folder\n",
        "actor.generate[0]#2.log": "in it\n",
    }
    assert capfd.readouterr().err == "before the run has a folder\nin it\n"


def test_the_oldest_part_of_a_log_is_removed_where_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_logs, "_MAX_BYTES", 40)
    logs = WorkerLogs()
    logs.begin(tmp_path)
    for number in range(100):
        logs.write("actor", b"%09d\n" % number)
    parts = [tmp_path / "logs" / name for name in ("actor.earlier.log", "actor.log")]
    kept = "".join(path.read_text() for path in parts).split()
    assert [int(number) for number in kept] == list(range(100 - len(kept), 100))
    assert 0 < len(kept) <= 6


def test_what_a_reward_prints_is_in_the_run_s_folder(tmp_path: Path):
    (tmp_path / "loud.py").write_text("print('loaded')\ndef f(response): return 1.0\n")
    executor = LocalExecutor(RuntimeConfig())
    executor.begin(tmp_path)
    terms: tuple[dict[str, object], ...] = (
        {"kind": "python", "name": "loud", "function": f"{tmp_path / 'loud.py'}:f"},
    )
    context = ScoreContext(role=RoleName("verifier"), terms=terms)
    scorers: Any = executor.open_scorers("verify", context, RewardsConfig(), workers=1)
    scorers.close()
    executor.close()
    assert (tmp_path / "logs" / "verifier.score[0].log").read_text() == "loaded\n"
