"""A few kills of the chaos runs, which `make chaos` makes by the dozen."""

from __future__ import annotations

from pathlib import Path

from tests.proofs.chaos import Chaos, Kill, drawn
from tests.warm_processes import WarmProcesses


def test_a_killed_driver_engine_or_scorer_costs_no_sample_and_changes_no_weight(
    warm: WarmProcesses, tmp_path: Path
):
    chaos = Chaos(warm, tmp_path)
    moments = {"driver": "checkpoint", "engine": "generation", "scorer": "scoring"}
    for victim, moment in moments.items():
        kill = Kill(
            executor="local", program="single", victim=victim, moment=moment, share=0.5, choice=1
        )
        outcome = chaos.kill(kill)
        assert outcome.killed
        assert outcome.violations == ()
        assert outcome.weights is True
        assert outcome.resumes == (victim == "driver")


def test_a_killed_rank_ends_the_run_which_is_resumed_with_the_same_weights(
    warm: WarmProcesses, tmp_path: Path
):
    chaos = Chaos(warm, tmp_path)
    for moment in ("update", "checkpoint"):
        kill = Kill(
            executor="local", program="ranks", victim="rank", moment=moment, share=0.5, choice=1
        )
        outcome = chaos.kill(kill)
        assert outcome.violations == ()
        assert outcome.weights is True
        assert outcome.resumes == 1
        assert "WorkerDied: roles.actor: a rank died" in outcome.followed


def test_a_series_of_kills_is_the_same_for_the_same_seed():
    assert [drawn(3, number, "ray") for number in range(20)] == [
        drawn(3, number, "ray") for number in range(20)
    ]
