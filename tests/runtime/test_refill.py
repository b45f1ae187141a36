"""Dynamic sampling: a batch has exactly as many groups as were asked for, or the run says why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.backend.protocols import ScoreRequest, ScoreResult
from flowrl.cli import run as command
from flowrl.data import PromptItem
from flowrl.errors import CheckpointError, ConfigError, DataError
from flowrl.files import read_json_lines
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.payloads import GroupRows
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.sources import PromptSupply
from flowrl.runtime.scoring.pool import ScoreFailure, ScoringPool
from tests.runtime.test_resume import resumed
from tests.runtime.test_rollouts import Engine, World, by_member, driver_of, prompts
from tests.runtime.tiny_runs import CtrlC, WatchedDisplay, outcome, tiny_config


def judge(groups: Sequence[GroupRows]) -> list[str | None]:
    scores = [{payload.score for _, payload in members} for _, members in groups]
    return ["too_even" if len(of_group) == 1 else None for of_group in scores]


def even(*evens: int):
    """Scores that are equal in the groups of these prompts."""

    def rule(request: ScoreRequest) -> float:
        return 1.0 if int(request.sample.split("/")[1]) in evens else by_member(request)

    return rule


class Cursor:
    """Hands out prompts one after the other."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.taken: list[int] = []

    def take(self, num: int) -> list[PromptItem]:
        items = prompts(num, first=self.next)
        self.next += num
        self.taken.append(num)
        return items


def refilling(
    world: World, cursor: Cursor, rule: Any, *, limit: int = 30, engine: Engine | None = None
) -> RolloutDriver:
    settings = SchedulerSettings(group_size=2, judges_groups=True, refill=True)
    return driver_of(
        world,
        engine or Engine(world),
        rule,
        judge=judge,
        scheduler=RolloutScheduler(settings, validate=True),
        supply=PromptSupply(take=lambda num, _: cursor.take(num), limit=limit),
        failures=FailureBudget(9),
    )


def test_filtered_groups_are_replaced_until_the_batch_is_full():
    world, cursor = World(), Cursor()
    driver = refilling(world, cursor, even(1, 3, 4))
    driver.offer(cursor.take(4))
    collected = driver.collect(1, 4)
    assert [group for group, _ in collected.groups] == ["0/0", "0/2", "0/5", "0/6"]
    assert collected.num_filtered_groups == 3
    assert {sample.rpartition("/")[0] for sample, _, _ in collected.filtered} == {
        "0/1",
        "0/3",
        "0/4",
    }
    assert [item.group for item in collected.further] == ["0/4", "0/5", "0/6"]
    assert len(driver.store) == 0


def test_further_prompts_are_offered_in_rounds_once_all_before_have_ended():
    """So that what is decoded together does not depend on when a scorer answers."""
    world, cursor = World(), Cursor()
    driver = refilling(world, cursor, even(0, 2, 4))
    driver.offer(cursor.take(4))
    driver.collect(1, 4)
    assert cursor.taken == [4, 2, 1]
    log = [event for event in world.log if event != "beat"]
    assert log.index("submit 0/4/0") > log.index("scored 0/3/1")
    assert log.index("submit 0/6/0") > log.index("scored 0/5/1")


def test_a_group_that_lost_a_reward_is_replaced_too():
    world, cursor = World(), Cursor()

    def rule(request: ScoreRequest) -> float | str:
        return "raised ValueError" if request.sample == "0/0/1" else by_member(request)

    driver = refilling(world, cursor, rule)
    driver.offer(cursor.take(2))
    collected = driver.collect(1, 2)
    assert [group for group, _ in collected.groups] == ["0/1", "0/2"]
    assert sorted(sample for sample, _, _ in collected.dropped) == ["0/0/0", "0/0/1"]


