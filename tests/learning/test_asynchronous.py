"""Learning while drawing: asynchronous GRPO at several bounds on age, and DAPO with refill.

`make learn` runs all of them; the other tests have whole runs of a few steps.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

import flowrl as fl
from flowrl.api import RunResult
from flowrl.files import read_json_lines
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics
from tests.runtime.tiny_runs import ages_of

STEPS = 200


def learned(name: str, warm_start: Path, repository: Path, runs: Path, *changes: str) -> RunResult:
    """A run of `STEPS` steps from the warm start, whose held-out accuracy rose by a tenth."""
    result = fl.run(
        str(repository / "graphs" / "flowrl_graphs" / f"{name}.py"),
        repository / "configs" / f"{name}.yaml",
        overrides=[
            f"stages=[{name}]",
            f"roles.actor.model={warm_start}",
            f"train.steps={STEPS}",
            # The configs' own is for ten times the steps.
            "train.optimizer.learning_rate=1e-3",
            "eval.every=0",
            f"runtime.runs={runs}",
            *changes,
        ],
        display=SilentDisplay(),
    )
    before, after = result.summary.before, result.summary.after
    assert before is not None
    assert after is not None
    assert result.summary.steps[name] == STEPS
    assert after >= before + 0.1
    return result


def steps_of(run: Path) -> list[StepMetrics]:
    return list(map(StepMetrics.from_json, read_json_lines(run / "metrics.jsonl")))


@pytest.mark.learn
@pytest.mark.parametrize(
    ("staleness", "changes"),
    [
        (1, ()),
        (4, ()),
        (4, ("train.policies.publication=abort",)),
        (2, ("train.refill=true", "roles.actor.num_engines=2")),
    ],
    ids=["one old", "four old", "four old, aborted", "two old, refilled, two engines"],
)
def test_asynchronous_grpo_learns_from_samples_of_bounded_age(
    staleness: int, changes: tuple[str, ...], warm_start: Path, repository: Path, tmp_path: Path
) -> None:
    changes = (f"train.max_staleness={staleness}", *changes)
    run = learned("async_grpo", warm_start, repository, tmp_path, *changes).folder
    steps = steps_of(run)
    versions = {step.step: step.version for step in steps}
    oldest = [
        versions[int(str(row["step"]))] - min(version for version, _ in row["versions"])  # type: ignore[attr-defined]
        for row in read_json_lines(run / "samples.jsonl")
        if row["end"] == "consumed"
    ]
    assert max(oldest) <= staleness
    # It was not synchronous in disguise.
    assert mean(oldest) > 0.5
    assert sum(sum(ages_of(step.extra).values()) for step in steps) == len(oldest)
    if "train.refill=true" in changes:
        assert {step.num_samples for step in steps} == {64 * 8}


@pytest.mark.learn
def test_dapo_learns_from_full_batches(warm_start: Path, repository: Path, tmp_path: Path) -> None:
    result = learned("dapo", warm_start, repository, tmp_path, "train.refill=true")
    steps = steps_of(result.folder)
    assert {step.num_samples for step in steps} == {64 * 8}
    assert sum(step.filtered_groups for step in steps) > STEPS
