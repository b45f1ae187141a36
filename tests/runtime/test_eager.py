"""Programs run line by line leave what the compiled run leaves, also where they are stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.api import resume
from flowrl.cli.run import resume as go_on
from flowrl.files import read_json_lines
from flowrl.observe.rows import StepMetrics
from tests.runtime.eager_programs import EQUAL, SEEN, TROUBLE, looking, rewarded
from tests.runtime.many_programs import CONFIGS
from tests.runtime.tiny_runs import (
    REWARD,
    CtrlC,
    Outcome,
    WatchedDisplay,
    just_too_small,
    outcome,
    tiny_config,
)
from tests.sizes import every


def left_by(folder: Path) -> dict[str, object]:
    """Everything in a run folder that two equal runs have alike."""
    last = max((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    state = json.loads((last / "state.json").read_text())
    found: dict[str, object] = {"cursors": state["stage"]["cursors"]}
    found["kl_coefficients"] = state["stage"]["kl_coefficients"]
    for path in sorted(folder.glob("trained/*/model.safetensors")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    return found


class PressedAfter(WatchedDisplay):
    """Does something once a step is recorded."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._step, self._act = step, act

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        if metrics.step == self._step:
            self._act()


def without_dropped(left: Outcome) -> tuple[Outcome, list[object], set[object]]:
    """An outcome apart from samples, those that were not dropped, and names of those that were."""
    rows = [json.loads(line) for line in left.samples.splitlines()]
    stayed = [row for row in rows if row["end"] != "dropped"]
    gone = {(row["step"], row["rollout"], row["sample"]) for row in rows if row["end"] == "dropped"}
    return replace(left, samples=b""), stayed, gone


@pytest.mark.parametrize("program", every(3, list(CONFIGS)))
def test_a_program_run_line_by_line_leaves_what_the_compiled_one_leaves(
    program: str, tmp_path: Path
):
    compiled, eager = (
        fl.run(None, CONFIGS[program](tmp_path), display=WatchedDisplay(), executor=executor)
        for executor in ("local", "eager")
    )
    assert outcome(eager.folder) == outcome(compiled.folder)
    assert left_by(eager.folder) == left_by(compiled.folder)


@fl.workflow
def judged_turns(
    prompts: fl.Prompts,
    *,
    pro: fl.Policy,
    con: fl.Policy,
    court: fl.Environment,
    verifier: fl.Reward,
) -> None:
    (mine, _), (theirs, scores) = fl.interact(
        (pro, con), court, prompts, max_turns=4, max_observation_tokens=1
    )
    pro.update(mine, advantages=fl.advantage.group_relative(verifier.score(mine)))
    con.update(theirs, advantages=fl.advantage.group_relative(scores))


def test_the_turns_of_one_of_two_policies_are_scored_by_rules_as_in_the_compiled_run(
    tmp_path: Path,
):
    config = CONFIGS["debate"](tmp_path)
    config["roles"]["verifier"] = {"backend": "verify", "terms": [REWARD]}
    compiled, eager = (
        fl.run(judged_turns, config, display=WatchedDisplay(), executor=executor)
        for executor in ("local", "eager")
    )
    assert outcome(eager.folder) == outcome(compiled.folder)


def test_a_run_of_two_stages_with_stops_evaluations_and_filters_is_the_same(tmp_path: Path):
    config = tiny_config(tmp_path)
    compiled = fl.run(None, config, display=WatchedDisplay())
    eager = fl.run(None, config, overrides=["executor=eager"], display=WatchedDisplay())
    assert outcome(eager.folder) == outcome(compiled.folder)
    kinds = [(row["stage"], row["step"]) for row in read_json_lines(eager.folder / "metrics.jsonl")]
    assert kinds == [(stage, step) for stage in ("sft", "grpo") for step in range(1, 5)]


