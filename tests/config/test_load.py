"""Files, `extends`, overrides and interpolation end in one validated tree that knows its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.data import ArithmeticData
from flowrl.config.load import LoadedConfig, load_config
from flowrl.config.roles import FreshModel
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError

MINIMAL = """\
stages: [sft, grpo]
data:
  train: {kind: arithmetic, split: train}
roles:
  actor:
    model:
      hidden_size: 32
      num_heads: 4
rewards:
  terms:
    - {kind: exact_match}
    - {kind: format, pattern: "[0-9]+"}
train:
  steps: 7
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def load(path: Path, *overrides: str) -> LoadedConfig:
    return load_config(path, overrides)


def test_what_a_file_leaves_out_keeps_its_default(config: Path) -> None:
    loaded = load(config)
    assert loaded.config.train.steps == 7
    assert loaded.config.train.group_size == RunConfig.model_fields["train"].default.group_size
    assert isinstance(loaded.config.data.train, ArithmeticData)


def test_the_resolved_config_reads_back_as_itself(config: Path, tmp_path: Path) -> None:
    first = load(config, "seed=5", "stop={at_least: 0.5}").config
    (tmp_path / "resolved.yaml").write_text(first.model_dump_json(indent=1))
    assert load(tmp_path / "resolved.yaml").config == first


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=300", 300),
        ("train.optimizer.learning_rate=2e-4", 2e-4),
        ("seed = 3", 3),
        ("name=a b", "a b"),
        ("name='1'", "1"),
        ("name=x=y", "x=y"),
        ("name=#1: first", "#1: first"),
        ("name=step #1", "step #1"),
        ("name=on", "on"),
        ("name=*star", "*star"),
        ("data.prompt={question}", "{question}"),
        ('data.prompt="{question}\\n"', "{question}\n"),
        ("data.prompt=", ""),
        ("stages=[grpo]", ("grpo",)),
        ("args={kl: 0.1, name: x, flag: true, none: null}", None),
        ("stage.sft.train.steps=10", None),
        ("roles.critic.model.hidden_size=8", None),
        ("rewards.terms.1.weight=0.5", None),
    ],
)
def test_an_override_is_read_as_a_value(config: Path, override: str, value: object) -> None:
    loaded = load(config, override)
    key = override.split("=")[0].strip()
    node: object = loaded.config.model_dump()
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, tuple) else node[part]  # type: ignore[index]
    if value is None:
        value = {
            "args": {"kl": 0.1, "name": "x", "flag": True, "none": None},
            "stage.sft.train.steps": 10,
            "roles.critic.model.hidden_size": 8,
            "rewards.terms.1.weight": 0.5,
        }[key]
    assert node == value
    assert loaded.where(key) == f"command line ({override})"


def test_a_text_takes_the_place_of_a_mapping(config: Path) -> None:
    loaded = load(config, "roles.actor.model=FOLDER")
    assert loaded.config.roles["actor"].model == "FOLDER"
    assert not loaded.is_set("roles.actor.model.hidden_size")


def test_a_mapping_merges_into_a_mapping(config: Path) -> None:
    model = load(config, "roles.actor.model={num_layers: 3}").config.roles["actor"].model
    assert isinstance(model, FreshModel)
    assert (model.num_layers, model.hidden_size) == (3, 32)


def test_a_mapping_of_another_kind_replaces_the_old_one(config: Path) -> None:
    loaded = load(config, "data.train={kind: jsonl, path: a.jsonl}")
    assert loaded.config.data.model_dump()["train"]["path"] == Path("a.jsonl")


def test_a_choice_called_kind_keeps_the_other_keys_of_its_section(
    config: Path, tmp_path: Path
) -> None:
    config.write_text(f"{MINIMAL}plan: {{kind: spatial, sigma: 2}}\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: run.yaml\nplan: {kind: temporal}\n")
    for loaded in (load(child), load(config, "plan={kind: temporal}")):
        assert (loaded.config.plan.kind, loaded.config.plan.sigma) == ("temporal", 2)


