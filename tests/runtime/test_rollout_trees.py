"""Rollouts from rollouts in whole runs: what is generated for what, ends, and resumption."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.cli.why import run as show_history
from flowrl.errors import ConfigError
from flowrl.files import read_json_lines
from flowrl_graphs.self_refine import self_refine
from tests.runtime import many_programs, tree_programs
from tests.runtime.killed_runs import run_until_killed
from tests.runtime.tiny_runs import CtrlC, Outcome, WatchedDisplay, outcome, resumed
from tests.runtime.tree_programs import tree_of
from tests.sizes import every
from tests.warm_processes import WarmProcesses

DRAFT, CRITIQUE, REVISION = "actor.generate", "rival.generate", "actor.generate.2"

Rows = Mapping[tuple[int, str, str], dict[str, Any]]


def run_of(config: Mapping[str, Any], *overrides: str) -> Path:
    return fl.run(None, config, display=WatchedDisplay(), overrides=overrides).folder


def rows_of(run: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(run / "samples.jsonl"))


def by_id(rows: Sequence[dict[str, Any]]) -> Rows:
    """Rows by step, rollout and sample; each has one."""
    found = {(row["step"], row["rollout"], row["sample"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def parent_of(sample: str) -> str:
    return sample.rpartition("/")[0]


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tree_of("refinement", tmp_path_factory.mktemp("refined")))


def test_children_answer_their_parents_and_have_ids_of_them(refined: Path):
    rows = by_id(rows_of(refined))
    assert Counter(rollout for _, rollout, _ in rows) == {DRAFT: 48, CRITIQUE: 96, REVISION: 96}
    parents = {CRITIQUE: DRAFT, REVISION: CRITIQUE}
    for (step, rollout, sample), row in rows.items():
        if rollout == DRAFT:
            continue
        parent = rows[step, parents[rollout], parent_of(sample)]
        text = "=" if rollout == CRITIQUE else f"={row['answer']}+"
        assert row["prompt"] == f"{parent['prompt']}{parent['response']}{text}"
        assert row["answer"] == parent["answer"]


def test_means_of_children_and_values_of_parents_reach_the_right_samples(refined: Path):
    rows = rows_of(refined)
    means: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["rollout"] == REVISION:
            means[row["step"], parent_of(row["sample"])].append(row["score"])
    for row in rows:
        if row["rollout"] == CRITIQUE:  # whose advantage reads the mean, which is reported
            assert row["score"] == np.mean(means[row["step"], row["sample"]])
    for step in read_json_lines(refined / "metrics.jsonl"):
        own = [np.mean(v) for (number, _), v in means.items() if number == step["step"]]
        assert step["extra"]["revised"] == pytest.approx(np.mean(own))


def test_each_answer_meets_others_of_its_group_in_both_places(tmp_path: Path):
    rows = by_id(rows_of(run_of(tree_of("tournament", tmp_path))))
    verdicts: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for (step, rollout, sample), row in rows.items():
        if rollout == DRAFT:
            continue
        parent = parent_of(sample)
        group, _, member = parent.rpartition("/")
        further = 1 if rollout == "rival.generate" else 3
        other = f"{group}/{(int(member) + further) % 4}"
        texts = [rows[step, DRAFT, name]["response"] for name in (parent, other)]
        assert row["prompt"] == f"{texts[0]}+{texts[1]}="
        verdict = row["response"][:1]
        verdicts[step, parent, further].append({"1": 1.0, "2": 0.0}.get(verdict, 0.5))
    for (step, rollout, sample), row in rows.items():
        if rollout == DRAFT:
            group, _, member = sample.rpartition("/")
            rate = 0.0
            for further in (1, 3):
                before = f"{group}/{(int(member) - further) % 4}"
                first, second = (verdicts[step, s, further] for s in (sample, before))
                rate += (np.mean(first) + 1 - np.mean(second)) / 4
            assert row["score"] == pytest.approx(rate)


def tokens_of(text: str) -> list[str]:
    """The tokens of a response: characters, and ids that the tokenizer does not name."""
    return re.findall(r"<unused\d+>|.", text)


def test_a_branch_continues_its_parent_and_is_scored_with_the_tokens_before_the_cut(tmp_path: Path):
    seen = f"{tree_programs.__file__}:whole"
    term = {"kind": "python", "name": "digit", "function": seen}
    run = run_of(tree_of("branching", tmp_path, rewards={"terms": [term], "timeout_s": 60.0}))
    rows = by_id(rows_of(run))
    trunk, branches, twigs, again = (f"actor.generate{n}" for n in ("", ".2", ".3", ".4"))
    counts = {trunk: 24, branches: 48, twigs: 48, again: 48}
    assert Counter(rollout for _, rollout, _ in rows) == counts
    for (step, rollout, sample), row in rows.items():
        if rollout == trunk:
            continue
        above = rows[step, trunk if rollout == branches else branches, parent_of(sample)]
        if rollout == again:
            assert row["prompt"] == f"{above['prompt']}{above['response']}="
            continue
        assert row["prompt"] == above["prompt"]
        said, before = tokens_of(row["response"]), tokens_of(above["response"])
        kept = above["num_tokens"] // 2
        if rollout == twigs:
            root = rows[step, trunk, parent_of(above["sample"])]
            kept = root["num_tokens"] // 2 + min(1, above["num_tokens"] - 1)
            assert row["score"] == len(row["response"])
        assert said[:kept] == before[:kept]
        assert len(said) + (row["finish"] == "stop") == kept + row["num_tokens"]


def without_mismatch(left: Outcome) -> Outcome:
    """An outcome without what compares logprobs of engine and trainer, to their last bit."""
    metrics = []
    for row in left.metrics:
        assert isinstance(row["extra"], dict)
        extra = {name: x for name, x in row["extra"].items() if "mismatch/" not in name}
        metrics.append({**row, "extra": extra})
    return replace(left, metrics=metrics)


@pytest.mark.parametrize(
    "program", every(3, ["refinement", "kept_drafts", "two_answers", "tournament", "branching"])
)
def test_line_by_line_and_with_engine_processes_a_tree_leaves_the_same(
    program: str, tmp_path: Path
):
    config = tree_of(program, tmp_path)
    whole, eager, apart = (
        without_mismatch(outcome(run_of(config, *overrides)))
        for overrides in ((), ("executor=eager",), ("roles.actor.num_engines=2",))
    )
    assert eager == whole
    assert replace(apart, state=whole.state) == whole  # the state names the engines


@pytest.mark.parametrize("program", ["refinement", "parts_of_the_data"])
def test_line_by_line_engines_have_the_same_samples_side_by_side(program: str, tmp_path: Path):
    config = tree_of(program, tmp_path, args={"ahead": True})  # a loss that reads their logprobs
    whole, eager = (outcome(run_of(config, *more)) for more in ((), ("executor=eager",)))
    assert eager == whole


@pytest.mark.parametrize("in_scoring", [False, True])
def test_a_stopped_tree_goes_on_to_the_same_weights(
    refined: Path, tmp_path: Path, in_scoring: bool, monkeypatch: pytest.MonkeyPatch
):
    pressing = CtrlC("refinement", 1, in_scoring=in_scoring, after=20)
    if in_scoring:
        _press_in_scoring(pressing, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fl.run(None, tree_of("refinement", tmp_path), display=pressing)
    resumed(tmp_path / "tiny")
    assert outcome(tmp_path / "tiny") == outcome(refined)


@pytest.mark.parametrize(
    ("program", "config_of"),
    [
        ("branching", tree_of),
        pytest.param("tournament", tree_of, marks=pytest.mark.slow),
        pytest.param("preferred_solutions", many_programs.config_of, marks=pytest.mark.slow),
        ("preferred_revisions", tree_of),
    ],
)
def test_branches_and_pairs_go_on_bit_by_bit_killed_and_stopped(
    tmp_path: Path, warm: WarmProcesses, program: str, config_of: Callable[..., dict[str, Any]]
):
    never = run_of(config_of(program, tmp_path / "never"))
    config = config_of(program, tmp_path)
    config["runtime"]["checkpoint_every"] = 1
    run = run_until_killed(warm, config, program, 2)  # its checkpoint is not written yet
    with pytest.raises(KeyboardInterrupt):
        resumed(run, display=CtrlC(program, 2))
    resumed(run)
    assert outcome(run) == outcome(never)


def _press_in_scoring(pressing: CtrlC, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.runtime.scoring.pool import ScoringPool

    submit = ScoringPool.submit

    def noticing(pool: ScoringPool, requests: Sequence[Any]) -> None:
        submit(pool, requests)
        pressing.press(len(requests))

    monkeypatch.setattr(ScoringPool, "submit", noticing)


@pytest.mark.parametrize("executor", ["local", "eager"])
def test_who_lacks_a_parent_or_children_is_dropped_and_every_sample_has_one_end(
    tmp_path: Path, executor: str
):
    reward = f"{tree_programs.__file__}:picky"
    term = {"kind": "python", "name": "digit", "function": reward}
    rewards = {"terms": [term], "max_failures": 1000, "timeout_s": 60.0}
    run = run_of(tree_of("refinement", tmp_path, rewards=rewards), f"executor={executor}")
    rows = by_id(rows_of(run))
    reasons = Counter(row["reason"].partition(":")[0] for row in rows.values())
    assert reasons["no_children"] > 0
    assert reasons["no_parent"] > 0
    assert reasons["reward_failed"] > 0
    alive = {key for key, row in rows.items() if row["end"] != "dropped"}
    revised = {(step, parent_of(s)) for step, rollout, s in alive if rollout == REVISION}
    for step, rollout, sample in alive:
        if rollout == CRITIQUE:
            assert (step, DRAFT, parent_of(sample)) in alive
            assert (step, sample) in revised
        elif rollout == REVISION:
            assert (step, CRITIQUE, parent_of(sample)) in alive
    groups = Counter((step, parent_of(s)) for step, rollout, s in alive if rollout == DRAFT)
    assert set(groups.values()) <= {4}


def test_prompts_of_what_a_filter_keeps_and_a_batch_that_is_refilled(tmp_path: Path):
    config = tree_of("kept_drafts", tmp_path)
    config["train"]["refill"] = True
    rows = rows_of(run_of(config))
    kept = {
        (row["step"], row["sample"])
        for row in rows
        if row["rollout"] == DRAFT and row["end"] == "consumed"
    }
    assert len(kept) == 3 * 4 * 4
    assert any(row["rollout"] == DRAFT and row["end"] == "filtered" for row in rows)
    children = [row for row in rows if row["rollout"] == REVISION]
    assert {(row["step"], parent_of(row["sample"])) for row in children} == kept
    assert Counter(row["reason"] for row in children if row["end"] == "filtered").keys() == {
        "zero_variance"
    }


def test_a_prompt_that_cannot_fit_the_model_is_refused_before_a_step(tmp_path: Path):
    config = tree_of("refinement", tmp_path)
    config["roles"]["actor"]["model"]["max_length"] = 20
    with pytest.raises(ConfigError) as caught:
        run_of(config)
    assert "prompts made of samples" in caught.value.what
    assert "tree_programs.py:" in str(caught.value.where)
    assert "at most 20 tokens" in str(caught.value.expected)
    assert not (tmp_path / "tiny").exists()


def test_the_ready_made_self_refinement_runs(tmp_path: Path):
    config = tree_of("refinement", tmp_path)
    config |= {"workflow": None, "stages": ["self_refine"], "roles": {**config["roles"]}}
    del config["roles"]["rival"], config["roles"]["judge"]
    asked = "{prompt}{response}="
    config["args"] = {"ask_critique": asked, "ask_revision": asked}
    result = fl.run(self_refine, config, display=WatchedDisplay())
    steps = list(read_json_lines(result.folder / "metrics.jsonl"))
    assert all(step["loss"] is not None for step in steps)
    ends = Counter((row["rollout"], row["end"]) for row in rows_of(result.folder))
    assert set(ends) == {
        (rollout, "consumed") for rollout in (DRAFT, "actor.generate.2", "actor.generate.3")
    }
    for step in steps:
        scores = [
            row["score"]
            for row in rows_of(result.folder)
            if row["step"] == step["step"] and row["rollout"] == "actor.generate.3"
        ]
        assert step["extra"]["after"] == pytest.approx(np.mean(scores))


def test_samples_that_are_evaluated_answer_held_out_prompts(refined: Path):
    rows = list(read_json_lines(refined / "evaluations.jsonl"))
    assert [row["step"] for row in rows] == [0, 3]
    summary = json.loads((refined / "summary.json").read_text())
    assert summary["num_held_out"] == 8
    assert (refined / "trained" / "rival").is_dir()  # the run's model is the actor's


def test_the_history_of_a_child_is_shown(refined: Path, capsys: pytest.CaptureFixture[str]):
    child = next(row for row in rows_of(refined) if row["rollout"] == REVISION)
    show_history(refined, child["sample"], as_json=False)
    shown = capsys.readouterr().out
    assert f"sample {child['sample']}: consumed" in shown
    assert "attempt 0 starts on actor.generate[0]" in shown
    with pytest.raises(ConfigError, match="has no member 7"):
        show_history(refined, f"{parent_of(child['sample'])}/7", as_json=False)