def test_the_limit_names_the_filter_s_pass_rate_and_what_is_missing():
    world, cursor = World(), Cursor()
    driver = refilling(world, cursor, even(*range(1, 50)), limit=10)
    driver.offer(cursor.take(4))
    with pytest.raises(DataError, match="too few groups pass the filter") as caught:
        driver.collect(1, 4)
    told = str(caught.value)
    assert "1 of 10 groups passed (10.0 %); 9 too_even; 3 are missing" in told
    assert "at most 10 prompts" in told
    assert sum(cursor.taken) == 10
    assert caught.value.exit_code == 2


def test_every_batch_has_a_limit_of_its_own():
    world, cursor = World(), Cursor()
    engine = Engine(world)
    driver = refilling(world, cursor, even(*range(0, 40, 2)), limit=8, engine=engine)
    for batch in (1, 2, 3):
        driver.offer(cursor.take(2))
        assert len(driver.collect(batch, 2).groups) == 2
        engine.version = batch
        driver.publish(batch)
    assert cursor.next > 8


# Whole runs


def dapo(runs: Path, **train: Any) -> dict[str, Any]:
    config = {**tiny_config(runs), "name": "tiny", "stages": ["dapo"], "stage": {}, "args": {}}
    config["train"] = {**config["train"], "refill": True, "group_size": 2, **train}
    del config["roles"]["reference"]
    return config


def steps_of(run: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(run / "metrics.jsonl"))


def test_every_step_of_dapo_learns_from_a_full_batch(tmp_path: Path):
    result = api.run(None, dapo(tmp_path), display=WatchedDisplay())
    steps = steps_of(result.folder)
    assert [step["num_samples"] for step in steps] == [16] * 4
    assert sum(step["filtered_groups"] for step in steps) > 0
    rows = list(read_json_lines(result.folder / "samples.jsonl"))
    assert len({(row["sample"]) for row in rows}) == len(rows)
    assert sum(row["end"] == "consumed" for row in rows) == 64


def test_without_refill_a_step_learns_from_what_is_left(tmp_path: Path):
    result = api.run(None, dapo(tmp_path, refill=False), display=WatchedDisplay())
    assert any(step["num_samples"] < 16 for step in steps_of(result.folder))


def test_a_refilled_run_goes_on_bit_by_bit(tmp_path: Path):
    never = api.run(None, dapo(tmp_path / "never"), display=WatchedDisplay())
    with pytest.raises(KeyboardInterrupt):
        api.run(None, dapo(tmp_path / "stopped"), display=CtrlC("dapo", 2))
    resumed(tmp_path / "stopped" / "tiny")
    assert outcome(tmp_path / "stopped" / "tiny") == outcome(never.folder)


def test_a_run_with_spare_samples_goes_on_bit_by_bit_whenever_scorers_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spare = {"refill": False, "steps": 3, "policies": {"over_sampling": {"members": 2}}}
    never = api.run(None, dapo(tmp_path / "never", **spare), display=WatchedDisplay())
    (_, _, num_dropped) = ends_of(never.folder)
    assert num_dropped == 3 * 8 * 2
    poll, looks = ScoringPool.poll, itertools.count()

    def hesitant(pool: ScoringPool) -> list[ScoreResult | ScoreFailure]:
        return poll(pool) if next(looks) % 3 == 0 else []

    monkeypatch.setattr(ScoringPool, "poll", hesitant)
    with pytest.raises(KeyboardInterrupt):
        api.run(None, dapo(tmp_path / "stopped", **spare), display=CtrlC("dapo", 2))
    resumed(tmp_path / "stopped" / "tiny")
    assert outcome(tmp_path / "stopped" / "tiny") == outcome(never.folder)


def ends_of(run: Path) -> list[int]:
    rows = list(read_json_lines(run / "samples.jsonl"))
    return [sum(row["end"] == end for row in rows) for end in ("consumed", "filtered", "dropped")]


