"""Held-out sets by name: greedy and sampled, pass@k, standard errors, and the best model."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import transformers

import flowrl as fl
from flowrl.cli import evaluate
from flowrl.config.schema import EvalConfig
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import ConfigError, FlowError
from flowrl.files import read_json_lines
from flowrl.ids import GroupId
from flowrl.observe.display import SilentDisplay
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.setup.evaluation import HeldOutSet, evaluation_row, held_out_sets
from tests.runtime.many_programs import CONFIGS
from tests.runtime.tiny_runs import CtrlC, tiny_config

ITEMS = tuple(
    PromptItem(
        epoch=0,
        index=index,
        group=GroupId(f"0/{index}"),
        row=Row(index=index, prompt="1+1=", answer="2", solution="2", fields={}, where="rows:1"),
        prompt_ids=np.array([1, 2]),
    )
    for index in range(4)
)


def samples_of(*scores: float) -> list[Payload]:
    """The scored samples of one prompt."""
    return [
        Payload(item=ITEMS[0], tokens=np.arange(3), score=score, terms={"right": score})
        for score in scores
    ]


def measured(groups: list[list[Payload]], samples: int = 4):
    held_out = HeldOutSet(name="", items=ITEMS, samples=samples, temperature=1.0)
    return evaluation_row("grpo", 0, held_out, groups, time.monotonic())


def test_pass_at_k_is_the_unbiased_estimator():
    row = measured([samples_of(1, 0, 0, 0), samples_of(0, 0, 0, 0), samples_of(1, 1, 0, 1)])
    assert row.metrics["right"] == pytest.approx((1 / 4 + 0 + 3 / 4) / 3)
    # 1 - C(3, 2) / C(4, 2) = 1/2, then 0, then 1 - C(1, 2) / C(4, 2) = 1.
    assert row.metrics["pass@2/right"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert row.metrics["pass@4/right"] == pytest.approx(2 / 3)
    assert "pass@2/score" not in row.metrics


def test_a_term_that_is_no_share_of_right_samples_has_no_pass_at_k():
    row = measured([samples_of(0.5, 1.0, 0.0, 0.0)])
    assert not any(name.startswith("pass@") for name in row.metrics)


def test_a_term_that_does_not_apply_to_a_sample_is_no_zero_in_its_mean():
    without = Payload(item=ITEMS[0], tokens=np.arange(3), score=-1.0, terms={})
    row = measured([[*samples_of(1, 0), without], [without]])
    assert row.metrics["right"] == 0.5
    assert row.metrics["score"] == (0 - 1) / 2


def test_the_standard_error_counts_prompts_and_not_samples():
    row = measured([samples_of(1, 1), samples_of(0, 0), samples_of(1, 0)], samples=2)
    # Means of the prompts: 1, 0, 1/2; their deviation is 1/2, over three prompts.
    assert row.errors["right"] == pytest.approx(0.5 / np.sqrt(3))
    assert measured([samples_of(1, 0)], samples=2).errors == {}


def test_a_set_takes_what_it_does_not_say_from_the_section():
    config = EvalConfig(
        num=3, samples=2, temperature=0.5, sets={"greedy": {"temperature": 0, "samples": 1}}
    )
    plain, greedy = held_out_sets(config, {"": ITEMS, "greedy": ITEMS})
    assert (len(plain.items), plain.samples, plain.temperature) == (3, 2, 0.5)
    assert (len(greedy.items), greedy.samples, greedy.temperature) == (3, 1, 0.0)


def config_with_sets(folder: Path) -> dict:
    config = tiny_config(folder / "runs")
    config["stages"] = ["grpo"]
    del config["stage"]
    config["eval"] = {
        "every": 2,
        "num": 8,
        "metric": "few/digit",
        "keep_best": True,
        "sets": {
            "greedy": {"temperature": 0},
            "few": {
                "data": {"kind": "arithmetic", "split": "eval", "held_out": 50},
                "samples": 2,
                "num": 4,
            },
        },
    }
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    return fl.run(None, config_with_sets(folder), display=SilentDisplay()).folder


def test_each_set_has_a_row_and_the_headline_names_the_metric_of_a_set(straight: Path):
    rows = list(read_json_lines(straight / "evaluations.jsonl"))
    assert [(row["step"], row["name"]) for row in rows] == [
        (step, name) for step in (0, 2, 4) for name in ("", "greedy", "few")
    ]
    few = rows[-1]
    assert (few["num"], few["samples"], few["temperature"]) == (4, 2, 1.0)
    assert set(few["metrics"]) >= {"digit", "pass@2/digit"}
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["metric"] == "few/digit"
    assert summary["after"] == few["metrics"]["digit"]


def test_the_model_with_the_highest_metric_is_kept(straight: Path):
    rows = [r for r in read_json_lines(straight / "evaluations.jsonl") if r["name"] == "few"]
    values = [row["metrics"]["digit"] for row in rows]
    best = transformers.AutoModelForCausalLM.from_pretrained(straight / "best")
    final = transformers.AutoModelForCausalLM.from_pretrained(straight / "model")
    is_last = values.index(max(values)) == len(values) - 1
    same = all((a == b).all() for a, b in zip(best.parameters(), final.parameters(), strict=True))
    assert same == is_last


def test_a_resumed_run_keeps_the_best_of_all_its_parts(straight: Path, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        fl.run(None, config_with_sets(tmp_path), display=CtrlC("grpo", 3))
    compiled = fl.compile(None, tmp_path / "runs" / "tiny" / "config.yaml")
    resumed = fl.resume(compiled, tmp_path / "runs" / "tiny", display=SilentDisplay()).folder
    for name in ("best", "model"):
        weights = Path(name) / "model.safetensors"
        assert (resumed / weights).read_bytes() == (straight / weights).read_bytes()


def test_eval_of_a_run_repeats_its_last_measurement(
    straight: Path, capsys: pytest.CaptureFixture[str]
):
    evaluate.run(straight, None, [], as_json=True)
    measured = json.loads(capsys.readouterr().out)
    assert measured["model"] == str(straight / "model")
    last = list(read_json_lines(straight / "evaluations.jsonl"))[-3:]
    assert [(row["name"], row["metrics"]) for row in measured["sets"]] == [
        (row["name"], row["metrics"]) for row in last
    ]


@pytest.mark.parametrize("program", ["debate", "two_learners"])
def test_eval_repeats_the_last_measurement_of_runs_whose_policies_are_copies_or_take_turns(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Their updates leave the loss to the config, too."""
    folder = fl.run(None, CONFIGS[program](tmp_path), display=SilentDisplay()).folder
    evaluate.run(folder, None, [], as_json=True)
    (measured,) = json.loads(capsys.readouterr().out)["sets"]
    last = list(read_json_lines(folder / "evaluations.jsonl"))[-1]
    assert measured["metrics"] == last["metrics"]


def test_eval_takes_the_newest_checkpoint_of_a_run_that_has_not_ended(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "model")
    evaluate.run(run, None, ["eval.sets=null", "eval.metric=digit"])
    first, line = capsys.readouterr().out.splitlines()
    assert re.search(r"run/checkpoints/\d+-grpo-step4/actor/model, config ", first)
    assert line.startswith("data.eval: 8 prompts x 1 at temperature 1: digit 0.")
    assert " (se 0." in line


def test_eval_of_a_folder_without_a_config_says_what_to_add(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"flowrl eval .* CONFIG"):
        evaluate.run(tmp_path, None, [])


def test_a_metric_of_a_set_that_is_not_there_is_refused(tmp_path: Path):
    config = config_with_sets(tmp_path)
    config["eval"]["metric"] = "fwe/digit"
    with pytest.raises(FlowError, match="did you mean 'few/digit'"):
        fl.compile(None, config)


def test_greedy_samples_of_one_prompt_are_refused(tmp_path: Path):
    config = config_with_sets(tmp_path)
    config["eval"]["sets"]["greedy"]["samples"] = 4
    with pytest.raises(FlowError, match=r"eval\.sets\.greedy\.samples"):
        fl.compile(None, config)
