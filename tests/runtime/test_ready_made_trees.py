"""Ready-made workflows whose rollouts answer what other rollouts made, in whole runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch
from flowrl.algo.resolve import resolve_advantage
from flowrl.files import read_json_lines
from flowrl_graphs.co_training import co_training
from flowrl_graphs.generative_judge import generative_judge
from flowrl_graphs.tree_rollouts import around_cut, tree_rollouts
from tests.runtime.tiny_runs import WatchedDisplay
from tests.runtime.tree_programs import tree_of

Rows = dict[str, list[dict[str, Any]]]


def run_of(
    flow: fl.Workflow, runs: Path, args: Mapping[str, object], roles: tuple[str, ...] = ()
) -> tuple[Rows, dict[str, Any]]:
    """One step: its samples by rollout, and what is logged."""
    config = tree_of("refinement", runs, steps=1, args=dict(args))
    own = config["roles"]
    config["roles"] = {"actor": own["actor"], **dict.fromkeys(roles, own["rival"])}
    if "verifier" in {role.name for role in flow.roles}:
        config["roles"]["verifier"] = own["verifier"]
    config |= {"workflow": None, "stages": [flow.name]}
    folder = fl.run(flow, config, display=WatchedDisplay()).folder
    (step,) = read_json_lines(folder / "metrics.jsonl")
    assert np.isfinite(step["loss"])
    rows: Rows = defaultdict(list)
    for row in read_json_lines(folder / "samples.jsonl"):
        assert row["end"] == "consumed"
        rows[row["rollout"]].append(row)
    return rows, step["extra"]


def number(text: str, regex: str, otherwise: float) -> float:
    found = re.findall(regex, text)
    return float(found[-1]) if found else otherwise


def test_an_answer_has_the_mean_of_the_scores_that_a_judge_states(tmp_path: Path):
    args = {"template": "{prompt}{response}=", "verdicts": 2}
    rows, extra = run_of(generative_judge, tmp_path, args, roles=("judge",))
    scores = [number(row["response"], r"\d", 0.0) for row in rows["judge.generate"]]
    assert len(scores) == 2 * len(rows["actor.generate"])
    assert extra["judged"] == pytest.approx(np.mean(scores))
    assert extra["judge.generate/unparsed"] < 1.0


def test_win_rates_of_a_group_have_the_mean_of_one_half(tmp_path: Path):
    args = {"template": "{prompt}{response}+{opponent}=", "regex": "^[0-9]", "opponents": 2}
    rows, extra = run_of(generative_judge, tmp_path, args, roles=("judge",))
    assert len(rows["judge.generate"]) == len(rows["judge.generate.2"]) == 16
    groups = defaultdict(list)
    for row in rows["actor.generate"]:
        groups[row["sample"].rpartition("/")[0]].append(row["score"])
    for scores in groups.values():
        assert np.mean(scores) == pytest.approx(0.5)
    assert extra["judged"] == pytest.approx(0.5)


def test_a_verifier_is_rewarded_for_verdicts_that_agree_with_the_outcome(tmp_path: Path):
    args = {"template": "{prompt}{response}=", "weight": 0.5}
    rows, extra = run_of(co_training, tmp_path, args, roles=("judge",))
    outcomes = {row["sample"]: row["terms"]["digit"] for row in rows["actor.generate"]}
    agreed = []
    for row in rows["judge.generate"]:
        verdict = number(row["response"], "[01]", 0.5)
        agreed.append(1 - abs(verdict - outcomes[row["sample"].rpartition("/")[0]]))
        assert row["score"] == pytest.approx(agreed[-1])
    assert extra["agreement"] == pytest.approx(np.mean(agreed))


def test_trunks_and_branches_learn_in_one_update(tmp_path: Path):
    rows, _ = run_of(tree_rollouts, tmp_path, {"group_size": 2, "branches": 3})
    trunk, leaves = rows["actor.generate"], rows["actor.generate.2"]
    assert (len(trunk), len(leaves)) == (8, 24)
    prompts = {row["sample"]: row["prompt"] for row in trunk}
    assert all(row["prompt"] == prompts[row["sample"].rpartition("/")[0]] for row in leaves)


def test_a_trunk_answers_for_its_cut_before_it_and_for_its_own_end_after_it():
    batch = AdvantageBatch(
        scores=np.zeros(3),
        groups=np.array([0, 0, 1]),
        mask=np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]]),
        logprobs=np.array([[-0.5, -0.1, -2.0], [-0.1, -3.0, -9.0], [-1.0, 0.0, -9.0]]),
        rewards=np.array([[1.0, 0.5], [0.0, 0.25], [1.0, 0.75]]),
    )
    spec = around_cut.spec()
    found = resolve_advantage(spec)(batch).advantages
    # Values at the cuts are 1/2 and 1/4 in the first group, 3/4 in the second.
    expected = [[0.125, 0.125, 0.5], [-0.125, -0.25, 0.0], [0.25, 0.0, 0.0]]
    np.testing.assert_allclose(found, expected, atol=1e-7)
