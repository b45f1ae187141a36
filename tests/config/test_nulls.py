"""`null` takes sections and named entries away, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.load import LoadedConfig, load_config
from flowrl.config.roles import FreshModel
from flowrl.config.schema import RunConfig

PARENT = """\
stages: [sft, grpo]
stage:
  sft: {train: {steps: 9}, bind: {student: actor}}
data:
  train: {kind: arithmetic, split: train}
roles:
  actor: {model: {hidden_size: 32}}
  critic: {copy_of: actor, num_slots: 3}
rewards:
  terms:
    - {kind: exact_match, weight: 0.5}
    - {kind: format, pattern: "[0-9]+"}
    - {kind: repetition, name: fluent, ngram: 2}
train: {steps: 7}
args: {kl: 0.5}
stop: {at_least: 0.5}
"""


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    path = tmp_path / "parent.yaml"
    path.write_text(PARENT)
    return path


def extended(parent: Path, text: str, *overrides: str) -> LoadedConfig:
    path = parent.parent / "child.yaml"
    path.write_text(f"extends: parent.yaml\n{text}\n")
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("stage: {sft: null}", "stage.sft=null"),
        ("stage: {sft: }", "stage={sft: ~}"),
        ("stage: null", "stage=null"),
    ],
)
def test_the_section_of_a_stage_is_taken_away(parent: Path, text: str, override: str) -> None:
    for loaded in (extended(parent, text), load_config(parent, [override])):
        assert loaded.config.stage == {}
        assert loaded.config.train.steps == 7
        assert not any(key.startswith("stage.") for key in loaded.places.origins)


def test_a_role_is_taken_away_and_others_stay(parent: Path) -> None:
    for loaded in (
        extended(parent, "roles: {critic: null}"),
        load_config(parent, ["roles.critic=null"]),
    ):
        assert list(loaded.config.roles) == ["actor"]
        assert isinstance(loaded.config.roles["actor"].model, FreshModel)


def test_one_reward_is_taken_away_by_its_name_or_its_place(parent: Path) -> None:
    for loaded in (
        extended(parent, "rewards: {terms: {format: null}}"),
        load_config(parent, ["rewards.terms.format=null"]),
        load_config(parent, ["rewards.terms.1=null"]),
    ):
        assert [term.name for term in loaded.config.rewards.terms] == ["accuracy", "fluent"]
        # What moved up keeps the line that it was written in.
        assert loaded.where("rewards.terms.1.ngram").startswith(f"{parent}:13")
        assert not loaded.is_set("rewards.terms.2")


def test_several_rewards_are_taken_away_at_once_and_one_is_changed_by_name(parent: Path) -> None:
    text = "rewards: {terms: {accuracy: null, format: null, fluent: {ngram: 4}}}"
    (term,) = extended(parent, text).config.rewards.terms
    assert (term.kind, term.name, getattr(term, "ngram", None)) == ("repetition", "fluent", 4)


@pytest.mark.parametrize("override", ["rewards=null", "rewards.terms=null", "rewards={terms: ~}"])
def test_all_rewards_are_taken_away(parent: Path, override: str) -> None:
    assert load_config(parent, [override]).config.rewards.terms == ()


def test_a_whole_section_goes_back_to_its_defaults(parent: Path) -> None:
    config = extended(parent, "train: null").config
    assert config.train == RunConfig.model_fields["train"].default


def test_entries_of_plain_values_are_taken_away(parent: Path) -> None:
    loaded = load_config(parent, ["stage.sft.bind.student=null"])
    assert loaded.config.stage["sft"].bind == {}
    assert loaded.config.stage["sft"].train.steps == 9


def test_where_nothing_is_a_value_null_is_that_value(parent: Path) -> None:
    overrides = ["args.kl=null", "stop=null", "roles.critic.copy_of=null"]
    loaded = load_config(parent, overrides)
    assert loaded.config.args == {"kl": None}
    assert loaded.config.stop is None
    assert loaded.config.roles["critic"].copy_of is None
    assert loaded.is_set("args.kl")


def test_what_was_taken_away_can_be_written_anew(parent: Path) -> None:
    loaded = load_config(parent, ["roles.critic=null", "roles.critic.copy_of=actor"])
    assert loaded.config.roles["critic"].copy_of == "actor"
    assert loaded.config.roles["critic"].num_slots == 256  # the default, not the parent's 3
