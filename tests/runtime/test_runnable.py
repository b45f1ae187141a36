"""What the local executor cannot do as it is written is refused before a run folder is made."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.program.workflow import Workflow
from flowrl.runtime.local.run_checks import require_runnable
from flowrl.runtime.setup.user_inputs import RunInputs
from tests.runtime.many_programs import CONFIGS
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config


@fl.workflow
def two_rewards(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout))
    actor.update(rollout, judge.score(rollout))


@fl.workflow
def scored_data(examples: fl.Examples, actor: fl.Policy, verifier: fl.Reward):
    fl.log("data", verifier.score(examples))
    actor.update(examples)


@fl.workflow
def modelled_data(pairs: fl.Pairs, model: fl.RewardModel):
    fl.log("data", model.score(pairs))
    model.update(pairs, loss=fl.loss.bradley_terry())


@fl.workflow
def unknown_part(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rest = actor.generate(fl.where(prompts, row="kind", none_of=["plain", "carry"]))
    part = actor.generate(fl.where(prompts, row="kind", equals="math"))
    rollout, scores = fl.concat((rest, verifier.score(rest)), (part, verifier.score(part)))
    actor.update(rollout, scores)


@fl.workflow
def mistyped_value(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(fl.where(prompts, row="kind", one_of=["carry", "plane"]))
    actor.update(rollout, verifier.score(rollout))


@fl.workflow
def unknown_template(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    draft = actor.generate(prompts)
    better = actor.generate(fl.prompts_of(draft, template="{prompt}{response}Better: "), n=2)
    actor.update(better, verifier.score(better))


@fl.workflow
def unknown_separator(prompts: fl.Prompts, actor: fl.Policy, prm: fl.RewardModel):
    rollout = actor.generate(prompts)
    rewards = prm.score(rollout, per="step", separator="\n\n")
    advantages = fl.advantage.reinforce_pp(None, rollout, token_rewards=rewards)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def refused(runs: Path, workflow: Workflow, **changes: Any) -> str:
    """The message of a run that is refused and leaves nothing behind."""
    config = {**tiny_config(runs), "args": {}, "stages": ["last"], "stage": {}, **changes}
    config["roles"]["judge"] = {"backend": "verify"}
    compiled = fl.compile(workflow, config)
    with pytest.raises(fl.FlowError) as caught:
        compiled.run(display=WatchedDisplay())
    assert not runs.exists()
    return str(caught.value)


def test_a_reward_without_terms_is_named_by_its_key(tmp_path: Path):
    config = {**tiny_config(tmp_path / "runs"), "args": {}, "stages": ["last"], "stage": {}}
    config["roles"]["judge"] = {"backend": "verify", "terms": []}
    with pytest.raises(fl.ConfigError, match="terms must not be empty") as caught:
        fl.compile(two_rewards, config)
    assert "roles.judge.terms" in str(caught.value)


@fl.workflow
def split_prompts(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(fl.where(prompts, row="a", one_of=range(50)))
    actor.update(rollout, verifier.score(rollout))


@fl.workflow
def split_samples(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = fl.where(actor.generate(prompts), row="a", one_of=range(50))
    actor.update(rollout, verifier.score(rollout))


def test_parts_by_row_are_of_steps_whose_prompts_are_known(tmp_path: Path):
    train = {**tiny_config(tmp_path)["train"], "refill": True}
    message = refused(tmp_path / "runs", split_prompts, train=train)
    assert "takes some of a step's prompts" in message
    assert "test_runnable.py:" in message


def test_a_part_that_no_row_is_in_is_refused_with_the_values_and_an_empty_rest_is_not(
    tmp_path: Path,
):
    message = refused(tmp_path / "runs", unknown_part)
    assert re.search(r"test_runnable.py:\d+: no row has kind='math'\n", message)
    assert re.search(r"found: '(plain', 'carry|carry', 'plain)' in 'kind' of arithmetic", message)


def test_characters_of_a_template_that_the_tokenizer_lacks_are_no_fault_of_a_row(tmp_path: Path):
    message = refused(tmp_path / "runs", unknown_template)
    assert re.match(r"\S*test_runnable.py:\d+: the template has characters", message)
    assert "' ' ':' 'B' 'e' 'r' 't'" in message
    assert "add them to roles.actor.tokenizer.alphabet, or write the template with" in message


def test_a_separator_of_steps_that_no_response_can_have_is_refused(tmp_path: Path):
    roles = tiny_config(tmp_path)["roles"]
    roles["prm"] = {"copy_of": "actor"}
    message = refused(tmp_path / "runs", unknown_separator, roles=roles)
    assert re.match(r"\S*test_runnable.py:\d+: the separator has characters", message)
    assert r"found: '\n'" in message
    assert "add them to roles.actor.tokenizer.alphabet, or end steps with" in message


def test_values_that_no_row_has_are_noted_beside_those_of_others(tmp_path: Path):
    config = {**tiny_config(tmp_path / "runs"), "args": {}, "stages": ["last"], "stage": {}}
    compiled = fl.compile(mistyped_value, config)
    with closing(RunInputs(compiled.config, compiled.stages)) as inputs:
        (note,) = inputs.prepared_inputs.notes
    assert "no row has kind='plane'" in note


def test_data_and_parts_by_row_are_scored_by_rules_and_by_models(tmp_path: Path):
    for workflow in (scored_data, modelled_data, split_samples):
        config = {**tiny_config(tmp_path), "args": {}, "stages": ["last"], "stage": {}}
        config["roles"]["model"] = config["roles"]["actor"]
        compiled = fl.compile(workflow, config)
        require_runnable(compiled.config, compiled.stages)


def test_a_stop_check_of_a_run_that_trains_no_policy_is_refused(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["last"], "stage": {}}
    config["roles"]["model"] = config["roles"]["actor"]
    config["stop"] = {"metric": "score", "at_least": 0.5}
    compiled = fl.compile(modelled_data, config)
    with pytest.raises(fl.ConfigError, match="stops by a measurement of no policy") as caught:
        require_runnable(compiled.config, compiled.stages)
    assert "it trains model" in str(caught.value)


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


def test_policies_that_take_turns_do_not_generate_ahead(tmp_path: Path):
    config = CONFIGS["debate"](tmp_path / "runs")
    ahead = fl.compile(None, config, overrides=["train.max_staleness=1"])
    with pytest.raises(fl.ConfigError, match=r"several policies take turns in court\.interact"):
        ahead.run(display=WatchedDisplay())
