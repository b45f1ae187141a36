"""Logprobs of two roles are one pass where both are copies of one model, in every stage anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import ConfigError
from flowrl.graph import Op
from tests.compiler import programs
from tests.compiler.programs import config


@fl.workflow
def two_references(
    prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward, one: fl.Policy, two: fl.Policy
):
    rollout = actor.generate(prompts)
    scores = judge.score(rollout)
    fl.log("one", one.logprobs(rollout))
    actor.update(rollout, scores, reference=two.logprobs(rollout), kl=fl.kl.k3(0.1))


def passes(**changes: Any) -> list[str]:
    settings = config(**changes)
    settings["roles"] |= {"one": {"copy_of": "actor"}, "two": {"copy_of": "actor"}}
    compiled = fl.compile(two_references, settings)
    return [node.id for node in compiled.graph.of_op(Op.LOGPROBS)]


def test_two_copies_of_one_model_are_asked_once():
    assert passes() == ["one.logprobs"]


def test_a_copy_that_an_earlier_stage_trained_is_asked_for_itself():
    imitate = {"workflow": f"{Path(programs.__file__)}:imitate", "bind": {"actor": "one"}}
    stages = {"stages": ["imitate", "main"], "stage": {"imitate": imitate}}
    assert passes(**stages) == ["one.logprobs", "two.logprobs"]
    imitate["bind"] = {"actor": "actor"}  # both begin as what the first stage made of it
    assert passes(**stages) == ["one.logprobs"]


def test_what_is_no_workflow_is_told_where_it_is_defined():
    def plain(prompts: fl.Prompts, actor: fl.Policy):
        pass

    with pytest.raises(ConfigError, match="this is no workflow to compile") as caught:
        fl.compile(plain, config())  # type: ignore[arg-type]
    assert "test_copies.py" in caught.value.where
    assert "@fl.workflow" in caught.value.hint
    with pytest.raises(ConfigError, match="this is no workflow to compile"):
        fl.compile(3, config())  # type: ignore[arg-type]


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="this is not a configuration") as caught:
        fl.compile(two_references, 3)  # type: ignore[arg-type]
    assert caught.value.found == "3"
