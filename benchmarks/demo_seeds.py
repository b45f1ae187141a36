"""The main job on several seeds: held-out accuracy before and after GRPO, and where the time goes.

    python benchmarks/demo_seeds.py [--seeds 0 1 2 3 4] [--results benchmarks/results]

Runs configs/quickstart.yaml once for each seed, one after another, prints a table, writes it as
JSON and Markdown. It exits 1 where a seed ends below `--at-least`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import flowrl as fl
from arguments import result_folder
from flowrl.files import write_text_atomic
from flowrl.observe.display import SilentDisplay

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
COLUMNS = ("seed", "before", "after", "sft steps", "grpo steps", "sft s", "grpo s", "whole run s")


def measure(seed: int, folder: Path) -> dict[str, float]:
    """One run; seconds are wall time of the stage's steps, the whole run includes set-up."""
    compiled = fl.compile(
        None, CONFIG, overrides=[f"seed={seed}", f"runtime.runs={folder}", f"name=seed{seed}"]
    )
    summary = compiled.run(display=SilentDisplay()).summary
    assert summary.before is not None
    assert summary.after is not None
    return {
        "seed": seed,
        "before": round(summary.before, 3),
        "after": round(summary.after, 3),
        "sft steps": summary.steps["sft"],
        "grpo steps": summary.steps["grpo"],
        "sft s": round(summary.seconds["sft"]["step"], 1),
        "grpo s": round(summary.seconds["grpo"]["step"], 1),
        "whole run s": round(summary.wall_s, 1),
    }


def table(rows: list[dict[str, float]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--at-least", type=float, default=0.9)
    parser.add_argument("--results", type=result_folder)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            rows.append(measure(seed, Path(folder)))
            print(rows[-1], flush=True)
    print("\n" + table(rows))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread a process"
    if options.results is not None:
        report = {"config": "configs/quickstart.yaml", "machine": machine, "runs": rows}
        write_text_atomic(options.results / "demo_seeds.json", json.dumps(report, indent=2) + "\n")
        text = f"# The main job on {len(rows)} seeds\n\n{machine}.\n\n{table(rows)}"
        write_text_atomic(options.results / "demo_seeds.md", text)
    return 0 if all(row["after"] >= options.at_least for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
