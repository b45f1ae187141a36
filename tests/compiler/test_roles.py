"""What plays a role must be able to: each mistake is told with the program's line and the key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

import flowrl as fl
import flowrl_backends.environment
import flowrl_backends.torch
from flowrl.compiler.role_backends import _words
from flowrl.errors import ConfigError, FlowError
from tests.compiler import programs
from tests.compiler.programs import config, model


def refused(workflow: fl.Workflow, settings: dict[str, Any]) -> FlowError:
    with pytest.raises(FlowError) as caught:
        fl.compile(workflow, settings)
    return caught.value


def with_roles(**roles: dict[str, Any]) -> dict[str, Any]:
    base = config()
    return {**base, "roles": {**base["roles"], **roles}}


def torch_with(monkeypatch: pytest.MonkeyPatch, **capabilities: Any) -> None:
    plugin = flowrl_backends.torch.plugin
    monkeypatch.setattr(type(plugin), "capabilities", replace(plugin.capabilities, **capabilities))


def line_of(text: str) -> str:
    """`programs.py:LINE` of the first line with that text."""
    lines = Path(programs.__file__).read_text().splitlines()
    return f"programs.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


# Kinds of roles and their backends.


def test_a_policy_cannot_be_played_by_rules():
    error = refused(programs.grpo, with_roles(actor={"backend": "verify"}))
    assert "role 'actor' of workflow 'grpo' is a policy (fl.Policy), which backend" in error.what
    assert line_of("def grpo(") in error.where
    assert "roles.actor.backend" in error.where
    assert error.found == "it offers score"
    assert error.expected == "a backend that offers generate or train: sglang, torch, vllm"


def test_a_rule_reward_cannot_be_played_by_a_model_and_is_told_what_can():
    error = refused(programs.grpo, with_roles(judge=model()))
    assert "role 'judge' of workflow 'grpo' is a reward (fl.Reward)" in error.what
    assert "a backend that offers score: verify" in error.expected
    assert "annotate it judge: fl.RewardModel where a model scores" in error.hint


def test_a_reward_model_cannot_be_played_by_rules_and_is_told_what_can():
    error = refused(programs.by_model, config())
    assert "role 'judge' of workflow 'by_model' is a reward model (fl.RewardModel)" in error.what
    assert "annotate it judge: fl.Reward where rules score" in error.hint


def test_an_environment_needs_a_backend_that_offers_one():
    error = refused(programs.play, with_roles(game={"backend": "verify"}))
    assert "role 'game' of workflow 'play' is an environment (fl.Environment)" in error.what
    assert error.expected == "a backend that offers environment: environment"


def test_an_environment_without_a_class_is_refused_by_plans_too():
    error = refused(programs.play, with_roles(game={"backend": "environment"}))
    assert error.what == "role 'game' is an environment, and its class is not named"
    assert "roles.game" in error.where
    assert error.hint == "set roles.game.environment=FILE.py:NAME"


def test_an_environment_of_a_plug_in_with_a_class_of_its_own_needs_no_class(monkeypatch):
    plugin = flowrl_backends.environment.plugin
    own = replace(plugin.capabilities, user_environment=False)
    monkeypatch.setattr(type(plugin), "capabilities", own)
    fl.compile(programs.play, with_roles(game={"backend": "environment"}))


def test_a_critic_needs_a_backend_with_value_heads(monkeypatch):
    torch_with(monkeypatch, heads=frozenset({"lm"}))
    error = refused(programs.ppo, with_roles(critic={"copy_of": "actor"}))
    assert "role 'critic' is a critic (fl.Critic), whose model ends in one number" in error.what
    assert line_of("def ppo(") in error.where
    assert error.found == "heads lm"
    assert error.expected == "a backend with the head value: none is installed"


# Options of plug-ins.


class Options(BaseModel, frozen=True, extra="forbid"):
    start_timeout_s: float = Field(default=60.0, gt=0)
    extra_args: tuple[str, ...] = ()


def test_options_of_a_plug_in_are_checked_with_the_line_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(type(flowrl_backends.torch.plugin), "options", Options, raising=False)
    options = {"start_timeout_s": 0, "extra_arg": []}
    file = tmp_path / "run.yaml"
    settings = with_roles(actor=model() | {"options": options})
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        fl.compile(programs.grpo, file)
    lines = file.read_text().splitlines()
    unknown, wrong = (
        f"{file}:{1 + next(i for i, line in enumerate(lines) if key in line)} "
        f"(roles.actor.options.{key}"
        for key in ("extra_arg", "start_timeout_s")
    )
    error = caught.value
    assert error.what == "unknown key 'extra_arg' in roles.actor.options"
    assert error.where.startswith(unknown)
    assert error.hint == "did you mean 'extra_args'?"
    (other,) = error.others
    assert other.what == "start_timeout_s must be more than 0.0"
    assert other.where.startswith(wrong)
    assert other.hint == "set roles.actor.options.start_timeout_s to more than 0.0"
    with pytest.raises(ConfigError, match="start_timeout_s must be a number") as caught:
        fl.compile(programs.grpo, config(), overrides=["roles.actor.options.start_timeout_s=soon"])
    assert caught.value.where == "command line (roles.actor.options.start_timeout_s=soon)"
    fl.compile(programs.grpo, with_roles(actor=model() | {"options": {"extra_args": ["-v"]}}))


def test_options_of_a_plug_in_that_has_none_are_refused():
    error = refused(programs.grpo, with_roles(judge={"backend": "verify", "options": {"a": 1}}))
    assert error.what == "backend 'verify' has no options"
    assert "roles.judge.options" in error.where


def test_a_role_that_the_config_does_not_name_is_told_at_its_line():
    error = refused(programs.ppo, config())
    assert "has a role 'critic' that the config does not name" in error.what
    assert line_of("critic.values(rollout)") in error.where
    assert error.hint == "set roles.critic.copy_of=actor, or roles.critic.model=FOLDER"


def test_an_environment_that_the_config_does_not_name_is_told_what_plays_one():
    error = refused(programs.play, config())
    assert "has a role 'game' that the config does not name" in error.what
    assert error.hint == "set roles.game.backend to one that offers environment: environment"


def test_roles_that_are_missing_are_told_that_they_can_be_bound():
    game = {"backend": "environment", "environment": "examples/guess.py:Guess"}
    games = with_roles(games_1=game)
    hint = refused(programs.play_all, games).hint
    assert hint.startswith("set roles.games_2.backend to one that offers environment")
    assert hint.endswith("or set bind.games=[NAME, NAME, ...], keys of roles")
    hint = refused(programs.taught, with_roles(verifier={"backend": "verify"})).hint
    assert hint.startswith("set roles.student.copy_of=actor, or ")
    assert hint.endswith("; or set bind.student=actor")


def test_all_roles_that_are_missing_are_told_in_one_error():
    error = refused(programs.taught, config())
    assert "has roles 'student', 'verifier' that the config does not name" in error.what
    assert error.where.count("programs.py:") == 2
    student, verifier = error.hint.split("; verifier: ")
    assert student.startswith("student: set roles.student.copy_of=actor, or ")
    assert verifier.startswith("set roles.verifier.backend to one that offers score: verify")


def test_a_role_without_a_model_is_told_whose_it_may_copy():
    error = refused(programs.ppo, with_roles(critic={"backend": "torch"}))
    assert error.what == "the role has no model"
    assert error.hint == "set roles.critic.copy_of=actor, or roles.critic.model=FOLDER"


# One kind throughout a run.


def test_a_role_of_two_kinds_in_two_stages_is_two_incompatible_models(tmp_path):
    settings = with_roles(judge=model())
    settings |= {
        "stages": ["learn", "main"],
        "stage": {"learn": {"workflow": f"{programs.__file__}:judge_learns"}},
    }
    error = refused(programs.grpo, settings)
    assert "role 'judge' is used for two incompatible models" in error.what
    assert "a reward (fl.Reward) in stage 'main'" in error.what
    assert "a reward model (fl.RewardModel) in stage 'learn'" in error.what
    assert line_of("def grpo(") in error.where
    assert line_of("def judge_learns(") in error.where
    compiled = fl.compile(programs.by_model, settings)
    trainable = [stage.plan.placement("judge").trainable for stage in compiled.stages]
    assert trainable == [True, False]


# Copies.


def test_a_critic_may_begin_as_a_copy_of_a_policy():
    compiled = fl.compile(programs.ppo, with_roles(critic={"copy_of": "actor"}))
    assert compiled.plan.placement("critic").copy_of == "actor"
    assert compiled.plan.placement("critic").head == "value"


def test_a_policy_cannot_begin_as_a_copy_of_a_critic():
    settings = with_roles(actor={"copy_of": "critic"}, critic=model())
    error = refused(programs.ppo, settings)
    assert "cannot begin as a copy of 'critic', a critic (fl.Critic)" in error.what
    assert "roles.actor.copy_of" in error.where


def test_what_has_no_model_cannot_be_copied():
    error = refused(programs.compared, with_roles(other={"copy_of": "judge"}))
    assert "role 'other' is a copy of 'judge', but 'judge' is a reward" in error.what


# Models that meet.


def test_samples_of_another_vocabulary_are_refused_with_both_sizes_and_where_they_come_from():
    other = model()
    other["tokenizer"] = {"kind": "char", "alphabet": "0123456789+= abcdef"}
    error = refused(programs.compared, with_roles(other=other))
    assert "other.logprobs reads samples that actor.generate generated" in error.what
    assert line_of("ref = other.logprobs(rollout)").split(":")[0] in error.where
    assert error.found == (
        "24 tokens (roles.other.tokenizer) and 16 tokens (roles.actor.tokenizer)"
    )


def test_vocabularies_of_one_size_may_differ_all_the_same():
    other = model()
    other["tokenizer"] = {"kind": "char", "alphabet": "9876543210+="}
    error = refused(programs.compared, with_roles(other=other))
    assert "a token id does not mean the same to other and actor" in error.what


def test_two_readers_of_the_same_examples_share_a_vocabulary():
    other = model()
    other["tokenizer"] = {"kind": "char", "alphabet": "0123456789+=-"}
    settings = with_roles(other=other)
    graph = fl.compile(programs.both_learn, with_roles(other=model(hidden_size=32))).graph
    read = {edge.src for edge in graph.edges if edge.dst in ("actor.update", "other.update")}
    assert read == {"examples"}
    error = refused(programs.both_learn, settings)
    assert "other.update reads samples that actor reads too" in error.what


def test_data_is_encoded_once_so_all_stages_read_it_alike():
    judge = model()
    judge["tokenizer"] = {"kind": "char", "alphabet": "0123456789+=-"}
    settings = with_roles(judge=judge)
    settings |= {
        "stages": ["learn", "main"],
        "stage": {"learn": {"workflow": f"{programs.__file__}:judge_learns"}},
    }
    error = refused(programs.by_model, settings)
    assert "actor.generate reads prompts that judge reads too" in error.what


def folder_with(path: Path, tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A role with a model in a folder."""
    path.mkdir()
    shape = {
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    (path / "config.json").write_text(json.dumps(shape))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "model.safetensors").touch()
    return {"model": str(path)}


