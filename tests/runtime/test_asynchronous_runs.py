"""Whole runs that learn while they draw: ages, accounts, stops, resumptions, dead engines."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flowrl as fl
from flowrl import api
from flowrl.backend.weights import Weights
from flowrl.cli import why
from flowrl.errors import ConfigError, WorkerDied
from flowrl.files import read_json_lines
from flowrl.observe.rows import StepMetrics
from flowrl.rollout.actions import Score
from flowrl.rollout.events import PromptsOffered, Resumed
from flowrl.rollout.journal import replay
from flowrl.rollout.machine import Transition
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.states import State
from flowrl.runtime.checkpoint.journal import _joined, rollout_journals
from flowrl.runtime.checkpoint.store import CheckpointStore
from flowrl.runtime.driver import rounds
from flowrl.runtime.driver.asynchronous_stage import AsynchronousStage
from flowrl.runtime.driver.streaming_tree import StreamingTree
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.local.engine_process import EngineProcess
from flowrl.runtime.transfer.weight_folders import WeightFolders
from flowrl.runtime.workers import Waitable, wait_for_any
from tests.runtime.killed_runs import run_until_killed
from tests.runtime.many_programs import CONFIGS
from tests.runtime.test_resume import resumed
from tests.runtime.tiny_runs import CtrlC, WatchedDisplay, ages_of, tiny_config
from tests.runtime.tree_programs import tree_of
from tests.warm_processes import WarmProcesses


def config_of(runs: Path, *, staleness: int = 2, **train: Any) -> dict[str, Any]:
    config = {**tiny_config(runs), "stages": ["async_grpo"], "stage": {}, "args": {}}
    del config["roles"]["reference"]
    config["train"] = {**config["train"], "steps": 6, "max_staleness": staleness, **train}
    return config


def steps_of(run: Path) -> list[StepMetrics]:
    return list(map(StepMetrics.from_json, read_json_lines(run / "metrics.jsonl")))


def rows_of(run: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(run / "samples.jsonl"))


def at_the_end(run: Path) -> tuple[RolloutScheduler, set[str]]:
    """The scheduler at the end of a run's journal, and every sample that was ever offered."""
    (files,) = rollout_journals(run)
    journal = _joined(files.files)
    size = journal.open().settings.num_members
    offered = {
        f"{group}/{member}"
        for event in journal.events
        if isinstance(event, PromptsOffered)
        for group in event.groups
        for member in range(size)
    }
    return replay(journal), offered


def check_ages(run: Path, staleness: int) -> None:
    """No consumed sample is too old, by the versions of its own tokens."""
    versions = {step.step: step.version for step in steps_of(run)}
    ages: dict[int, Counter[int]] = {}
    for row in rows_of(run):
        if row["end"] == "consumed":
            first = min(version for version, _ in row["versions"])
            ages.setdefault(row["step"], Counter())[versions[row["step"]] - first] += 1
    assert max(max(of_step) for of_step in ages.values()) <= staleness
    # And the metrics say the same.
    for step in steps_of(run):
        assert ages_of(step.extra) == dict(ages.get(step.step, {}))
        assert sum(ages_of(step.extra).values()) == step.num_samples


def check_accounts(run: Path) -> None:
    """Every sample that was offered has at most one end, and the rest are live."""
    ends = Counter(row["sample"] for row in rows_of(run))
    assert set(ends.values()) == {1}
    scheduler, offered = at_the_end(run)
    assert set(ends) <= offered
    counts = scheduler.counts
    assert counts.conserved
    assert counts.admitted == len(offered)
    by_end = Counter(row["end"] for row in rows_of(run))
    assert by_end["consumed"] == counts.consumed
    # Filtered and dropped ones are told with the next batch.
    assert by_end["filtered"] <= counts.filtered
    assert len(offered - set(ends)) == counts.live + counts.filtered - by_end["filtered"]


