"""A role that only generates has an engine and no trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import ConfigError, GraphError
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

LONE = """
from dataclasses import replace

from flowrl_backends.torch.plugin import TorchPlugin


class Lone(TorchPlugin):
    name = "lone"
    capabilities = replace(TorchPlugin.capabilities, services=frozenset({"generate"}))

    def open_train(self, context):
        raise AssertionError("it has no trainer")


plugin = Lone()
"""


@pytest.fixture(autouse=True)
def lone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "lone-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.backends]\nlone = lone_engine:plugin\n")
    (site / "lone_engine.py").write_text(LONE)
    monkeypatch.syspath_prepend(str(site))


@fl.workflow
def against(prompts: fl.Prompts, actor: fl.Policy, opponent: fl.Policy, verifier: fl.Reward):
    theirs = opponent.generate(prompts)
    fl.log("theirs", verifier.score(theirs))
    rollout = actor.generate(prompts)
    fl.log("ours", verifier.score(rollout))
    scores = verifier.score(rollout)
    return actor.update(rollout, advantages=fl.advantage.group_relative(scores))


@fl.workflow
def judged(prompts: fl.Prompts, actor: fl.Policy, opponent: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    fl.log("theirs", opponent.logprobs(rollout))
    scores = verifier.score(rollout)
    return actor.update(rollout, advantages=fl.advantage.group_relative(scores))


def config(tmp_path: Path, model: object) -> dict[str, Any]:
    made = tiny_config(tmp_path)
    made |= {"stages": ["last"], "stage": {}, "args": {}}
    made["train"] |= {"steps": 2}
    made["roles"]["opponent"] = {"backend": "lone", "model": model}
    del made["roles"]["reference"]
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that a run has made."""
    made = tiny_config(tmp_path) | {"stages": ["sft"], "stage": {}, "args": {}}
    made["train"] |= {"steps": 1}
    trained = fl.run(None, made, display=WatchedDisplay())
    return trained.folder / "model"


@pytest.mark.parametrize("engines", [1, 2])
def test_a_role_that_only_generates_runs_on_an_engine_alone(
    tmp_path: Path, folder: Path, engines: int
):
    made = config(tmp_path, str(folder))
    made["roles"]["opponent"]["num_engines"] = engines
    display = WatchedDisplay()
    fl.run(against, made, display=display)
    assert display.steps == [("last", 1), ("last", 2)]


def test_what_a_trainer_does_is_refused_at_its_line(tmp_path: Path, folder: Path):
    with pytest.raises(GraphError, match="asks opponent to do what a trainer does") as caught:
        fl.compile(judged, config(tmp_path, str(folder)))
    assert "test_roles_without_trainers.py:" in str(caught.value.where)
    assert caught.value.found == "it can generate"


def test_a_new_model_without_a_trainer_is_refused(tmp_path: Path):
    new = tiny_config(tmp_path)["roles"]["actor"]["model"]
    with pytest.raises(ConfigError, match="has a new model, whose weights a trainer makes"):
        fl.compile(against, config(tmp_path, new))