def test_an_item_that_is_changed_by_its_name_remembers_the_line_of_the_change(
    config: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: run.yaml\nrewards: {terms: {accuracy: {weight: 2}}}\n")
    loaded = load(child)
    assert loaded.where("rewards.terms.0.weight") == f"{child}:2 (rewards.terms.0.weight)"
    assert loaded.where("rewards.terms.0.kind") == f"{config}:11 (rewards.terms.0.kind)"


def test_the_later_override_wins(config: Path) -> None:
    loaded = load(config, "train.steps=1", "train={steps: 2}", "train.steps=3")
    assert loaded.config.train.steps == 3
    assert loaded.where("train.steps") == "command line (train.steps=3)"


def test_values_remember_their_line(config: Path) -> None:
    loaded = load(config)
    assert loaded.where("train.steps") == f"{config}:14 (train.steps)"
    assert loaded.where("rewards.terms.1.pattern") == f"{config}:12 (rewards.terms.1.pattern)"
    assert loaded.where("train.group_size") == f"{config} (train.group_size)"
    assert loaded.is_set("train.steps")
    assert not loaded.is_set("train.group_size")


def test_a_file_extends_another_and_keeps_both_lines(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    child = folder / "child.yaml"
    child.write_text("extends: ../run.yaml\nseed: 4\ntrain: {group_size: 2}\n")
    loaded = load(child)
    assert (loaded.config.seed, loaded.config.train.steps) == (4, 7)
    assert loaded.config.train.group_size == 2
    assert loaded.where("seed") == f"{child}:2 (seed)"
    assert loaded.where("train.steps") == f"{folder / '../run.yaml'}:14 (train.steps)"


def test_interpolation_reaches_values_and_defaults(config: Path) -> None:
    loaded = load(config, "name=run-${train.steps}-${seed}", "eval.every=${train.steps}")
    assert loaded.config.name == "run-7-0"
    assert loaded.config.eval.every == 7


def test_without_a_file_the_base_and_overrides_are_enough() -> None:
    base = {"stages": ["grpo"], "data": {"train": "rows.jsonl"}, "seed": 1}
    loaded = load_config(None, ["seed=2"], base=base)
    assert loaded.config.seed == 2
    assert base["seed"] == 1
    assert loaded.where("name") == "name"


def test_numbers_are_decimal_and_words_stay_words(tmp_path: Path) -> None:
    path = tmp_path / "types.yaml"
    path.write_text(
        "stages: [grpo]\ndata: {train: rows.jsonl}\n"
        "args: {a: 1e-4, b: 010, c: no, d: 1:30, e: 2024-01-01, f: ~, g: 1., h: -.5}\n"
    )
    args = load(path).config.args
    assert args["a"] == 1e-4
    assert [args[key] for key in "bcde"] == ["010", "no", "1:30", "2024-01-01"]
    assert args["f"] is None
    assert (args["g"], args["h"]) == (1.0, -0.5)


def test_a_tab_may_come_before_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "tabs.yaml"
    path.write_text("stages: [grpo]\nseed: 3\t# a comment\ndata: {train: rows.jsonl}\n")
    assert load(path).config.seed == 3


def test_the_example_configs_load(repository: Path) -> None:
    configs = sorted((repository / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        assert load(path).config.stages


def test_a_tree_with_every_error_type_is_a_config_error(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config, "train.steps=x", "sed=1", "executor=no", "stop={}", "data.train={kind: x}")
    lines = str(caught.value).splitlines()
    assert lines[0] == "command line (sed=1): unknown key 'sed'"
    assert "and 4 more mistakes" in lines[-1]
    assert len(lines) <= 4


def test_a_role_has_the_stages_optimizer_but_for_what_it_changes(config: Path) -> None:
    loaded = load(
        config,
        "train.optimizer={learning_rate: 1e-4, warmup_updates: 3, schedule: linear}",
        "roles.critic.optimizer={learning_rate: 1e-3, warmup_updates: 0}",
    ).config
    critic, actor = (loaded.optimizer_of(role, loaded.train) for role in ("critic", "actor"))
    assert actor == loaded.train.optimizer
    assert critic == actor.model_copy(update={"learning_rate": 1e-3, "warmup_updates": 0})
    assert critic.schedule == "linear"


def test_values_given_in_python_are_written_values() -> None:
    base = {"stages": ["grpo"], "data": {"train": "rows.jsonl"}, "train": {"group_size": 4}}
    loaded = load_config(None, ["seed=2"], base=base)
    assert loaded.is_set("train.group_size")
    assert loaded.where("train.group_size") == "the given configuration (train.group_size)"
    assert loaded.where("seed") == "command line (seed=2)"
    assert not loaded.is_set("train.mini_batches")


def test_a_later_preset_replaces_the_layout_of_an_earlier_file(tmp_path: Path) -> None:
    own = "prompt: '{question}:', answer: answer, solution: '{answer}', system: Short."
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"stages: [grpo]\ndata: {{train: a.jsonl, {own}}}\n")
    second.write_text("extends: first.yaml\ndata: {preset: verl_parquet, solution: '{answer}'}\n")
    by_file, by_override = (
        load(second).config.data,
        load(first, "data.solution={answer}", "data.preset=verl_parquet").config.data,
    )
    for data in (by_file, by_override):
        assert (data.prompt, data.answer) == ("{prompt}", "reward_model.ground_truth")
        assert (data.solution, data.system) == ("{answer}", "Short.")


def test_the_temperature_of_the_metric_is_that_of_its_set() -> None:
    base = {"stages": ["grpo"], "data": {"train": "a.jsonl"}}
    sets = {"greedy": {"temperature": 0}, "more": {"num": 4}}
    for metric, temperature in [("greedy/acc", 0.0), ("more/acc", 0.5), ("pass@2/acc", 0.5)]:
        measured = {"sets": sets, "temperature": 0.5, "metric": metric}
        config = load_config(None, base={**base, "eval": measured}).config
        assert config.eval.metric_temperature == temperature