def test_samples_are_of_bounded_age_and_each_has_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = tmp_path / "memory"
    memory.mkdir()
    folders: list[WeightFolders] = []

    def opened(beside: Path, *, share: None) -> WeightFolders:
        folders.append(WeightFolders(beside, shared_memory=memory))
        return folders[-1]

    def call(stage: AsynchronousStage, act: Callable[[], None]) -> None:
        does.append(stage.doing)
        in_thread(stage, act)

    does: list[str] = []
    in_thread = AsynchronousStage._call
    monkeypatch.setattr(AsynchronousStage, "_call", call)
    monkeypatch.setattr("flowrl.runtime.local.engine_fleet.WeightFolders", opened)
    display = WatchedDisplay()
    run = api.run(None, config_of(tmp_path), display=display).folder
    assert does.count("engines are being opened") == 1
    assert [step for _, step in display.steps] == list(range(1, 7))
    steps = steps_of(run)
    assert [step.version for step in steps] == list(range(6))
    assert steps[0].extra["staleness/max"] == 0.0
    assert steps[-1].extra["staleness/mean"] > 0.0
    assert all(step.seconds["wait"] >= 0.0 for step in steps)
    assert any(step.seconds["generate"] > 0.0 for step in steps)
    assert any(step.filtered_groups for step in steps)
    check_ages(run, 2)
    check_accounts(run)
    assert len(list(read_json_lines(run / "evaluations.jsonl"))) >= 3
    (weights,) = folders
    assert weights.latest is not None
    assert weights.latest.version == 6
    assert list(memory.iterdir()) == []  # nothing is left behind


def test_the_journal_on_disk_holds_every_event_that_a_checkpoint_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[int, int]] = []
    save = CheckpointStore.save

    def saved(store: CheckpointStore, position: Any, write: Any, state: Any) -> Path:
        (files,) = rollout_journals(store.folder.parent)
        (scheduler,) = state["stage"]["schedulers"].values()
        seen.append((_joined(files.files).events[-1].id, scheduler["last_event_id"]))
        return save(store, position, write, state)

    monkeypatch.setattr(CheckpointStore, "save", saved)
    config = config_of(tmp_path, steps=3)
    config["runtime"]["checkpoint_every"] = 1
    api.run(None, config, display=WatchedDisplay())
    assert len(seen) == 3
    assert all(on_disk >= of_state for on_disk, of_state in seen)


@pytest.mark.parametrize("publication", ["abort", "finish"])
def test_running_samples_can_be_stopped_or_finished_when_weights_come(
    tmp_path: Path, publication: str, capsys: pytest.CaptureFixture[str]
):
    config = config_of(tmp_path, policies={"publication": publication}, refill=True)
    # Few slots and long samples: the trainer waits for the engines, so some samples are in the
    # middle whenever weights come.
    actor = config["roles"]["actor"]
    actor |= {"num_engines": 2, "num_slots": 2}
    actor["model"] = {**actor["model"], "max_length": 128}
    config["train"]["sampling"] = {"max_tokens": 100}
    run = api.run(None, config, display=WatchedDisplay()).folder
    assert [step.num_samples for step in steps_of(run)] == [32] * 6
    check_ages(run, 2)
    check_accounts(run)
    steps = transitions(run)[0]
    engines = {step.engine for step in steps if step.engine}
    assert engines == {"actor.generate[0]", "actor.generate[1]"}
    if publication == "finish":
        assert all(len(row["versions"]) <= 1 for row in rows_of(run))
        return
    aborted = next(step.sample for step in steps if step.reason == "updating")
    told = why_of(run, aborted, capsys)
    assert "was aborted: updating" in told
    assert "attempt 1 starts on" in told


