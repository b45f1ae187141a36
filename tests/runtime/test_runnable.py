"""What the local executor cannot do as it is written is refused before a run folder is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.config.schema import RoleConfig
from flowrl.program import Workflow
from flowrl.runtime.runnable import require_runnable
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config


@fl.workflow
def rollout_and_examples(
    prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, verifier: fl.Reward
):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout))
    actor.update(examples)


@fl.workflow
def filtered_and_whole(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    actor.update(rollout, scores)
    kept, kept_scores = fl.filter.zero_variance(rollout, scores)
    actor.update(kept, kept_scores)


@fl.workflow
def two_rewards(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout))
    actor.update(rollout, judge.score(rollout))


@fl.workflow
def first(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout))


@fl.workflow
def second(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, judge.score(rollout))


@fl.workflow
def unscored(prompts: fl.Prompts, actor: fl.Policy):
    actor.update(actor.generate(prompts), loss=fl.loss.cross_entropy())


def refused(runs: Path, workflow: Workflow, **changes: Any) -> str:
    """The message of a run that is refused and leaves nothing behind."""
    config = {**tiny_config(runs), "args": {}, "stages": ["last"], "stage": {}, **changes}
    config["roles"]["judge"] = {"backend": "verify"}
    compiled = fl.compile(workflow, config)
    with pytest.raises(fl.ConfigError) as caught:
        compiled.run(display=WatchedDisplay())
    assert not runs.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("workflow", "sets"),
    [
        (rollout_and_examples, "of actor.generate, actor.update.2 of examples"),
        (filtered_and_whole, "of actor.generate, advantage.2 of filter"),
    ],
)
def test_a_stage_that_learns_from_two_sets_of_samples(
    tmp_path: Path, workflow: Workflow, sets: str
):
    message = refused(tmp_path / "runs", workflow)
    assert "several sets of samples" in message
    assert "test_runnable.py:" in message
    assert sets in message


def test_a_stage_that_scores_twice(tmp_path: Path):
    message = refused(tmp_path / "runs", two_rewards)
    assert "scores its samples 2 times" in message
    assert "verifier.score, judge.score" in message
    assert "rewards.terms" in message


def test_a_rollout_that_nothing_scores(tmp_path: Path):
    message = refused(tmp_path / "runs", unscored, rewards={}, data={"train": _ARITHMETIC}, eval={})
    assert message.startswith("rewards.terms: the rollouts of stage 'last' are scored")


def test_stages_that_are_scored_by_different_backends(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["first", "last"]}
    config["stage"] = {"first": {"workflow": f"{__file__}:first"}}
    config["roles"]["judge"] = {"backend": "verify"}
    compiled = fl.compile(second, config)
    require_runnable(compiled.config, compiled.stages)
    judge = RoleConfig(backend="another")
    roles = {**compiled.config.roles, "judge": judge}
    with pytest.raises(fl.ConfigError, match="scored by different backends") as caught:
        require_runnable(compiled.config.model_copy(update={"roles": roles}), compiled.stages)
    assert "roles.judge.backend, roles.verifier.backend" in str(caught.value)
    assert "another, verify" in str(caught.value)


_ARITHMETIC = {"kind": "arithmetic", "split": "train"}


def test_a_stop_check_of_a_policy_that_the_stage_does_not_train_is_refused(tmp_path: Path):
    config = tiny_config(tmp_path)
    config["roles"]["student"] = config["roles"]["actor"]
    config["stages"] = ["warm", "grpo"]
    config["stage"] = {
        "warm": {
            "workflow": str(Path(__file__).parent / "student_sft.py"),
            "stop": {"metric": "score", "at_least": 0.5},
        }
    }
    compiled = fl.compile(None, config)
    with pytest.raises(fl.ConfigError, match="stops by a measurement of role 'actor'") as caught:
        require_runnable(compiled.config, compiled.stages)
    assert "it trains student" in str(caught.value)


@fl.workflow
def generated_by_a_copy(
    prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, reference: fl.Policy
):
    rollout = reference.generate(prompts)
    actor.update(rollout, verifier.score(rollout))


def test_a_copy_that_generates(tmp_path: Path):
    text = refused(tmp_path / "runs", generated_by_a_copy)
    assert "reference.generate is of a copy" in text
    assert "roles.reference.copy_of=actor" in text
