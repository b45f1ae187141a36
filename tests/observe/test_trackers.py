"""Trackers get every number of a run, under the names of flowrl, verl or MindSpeed-RL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from flowrl.entry_points import Entry
from flowrl.errors import ConfigError
from flowrl.observe.metric_names import NAMES
from flowrl.observe.rows import EvaluationRow, StepMetrics
from flowrl.observe.trackers import TrackerContext, Trackers

STEP = StepMetrics(
    stage="grpo",
    step=2,
    reward_mean=0.5,
    length_mean=4.0,
    truncated=0.125,
    grad_norm=1.5,
    kl=0.25,
    clip_fraction_low=0.1,
    clip_fraction_high=0.2,
    wall_s=2.0,
    seconds={"generate": 0.5, "update": 1.0},
    extra={"entropy": 0.75, "consumed_tokens": 800.0, "prompt_length/mean": 6.0},
)
HELD_OUT = EvaluationRow(stage="grpo", step=2, num=8, temperature=0.0, metrics={"accuracy": 0.5})


def context(folder: Path, **options: object) -> TrackerContext:
    return TrackerContext(name="run", folder=folder, config={"seed": 0}, options=options)


def test_verl_names_are_those_of_its_dashboards() -> None:
    named = NAMES["verl"].step(STEP, devices=4)
    assert named["critic/score/mean"] == 0.5
    assert named["response_length/clip_ratio"] == 0.125
    assert named["actor/pg_clipfrac"] == pytest.approx(0.1 + 0.2)
    assert named["actor/entropy"] == 0.75
    assert named["timing_s/gen"] == 0.5
    assert named["perf/total_num_tokens"] == 800
    assert named["perf/throughput"] == 800 / 2.0 / 4
    assert NAMES["verl"].evaluation(HELD_OUT) == {"val-core/accuracy": 0.5}


def test_mindspeed_names_have_its_three_throughputs_per_device() -> None:
    named = NAMES["mindspeed_rl"].step(STEP, devices=4)
    assert named["grpo/score/mean"] == 0.5
    assert named["timing/all"] == 2.0
    assert (named["e2e_tps"], named["update_tps"], named["vllm_tps"]) == (100.0, 200.0, 400.0)


def test_a_set_of_names_loses_no_number_and_invents_none() -> None:
    own = NAMES["flowrl"].step(STEP, devices=1)
    assert own["reward_mean"] == 0.5
    assert own["seconds/update"] == 1.0
    assert "loss" not in own  # the step made no update
    for names in NAMES.values():
        named = names.step(STEP, devices=1)
        assert set(own.values()) - {400.0} <= set(named.values())


def test_a_step_without_consumed_samples_has_no_throughput() -> None:
    empty = StepMetrics(stage="grpo", step=1, wall_s=1.0)
    assert "perf/throughput" not in NAMES["verl"].step(empty, devices=1)


def test_tensorboard_reads_what_was_logged_and_a_resumed_run_hides_the_repeated_steps(
    tmp_path: Path,
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from flowrl_backends.trackers.tensorboard import TensorBoard

    first = TensorBoard(context(tmp_path))
    for step in (1, 2, 3):
        first.log("grpo", step, {"reward_mean": float(step)})
    first.close()
    again = TensorBoard(
        TrackerContext(name="run", folder=tmp_path, config={}, options={}, resumed_at=("grpo", 2))
    )
    again.log("grpo", 3, {"reward_mean": 30.0})
    again.close()
    read = events.EventAccumulator(str(tmp_path / "tensorboard" / "grpo")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward_mean")] == [(1, 1), (2, 2), (3, 30)]


def test_wandb_writes_an_offline_run_that_keeps_its_id_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from flowrl_backends.trackers.wandb import WandB

    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    tracker = WandB(context(tmp_path, project="sums"))
    tracker.log("grpo", 1, {"reward_mean": 0.5})
    tracker.close()
    identity = (tmp_path / "wandb" / "run_id").read_text()
    [written] = (tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    assert b"reward_mean" in written.read_bytes()


@pytest.mark.parametrize("options", [{"mode": "cloud"}, {"projct": "sums"}])
def test_wandb_refuses_options_that_it_does_not_know(
    tmp_path: Path, options: dict[str, object]
) -> None:
    from flowrl_backends.trackers.wandb import WandB

    with pytest.raises(ConfigError, match=r"tracking\.options\.wandb"):
        WandB(context(tmp_path, **options))


class Failing:
    """A tracker that raises at its second call."""

    def __init__(self, context: TrackerContext) -> None:
        self.calls: list[Mapping[str, float]] = []
        self.closed = 0

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(values)
        if len(self.calls) == 2:
            raise OSError("no space left on device")

    def close(self) -> None:
        self.closed += 1


def test_a_tracker_that_raises_is_warned_about_once_and_gets_no_more_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Failing(context(tmp_path))
    monkeypatch.setattr(Entry, "load", lambda self, error: lambda context: tracker)
    warnings: list[str] = []
    opened = Trackers(
        ["tensorboard"], "flowrl", lambda name: context(tmp_path), lambda stage: 1, warnings.append
    )
    opened.evaluation(HELD_OUT)
    opened.step(STEP)
    opened.step(STEP)
    opened.close()
    assert tracker.calls[0] == {"eval/accuracy": 0.5}
    assert (len(tracker.calls), tracker.closed) == (2, 1)
    [warning] = warnings
    assert "'tensorboard'" in warning
    assert "OSError: no space left on device" in warning


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard") as report:
        Trackers(["tensorbord"], "flowrl", lambda name: context(tmp_path), lambda stage: 1, print)
    assert report.value.where == "tracking.to"
