"""Edited plans of this machine: what a run would refuse is refused when they are priced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cluster.cpu import MemoryReading
from tests.cli.command_line import ROOT, Run, runner


@pytest.fixture
def flowrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)
    return runner(capsys, "plan")


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("", {"kind": "hybrid"}, "(kind): this executor knows no such kind"),
        (
            "actor",
            {"num_slots": 10**6},
            ".num_slots): memory is planned for another number of samples",
        ),
        ("actor.generate", {"replicas": 900}, "(operations): this machine does not hold the plan"),
        ("actor.generate", {"cores": [1 << 14]}, ".cores): there is no such core here"),
    ],
)
def test_what_a_run_here_would_refuse_of_an_edited_plan_is_refused_when_it_is_priced(
    flowrl: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    change: dict[str, object],
    said: str,
):
    # What is free of this machine's memory changes all the time, and stands in its plans.
    memory = MemoryReading(total=1 << 34, available=1 << 33)
    monkeypatch.setattr("flowrl.cluster.cpu.read_memory", lambda _: memory)
    job = ["configs/guess.yaml", "train.max_staleness=1"]
    path = tmp_path / "a.plan.json"
    assert flowrl(*job, "-o", str(path))[0] == 0
    assert flowrl(*job, "--plan", str(path), "--json")[:2] == (0, path.read_text())
    raw = json.loads(path.read_text())
    parts = [raw] if not part else [*raw["placements"], *raw["operations"]]
    for one in parts:
        if part in ("", one.get("role") if "." not in part else one.get("node")):
            one.update(change)
            break
    path.write_text(json.dumps(raw))
    code, out, err = flowrl(*job, "--plan", str(path))
    assert (code, out) == (2, "")
    assert said in err
    assert "to fix: " in err