VOCAB = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<eos>", "id": 2}]}


def test_folders_with_one_tokenizer_agree_and_a_reader_with_fewer_rows_is_told(tmp_path, caplog):
    actor = folder_with(tmp_path / "small", VOCAB, 16)
    teacher = folder_with(tmp_path / "large", {**VOCAB, "version": "1.0"}, 24)
    graph = fl.compile(programs.compared, with_roles(actor=actor, other=teacher)).graph
    assert graph.feeding("other.logprobs", "rollout").src == "actor.generate"
    assert graph.feeding("actor.update", "reference").src == "other.logprobs"
    assert caplog.records == []
    fl.compile(programs.compared, with_roles(actor=teacher, other=actor))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "other.logprobs reads samples of actor, which can generate the token ids 16 "
    )
    assert "to 23 too" in said
    assert f"other has only 16 tokens ({tmp_path / 'small' / 'config.json'})" in said


@pytest.mark.parametrize("added", [None, [], "left out"])
def test_tokenizers_without_added_words_are_compared_by_their_words(added):
    entry = {} if added == "left out" else {"added_tokens": added}
    written = json.dumps({"version": "1.0", **entry, "model": {"vocab": {"a": 0}}})
    assert _words(written.encode()) == _words(b'{"model": {"vocab": {"a": 0}}}') == ({"a": 0}, {})