def why_of(run: Path, sample: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `flowrl why` prints."""
    capsys.readouterr()
    why.run(run, sample, as_json=False)
    return capsys.readouterr().out


def transitions(run: Path) -> tuple[list[Transition], list[int]]:
    """Every transition in a run's journal, and the events with which it was resumed."""
    (files,) = rollout_journals(run)
    seen: list[Transition] = []
    journal = _joined(files.files)
    replay(journal, observer=seen.append)
    return seen, [event.id for event in journal.events if isinstance(event, Resumed)]


@pytest.mark.parametrize(
    "ctrl_c",
    [
        pytest.param(lambda: CtrlC("async_grpo", 2), id="at a boundary"),
        pytest.param(lambda: CtrlC("async_grpo", 3, in_scoring=True, after=4), id="in a rollout"),
    ],
)
def test_a_stopped_run_goes_on_with_what_it_had_drawn(
    tmp_path: Path,
    ctrl_c: Callable[[], CtrlC],
    keyboard: list[CtrlC],
    capsys: pytest.CaptureFixture[str],
):
    display = ctrl_c()
    keyboard.append(display)
    with pytest.raises(KeyboardInterrupt):
        api.run(None, config_of(tmp_path), display=display)
    run = tmp_path / "tiny"
    assert "--resume" in display.notes[-1]
    before = {row["sample"] for row in rows_of(run)}
    unused = max((run / "checkpoints").iterdir()) / "unused-samples"
    assert (unused / "actor.generate" / "samples.safetensors").stat().st_size > 0
    keyboard.clear()

    resumed(run)

    assert [step.step for step in steps_of(run)] == list(range(1, 7))
    check_ages(run, 2)
    check_accounts(run)
    after = rows_of(run)
    assert before < {row["sample"] for row in after}
    # Some of what was drawn before the stop was learned from after it.
    first = min(row["step"] for row in after if row["sample"] not in before)
    early = [row for row in after if row["step"] == first and row["end"] == "consumed"]
    assert any(version < first - 1 for row in early for version, _ in row["versions"])
    # Samples that were under way went on, with what they had, and the journal tells of both.
    steps, (moment,) = transitions(run)
    begun = {s.sample for s in steps if s.after is State.RUNNING and s.event_id < moment}
    used = [s.sample for s in steps if s.after is State.CONSUMED and s.event_id > moment]
    name = next(name for name in used if name in begun)
    assert "the run goes on from its checkpoint" in why_of(run, name, capsys)


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> list[CtrlC]:
    """Has the displays in it told of every batch that goes to the scorers."""
    from flowrl.runtime.driver.streaming_driver import StreamingDriver

    displays: list[CtrlC] = []
    score = StreamingDriver._score

    def watched(driver: StreamingDriver, action: Score) -> None:
        score(driver, action)
        for display in displays:
            if display.armed:
                # Signals reach the main thread, wherever they are raised.
                display.armed = False
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(StreamingDriver, "_score", watched)
    return displays


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, warm: WarmProcesses):
    config = config_of(tmp_path)
    config["runtime"]["checkpoint_every"] = 2
    run = run_until_killed(warm, config, "async_grpo", 5)
    display = WatchedDisplay()
    resumed(run, display=display)
    assert display.steps == [("async_grpo", 5), ("async_grpo", 6)]
    check_ages(run, 2)
    check_accounts(run)


class Killer(WatchedDisplay):
    """Kills an engine's process after a step."""

    def __init__(self, processes: list[EngineProcess], after: int) -> None:
        super().__init__()
        self._processes = processes
        self._after = after

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        if metrics.step == self._after:
            os.kill(self._processes[0]._channel.process.pid, signal.SIGKILL)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    """Every engine's process that is started."""
    started: list[EngineProcess] = []
    init = EngineProcess.__init__

    def watched(engine: EngineProcess, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        started.append(engine)

    monkeypatch.setattr(EngineProcess, "__init__", watched)
    return started


def test_a_run_goes_on_when_its_only_engine_is_killed(
    tmp_path: Path, processes: list[EngineProcess]
):
    run = api.run(None, config_of(tmp_path), display=Killer(processes, 2)).folder
    assert len(processes) == 2
    assert [step.step for step in steps_of(run)] == list(range(1, 7))
    check_ages(run, 2)
    check_accounts(run)


def test_an_engine_that_cannot_stay_alive_ends_the_run_with_a_typed_error(
    tmp_path: Path, processes: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
):
    submit = EngineProcess.submit

    def killing(engine: EngineProcess, requests: Any) -> None:
        submit(engine, requests)
        os.kill(engine._channel.process.pid, signal.SIGKILL)

    monkeypatch.setattr(EngineProcess, "submit", killing)
    with pytest.raises(WorkerDied, match="without ending a sample") as caught:
        api.run(None, config_of(tmp_path), display=WatchedDisplay())
    assert "actor.generate[0]" in str(caught.value)
    assert "SIGKILL" in str(caught.value)


def test_several_engines_draw_for_a_synchronous_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def wait(workers: list[Waitable], timeout_s: float) -> None:
        waits.append(timeout_s)
        wait_for_any(workers, timeout_s)

    waits: list[float] = []
    # A clock on which each wait for an engine takes a second, and nothing else takes time.
    monkeypatch.setattr(rounds, "wait_for_any", wait)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: len(waits)))
    config = config_of(tmp_path, staleness=0)
    del config["eval"]
    config["roles"]["actor"]["num_engines"] = 2
    run = api.run(None, config, display=WatchedDisplay()).folder
    ages = [
        step.version - version
        for step in steps_of(run)
        for row in rows_of(run)
        if row["step"] == step.step
        for version, _ in row["versions"]
    ]
    assert set(ages) == {0}
    assert sum(step.seconds["generate"] for step in steps_of(run)) == len(waits) > 0


