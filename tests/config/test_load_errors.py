"""Every mistake in a config is a `ConfigError` of at most four lines that says where and what."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.load import load_config
from flowrl.errors import ConfigError

GOOD = """\
stages: [grpo]
data:
  train: {kind: arithmetic, split: train}
roles:
  actor: {model: {hidden_size: 32}, tokenizer: {kind: char, alphabet: "01"}}
rewards:
  terms: [{kind: exact_match}]
name: first
"""


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert 1 <= len(text.splitlines()) <= 4, text
    assert caught.value.exit_code == 2
    return text


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    load_config(path)
    return path


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.stepz=3", ["unknown key 'stepz' in train", "did you mean 'steps'?", "group_size"]),
        ("trian.steps=3", ["unknown key 'trian'", "did you mean 'train'?"]),
        ("learning_rate=1", ["did you mean train.optimizer.learning_rate?"]),
        ("roles.model.modl=x", ["unknown key 'modl' in roles.model", "did you mean 'model'?"]),
        ("rewards.terms.0.wieght=2", ["in rewards.terms.0", "did you mean 'weight'?"]),
        ("data.train.digit=1", ["in data.train", "did you mean 'digits'?"]),
        ("roles.actor.tokenizer.size=1", ["expected: alphabet, kind"]),
        ("roles.actor.model.layers=1", ["in roles.actor.model", "num_layers"]),
        ("train.steps=abc", ["steps must be a whole number", "found: 'abc' (text)"]),
        ("train.steps=1.5", ["steps must be a whole number", "found: 1.5"]),
        ("seed=true", ["seed must be a number, not true or false"]),
        (
            "seed=null",
            ["seed always has a value", "sections and named entries only"],
        ),
        ("executor=null", ["executor always has a value"]),
        ("stages=null", ["'stages' is missing"]),
        ("data.train=null", ["'train' is missing in data"]),
        (
            "rewards.terms.acuracy=null",
            ["no item 'acuracy'", "its only item, 0, or a name: accuracy", "did you mean"],
        ),
        ("train.steps=-1", ["steps must be at least 0", "found: -1"]),
        ("data.train.digits=4", ["digits must be at most 3"]),
        ("train.optimizer.learning_rate=0", ["learning_rate must be more than 0"]),
        ("train.optimizer.beta1=1", ["beta1 must be less than 1"]),
        ("train.optimizer.learning_rate=.inf", ["learning_rate must be a finite number"]),
        ("stages=grpo", ["stages must be a list", "[grpo]"]),
        ("stages=[]", ["stages must not be empty"]),
        (
            "stages=[a, a]",
            [
                "stages",
                "a stage is named twice",
                "raise its steps",
                "stages=[a_1, a], stage.a_1.workflow=a and stage.a_1.train",
            ],
        ),
        (
            "train=3",
            ["train must be a mapping", "train.KEY; KEY is one of epochs, group_size, max_"],
        ),
        ("roles=3", ["roles must be a mapping", "write what it holds by name: roles.NAME"]),
        ("stage=grpo", ["stage must be a mapping", "by name: stage.NAME"]),
        ("roles.actor.model=3", ["model must be text or a mapping"]),
        ("roles.actor.model.num_heads=5", ["hidden_size 32 is not a multiple of num_heads 5"]),
        ("roles.actor.dtype=int8", ["dtype cannot be 'int8'", "bfloat16"]),
        ("plan.kind=hybrid", ["kind cannot be 'hybrid'", "take auto, which gives hybrid plans"]),
        ("plan.kind=colocated", ["kind cannot be 'colocated'", "it is called temporal"]),
        ("algorithm.aggregation=tokenmean", ["did you mean 'token-mean'?"]),
        ("executor=spark", ["executor cannot be 'spark'", "expected: one of local, eager, ray"]),
        ("args.x=[1]", ["x must be text, a number or true or false"]),
        ("stop={}", ["'at_least' is missing in stop"]),
        ("data.train={kind: jsonl}", ["'path' is missing in data.train"]),
        ("data.train={kind: jsnl}", ["no kind 'jsnl'", "arithmetic, file, jsonl", "'jsonl'?"]),
        ("rewards.terms=[{weight: 1}]", ["rewards.terms.0 does not say its kind"]),
        ("rewards.terms=[3]", ["0 must be a mapping", "write {kind: exact_match, ...}; there are"]),
        ("rewards.terms.4.weight=2", ["a list of 1, which has no item '4'"]),
        ("name.x=1", ["name is 'first', which has no key 'x'", "good.yaml:8"]),
        ("data.prompt={a: 1}", ["prompt must be text", "quotes"]),
        ("rewards.terms=[{kind: overlong}]", ["'max_tokens' is missing in rewards.terms.0"]),
        ("rewards.terms=[{kind: overlog, max_tokens: 3}]", ["did you mean 'overlong'?"]),
        ("rewards.terms=[{kind: stop_properly}]", ["'of' is missing in rewards.terms.0"]),
        (
            "rewards.terms=[{kind: stop_properly, of: accuracy, weight: 2}]",
            ["unknown key 'weight' in rewards.terms.0", "coefficient, kind, name, of"],
        ),
        ("rewards.terms=[{kind: repetition, max_penalty: 1}]", ["max_penalty must be at most 0"]),
        ("roles.judge={terms: [{kind: gsm9k}]}", ["roles.judge.terms.0", "'gsm8k'?"]),
        ("roles.judge={terms: [{kind: gsm8k, wieght: 1}]}", ["did you mean 'weight'?"]),
        ("roles.actor.optimizer={beta1: 1}", ["beta1 must be less than 1"]),
        ("roles.actor.optimizer={lr: 1}", ["unknown key 'lr' in roles.actor.optimizer"]),
        ("roles.game={timeout_s: 0}", ["timeout_s must be more than 0"]),
        ("train.truncated=repeal", ["one of refuse, ignore, repeat", "did you mean 'repeat'?"]),
        ("data.difficulty={low: 0.9, high: 0.1}", ["low=0.9 is above high=0.1"]),
        ("data.curriculum={}", ["'kind' is missing in data.curriculum"]),
        ("data.curriculum={kind: solve_rte}", ["did you mean 'solve_rate'?"]),
        ("data.curriculum={kind: solve_rate, explore: 2}", ["explore must be at most 1"]),
        ("data.curriculum={kind: solve_rate, low: 0.9, high: 0.1}", ["no rate lies between"]),
        (
            "data.curriculum={kind: solve_rate, low: 0.6, explore: 0}",
            ["prior=0.5 lies outside low=0.6 to high=1", "without explore no prompt"],
        ),
        (
            "data.curriculum={kind: solve_rate, solved_score: -1}",
            ["unsolved_score=0 is not below solved_score=-1"],
        ),
        ("name=[1, 2", ["not YAML"]),
        ("name=${sede}", ["cannot be interpolated", "sede"]),
        ("name=${name}", ["cannot be interpolated"]),
    ],
)
def test_a_wrong_override_is_quoted_and_explained(
    good: Path, override: str, parts: list[str]
) -> None:
    text = message(good, override)
    for part in parts:
        assert part in text
    if "missing" not in text and "interpolated" not in text and "num_heads" not in text:
        assert f"command line ({override})" in text


def test_a_key_of_a_section_that_repeats_another_is_told_where_to_set_it(good: Path) -> None:
    text = message(good, "roles.pro=${roles.actor}", "roles.pro.num_engines=2")
    assert "set roles.actor.num_engines=..., which roles.pro repeats" in text


@pytest.mark.parametrize("override", ["train=[1]", "rewards=[a]", "algorithm.advantage=[1]"])
def test_a_list_in_place_of_a_section_is_refused_next_to_interpolations(
    good: Path, override: str
) -> None:
    text = message(good, "name=${seed}", override)
    assert f"command line ({override}): " in text
    assert "must be a mapping" in text


@pytest.mark.parametrize("override", ["train.steps", "--train.steps"])
def test_an_override_without_a_value_is_told_how_to_give_one(good: Path, override: str) -> None:
    assert "to fix: write train.steps=VALUE" in message(good, override)


@pytest.mark.parametrize("override", ["train", "=3", "a..b=3", ".a=3", ""])
def test_what_is_no_override_is_refused(good: Path, override: str) -> None:
    text = message(good, override)
    assert f"{override!r} is no override" in text
    assert "key=value" in text


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("trian: {steps: 3}\n", [":9 (trian)", "did you mean 'train'?"]),
        ("train:\n  steps: [1]\n", [":10 (train.steps)", "steps must be a whole number"]),
        ("train.steps: 3\n", [":9", "nest keys in a file"]),
        ("seed: 1\nseed: 2\n", [":10", "'seed' is written twice", "good.yaml:9"]),
        ("train: {steps: 1, steps: 2}\n", [":9", "'steps' is written twice"]),
        ("train:\n\tsteps: 3\n", [":10", "not YAML", "spaces, not tabs"]),
        ("seed: {1\n", ["not YAML", "good.yaml:"]),
        ("cluster: a: b\n", [":9", "not YAML", "quotes"]),
        ("1: x\n", [":9", "a key must be text", "found: 1"]),
        ("? [a]\n: x\n", [":9", "a key must be text", "a list"]),
        ("<<: {seed: 1}\n", [":9", "merge keys", "extends"]),
        ("seed: !!python/object:os.system 1\n", [":9", "tag"]),
        ("seed: !!int one\n", [":9", "the tag tag:yaml.org,2002:int is not read"]),
        ("args: &a {x: *a}\n", [":9", "an alias inside its anchor"]),
        ("---\nseed: 1\n", ["not YAML"]),
        ("extends: 3\n", [":9 (extends)", "path of one file"]),
    ],
)
def test_a_wrong_line_is_named(good: Path, extra: str, parts: list[str]) -> None:
    good.write_text(GOOD + extra)
    text = message(good)
    assert str(good) in text
    for part in parts:
        assert part in text


def test_a_missing_key_says_how_to_set_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("stages: [grpo]\n")
    text = message(path)
    assert f"{path} (data): 'data' is missing" in text
    assert "data=..." in text


def test_a_missing_file_is_answered_with_the_nearest(good: Path) -> None:
    text = message(good.parent / "god.yaml")
    assert "no such file" in text
    assert f"did you mean {good}?" in text


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"no folder {tmp_path / 'nowhere'}" in message(tmp_path / "nowhere" / "a.yaml")


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    assert "this is a folder" in message(tmp_path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n- b\n", "no mapping"),
        (b"just text\n", "no mapping"),
        (b"name: \xff\n", "not UTF-8"),
    ],
)
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    text = message(path)
    assert str(path) in text
    assert part in text


def test_a_missing_extended_file_names_both_files(good: Path) -> None:
    good.write_text("extends: bsae.yaml\n" + GOOD)
    text = message(good)
    assert f"{good}:1 (extends): {good.parent / 'bsae.yaml'}: no such file" in text


def test_a_mistake_in_an_extended_file_names_that_file(good: Path, tmp_path: Path) -> None:
    good.write_text(GOOD + "sed: 1\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: good.yaml\n")
    assert f"{good}:9 (sed): unknown key 'sed'" in message(child)


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("extends: b.yaml\nname: a\n")
    second.write_text("extends: a.yaml\nname: b\n")
    text = message(first)
    assert "a file extends itself" in text
    assert f"{second}:1 (extends)" in text


def test_machines_given_as_a_config_are_told_where_they_go(tmp_path: Path):
    path = tmp_path / "h100.yaml"
    path.write_text("nodes: [{name: a, cores: 8, memory_gib: 64}]\n")
    assert "goes next to a configuration, as cluster=FILE" in message(path)


def test_a_workflow_given_as_a_config_is_told_where_workflows_go(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("def mine(prompts): ...\n")
    text = message(path)
    assert "this is a Python file, not a config" in text
    assert f"workflow={path}" in text


@pytest.mark.parametrize("name", ["a\x01", "\udcff"])
def test_an_override_may_hold_characters_that_yaml_does_not(good: Path, name: str) -> None:
    assert load_config(good, [f"name={name}"]).config.name == name


def test_a_control_character_in_a_file_is_told(good: Path) -> None:
    good.write_text(GOOD + "cluster: a\x01\n")
    with pytest.raises(ConfigError) as caught:
        load_config(good)
    assert "a character that text cannot hold" in str(caught.value)
    assert str(good) in str(caught.value)