def test_folders_with_other_words_do_not_agree_even_where_they_have_as_many(tmp_path):
    other = {**VOCAB, "model": {"vocab": {"b": 0, "a": 1}}}
    actor = folder_with(tmp_path / "small", VOCAB, 16)
    teacher = folder_with(tmp_path / "large", other, 16)
    error = refused(programs.compared, with_roles(actor=actor, other=teacher))
    assert "a token id does not mean the same" in error.what
    assert str(tmp_path / "large" / "config.json") in error.found


def test_weights_are_not_taken_over_by_another_architecture():
    error = refused(programs.refreshed, with_roles(other=model(hidden_size=32)))
    assert "other takes over the weights of actor, but the two models differ" in error.what
    assert line_of("other.sync(actor, every=2)") in error.where
    assert "other: hidden_size=32, head_dim=16 (roles.other)" in error.found
    assert "actor: hidden_size=16, head_dim=8 (roles.actor)" in error.found
    for other in ({"copy_of": "actor"}, model()):
        graph = fl.compile(programs.refreshed, with_roles(other=other)).graph
        assert graph.feeding("other.sync", "weights").src == "actor.update"
        assert graph.node("other.sync").attr("every") == 2


# Grammars.


def test_a_grammar_needs_a_backend_that_holds_it(monkeypatch):
    settings = config()
    settings["train"]["truncated"] = "ignore"
    torch_with(monkeypatch, grammars=frozenset())
    error = refused(programs.constrained, settings)
    assert (
        "actor.generate asks actor to hold its tokens to a grammar (regex), which backend 'torch'"
        in (error.what)
    )
    assert line_of('fl.grammar.regex("[0-9]+")') in error.where
    assert error.found == "it can do no such thing"
    assert error.expected == "roles.actor.backend that declares regex: none is installed"


