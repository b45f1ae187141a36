"""Programs run line by line: their results are those of the compiled run, and lines have values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.files import read_json_lines
from tests.runtime.many_programs import CONFIGS
from tests.runtime.tiny_runs import WatchedDisplay, outcome, tiny_config


def left_by(folder: Path) -> dict[str, object]:
    """Everything in a run folder that two equal runs have alike."""
    last = max((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    state = json.loads((last / "state.json").read_text())
    found: dict[str, object] = {"cursors": state["stage"]["cursors"]}
    found["kl_coefficients"] = state["stage"]["kl_coefficients"]
    for path in sorted(folder.glob("trained/*/model.safetensors")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.mark.parametrize("program", CONFIGS)
def test_a_program_run_line_by_line_leaves_what_the_compiled_one_leaves(
    program: str, tmp_path: Path
):
    compiled, eager = (
        fl.run(None, CONFIGS[program](tmp_path), display=WatchedDisplay(), executor=executor)
        for executor in ("local", "eager")
    )
    assert outcome(eager.folder) == outcome(compiled.folder)
    assert left_by(eager.folder) == left_by(compiled.folder)


def test_a_run_of_two_stages_with_stops_evaluations_and_filters_is_the_same(tmp_path: Path):
    config = tiny_config(tmp_path)
    compiled = fl.run(None, config, display=WatchedDisplay())
    eager = fl.run(None, config, overrides=["executor=eager"], display=WatchedDisplay())
    assert outcome(eager.folder) == outcome(compiled.folder)
    kinds = [(row["stage"], row["step"]) for row in read_json_lines(eager.folder / "metrics.jsonl")]
    assert kinds == [(stage, step) for stage in ("sft", "grpo") for step in range(1, 5)]