@pytest.mark.parametrize("program", ["guessing"])
def test_episodes_and_examples_beside_a_rollout_run_ahead_too(tmp_path: Path, program: str):
    config = CONFIGS[program](tmp_path)
    config["train"]["max_staleness"] = 1
    config["train"]["steps"] = 3
    config["plan"] = {"kind": "asynchronous"}
    run = api.run(None, config, display=WatchedDisplay()).folder
    steps = steps_of(run)
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.extra["staleness/max"] <= 1.0 for step in steps)
    assert {row["end"] for row in rows_of(run)} == {"consumed"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executor": "eager"}, "generates what its lines ask for"),
        ({"train": {"policies": {"publication": "abrot"}}}, "no kind of publication 'abrot'"),
        ({"train": {"policies": {"publicaton": "abort"}}}, "no rule of the scheduler"),
        (
            {"train": {"policies": {"order": {"kind": "longest_first", "windw": 3}}}},
            "no option of longest_first 'windw'",
        ),
        ({"train": {"policies": {"order": {"kind": "longest_first", "window": "x"}}}}, "window"),
        ({"train": {"policies": {"over_sampling": {"prompts": 2}}}}, "redundant prompts need"),
        ({"train": {"policies": {"admission": {"groups": 2}}}}, "age budget follows"),
        ({"train": {"policies": {"retries": {"attempts": 0}}}}, "attempts is out of range"),
        ({"train": {"policies": {"retries": {"tries": 2}}}}, "no option of retries 'tries'"),
        (
            {"train": {"policies": {"fairness": {"kind": "weighted_shares", "math": 1}}}},
            "rows do not name their source",
        ),
        (
            {"train": {"policies": {"fairness": {"kind": "weighted_shares", "math": 0}}}},
            "shares of sources are wrong",
        ),
        (
            {"train": {"policies": {"fairness": {"kind": "weighted_shares", "math": "x"}}}},
            "math of weighted_shares must be",
        ),
    ],
)
def test_what_cannot_be_scheduled_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    config = config_of(tmp_path / "runs")
    config["train"] |= changes.pop("train", {})
    with pytest.raises(ConfigError, match=message):
        api.run(None, {**config, **changes}, display=WatchedDisplay())
    assert not (tmp_path / "runs").exists()


def sourced_config(folder: Path, **shares: float) -> dict[str, Any]:
    """A run whose prompts are of two topics, the second one with two rows only."""
    config = config_of(folder / "runs")
    topics = ["math"] * 10 + ["code"] * 2
    rows = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "topic": topic}
        for n, topic in enumerate(topics)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"] = {**config["data"], "train": str(data), "source": "topic"}
    config["train"]["policies"] = {"fairness": {"kind": "weighted_shares", **shares}}
    return config