def test_an_option_that_the_engine_does_not_follow_is_refused(monkeypatch):
    settings = config()
    settings["train"] |= {"truncated": "ignore", "sampling": {"top_k": 8, "min_tokens": 2}}
    torch_with(monkeypatch, sampling=frozenset({"top_k"}))
    error = refused(programs.grpo, settings)
    assert "actor.generate asks actor to sample with min_tokens=2, which backend" in error.what
    assert error.found == "it can top_k"
    settings["train"] |= {"sampling": {"top_k": 8, "stop": "</answer>"}}
    error = refused(programs.grpo, settings)
    assert 'actor.generate asks actor to sample with stop=["</answer>"], which' in error.what


@pytest.mark.parametrize(
    ("options", "role", "what"),
    [
        ({"decay": 0.9}, "other", "average weights (decay=)"),
        ({"reset_optimizer": True}, "actor", "reset an optimizer"),
    ],
)
def test_a_sync_that_the_backend_cannot_make_is_refused(monkeypatch, options, role, what):
    @fl.workflow
    def program(examples: fl.Examples, actor: fl.Policy, other: fl.Policy):
        fl.log("other", other.logprobs(examples))
        actor.update(examples)
        other.sync(actor, **options)

    settings = with_roles(other={"copy_of": "actor"})
    fl.compile(program, settings)
    torch_with(monkeypatch, updates=frozenset())
    error = refused(program, settings)
    assert error.what == f"other.sync asks {role} to {what}, which backend 'torch' cannot"
    assert "test_roles.py:" in error.where


