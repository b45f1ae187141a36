"""Whoever forgets to name the cluster of a large job is told how to name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command_line import ROOT, runner

LARGE = "configs/grpo_qwen25_7b.yaml"
H100S = "configs/clusters/h100_1x8.yaml"
DATA = "data.train=tests/data/gsm8k_train.jsonl"
HUGE = "train.sampling.max_tokens=120000"
"""Samples that no machine at hand holds."""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that is refused writes."""
    code, _, err = runner(capsys)(*arguments)
    assert code == 2
    return err


@pytest.mark.parametrize(
    ("command", "option"),
    [("plan", "--cluster FILE"), ("simulate", "--cluster FILE")],
)
def test_a_large_job_without_data_is_offered_a_cluster(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
):
    text = told([command, LARGE], capsys)
    assert "no such data file: data/math/train.jsonl" in text
    assert f"name the cluster that is meant, for which no data is read: {option}" in text


def test_a_large_job_without_data_is_drawn_as_with_a_cluster(capsys: pytest.CaptureFixture[str]):
    code, drawn, _ = runner(capsys)("graph", LARGE)
    assert code == 0
    assert runner(capsys)("graph", LARGE, f"cluster={H100S}") == (0, drawn, "")
    assert "actor.generate" in drawn
    code, placed, _ = runner(capsys)(
        "graph", "configs/quickstart.yaml", "data.train=gone.jsonl", "--level", "placed"
    )
    assert code == 0
    assert "grpo (placed)" in placed


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["plan", LARGE, DATA], "--cluster FILE"),
        (["graph", LARGE, "--level", "lowered"], "cluster=FILE"),
        (["graph", LARGE, "--print-after", "fill_defaults"], "cluster=FILE"),
    ],
    ids=["plan", "lowered", "passes"],
)
def test_a_job_that_does_not_fit_here_is_offered_a_cluster(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
):
    text = told([*command, HUGE], capsys)
    assert "does not fit on" in text
    assert f"; or name the cluster that is meant: {option} (configs/clusters" in text


def test_a_job_that_does_not_fit_the_cluster_that_is_named_is_offered_no_other(
    capsys: pytest.CaptureFixture[str],
):
    text = told(["plan", LARGE, "--cluster", H100S, "plan.memory_share=0.05"], capsys)
    assert "does not fit on H100" in text
    assert "cluster that is meant" not in text


def test_another_mistake_of_a_config_without_data_is_offered_none(
    capsys: pytest.CaptureFixture[str],
):
    text = told(["plan", LARGE, "train.mini_batches=5"], capsys)
    assert "train.mini_batches=5" in text.splitlines()[0]
    assert "cluster that is meant" not in text


def test_a_plan_over_many_devices_is_refused_before_one_of_this_machine_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = tmp_path / "many.plan.json"
    assert runner(capsys)("plan", LARGE, "--cluster", H100S, "--output", str(plan))[0] == 0
    for data in ([], [DATA]):
        text = told(["run", LARGE, *data, "--plan", str(plan)], capsys)
        assert f"{plan}: the local executor runs plans for one device of its machine" in text
        assert "plan over 8 devices" in text


@pytest.mark.parametrize("name", ["quickstart", "quickstrat.yaml"])
def test_a_ready_made_config_is_found_by_its_name(name: str, capsys: pytest.CaptureFixture[str]):
    assert "did you mean configs/quickstart.yaml?" in told(["plan", name], capsys)


def test_a_name_like_none_of_them_is_not(capsys: pytest.CaptureFixture[str]):
    assert "did you mean" not in told(["plan", "zzz"], capsys)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            '{"model_type": ',
            ["config.json cannot be read", "alone (FILE.json) to plan, or in its folder"],
        ),
        ("[]", ["config.json cannot be read", "it holds no JSON object"]),
        (
            '{"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42}',
            ["found: model_type 'gemma2'", "take a model of one of these families (configs/models"],
        ),
    ],
)
def test_a_shape_that_cannot_be_read_or_counted_is_told_with_the_key_that_named_it(
    text: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shape = tmp_path / "shape.json"
    shape.write_text(text)
    err = told(["plan", LARGE, "--cluster", H100S, f"roles.actor.model={shape}"], capsys)
    assert f"command line (roles.actor.model={shape})" in err
    for part in parts:
        assert part in err


def test_responses_that_no_model_holds_are_told_beside_a_prompt_of_a_token(
    capsys: pytest.CaptureFixture[str],
):
    err = told(["plan", LARGE, "--cluster", H100S, "train.sampling.max_tokens=999999"], capsys)
    assert "which with prompts of 1 token or more do not fit the model" in err


def test_fewer_devices_than_a_node_has_are_told_as_its_part(capsys: pytest.CaptureFixture[str]):
    words = ["size", LARGE, "--device", "H100-SXM-80GB"]
    code, out, _ = runner(capsys)(*words)
    assert code == 0
    assert out.startswith("at least 1 x H100-SXM-80GB (of a node of 8)\n")
