"""Episodes that end since what the environment says has no place are counted and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fl
from tests.runtime.tiny_runs import tiny_config

GAME = """
from flowrl_backends.environment import Step


class Talks:
    def reset(self, row):
        return ""

    def step(self, turn):
        return Step("=" * 9, reward=0.5, done=turn == 1)
"""


@fl.workflow
def plays(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment, bound: int = 8):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=3, max_observation_tokens=bound)
    actor.update(rollout, scores)


@pytest.mark.parametrize(("bound", "cut"), [(8, 12.0), (9, None)])
def test_cut_episodes_are_in_the_row_of_the_step_and_told_once(tmp_path, capsys, bound, cut):
    (tmp_path / "talks.py").write_text(GAME)
    config = tiny_config(tmp_path / "runs")
    config |= {"stages": ["plays"], "stage": {}, "args": {"bound": bound}, "rewards": {}}
    config["data"].pop("eval", None)
    config.pop("eval", None)
    config["roles"] = {
        "actor": config["roles"]["actor"],
        "game": {"backend": "environment", "environment": f"{tmp_path / 'talks.py'}:Talks"},
    }
    config["roles"]["actor"]["model"]["max_length"] = 64
    config["train"] |= {"steps": 2, "prompts_per_step": 4, "group_size": 3, "mini_batches": 1}
    folder = fl.run(plays, config).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["extra"].get("cut_episodes") for row in rows] == [cut, cut]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(row["terms"].get("cut_observation") == (cut and 1.0) for row in samples)
    # Versions are of what was drawn: an observation of nine tokens is not among them.
    assert all(sum(n for _, n in row["versions"]) == row["num_tokens"] for row in samples)
    assert capsys.readouterr().out.count("12 episodes were cut") == (1 if cut else 0)


def test_the_run_folder_of_a_prompt_only_file_is_made(tmp_path: Path):
    """Rows need neither answer nor solution where an environment reads the row alone."""
    (tmp_path / "talks.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    config = tiny_config(tmp_path / "runs")
    config |= {"stages": ["plays"], "stage": {}, "args": {"bound": 9}, "rewards": {}}
    config["data"] = {"train": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 8}
    config.pop("eval", None)
    config["roles"] = {
        "actor": config["roles"]["actor"],
        "game": {"backend": "environment", "environment": f"{tmp_path / 'talks.py'}:Talks"},
    }
    config["roles"]["actor"]["model"]["max_length"] = 64
    config["train"] |= {"steps": 1, "prompts_per_step": 4, "group_size": 3, "mini_batches": 1}
    assert (fl.run(plays, config).folder / "summary.json").is_file()
