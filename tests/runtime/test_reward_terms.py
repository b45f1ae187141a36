"""What a step tells of each reward term: by name, over all scored samples, with its failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.observe.run_folder import RunFolder
from tests.runtime.tiny_runs import REWARD, WatchedDisplay, tiny_config

PROGRAM = """
import flowrl as fl


@fl.workflow
def two(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward):
    rollout = actor.generate(prompts)
    scores = fl.weighted_sum((verifier.score(rollout), 1.0), (judge.score(rollout), 0.5))
    rollout, scores = fl.filter.difficulty(rollout, scores, low=19.0, high=99.0)
    actor.update(rollout, scores)


def picky(response):
    if response.startswith("9"):
        raise ValueError("no nines")
    return 3.0 * len(response)


def pickier(response):
    if response.startswith("8"):
        raise ValueError("no eights")
    return -float(len(response))
"""


def test_the_terms_of_two_roles_are_metrics_by_name(tmp_path: Path):
    (tmp_path / "two.py").write_text(PROGRAM)
    own = [
        {"kind": "python", "function": f"{tmp_path / 'two.py'}:{name}", "name": "own"}
        for name in ("picky", "pickier")
    ]
    config: dict[str, Any] = tiny_config(tmp_path / "runs")
    config |= {"stages": ["two"], "stage": {}, "args": {}, "executor": "eager"}
    config["workflow"] = f"{tmp_path / 'two.py'}:two"
    config["roles"] |= {"judge": {"backend": "verify", "terms": [own[1]]}}
    config["rewards"] |= {"terms": [{**REWARD, "weight": 7.0}, own[0]], "max_failures": 500}
    config["eval"] = {"every": 0, "num": 8, "metric": "score"}
    config["train"] |= {"steps": 3, "prompts_per_step": 16}
    config |= {"seed": 1}
    del config["data"]["eval"], config["roles"]["reference"]
    result = fl.run(None, config, display=WatchedDisplay())
    folder = RunFolder.open(result.folder)
    samples = list(folder.samples())
    failures = dict.fromkeys(("verifier/own", "judge/own", "digit"), 0.0)
    for row in folder.steps():
        scored = [s for s in samples if s.step == row.step and s.end != "dropped"]
        for name in failures:
            values = np.array([s.terms[name] for s in scored])
            assert row.extra[f"terms/{name}/mean"] == pytest.approx(values.mean())
            assert row.extra[f"terms/{name}/std"] == pytest.approx(values.std())
            failures[name] += row.extra[f"terms/{name}/failures"]
    assert {s.end for s in samples} == {"consumed", "filtered", "dropped"}
    dropped = [s.reason for s in samples if s.reason.startswith("reward_failed: ")]
    assert failures == {
        "verifier/own": float(sum("no nines" in reason for reason in dropped)),
        "judge/own": float(sum("no eights" in reason for reason in dropped)),
        "digit": 0.0,
    }
    assert min(failures["verifier/own"], failures["judge/own"]) > 0
