"""Whole runs whose policy is trained by two ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.errors import PlanError, WorkerDied
from flowrl.runtime.local.ranks import RankProcesses
from tests.runtime.tiny_runs import (
    CtrlC,
    Outcome,
    WatchedDisplay,
    outcome,
    resumed,
    stopped,
    tiny_config,
)


def _with_ranks(runs: Path, **options: Any) -> dict[str, Any]:
    config = tiny_config(runs)
    config["roles"]["actor"] |= {"ranks": 2, "options": options}
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    runs = tmp_path_factory.mktemp("runs")
    return outcome(api.run(None, _with_ranks(runs), display=WatchedDisplay()).folder)


@pytest.mark.parametrize("shard", ["gradients", "optimizer"])
def test_two_ranks_learn_what_one_process_learns(tmp_path: Path, shard: str) -> None:
    one = api.run(None, tiny_config(tmp_path / "one"), display=WatchedDisplay())
    two = api.run(None, _with_ranks(tmp_path / "two", shard=shard), display=WatchedDisplay())
    want, got = outcome(one.folder), outcome(two.folder)
    assert len(got.metrics) == len(want.metrics) == 8
    # Rounding differs, and the model of the tiny run is one that it changes no sampled token of.
    assert got.counts == want.counts
    for step, other in zip(got.metrics, want.metrics, strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), step["step"]


def test_a_run_of_two_ranks_that_is_stopped_ends_as_one_never_stopped(
    straight: Outcome, tmp_path: Path
) -> None:
    run = stopped(tmp_path, CtrlC("grpo", 2), roles=_with_ranks(tmp_path)["roles"])
    resumed(run)
    assert outcome(run) == straight


def test_the_death_of_a_rank_ends_the_run_which_can_be_resumed(
    straight: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RankProcesses] = []
    init = RankProcesses.__init__

    def noted(ranks: RankProcesses, *arguments: Any, **options: Any) -> None:
        init(ranks, *arguments, **options)
        opened.append(ranks)

    monkeypatch.setattr(RankProcesses, "__init__", noted)

    class Killer(WatchedDisplay):
        def step(self, metrics: Any, eta_s: float | None = None) -> None:
            super().step(metrics, eta_s)
            if self.steps[-1] == ("grpo", 2):
                (ranks,) = opened
                os.kill(ranks._channels[1].process.pid, signal.SIGKILL)

    config = _with_ranks(tmp_path)
    config["runtime"]["checkpoint_every"] = 1
    with pytest.raises(WorkerDied, match="rank 1 of 2: signal SIGKILL") as caught:
        api.run(None, config, display=Killer())
    assert caught.value.where == "roles.actor"
    resumed(tmp_path / "tiny")
    assert outcome(tmp_path / "tiny") == straight


def test_the_ray_executor_refuses_ranks(tmp_path: Path) -> None:
    config = {**_with_ranks(tmp_path), "executor": "ray"}
    with pytest.raises(PlanError, match="trains a model in one process") as caught:
        api.run(None, config, display=WatchedDisplay())
    assert caught.value.where == "roles.actor.ranks"
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stopped_run_goes_on_with_another_number_of_ranks(
    straight: Outcome, tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = stopped(tmp_path, CtrlC("grpo", 2), roles=_with_ranks(tmp_path)["roles"])
    resumed(run, f"roles.actor.ranks={ranks}")
    assert f"another number of ranks (actor: 2 -> {ranks})" in caplog.text
    left = outcome(run)
    assert left.counts == straight.counts
    for step, other in zip(left.metrics, straight.metrics, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