def test_a_sum_that_the_backend_cannot_make_is_refused(monkeypatch):
    @fl.workflow
    def program(examples: fl.Examples, actor: fl.Policy):
        actor.update(fl.sum(fl.term(examples), 0.1 * fl.term(examples)))

    fl.compile(program, config())
    torch_with(monkeypatch, updates=frozenset({"average"}))
    error = refused(program, config())
    assert error.what == (
        "actor.update asks actor to learn from a sum (fl.sum), which backend 'torch' cannot"
    )
    assert error.found == "it can average"


def test_a_grammar_that_the_backend_holds_is_taken(monkeypatch):
    torch_with(monkeypatch, grammars=frozenset({"regex"}))
    settings = config()
    settings["train"]["truncated"] = "ignore"
    graph = fl.compile(programs.constrained, settings).graph
    assert graph.node("actor.generate").attr("grammar") == fl.grammar.regex("[0-9]+")


def test_a_grammar_changes_the_distribution_and_no_trainer_repeats_it(monkeypatch):
    torch_with(monkeypatch, grammars=frozenset({"regex"}), repeats_truncation=frozenset({"top_p"}))
    error = refused(programs.constrained, config())
    assert "samples with a grammar (regex)" in error.what
    assert error.expected == "no grammar"
    settings = config()
    settings["train"]["truncated"] = "repeat"
    error = refused(programs.constrained, settings)
    assert "cannot include in logprobs that actor.generate samples with a grammar (regex)" in (
        error.what
    )
    assert error.found == "train.truncated=repeat, and it repeats top_p"


# What was decided is in the plan.


def test_the_plan_says_where_old_logprobs_come_from_and_why():
    settings = with_roles(critic={"copy_of": "actor"})
    reasons = {r.subject: r for r in fl.compile(programs.ppo, settings).plan.reasons}
    old = reasons["actor.update.old_logprobs"]
    assert old.choice == "of actor.logprobs"
    assert [rejected.choice for rejected in old.rejected] == ["own", "rollout_logprobs"]
    settings["algorithm"] = {"trust_rollout_logprobs": True}
    trusted = {r.subject: r for r in fl.compile(programs.ppo, settings).plan.reasons}
    assert trusted["actor.update.old_logprobs"].choice == "rollout_logprobs"
    settings["train"]["mini_batches"] = 1
    own = {r.subject: r for r in fl.compile(programs.ppo, settings).plan.reasons}
    assert own["actor.update.old_logprobs"].choice == "own"


def test_the_last_policy_is_evaluated_and_not_a_critic_that_learns_after_it():
    @fl.workflow
    def critic_last(prompts: fl.Prompts, *, actor: fl.Policy, critic: fl.Critic, judge: fl.Reward):
        rollout = actor.generate(prompts)
        values = critic.values(rollout)
        advantages, returns = fl.advantage.gae(judge.score(rollout), values, rollout)
        actor.update(rollout, advantages=advantages)
        critic.update(rollout, returns=returns, values=values)

    settings = with_roles(critic={"copy_of": "actor"})
    settings["data"]["eval"] = {"kind": "arithmetic", "split": "eval"}
    plan = fl.compile(critic_last, settings).plan
    assert plan.placement("critic").num_slots == 0
    assert plan.placement("actor").num_slots == 256
