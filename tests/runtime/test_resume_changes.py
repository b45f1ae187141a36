"""A run goes on with the files and graphs it began with, or says what has changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.errors import CheckpointError
from flowrl.program.registry import load_workflow
from tests.runtime.tiny_runs import (
    CtrlC,
    WatchedDisplay,
    outcome,
    resumed,
    stopped,
    tiny_config,
)


def test_a_checkpoint_of_other_stages_is_refused(tmp_path: Path):
    run = stopped(tmp_path, CtrlC("grpo", 1))
    config = {**tiny_config(tmp_path), "stages": ["grpo"], "stage": {}}
    with pytest.raises(CheckpointError, match="another sequence of stages"):
        api.resume(api.compile(None, config), run, display=WatchedDisplay())


PROGRAM = """
import flowrl as fl

@fl.workflow
def other(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout), loss=fl.loss.policy_clip(0.2))
"""


def test_a_workflow_given_as_an_object_is_found_again_by_its_file(tmp_path: Path):
    (tmp_path / "other.py").write_text(PROGRAM)
    workflow = load_workflow(str(tmp_path / "other.py"))
    config = {**tiny_config(tmp_path), "args": {}}
    with pytest.raises(KeyboardInterrupt):
        api.run(workflow, config, display=CtrlC("grpo", 1))
    display = WatchedDisplay()
    result = resumed(tmp_path / "tiny", display=display)
    assert display.steps == [("grpo", 2), ("grpo", 3), ("grpo", 4)]
    assert "graph other lowered" in (result.folder / "graph.grpo.txt").read_text()


def test_a_run_does_not_go_on_with_another_workflow(tmp_path: Path):
    run = stopped(tmp_path, CtrlC("grpo", 1))
    (tmp_path / "other.py").write_text(PROGRAM)
    workflow = load_workflow(str(tmp_path / "other.py"))
    compiled = api.compile(workflow, {**tiny_config(tmp_path), "args": {}})
    with pytest.raises(CheckpointError, match=r"other\.py was not there; is \d+ bytes"):
        api.resume(compiled, run, display=WatchedDisplay())
    # Nor where that is accepted: what the checkpoint holds belongs to other nodes.
    with pytest.raises(CheckpointError, match="not the one that this run began with") as caught:
        api.resume(compiled, run, display=WatchedDisplay(), accept_changes=True)
    assert "other.py:5" in str(caught.value)


def test_a_workflow_that_says_other_numbers_goes_on_where_that_is_accepted(tmp_path: Path):
    config = {**tiny_config(tmp_path), "args": {}}
    compiled = []
    for name, low in (("first.py", 0.2), ("second.py", 0.3)):
        (tmp_path / name).write_text(PROGRAM.replace("0.2", str(low)))
        compiled.append(api.compile(load_workflow(str(tmp_path / name)), config))
    with pytest.raises(KeyboardInterrupt):
        compiled[0].run(display=CtrlC("grpo", 1))
    run = tmp_path / "tiny"
    with pytest.raises(CheckpointError, match="began with other files"):
        api.resume(compiled[1], run, display=WatchedDisplay())
    display = CtrlC("grpo", 2)
    with pytest.raises(KeyboardInterrupt):
        api.resume(compiled[1], run, display=display, accept_changes=True)
    assert display.steps == [("grpo", 2)]
    assert "0.3" in (run / "graph.grpo.txt").read_text()
    api.resume(compiled[1], run, display=WatchedDisplay())  # from now on it is the run's own


def rows_of(numbers: range, answer: str = "") -> str:
    rows = [{"prompt": f"{i}+{i}=", "answer": answer or f"{2 * i:03}"} for i in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_files(folder: Path) -> dict[str, Any]:
    """The tiny configuration with data and a reward in files of its own."""
    (folder / "train.jsonl").write_text(rows_of(range(10, 30)))
    (folder / "held_out.jsonl").write_text(rows_of(range(30, 40)))
    (folder / "own.py").write_text("def own(response):\n    return float(response[:1].isdigit())\n")
    config = tiny_config(folder / "runs") | {"stages": ["grpo"], "stage": {}}
    data = {"train": str(folder / "train.jsonl"), "eval": str(folder / "held_out.jsonl")}
    config["data"] = {**config["data"], **data}
    term = {"kind": "python", "function": f"{folder}/own.py:own", "name": "digit"}
    config["rewards"] = {**config["rewards"], "terms": [term]}
    return config


def test_a_run_does_not_go_on_with_changed_files_unless_that_is_accepted(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        api.run(None, with_files(tmp_path), display=CtrlC("grpo", 1))
    run = tmp_path / "runs" / "tiny"
    # Other answers, and one row less of the held-out data; another reward.
    (tmp_path / "train.jsonl").write_text(rows_of(range(10, 30), answer="000"))
    (tmp_path / "held_out.jsonl").write_text(rows_of(range(30, 39)))
    (tmp_path / "own.py").write_text("def own(response):\n    return float(len(response) > 3)\n")
    metrics = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="began with other files") as caught:
        resumed(run)
    said = str(caught.value)
    for file in ("train.jsonl", "held_out.jsonl", "own.py"):
        assert re.search(rf"{file} was [\d,]+ bytes, sha256 \w+; is [\d,]+ bytes, sha256", said)
    assert "--accept-changes" in said
    assert (run / "metrics.jsonl").read_bytes() == metrics  # nothing was touched

    display = CtrlC("grpo", 2)
    with pytest.raises(KeyboardInterrupt):
        resumed(run, display=display, accept_changes=True)
    assert display.steps == [("grpo", 2)]
    changed = [note for note in display.notes if note.startswith("goes on with a changed file: ")]
    assert len(changed) == 3
    # They are the run's own now.
    display = WatchedDisplay()
    done = resumed(run, display=display)
    assert display.steps == [("grpo", 3), ("grpo", 4)]
    assert not any("changed file" in note for note in display.notes)
    assert done.summary.num_held_out == 9


def test_sources_and_estimates_of_solve_rates_go_on_as_they_were(tmp_path: Path):
    config = with_files(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    topics = [{**row, "topic": "ab"[i % 4 == 0]} for i, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in topics))
    config["data"] |= {"source": "topic", "curriculum": {"kind": "solve_rate", "explore": 0.5}}
    config["train"]["policies"] = {"fairness": {"kind": "weighted_shares", "a": 1, "b": 2}}
    never = outcome(api.run(None, config, display=WatchedDisplay()).folder)

    config["runtime"] = {"runs": str(tmp_path / "stopped")}
    with pytest.raises(KeyboardInterrupt):
        api.run(None, config, display=CtrlC("grpo", 2))
    run = tmp_path / "stopped" / "tiny"
    resumed(run)
    assert outcome(run) == never
    (cursor,) = never.state["stage"]["cursors"].values()
    assert sum(cursor["taken"].values()) == 32
    assert all(source["curriculum"]["rates"] for source in cursor["sources"].values())


def test_rewards_that_failed_before_a_stop_still_count_after_it(tmp_path: Path):
    config = with_files(tmp_path)
    (tmp_path / "own.py").write_text(
        "def own(response):\n    return float(response[0].isdigit())\n"  # some are empty
    )
    config["rewards"]["max_failures"] = 1000
    config["runtime"] = {"runs": str(tmp_path / "stopped")}
    with pytest.raises(KeyboardInterrupt):
        api.run(None, config, display=CtrlC("grpo", 2))
    run = tmp_path / "stopped" / "tiny"
    (*_, newest) = sorted((run / "checkpoints").iterdir())
    failed = json.loads((newest / "state.json").read_text())["reward_failures"]
    (tmp_path / "own.py").write_text("def own(response):\n    return 0.0\n")
    resumed(run, accept_changes=True)
    assert outcome(run).state["reward_failures"] == failed > 0


def test_a_killed_run_that_has_no_checkpoint_names_changed_files_too(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        api.run(None, with_files(tmp_path), display=CtrlC("grpo", 1, times=2))
    (tmp_path / "own.py").write_text("def own(response):\n    return 1.0\n")
    with pytest.raises(CheckpointError, match=r"own\.py was"):
        resumed(tmp_path / "runs" / "tiny")


def test_a_run_does_not_go_on_with_other_held_out_data(tmp_path: Path):
    rows = tmp_path / "held_out.jsonl"
    row = {"prompt": "12+34=", "answer": "046"}
    rows.write_text(json.dumps(row) + "\n")
    data = {**tiny_config(tmp_path)["data"], "eval": str(rows)}
    run = stopped(tmp_path / "runs", CtrlC("grpo", 1), data=data)
    rows.write_text(json.dumps({**row, "answer": "047"}) + "\n")
    with pytest.raises(CheckpointError, match=r"held_out\.jsonl was \d+ bytes"):
        resumed(run)


def test_held_out_prompts_that_read_otherwise_are_noticed_beside_their_file(tmp_path: Path):
    run = stopped(tmp_path, CtrlC("grpo", 1))
    written = run / "config.yaml"
    text = written.read_text()
    written.write_text(text.replace("held_out: 100", "held_out: 99"))  # by a hand
    assert written.read_text() != text
    with pytest.raises(CheckpointError, match="held-out data changed"):
        resumed(run)
    resumed(run, accept_changes=True)