@pytest.mark.parametrize("program", every(2, list(EQUAL)))
def test_lines_that_the_compiled_run_orders_otherwise_give_the_same(program: str, tmp_path: Path):
    settings = dict(EQUAL[program])
    config = rewarded(program, tmp_path, settings.pop("reward", "digits"))
    config["rewards"] |= settings.get("rewards", {})
    compiled, eager = (
        fl.run(None, config, display=WatchedDisplay(), executor=executor)
        for executor in ("local", "eager")
    )
    # Where a reward fails, scorer processes may have scored others of its group before, or not.
    (left, stayed, gone), (other, others, lost) = (
        without_dropped(outcome(run.folder)) for run in (compiled, eager)
    )
    assert others == stayed
    assert lost == gone
    assert other == left
    assert left_by(eager.folder) == left_by(compiled.folder)
    assert bool(gone) == ("rewards" in settings)
    logged = [row["extra"] for row in read_json_lines(eager.folder / "metrics.jsonl")]
    if program == "dense_rewards":
        assert all({"rewards", "terms/model/mean"} <= extra.keys() for extra in logged)
    if program == "texts_and_rows":
        # A response of an example is its text and the token that ends it.
        assert [extra["taught"] for extra in logged] == [-1.0] * len(logged)


def test_engines_that_give_their_memory_back_are_awake_where_lines_draw(tmp_path: Path):
    tight = just_too_small(tiny_config(tmp_path))
    assert any(stage.plan.residency for stage in tight.stages)
    eager = replace(tight, config=tight.config.model_copy(update={"executor": "eager"}))
    left = [run.run(display=WatchedDisplay()).folder for run in (tight, eager)]
    assert outcome(left[1]) == outcome(left[0])


def test_ctrl_c_in_a_reward_stops_the_run_and_the_compiled_executor_goes_on_with_it(
    tmp_path: Path,
):
    config = rewarded("troubled", tmp_path, "interrupting", name="stopped")
    whole = fl.run(None, {**config, "name": "whole"}, display=WatchedDisplay())
    display = PressedAfter(1, lambda: TROUBLE.append(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fl.run(None, config, display=display, executor="eager")
    assert not TROUBLE
    assert any("stopped after step 1 of troubled" in note for note in display.notes)
    folder = tmp_path / "stopped"
    again = fl.compile(None, folder / "config.yaml", overrides=["executor=local"])
    resume(again, folder, display=WatchedDisplay())
    assert outcome(folder) == outcome(whole.folder)


def test_an_eager_run_that_was_stopped_goes_on_eagerly(tmp_path: Path):
    config = rewarded("looking", tmp_path, name="stopped")
    whole = fl.run(looking, {**config, "name": "whole"}, display=WatchedDisplay())
    with pytest.raises(KeyboardInterrupt):
        fl.run(looking, config, display=CtrlC("looking", 2), executor="eager")
    folder = tmp_path / "stopped"
    SEEN.clear()
    resume(fl.compile(looking, folder / "config.yaml"), folder, display=WatchedDisplay())
    assert [name for name, _ in SEEN] == ["drawn", "scored"]
    assert outcome(folder) == outcome(whole.folder)


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing_behind(tmp_path: Path):
    config = rewarded("looking", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fl.run(None, config, display=CtrlC("looking", 1, times=2), executor="eager")
    assert not list(tmp_path.glob("tiny/checkpoints/*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_compiled_run_that_was_stopped_can_be_looked_at_line_by_line(tmp_path: Path):
    config = rewarded("looking", tmp_path, name="stopped")
    whole = fl.run(None, {**config, "name": "whole"}, display=WatchedDisplay())
    with pytest.raises(KeyboardInterrupt):
        fl.run(None, config, display=CtrlC("looking", 2))
    go_on(tmp_path / "stopped", ["executor=eager"])
    written = (tmp_path / "stopped" / "config.yaml").read_text()
    assert "executor: eager" in written
    assert outcome(tmp_path / "stopped") == outcome(whole.folder)
