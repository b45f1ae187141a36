"""`fl.compile` and `fl.run` from a program."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.cluster import load_cluster
from flowrl.config.load import load_config
from flowrl.config.schema import RunConfig
from flowrl.observe.run_folder import RunFolder
from tests.runtime.tiny_runs import (
    REWARD,
    WatchedDisplay,
    just_too_small,
    tiny_config,
    write_config,
)


@fl.workflow
def mine(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    actor.update(rollout, scores)


@fl.workflow
def twice(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    actor.update(rollout, scores)
    actor.update(rollout, scores)


def test_a_config_may_be_a_path_a_mapping_or_a_config(tmp_path: Path):
    path = write_config(tmp_path, args={})
    by_path = fl.compile(mine, path)
    by_text = fl.compile(mine, str(path))
    by_mapping = fl.compile(mine, {**tiny_config(tmp_path / "runs"), "args": {}})
    by_config = fl.compile(mine, RunConfig(**{**tiny_config(tmp_path / "runs"), "args": {}}))
    by_loaded = fl.compile(mine, load_config(path))
    for compiled in (by_text, by_mapping, by_config, by_loaded):
        assert compiled.config == by_path.config
        assert compiled.graph == by_path.graph


def even(response: str) -> float:
    return float(len(response) % 2 == 0)


async def solved(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def test_reward_functions_are_given_as_they_are(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["grpo"], "stage": {}}
    result = fl.run(
        mine,
        config,
        overrides=["train.steps=1", "eval.metric=even"],
        rewards=[even, solved],
        display=WatchedDisplay(),
    )
    for row in RunFolder.open(result.folder).samples():
        assert row.terms == {
            "even": even(row.response),
            "solved": float(row.response == row.answer),
        }
    terms = [{"use": even, "weight": 0.5}]
    compiled = fl.compile(mine, {**config, "rewards": {"terms": terms}, "eval": {}})
    (term,) = compiled.config.rewards.terms
    assert (term.name, term.model_dump()["function"]) == ("even", f"{__file__}:even")


@pytest.mark.parametrize("function", [len, lambda response: 1.0, RunFolder.open])
def test_a_reward_that_scorer_processes_cannot_find_is_refused(function, tmp_path: Path):
    with pytest.raises(fl.ConfigError, match="at the top level of a Python file"):
        fl.run(mine, tiny_config(tmp_path), rewards=[function])


def test_overrides_go_over_every_form(tmp_path: Path):
    path = write_config(tmp_path)
    config = load_config(path).config
    for form in (path, config, tiny_config(tmp_path / "runs")):
        compiled = fl.compile(None, form, overrides=["train.steps=9", "seed=5"])
        assert (compiled.config.train.steps, compiled.config.seed) == (9, 5)
        assert compiled.config.stage["sft"].train.steps == 4
    with pytest.raises(fl.ConfigError, match="overrides belong to the call that reads"):
        fl.compile(None, load_config(path), overrides=["seed=5"])


def test_a_workflow_takes_the_place_of_the_last_stages(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}}
    compiled = fl.compile(mine, config)
    assert [stage.graph.name for stage in compiled.stages] == ["sft", "mine"]
    assert compiled.graph is compiled.stages[-1].graph
    assert compiled.plan is compiled.stages[-1].plan
    assert [stage.graph.name for stage in fl.compile(None, config).stages] == ["sft", "grpo"]
    assert fl.compile("sft", {**config, "stages": ["sft"], "stage": {}}).graph.name == "sft"


def test_a_plan_can_be_made_for_a_machine_that_is_not_here_but_not_run(tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(
        "nodes: [{name: far, memory_gib: 64, cores: 8, "
        "devices: [{type: cuda, count: 2, name: card, memory_gib: 80}]}]"
    )
    config = {**tiny_config(tmp_path / "runs"), "cluster": str(tmp_path / "cluster.yaml")}
    compiled = fl.compile(None, config)
    pool = load_cluster(tmp_path / "cluster.yaml")
    assert compiled.plan.placements == fl.compile(None, config, pool=pool).plan.placements
    with pytest.raises(fl.PlanError, match="devices that are not here"):
        compiled.run(display=WatchedDisplay())
    assert not (tmp_path / "runs").exists()


def test_a_run_returns_its_folder_and_its_summary(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["grpo"], "stage": {}}
    display = WatchedDisplay()
    result = fl.run(mine, config, overrides=["train.steps=1"], display=display)
    assert result.folder == tmp_path / "tiny"
    assert display.steps == [("grpo", 1)]
    assert display.summary == result.summary
    written = json.loads((result.folder / "summary.json").read_text())
    assert (written["before"], written["after"]) == (result.summary.before, result.summary.after)

    # The same job again is another folder with the same results.
    again = fl.run(mine, config, overrides=["train.steps=1"], display=WatchedDisplay())
    assert again.folder == tmp_path / "tiny-2"
    assert again.summary.after == result.summary.after
    weights = [(run.folder / "model/model.safetensors").read_bytes() for run in (result, again)]
    assert weights[0] == weights[1]


def test_the_last_line_tells_the_score_where_nothing_is_called_accuracy(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["grpo"], "stage": {}}
    config["eval"] = {"num": 8}
    assert REWARD["name"] != "accuracy"
    result = fl.run(None, config, overrides=["train.steps=1"], display=WatchedDisplay())
    assert result.summary.headline.startswith("held-out sampled score: before 0.")


def test_a_supervised_stage_alone_is_a_run(tmp_path: Path):
    config = tiny_config(tmp_path)
    config |= {"stages": ["sft"], "stage": {}, "args": {}, "eval": {"num": 8, "metric": "digit"}}
    result = fl.run(None, config, overrides=["train.steps=2"], display=WatchedDisplay())
    assert result.summary.steps == {"sft": 2}
    assert result.summary.headline.startswith("held-out sampled digit: before 0.")


def test_a_stage_of_no_steps_measures_the_same_twice(tmp_path: Path):
    display = WatchedDisplay()
    result = fl.run(None, tiny_config(tmp_path), overrides=["train.steps=0"], display=display)
    assert result.summary.before == result.summary.after
    assert {stage for stage, _ in display.steps} == {"sft"}


def test_the_last_stage_starts_from_what_the_one_before_learned(tmp_path: Path):
    """Also where that one never stopped to be measured, so that nothing was published before."""
    config = tiny_config(tmp_path)
    del config["stage"]["sft"]["stop"]
    unchecked = fl.run(None, config, overrides=["train.steps=0"], display=WatchedDisplay())
    checked = fl.run(
        None, tiny_config(tmp_path), overrides=["train.steps=0"], display=WatchedDisplay()
    )
    untrained = fl.run(
        None,
        config,
        overrides=["train.steps=0", "stage.sft.train.steps=0"],
        display=WatchedDisplay(),
    )
    measured = [run.folder / "evaluations.jsonl" for run in (unchecked, checked, untrained)]
    ends = [json.loads(path.read_text().splitlines()[-1])["metrics"] for path in measured]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]


def test_a_run_in_another_thread_works_and_leaves_signals_alone(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["grpo"], "stage": {}}
    results: list[object] = []

    def work() -> None:
        try:
            results.append(
                fl.run(None, config, overrides=["train.steps=1"], display=WatchedDisplay())
            )
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120.0)
    assert not thread.is_alive()
    (result,) = results
    assert not isinstance(result, BaseException), result


def test_a_schedule_counts_every_update_of_a_step(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}, "stages": ["grpo"], "stage": {}, "eval": {}}
    optimizer = {"learning_rate": 1e-3, "schedule": "linear", "final_fraction": 0.5}
    config["train"] = {**config["train"], "steps": 2, "mini_batches": 1, "optimizer": optimizer}
    result = fl.run(twice, config, display=WatchedDisplay())
    rates = [row.learning_rate for row in RunFolder.open(result.folder).steps()]
    # Four updates fall linearly from 1e-3 to 5e-4; a row tells the last of its step.
    assert rates == pytest.approx([1e-3 - 5e-4 / 3, 5e-4])


def test_responses_that_do_not_fit_behind_a_prompt_are_refused_before_the_first_stage(
    tmp_path: Path,
):
    """A model folder says how long its samples may be only once its rows are tokenised."""
    trained = fl.run(None, tiny_config(tmp_path / "first"), display=WatchedDisplay())
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "12+34=12+34=", "answer": "046"}) + "\n")
    config = {**tiny_config(tmp_path / "runs"), "args": {}, "stages": ["grpo"], "stage": {}}
    config["roles"]["actor"] |= {"model": str(trained.folder / "model"), "tokenizer": None}
    config |= {"data": {"train": str(rows), "max_prompt_tokens": 12}, "eval": {}}
    display = WatchedDisplay()
    with pytest.raises(fl.ConfigError, match="prompt and response do not fit the model") as caught:
        fl.run(mine, config, display=display)
    text = str(caught.value)
    assert "12 prompt tokens + max_tokens=6 = 18; expected: at most 16 tokens" in text
    assert "max_length to 18, or set train.sampling.max_tokens=4" in text
    assert display.steps == []


def test_engines_that_give_their_memory_back_are_awake_for_evaluations(tmp_path: Path):
    tight = just_too_small(tiny_config(tmp_path))
    assert {switch.what for stage in tight.stages for switch in stage.plan.residency} == {
        "kv cache"
    }
    result = tight.run(display=WatchedDisplay())
    measured = [(row.stage, row.step) for row in RunFolder.open(result.folder).evaluations()]
    assert measured == [("sft", 2), ("sft", 4), ("grpo", 0), ("grpo", 2), ("grpo", 4)]
