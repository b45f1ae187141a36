"""The plans that there are for the quickstart on this machine, predicted and then run.

    python benchmarks/plans_measured.py [--steps 24] [--repetitions 2] [--warm-up 200]

A profile is measured, the quickstart's policy is warmed up with examples, and then each plan runs
GRPO from that policy for some steps, the plans in turns, so that a busy minute of the machine
touches all of them. Every plan is asked for with `max_staleness=1`, which changes nothing of a
synchronous one; without it the asynchronous plan is not open.

Of each run the mean step behind the first ones counts, of a plan the median of its runs. Writes
benchmarks/results/plans_measured.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import flowrl as fl
from flowrl.api import Compiled
from flowrl.cli import profile as profile_command
from flowrl.compiler import CompiledStage
from flowrl.files import require_writable
from flowrl.observe.display import SilentDisplay
from flowrl.observe.run_folder import RunFolder
from flowrl.sim.choose_plan import Predicted, best_of, predicted_choices
from flowrl.sim.profile import load_profile, profile_times

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
RESULTS = Path(__file__).parent / "results"
WARM_UP = 4
"""Steps of a run that do not count."""


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=200, help="supervised steps before")
    options = parser.parse_args()
    require_writable(RESULTS / "plans_measured.json")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plans-") as scratch:
        result = measured(Path(scratch), options.steps, options.repetitions, options.warm_up)
    result["seconds"] = round(time.monotonic() - began, 1)
    (RESULTS / "plans_measured.json").write_text(json.dumps(result, indent=2) + "\n")
    text = table(result)
    (RESULTS / "plans_measured.md").write_text(text)
    print(text)


def measured(folder: Path, steps: int, repetitions: int, warm_up: int) -> dict[str, Any]:
    """Predictions and measurements of every plan."""
    path = folder / "profile.json"
    profile_command.run(CONFIG, [f"runtime.runs={folder}"], path, as_json=False)
    supervised = ["stages=[sft]", f"train.steps={warm_up}", "train.prompts_per_step=256"]
    supervised += ["train.group_size=1", "train.mini_batches=1", "train.micro_batch=256"]
    supervised += ["train.optimizer.learning_rate=2e-3", "eval.every=0", f"runtime.runs={folder}"]
    supervised += ["stage=null"]
    start = fl.compile(None, CONFIG, overrides=supervised, measured=False)
    model = start.run(display=SilentDisplay()).folder / "model"
    words = ["stages=[grpo]", "stage=null", f"train.steps={steps}", "train.max_staleness=1"]
    words += [f"roles.actor.model={model}", "roles.actor.tokenizer=null", "eval.every=0"]
    words += [f"runtime.runs={folder}", "runtime.checkpoint_minutes=0"]
    compiled = fl.compile(None, CONFIG, overrides=words, measured=False)
    (stage,) = compiled.stages
    config = compiled.config
    times = profile_times(load_profile(path), stage, source="a profile")
    plans, _ = predicted_choices(stage, times, config.plan, config.seed)
    taken: dict[int, list[float]] = {number: [] for number in range(len(plans))}
    for turn in range(repetitions):
        order = list(taken) if turn % 2 == 0 else list(reversed(taken))
        for number in order:
            taken[number].append(step_s(compiled, stage, plans[number]))
    synchronous = [one for one in plans if one.choice.kind != "asynchronous"]
    rows = [
        {
            "kind": one.choice.kind,
            "plan": str(one.choice),
            "predicted_s": round(one.step_s, 6),
            "measured_s": round(median(taken[number]), 6),
            "runs_s": [round(run, 6) for run in taken[number]],
        }
        for number, one in enumerate(plans)
    ]
    return {
        "config": "configs/quickstart.yaml",
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(one, 2) for one in os.getloadavg()],
        "steps": steps,
        "repetitions": repetitions,
        "plans": rows,
        "chosen": {
            "quickstart": chosen(rows[: len(synchronous)], plans.index(best_of(synchronous))),
            "quickstart with max_staleness=1": chosen(rows, plans.index(best_of(plans))),
        },
    }


def step_s(compiled: Compiled, stage: CompiledStage, one: Predicted) -> float:
    """Mean seconds of a step of a run by a plan."""
    run = compiled.with_plan(one.plan).run(display=SilentDisplay())
    rows = [row for row in RunFolder.open(run.folder).steps() if row.stage == stage.name]
    return mean(row.wall_s for row in rows[WARM_UP:])


def chosen(rows: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    """What the planner takes of some plans, and what it costs beside the best of them."""
    mine = rows[number]
    best = min(rows, key=lambda row: row["measured_s"])
    return {
        "chosen": f"{mine['kind']}: {mine['plan']}",
        "best": f"{best['kind']}: {best['plan']}",
        "chosen_over_best": round(mine["measured_s"] / best["measured_s"], 4),
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        "# Plans for this machine, predicted and run",
        "",
        f"`python benchmarks/plans_measured.py`: {result['config']}, {result['cores']} cores, "
        f"{result['repetitions']} runs of {result['steps']} steps for each plan, in turns; load "
        f"{result['load'][0]} at the end. These are all plans that there are on so many cores.",
        "",
        "What counts is the order of plans. Predicted seconds are of steps that learn from every "
        "group; a run drops groups whose scores are all alike, and its updates are shorter for it.",
        "",
        "| plan | predicted | measured | predicted / measured | runs |",
        "|---|---|---|---|---|",
    ]
    for row in result["plans"]:
        runs = ", ".join(f"{1e3 * run:.0f}" for run in row["runs_s"])
        lines.append(
            f"| {row['kind']}: {row['plan']} | {1e3 * row['predicted_s']:.0f} ms | "
            f"{1e3 * row['measured_s']:.0f} ms | {row['predicted_s'] / row['measured_s']:.2f} | "
            f"{runs} ms |"
        )
    lines.append("")
    for name, one in result["chosen"].items():
        lines.append(
            f"- {name}: chosen {one['chosen']}; best measured {one['best']}; "
            f"chosen / best = {one['chosen_over_best']:.3f}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