@pytest.mark.parametrize("staleness", [0, 1])
def test_sources_of_prompts_have_their_shares_also_after_a_resumption(
    tmp_path: Path, staleness: int
):
    config = sourced_config(tmp_path, math=1.0, code=3.0)
    config["train"] |= {"max_staleness": staleness, "steps": 2}
    run = api.run(None, config, display=WatchedDisplay()).folder
    resumed(run, "train.steps=4")
    groups = {row["sample"].rpartition("/")[0] for row in rows_of(run)}
    of_code = sum(int(group.partition("/")[2]) >= 10 for group in groups)
    assert len(groups) == 4 * 8
    # Three of four, whatever the numbers of rows; what runs ahead ends in another order.
    if staleness:
        assert abs(of_code - 24) <= 3
        check_ages(run, staleness)
        check_accounts(run)
    else:
        assert of_code == 24


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"math": 1.0}, "without a share: code"),
        ({"math": 1.0, "code": 1.0, "logic": 1.0}, "without rows: logic"),
    ],
)
def test_shares_of_other_sources_than_the_data_has_are_refused_before_anything_starts(
    tmp_path: Path, shares: dict[str, float], message: str
):
    with pytest.raises(ConfigError, match=message):
        api.run(None, sourced_config(tmp_path, **shares), display=WatchedDisplay())
    assert not (tmp_path / "runs").exists()


def test_aborted_episodes_would_never_end_and_are_refused(tmp_path: Path):
    config = CONFIGS["guessing"](tmp_path / "runs")
    config["train"] |= {"max_staleness": 1, "policies": {"publication": "abort"}}
    with pytest.raises(ConfigError, match="starts again"):
        api.run(None, config, display=WatchedDisplay())


# Trees of samples


def tree_config(runs: Path, program: str = "refinement", **train: Any) -> dict[str, Any]:
    config = tree_of(program, runs)
    config["train"] |= {"steps": 4, "max_staleness": 1, **train}
    if program != "chain_of_one":
        config["args"] = {"ahead": True}
    return config


def check_tree(run: Path, parents: dict[str, str], staleness: int) -> None:
    """Each consumed child is consumed with its parent, and neither is too old."""
    versions = {step.step: step.version for step in steps_of(run)}
    rows = {(row["rollout"], row["sample"]): row for row in rows_of(run)}
    assert len(rows) == len(rows_of(run))  # each sample has one end
    oldest: dict[tuple[str, str], int] = {}
    roots = {rollout for rollout, _ in rows} - parents.keys()
    for rollout in (*roots, *parents):
        for (name, sample), row in rows.items():
            if name != rollout or row["end"] == "dropped":
                continue
            first = min(version for version, _ in row["versions"])
            if rollout in parents:
                above = (parents[rollout], sample.rpartition("/")[0])
                assert rows[above]["step"] == row["step"]
                first = min(first, oldest[above])
            oldest[name, sample] = first
            assert versions[row["step"]] - first <= staleness
    told = [
        x for step in steps_of(run) for name, x in step.extra.items() if "staleness/max" in name
    ]
    assert 0 < max(told) <= staleness
    for files in rollout_journals(run):
        counts = replay(_joined(files.files)).counts
        assert counts.conserved


REFINED = {"rival.generate": "actor.generate", "actor.generate.2": "rival.generate"}


def test_a_tree_runs_ahead_of_the_trainer_and_children_are_as_old_as_their_parents(tmp_path: Path):
    run = api.run(None, tree_config(tmp_path), display=WatchedDisplay()).folder
    check_tree(run, REFINED, 1)


def test_rules_score_parts_and_examples_ahead_of_the_trainer(tmp_path: Path):
    config = CONFIGS["split_and_joined"](tmp_path, steps=4)
    config["train"]["max_staleness"] = 1
    run = api.run(None, config, display=WatchedDisplay()).folder
    judged: dict[int, list[float]] = {}
    solved = set()
    for row in rows_of(run):
        first, second = map(int, row["prompt"].removesuffix("=").split("+"))
        texts = [row["response"]]
        if first >= 50 and (row["step"], row["prompt"]) not in solved:  # its solution is joined
            solved.add((row["step"], row["prompt"]))
            texts.append(row["answer"])
        if second % 2 == 0:
            scores = (bool(re.fullmatch(".*[0-4]", t)) + 0.5 * t[:1].isdigit() for t in texts)
            judged.setdefault(row["step"], []).extend(scores)
    assert len(judged) == 4
    for step in steps_of(run):
        mean = sum(judged[step.step]) / len(judged[step.step])
        assert step.extra["judged_even"] == pytest.approx(mean)
    assert {age for step in steps_of(run) for age in ages_of(step.extra)} == {0, 1}


