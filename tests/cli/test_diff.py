"""`flowrl diff`: configurations, graphs and plans, recognised by their content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_line import ROOT, Run, runner

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
LARGE = str(ROOT / "configs" / "grpo_qwen25_7b.yaml")


@pytest.fixture
def flowrl(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner(capsys)


@pytest.fixture
def files(flowrl: Run) -> None:
    """A config, a workflow's graph and a plan in the current folder."""
    Path("other.yaml").write_text(f"extends: {QUICKSTART}\ntrain: {{micro_batch: 64}}\n")
    assert flowrl("graph", "grpo", "-o", "grpo.json")[0] == 0
    assert flowrl("plan", QUICKSTART, "-o", "best.yaml")[0] == 0


def test_configurations_differ_in_the_keys_whose_values_differ(flowrl: Run, files: None):
    code, out, err = flowrl("diff", QUICKSTART, "other.yaml")
    assert (code, out, err) == (0, "train.micro_batch: 128 -> 64\n", "")
    assert json.loads(flowrl("diff", QUICKSTART, "other.yaml", "--json")[1]) == out.splitlines()
    assert flowrl("diff", QUICKSTART, "other.yaml", "train.micro_batch=32")[1] == (
        "the configs are equal\n"
    )


def test_a_section_that_one_configuration_lacks_is_a_line(flowrl: Run):
    lines = flowrl("diff", QUICKSTART, LARGE)[1].splitlines()
    assert f"stage.sft: only in {QUICKSTART}" in lines
    assert f"roles.reference: only in {LARGE}" in lines
    assert "train.optimizer.learning_rate: 0.0003 -> 1e-06" in lines


@pytest.mark.parametrize(
    "words",
    [
        ["grpo.json", "ppo"],
        ["grpo", "ppo"],
        ["grpo.json", QUICKSTART],
        ["grpo", QUICKSTART, "--stage", "sft"],
        [QUICKSTART, "other.yaml", "--as", "graphs", "--level", "placed"],
    ],
)
def test_graphs_of_workflows_configs_and_files_are_compared(
    flowrl: Run, files: None, words: list[str]
):
    code, out, err = flowrl("diff", *words)
    assert (code, err) == (0, "")
    names = {"ppo": "ppo (traced)", QUICKSTART: "grpo (traced)", "other.yaml": "grpo (placed)"}
    after = "sft (traced)" if "sft" in words else names[words[1]]
    assert out.splitlines()[0].partition(" -> ")[2].startswith(f"{after}: ")


def test_the_placed_graphs_of_two_configurations_show_their_batches(flowrl: Run, files: None):
    lines = flowrl("diff", QUICKSTART, "other.yaml", "--as", "graphs", "--level", "placed")[1]
    assert "\n  - attr micro_batch = 128\n  + attr micro_batch = 64\n" in lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["best.yaml", "grpo"], "these two cannot be compared\n"),
        (["best.yaml", QUICKSTART, "--as", "graphs"], "these two cannot be compared as graphs"),
        (["grpo", "ppo", "--as", "graph"], "did you mean 'graphs'?"),
        (["grpo", "ppo", "--cluster", "c.yaml"], "--cluster has a meaning for plans"),
        (
            ["grpo", "ppo", "--stage", "sft"],
            "--stage is for a configuration, and neither target is one",
        ),
        (["grpo", "ppo", "seed=3"], "seed=3 is for a configuration, and neither target is one"),
        (["grpo", "ppo", "--level", "lower"], "did you mean 'lowered'?"),
        ([QUICKSTART, "other.yaml", "--level", "lowered"], "add --as graphs"),
        (["best.yaml", "best.yaml", "--pin", "rollout.tp=2"], "and --pin needs a configuration"),
        (["best.yaml", "best.yaml", "train.steps=3"], "neither target is one"),
        (["best.yaml", "gone.plan.json"], "gone.plan.json: no such file"),
        (["other.yaml", "othr.yaml"], "did you mean other.yaml?"),
        (["grpo", "nothing.py"], "no file nothing.py"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(
    flowrl: Run, files: None, words: list[str], said: str
):
    code, out, err = flowrl("diff", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_plan_is_compared_with_the_plan_of_a_changed_configuration(flowrl: Run, files: None):
    code, out, err = flowrl("diff", "best.yaml", QUICKSTART, "train.prompts_per_step=32")
    assert (code, err) == (0, "")
    assert "64 -> 32" in out
