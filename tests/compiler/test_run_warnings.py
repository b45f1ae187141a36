"""Roles without work, critics that never learn, lengths out of reach: said when compiled."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import flowrl as fl
from flowrl.errors import ConfigError
from tests.compiler.programs import config, grpo, imitate, model, ppo


def warned(caplog: pytest.LogCaptureFixture, workflow: fl.Workflow, **changes: Any) -> list[str]:
    caplog.clear()
    fl.compile(workflow, config(**changes))
    return [record.getMessage() for record in caplog.records]


def roles(**more: Any) -> dict[str, Any]:
    return {"actor": model(), "judge": {"backend": "verify"}, **more}


def test_a_role_that_no_workflow_uses_is_told_with_its_key(caplog):
    (said,) = warned(caplog, grpo, roles=roles(spare=model()))
    assert said.startswith("the given configuration (roles.spare): no workflow of this run uses")
    assert "actor" in said
    assert "judge" in said


def test_a_misspelt_role_of_the_command_line_is_an_error_with_the_one_that_is_meant(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config(roles=roles())))
    with pytest.raises(ConfigError, match="no workflow of this run uses the role actr") as caught:
        fl.compile(grpo, file, overrides=["roles.actr.num_slots=3"])
    assert caught.value.where == "command line (roles.actr.num_slots=3)"
    assert caught.value.hint == "did you mean 'actor'?"


def test_more_threads_than_this_process_has_cores_are_told(caplog, monkeypatch):
    monkeypatch.setattr("flowrl.compiler.warnings.read_cores", lambda: 2)
    assert warned(caplog, grpo, roles=roles(), runtime={"num_threads": 2}) == []
    (said,) = warned(caplog, grpo, roles=roles(), runtime={"num_threads": 3})
    assert "(runtime.num_threads): 3 threads of each worker on 2 cores" in said
    assert "set runtime.num_threads=2 or less" in said


def test_a_role_of_another_file_need_not_be_used(caplog, tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config(roles=roles(spare=model()))))
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\n")
    caplog.clear()
    fl.compile(grpo, child)
    assert caplog.records == []
    child.write_text("extends: base.yaml\nroles: {other: {copy_of: actor}}\n")
    fl.compile(grpo, child)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{child}:2 (roles.other)" in said
    caplog.clear()
    fl.compile(None, child, overrides=[f"workflow={__file__}:only_actor", "args={}"])
    assert caplog.records == []
    fl.compile(None, child, overrides=[f"workflow={__file__}:only_actor", "roles.new={}"])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "command line (roles.new={})" in said


def test_a_role_that_a_used_one_copies_is_used(caplog):
    critic = {"copy_of": "base"}
    assert warned(caplog, ppo, roles=roles(critic=critic, base=model())) == []


@pytest.mark.parametrize("actor", ["${roles.base}", model() | {"model": "${ roles.base.model }"}])
def test_a_role_that_an_interpolation_names_is_used(caplog, actor):
    assert warned(caplog, grpo, roles=roles(actor=actor, base=model())) == []


def test_a_role_whose_part_is_switched_off_is_used(caplog):
    @fl.workflow
    def optional(
        prompts: fl.Prompts,
        *,
        actor: fl.Policy,
        other: fl.Policy,
        judge: fl.Reward,
        kl: float = 0.0,
    ):
        rollout = actor.generate(prompts)
        reference = other.logprobs(rollout) if kl else None
        actor.update(rollout, judge.score(rollout), reference=reference, kl=fl.kl.k3(kl))

    assert warned(caplog, optional, roles=roles(other={"copy_of": "actor"})) == []


@fl.workflow
def idle_critic(prompts: fl.Prompts, *, actor: fl.Policy, critic: fl.Critic, judge: fl.Reward):
    rollout = actor.generate(prompts)
    advantages, _ = fl.advantage.gae(judge.score(rollout), critic.values(rollout), rollout)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2, anchor="old"))


def test_a_critic_that_is_never_updated_is_told_with_the_line_that_reads_it(caplog):
    (said,) = warned(caplog, idle_critic, roles=roles(critic={"copy_of": "actor"}))
    assert "test_run_warnings.py:" in said
    assert "critic.values reads the values of critic, which no workflow of this run updates" in said
    assert "critic.update(rollout, returns=returns" in said


def test_a_critic_that_another_stage_teaches_is_not(caplog):
    both = config(roles=roles(critic={"copy_of": "actor"}))
    both |= {"stages": ["first", "main"], "stage": {"first": {"workflow": f"{__file__}:taught"}}}
    both["stage"]["first"]["train"] = {"sampling": {"max_tokens": 4}}
    caplog.clear()
    fl.compile(idle_critic, both)
    assert [record.getMessage() for record in caplog.records] == []


taught = ppo
only_actor = imitate


def shaped(max_tokens: int, buffer: int) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = fl.shaping.soft_overlong(
            judge.score(rollout), rollout, max_tokens=max_tokens, buffer=buffer
        )
        actor.update(rollout, scores)

    return program


@pytest.mark.parametrize(
    ("max_tokens", "buffer", "reach"),
    [
        (8, 2, "it never begins"),
        (8, 0, "it never begins"),
        (5, 2, "it never exceeds 0.5 of its factor"),
    ],
)
def test_a_length_penalty_above_what_responses_can_have_is_told(caplog, max_tokens, buffer, reach):
    (said,) = warned(caplog, shaped(max_tokens, buffer))
    assert f"at max_tokens={max_tokens}, but responses have at most 4" in said
    assert said.endswith(reach)


def test_a_length_penalty_that_can_be_met_is_not_told(caplog):
    assert warned(caplog, shaped(4, 2)) == []


GAME = {"backend": "environment", "environment": "examples/guess.py:Guess"}


def playing(turns: int, said: int) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment):
        rollout, scores = fl.interact(
            actor, game, prompts, max_turns=turns, max_observation_tokens=said
        )
        actor.update(rollout, scores)

    return program


def of_games(max_length: int = 32) -> dict[str, Any]:
    return {"actor": model(max_length=max_length), "game": GAME}


def test_a_length_penalty_of_episodes_is_compared_with_no_limit_of_one_response(caplog):
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment):
        rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
        scores = fl.shaping.soft_overlong(scores, rollout, max_tokens=20, buffer=4)
        actor.update(rollout, scores)

    assert warned(caplog, program, roles=of_games(128)) == []


def test_turns_that_can_never_be_had_are_refused(caplog):
    assert warned(caplog, playing(12, 4), roles=of_games()) == []
    # A prompt of 8 and 12 turns, with a token said between two, are 31 tokens.
    assert warned(caplog, playing(12, 4), roles=of_games(31)) == []
    with pytest.raises(ConfigError, match=r"max_turns=13.* cannot fit the model") as caught:
        warned(caplog, playing(13, 4), roles=of_games())
    assert "33 tokens" in str(caught.value)
    assert "write max_turns=12" in str(caught.value)


@fl.workflow
def measured(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
    judge.score(actor.generate(prompts))


def test_held_out_data_of_a_run_that_trains_no_policy_is_told(caplog):
    assert warned(caplog, measured, roles=roles()) == []
    data = {**config()["data"], "eval": {"kind": "arithmetic", "split": "eval"}}
    (said,) = warned(caplog, measured, roles=roles(), data=data)
    assert "(data.eval): held-out prompts are answered by the policy that a run trains" in said
    assert warned(caplog, grpo, roles=roles(), data=data) == []