def test_a_run_whose_filter_lets_nothing_pass_stops_with_a_checkpoint(tmp_path: Path):
    config = dapo(tmp_path, refill_limit=2)
    config["rewards"]["terms"] = [{"kind": "format", "name": "digit", "pattern": ".*"}]
    display = WatchedDisplay()
    with pytest.raises(DataError, match="too few groups pass") as caught:
        api.run(None, config, display=display)
    assert "train.refill_limit=2" in str(caught.value)
    assert "0 of 16 groups passed (0.0 %); 16 zero_variance(tolerance=1e-08)" in str(caught.value)
    assert "--resume" in display.notes[-1]
    assert "the resumed run takes a greater train.refill_limit too" in str(caught.value)
    assert "begin a new run, with prompts" in str(caught.value)
    assert "or with train.refill=false" in str(caught.value)


def test_a_run_that_stopped_at_its_limit_goes_on_with_a_greater_one_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = dapo(tmp_path, refill_limit=1)
    with pytest.raises(DataError, match="too few groups pass"):
        api.run(None, config, display=WatchedDisplay())
    with pytest.raises(ConfigError, match="keeps its configuration"):
        command.resume(tmp_path / "tiny", ["train.refill=false"])
    command.resume(tmp_path / "tiny", ["train.refill_limit=30"])
    assert [step["num_samples"] for step in steps_of(tmp_path / "tiny")] == [16] * 4
    never = api.run(None, dapo(tmp_path / "never", refill_limit=30), display=WatchedDisplay())
    assert outcome(tmp_path / "tiny").metrics == outcome(never.folder).metrics
    assert "held-out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("train.refill_limit=30", CheckpointError),
        ("stage.sft.train.refill_limit=30", CheckpointError),
        ("roles.game.timeout_s=90", CheckpointError),
        ("stage.sft.train.refill=false", ConfigError),
        ("stage.sft.train.steps=9", ConfigError),
        ("roles.game.num_slots=9", ConfigError),
    ],
)
def test_limits_may_be_raised_in_a_resumed_run_and_what_it_draws_may_not(
    tmp_path: Path, override: str, error: type[Exception]
):
    """What may be changed is looked at before the folder, in which there is no run."""
    with pytest.raises(error):
        command.resume(tmp_path, [override])


TWO_ROLLOUTS = """
import flowrl as fl


@fl.workflow
def program(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    greedy = actor.generate(prompts, n=1, temperature=0)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    advantages = fl.advantage.group_relative(scores, std="group")
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))
    fl.log("greedy", verifier.score(greedy))
"""

LATE_FILTER = """
import flowrl as fl


@fl.workflow
def program(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, judge: fl.RewardModel):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, judge.score(rollout))
    advantages = fl.advantage.group_relative(scores, std="group")
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (TWO_ROLLOUTS, "several of its rollouts answer the same prompts"),
        (LATE_FILTER, "filter reads what is known of whole batches only"),
    ],
)
def test_refilling_is_refused_where_it_would_not_do_what_it_says(
    tmp_path: Path, program: str, message: str
):
    path = tmp_path / "program.py"
    path.write_text(program)
    config = {**dapo(tmp_path / "runs"), "workflow": f"{path}:program"}
    config["roles"]["judge"] = {"backend": "torch", "copy_of": "actor"}
    with pytest.raises(ConfigError, match=message):
        api.run(None, config, display=WatchedDisplay())
    assert not (tmp_path / "runs").exists()


def test_refilling_is_refused_line_by_line(tmp_path: Path):
    config = {**dapo(tmp_path), "executor": "eager"}
    with pytest.raises(ConfigError, match="no line that takes further prompts"):
        api.run(None, config, display=WatchedDisplay())


def test_refilling_is_refused_of_a_stage_that_draws_nothing(tmp_path: Path):
    config = tiny_config(tmp_path)
    config["stage"]["sft"]["train"]["refill"] = True
    with pytest.raises(ConfigError, match="it generates nothing") as caught:
        api.run(None, config, display=WatchedDisplay())
    assert caught.value.where == "stage.sft.train.refill"
