"""`flowrl graph --level`: what the program says, what is left open no more, and where it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli.graph import GraphOptions, run
from flowrl.errors import ConfigError
from flowrl.graph import Level, graph_from_json
from tests.graph_text import parse

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONFIG = str(CONFIGS / "ppo.yaml")
QUICKSTART = str(CONFIGS / "quickstart.yaml")
ELSEWHERE = (f"cluster={CONFIGS / 'clusters' / 'laptop.yaml'}",)
"""So that the devices of the machine that tests run on do not matter."""


def shown(capsys, level: str, form: str = "text", target: str = CONFIG) -> str:
    run(target, ELSEWHERE, GraphOptions(form=form, level=level))
    return capsys.readouterr().out


@pytest.mark.parametrize("level", list(Level))
def test_each_level_is_shown_and_reads_back(capsys, level):
    assert parse(shown(capsys, level)).level is level
    graph = graph_from_json(json.loads(shown(capsys, level, "json")))
    assert graph.level is level


def test_the_placed_graph_says_where_each_role_runs(capsys):
    text = shown(capsys, "placed", "tree")
    assert "critic.values  on cpu:0 in main, " in text
    assert "samples a step, starts on each sample" in text
    assert "critic.values  on" not in shown(capsys, "lowered", "tree")


def test_a_placed_graph_says_how_a_plan_moves_weights_that_could_be_read_in_place(capsys):
    words = (*ELSEWHERE, "stages=[grpo]", "plan.kind=spatial")
    run(QUICKSTART, words, GraphOptions(form="tree", level="lowered"))
    assert "actor.sync  in place" in capsys.readouterr().out
    run(QUICKSTART, words, GraphOptions(form="tree", level="placed"))
    out = capsys.readouterr().out
    assert "actor.sync  weights are moved" in out
    assert "by folder" in out
    run(QUICKSTART, words[:-1], GraphOptions(form="tree", level="placed"))
    assert "actor.sync  in place" in capsys.readouterr().out


def test_a_graph_over_many_devices_has_the_plans_micro_batches_and_no_bytes_of_one_device(capsys):
    words = (f"cluster={CONFIGS / 'clusters' / 'h100_1x8.yaml'}",)
    config = str(CONFIGS / "grpo_qwen25_7b.yaml")
    run(config, words, GraphOptions(form="tree", level="placed"))
    out = capsys.readouterr().out
    assert "rows at once" not in out
    assert ", in micro-batches of " in out
    assert "actor.sync  weights are moved" in out
    assert "PFLOP, output " in out
    assert "activations" not in out
    assert "KV cache" not in out


def test_a_workflow_without_a_config_has_no_place(capsys):
    with pytest.raises(ConfigError, match="cannot be placed") as caught:
        run("grpo", (), GraphOptions(level="placed"))
    assert "flowrl graph CONFIG.yaml workflow=grpo --level placed" in caught.value.hint


def test_of_several_stages_the_last_is_shown_and_the_others_are_named(capsys):
    run(QUICKSTART, ELSEWHERE, GraphOptions())
    out = capsys.readouterr().out
    assert "actor.generate" in out
    assert out.endswith("\n\nstage grpo, the last of sft -> grpo; --stage sft shows the other\n")
    run(QUICKSTART, ELSEWHERE, GraphOptions(stage="grpo"))
    assert "the last of" not in capsys.readouterr().out
    assert "the last of" not in shown(capsys, "traced", "text", QUICKSTART)


def test_a_stage_is_shown_by_its_name(capsys):
    run(QUICKSTART, ELSEWHERE, GraphOptions(form="text", stage="sft"))
    out = capsys.readouterr().out
    assert "generate" not in out
    assert "cross_entropy" in out
    run(QUICKSTART, ELSEWHERE, GraphOptions(form="text", stage="grpo"))
    assert "actor.generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "stage", "message"),
    [
        (QUICKSTART, "sftt", "has no stage 'sftt'"),
        ("grpo", "grpo", "a workflow alone has no stages"),
    ],
)
def test_a_stage_that_is_not_there_is_refused(target, stage, message):
    overrides = ELSEWHERE if target == QUICKSTART else ()
    with pytest.raises(ConfigError, match=message):
        run(target, overrides, GraphOptions(stage=stage))


def test_a_run_folder_is_refused_with_the_config_in_it(tmp_path):
    (tmp_path / "config.yaml").write_text(f"extends: {QUICKSTART}\n")
    with pytest.raises(ConfigError, match="this is a run's folder") as caught:
        run(str(tmp_path), (), GraphOptions())
    assert caught.value.hint == f"name {tmp_path}/config.yaml in its place"
