"""Sizes of program and configuration: what must suffice and fit, and the longest sample of all.

Workers are opened once, so every stage's plan proves the longest sample of the whole run.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler.lowering import LoweredStage
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.sizes import check_sizes
from flowrl.config.load import load_config
from flowrl.errors import ConfigError
from flowrl.graph import Graph, Level, Node, Op
from flowrl.ids import NodeId, RoleName
from flowrl.passes import Context
from flowrl.specs import Sampling
from flowrl.specs.loss.base import DPO
from flowrl.user_lines import SourceRef
from tests.compiler.programs import grpo
from tests.runtime.tiny_runs import tiny_config


def check(traced: Graph, lowered: Graph, folder: Path, override: str) -> None:
    """Checks the sizes of a stage with a graph of one's own, as the last one of a config."""
    loaded = load_config(None, [override], base=tiny_config(folder))
    stage = LoweredStage(
        name="grpo",
        prefix="",
        config=loaded.config.stage_config("grpo"),
        workflow=grpo,
        traced=traced,
        context=Context(),
        graph=lowered,
    )
    check_sizes([stage], RoleBackends(loaded))


def lengths(config: dict[str, Any]) -> list[int]:
    return [stage.plan.sizes.max_length for stage in fl.compile(None, config).stages]


def test_every_stage_is_planned_for_the_longest_sample_of_any(tmp_path: Path):
    config = tiny_config(tmp_path)
    config["data"]["max_prompt_tokens"] = 6
    config["stages"] = ["short", "grpo"]
    config["stage"] = {
        "short": {"workflow": "grpo", "train": {"sampling": {"max_tokens": 2}}},
    }
    config["train"]["sampling"] = {"max_tokens": 5}
    assert lengths(config) == [11, 11]


def test_no_sample_is_longer_than_the_model_of_a_folder_takes(tmp_path: Path):
    config = tiny_config(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "vocab_size": 16,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 9,
            }
        )
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    config["roles"]["actor"] = {"model": str(folder)}
    config["data"]["max_prompt_tokens"] = 100
    assert lengths(config) == [9] * len(config["stages"])


NUMBERS = count()

PROGRAM = """\
import flowrl as fl


@fl.workflow
def mine(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts{options})
    scores = verifier.score(rollout)
    actor.update(rollout, advantages=fl.advantage.{advantage}, loss=fl.loss.reinforce())
"""


def message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    options: str = "",
    advantage: str = "leave_one_out(scores)",
    fits: bool = False,
) -> str:
    """What compiling a program of one's own says; nothing, where it `fits`."""
    monkeypatch.chdir(tmp_path)
    # A program that was loaded once is not read again.
    program = f"mine{next(NUMBERS)}.py"
    Path(program).write_text(PROGRAM.format(options=options, advantage=advantage))
    config = tiny_config(tmp_path / "runs")
    config |= {"stages": ["mine"], "stage": {}, "workflow": program, "args": {}}
    config["train"] |= {"mini_batches": 1}
    Path("run.yaml").write_text(json.dumps(config, indent=1))
    if fits:
        fl.compile(None, "run.yaml", overrides=overrides)
        return ""
    with pytest.raises(ConfigError) as caught:
        fl.compile(None, "run.yaml", overrides=overrides)
    text = str(caught.value)
    assert 1 <= len(text.splitlines()) <= 4, text
    return text.replace(program, "mine.py")


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_relative", "max_rl", "pass_at_k"])
def test_a_group_of_one_has_nothing_to_be_compared_with(tmp_path, monkeypatch, advantage):
    advantage += "(scores)"
    text = message(tmp_path, monkeypatch, "train.group_size=1", advantage=advantage)
    assert "command line (train.group_size=1) and mine.py:8 (advantage)" in text
    assert "advantage compares the samples of a group" in text
    assert "train.group_size=1 gives each prompt a group of one" in text
    assert "at least 2 samples a prompt" in text
    assert "set train.group_size=2" in text
    message(tmp_path, monkeypatch, "train.group_size=2", advantage=advantage, fits=True)