def test_no_child_begins_between_the_new_weights_of_its_parent_s_policy_and_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load, look = StreamingTree.load, StreamingTree.round
    done: list[str] = []

    def loaded(tree: StreamingTree, fleet: EngineFleet, weights: Weights) -> None:
        done.append(str(weights.version))
        load(tree, fleet, weights)

    def looked(tree: StreamingTree, wake: int) -> int:
        done.append("round")
        return look(tree, wake)

    monkeypatch.setattr(StreamingTree, "load", loaded)
    monkeypatch.setattr(StreamingTree, "round", looked)
    # The rival never learns: its publication is counted at the end of each step.
    run = api.run(None, tree_config(tmp_path, "tournament"), display=WatchedDisplay()).folder
    of_loads = [what for what, _ in groupby(done)]
    assert [what for what in of_loads if what != "round"] == ["1", "2", "3", "4"]
    assert done.count("1") == done.count("4") == 2
    assert {row["end"] for row in rows_of(run)} == {"consumed"}


TREES = {
    "refinement": REFINED,
    "tournament": {f"rival.generate{n}": "actor.generate" for n in ("", ".2")},
    "branching": {
        "actor.generate.2": "actor.generate",
        "actor.generate.3": "actor.generate.2",
        "actor.generate.4": "actor.generate.2",
    },
}


@pytest.mark.parametrize("program", TREES)
def test_a_killed_tree_goes_on_from_its_last_checkpoint(
    tmp_path: Path, warm: WarmProcesses, program: str
):
    config = tree_config(tmp_path, program)
    config["runtime"]["checkpoint_every"] = 2
    run = run_until_killed(warm, config, program, 3)
    resumed(run)
    assert [step.step for step in steps_of(run)] == [1, 2, 3, 4]
    check_tree(run, TREES[program], 1)
    if program == "tournament":
        assert {row["end"] for row in rows_of(run)} == {"consumed"}


def test_each_step_has_its_rows_ahead_of_the_trainer_also_where_the_run_is_killed(
    tmp_path: Path, warm: WarmProcesses
):
    in_turns = tree_of("parts_of_the_data", tmp_path / "in_turns", steps=4)
    whole = api.run(None, in_turns, display=WatchedDisplay()).folder
    config = tree_config(tmp_path, "parts_of_the_data", max_staleness=2)
    config["runtime"]["checkpoint_every"] = 2
    run = run_until_killed(warm, config, "parts_of_the_data", 3)
    resumed(run)

    def samples_of(folder: Path) -> list[tuple[int, str, str, str]]:
        keys = ("step", "rollout", "sample", "end")
        return sorted(tuple(row[key] for key in keys) for row in rows_of(folder))

    assert samples_of(run) == samples_of(whole)
    check_tree(run, {"actor.generate.3": "actor.generate.2"}, 2)


@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        ("two_rollouts", {"refill": True}, "each of its steps has the rows of"),
        ("chain_of_one", {"policies": {"publication": "abort"}}, "share theirs"),
    ],
)
def test_what_cannot_run_ahead_together_is_refused(
    tmp_path: Path, program: str, changes: dict[str, Any], message: str
):
    config = tree_config(tmp_path, "chain_of_one", **changes)
    if program == "two_rollouts":
        config["workflow"] = f"{__file__}:two_rollouts"
    with pytest.raises(ConfigError, match=message):
        api.run(None, config, display=WatchedDisplay())


@fl.workflow
def two_rollouts(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    for rollout in [actor.generate(prompts), actor.generate(prompts)]:
        actor.update(rollout, verifier.score(rollout))