def test_a_group_size_of_the_program_is_told_with_its_line(tmp_path, monkeypatch):
    text = message(tmp_path, monkeypatch, options=", n=1")
    assert "mine.py:6 (actor.generate) and mine.py:8 (advantage)" in text
    assert "n=1 gives each prompt a group of one" in text
    assert "write n=2" in text
    message(tmp_path, monkeypatch, "train.group_size=1", options=", n=2", fits=True)


def test_samples_that_a_join_puts_into_one_group_are_compared_with_each_other(tmp_path):
    @fl.workflow
    def joined(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        greedy, others = actor.generate(prompts, n=1, temperature=1.0), actor.generate(prompts, n=2)
        parts = [(each, verifier.score(each)) for each in (greedy, others)]
        best, scores = fl.select.top(*fl.concat(*parts), k=3)
        actor.update(best, advantages=fl.advantage.group_relative(scores))

    @fl.workflow
    def split(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        lone = actor.generate(prompts, n=1)
        scores = verifier.score(lone)
        parts = [fl.where((lone, scores), row="a", equals=number) for number in (1, 2)]
        rollout, scores = fl.concat(*parts)
        actor.update(rollout, advantages=fl.advantage.group_relative(scores))

    config = tiny_config(tmp_path) | {"stages": ["last"], "stage": {}, "args": {}}
    fl.compile(joined, config)
    with pytest.raises(ConfigError, match="a group of one"):
        fl.compile(split, config)


def test_a_group_of_one_child_is_shown_how_parents_are_compared(tmp_path):
    @fl.workflow
    def revised(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        draft = actor.generate(prompts)
        revision = actor.generate(fl.prompts_of(draft, template="{prompt}{response}+"), n=1)
        relative = fl.advantage.group_relative(verifier.score(revision))
        actor.update(revision, advantages=relative)

    config = tiny_config(tmp_path) | {"stages": ["last"], "stage": {}, "args": {}}
    with pytest.raises(ConfigError, match="a group of one") as caught:
        fl.compile(revised, config)
    assert "fl.mean_of_children(scores)" in caught.value.hint


@pytest.mark.parametrize("of_prompts", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_examples_are_compared_with_samples_of_the_same_prompts(tmp_path, of_prompts, alone):
    def mixed(prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, verifier: fl.Reward):
        solutions = fl.Examples.of(prompts) if of_prompts else examples
        rollout = actor.generate(prompts)
        fl.log("score", verifier.score(rollout))
        sets = (solutions,) if alone else (rollout, solutions)
        scored = [(each, verifier.score(each)) for each in sets]
        given = scored[0] if alone else fl.concat(*scored, missing_logprob=0.0)
        if of_prompts:
            actor.update(examples)
        actor.update(*given, loss=fl.loss.reinforce())

    config = tiny_config(tmp_path) | {"stages": ["last"], "stage": {}, "args": {}}
    if of_prompts and not alone:
        fl.compile(fl.workflow(mixed), config)
        return
    with pytest.raises(ConfigError, match="no other samples answer the prompts of") as caught:
        fl.compile(fl.workflow(mixed), config)
    assert "fl.Examples.of(prompts)" in caught.value.hint


def test_an_advantage_that_compares_no_group_takes_groups_of_one(tmp_path, monkeypatch):
    reinforce = "reinforce_pp(scores, rollout)"
    message(tmp_path, monkeypatch, "train.group_size=1", advantage=reinforce, fits=True)


def test_a_response_of_the_program_that_no_model_holds_is_refused(tmp_path, monkeypatch):
    text = message(tmp_path, monkeypatch, options=", max_tokens=9")
    # data.max_prompt_tokens is 8, the model holds 16.
    assert "mine.py:6 (actor.generate) and run.yaml" in text
    assert "generates responses of max_tokens=9" in text
    assert "prompts of 8 tokens or more" in text
    assert "at most 16 tokens" in text
    assert "write max_tokens=8" in text
    message(tmp_path, monkeypatch, options=", max_tokens=8", fits=True)
    text = message(tmp_path, monkeypatch, options=", sampling=fl.Sampling(max_tokens=64)")
    assert "generates responses of max_tokens=64" in text


def test_a_default_response_that_no_model_holds_is_told_as_a_default(tmp_path, monkeypatch):
    text = message(tmp_path, monkeypatch, "train.sampling={}", "train.sampling.max_tokens=256")
    assert "train.sampling.max_tokens=256" in text
    assert "set train.sampling.max_tokens=8" in text


def test_a_program_may_not_force_responses_beyond_their_end(tmp_path):
    generate = Node(
        id=NodeId("actor.generate"),
        op=Op.GENERATE,
        role=RoleName("actor"),
        attrs=(("sampling", None), ("min_tokens", 7)),
        source=SourceRef(file="mine.py", line=6),
    )
    traced = Graph(name="mine", level=Level.TRACED, nodes=(generate,), edges=())
    filled = generate.with_attrs(sampling=Sampling(min_tokens=7, max_tokens=6))
    with pytest.raises(ConfigError) as caught:
        check(traced, traced.replacing(filled), tmp_path, "train.sampling.max_tokens=6")
    text = str(caught.value)
    assert "actor.generate has min_tokens=7 above train.sampling.max_tokens=6" in text
    assert "mine.py:6 (actor.generate) and command line (train.sampling.max_tokens=6)" in text
    assert "write min_tokens=6, or set train.sampling.max_tokens=7" in text


def test_a_length_penalty_that_no_response_can_meet_is_refused(tmp_path, monkeypatch):
    term = "rewards.terms=[{{kind: format, name: digit, pattern: x}}, {{kind: overlong, {}}}]"
    text = message(tmp_path, monkeypatch, term.format("max_tokens: 10, buffer: 4"))
    assert "'overlong' begins above 6 tokens (max_tokens=10 - buffer=4)" in text
    assert "responses have at most train.sampling.max_tokens=6" in text
    assert "set rewards.terms.1.max_tokens=6" in text
    message(tmp_path, monkeypatch, term.format("max_tokens: 6, buffer: 4"), fits=True)
    # The hard penalty is of responses longer than max_tokens.
    assert "begins above 6 tokens" in message(tmp_path, monkeypatch, term.format("max_tokens: 6"))


@pytest.mark.parametrize(
    ("size", "nearest"), [(1, "train.micro_batch=2"), (33, "train.micro_batch=32 or 34")]
)
def test_a_micro_batch_separates_no_pair(tmp_path, size, nearest):
    source = SourceRef(file="dpo.py", line=7)
    update = Node(
        id=NodeId("actor.update"),
        op=Op.UPDATE,
        role=RoleName("actor"),
        attrs=(("loss", DPO()),),
        source=source,
    )
    graph = Graph(name="dpo", level=Level.LOWERED, nodes=(update,), edges=())
    check(graph, graph, tmp_path, "train.micro_batch=32")
    with pytest.raises(ConfigError) as caught:
        check(graph, graph, tmp_path, f"train.micro_batch={size}")
    text = str(caught.value)
    assert f"command line (train.micro_batch={size}) and dpo.py:7" in text
    assert f"train.micro_batch={size} would separate a pair" in text
    assert f"nearest: {nearest}" in text


SELECTING = """\
import flowrl as fl


@fl.workflow
def mine(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts, n=4)
    scores = verifier.score(rollout)
    rollout, scores = fl.select.{select}
    actor.update(rollout, {learn})
"""

IMITATE = "loss=fl.loss.cross_entropy()"


@pytest.mark.parametrize("select", ["top(rollout, scores, k={})", "random(rollout, scores, k={})"])
def test_a_selection_leaves_enough_and_not_more_than_there_are(tmp_path, monkeypatch, select):
    def told(k: int, learn: str = "scores", *, fits: bool = False) -> str:
        ready = SELECTING.replace("{select}", select.format(k)).replace("{learn}", learn)
        monkeypatch.setattr("tests.compiler.test_sizes.PROGRAM", ready)
        return message(tmp_path, monkeypatch, fits=fits)

    text = told(1)
    assert "mine.py:8 (select) and mine.py:9 (advantage)" in text
    assert "advantage compares the samples of a group" in text
    assert "select keeps one sample of each group (k=1)" in text
    told(1, IMITATE, fits=True)
    told(2, fits=True)
    told(4, fits=True)
    text = told(5)
    assert "mine.py:6 (actor.generate) and mine.py:8 (select)" in text
    assert "select keeps 5 samples of each group, but n=4 gives it 4" in text
    assert "write k=4, or write n=5" in text
