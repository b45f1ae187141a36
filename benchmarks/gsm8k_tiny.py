"""The GSM8K run of `configs/gsm8k_tiny.yaml` on given seeds: time, format and accuracy.

Each seed is one `flowrl run` in a process of its own. Format and accuracy are means over sampled
answers to held-out problems (test split), one each, at temperature 1: at the last check of the
warm start, which is also where GRPO begins, and after GRPO.

    python benchmarks/gsm8k_tiny.py --train PATH/train.jsonl --eval PATH/test.jsonl --seeds 0 1

Writes gsm8k_tiny.json and gsm8k_tiny.md into `--results`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from arguments import result_folder

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "gsm8k_tiny.yaml"


def children_cpu_s() -> float:
    """Processor seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_seed(seed: int, overrides: list[str], runs: Path) -> dict[str, Any]:
    """One run; its figures."""
    name = f"gsm8k_tiny-seed{seed}"
    command = [sys.executable, "-m", "flowrl.cli", "run", str(CONFIG)]
    command += [f"seed={seed}", f"runtime.runs={runs}", f"name={name}", *overrides]
    before = children_cpu_s()
    subprocess.run(command, check=True)
    cpu_s = children_cpu_s() - before
    folder = max(runs.glob(f"{name}*"), key=lambda path: path.stat().st_mtime)
    summary = json.loads((folder / "summary.json").read_text())
    evaluations = [
        json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()
    ]
    grpo = [row for row in evaluations if row["stage"] == "grpo"]
    first, last = grpo[0]["metrics"], grpo[-1]["metrics"]
    return {
        "seed": seed,
        "wall_s": round(summary["wall_s"], 1),
        "cpu_s": round(cpu_s, 1),
        "steps": summary["steps"],
        "held_out": summary["num_held_out"],
        "format": {"before": first["format"], "after": last["format"]},
        "accuracy": {"before": first["accuracy"], "after": last["accuracy"]},
        "length": {"before": round(first["length"], 1), "after": round(last["length"], 1)},
        "curve": [[row["step"], row["metrics"]["format"]] for row in grpo],
        "seconds": {
            stage: {kind: round(value, 1) for kind, value in seconds.items()}
            for stage, seconds in summary["seconds"].items()
        },
        "response_tokens": summary["num_tokens"],
        "samples": summary["samples"],
        "libraries": summary["libraries"],
    }


def machine() -> str:
    """What it ran on, without names."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{os.cpu_count()} CPU cores ({model}), one thread of arithmetic"


def table(rows: list[dict[str, Any]], machine: str) -> str:
    """The figures as Markdown."""
    lines = [
        "# GSM8K, a model of two million parameters",
        "",
        f"`benchmarks/gsm8k_tiny.py` on {machine}. Format and accuracy of sampled answers to "
        f"{rows[0]['held_out']} held-out problems, before and after GRPO. Wall time is of the "
        "whole run; CPU time is of all its processes and is not lengthened by other work on the "
        "machine.",
        "",
        "| seed | steps sft + grpo | format | accuracy | answer, tokens | wall, s | CPU, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = f"{row['steps']['sft']} + {row['steps']['grpo']}"
        change = [
            f"{row[key]['before']:{form}} to {row[key]['after']:{form}}"
            for key, form in (("format", ".2f"), ("accuracy", ".3f"), ("length", ".0f"))
        ]
        lines.append(
            f"| {row['seed']} | {steps} | {' | '.join(change)} | {row['wall_s']:.0f} "
            f"| {row['cpu_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs every seed and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--eval", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument(
        "--results", type=result_folder, default=str(ROOT / "benchmarks" / "results")
    )
    parser.add_argument("--machine", default=machine())
    options = parser.parse_args()
    overrides = [f"data.train={options.train}", f"data.eval={options.eval}"]
    rows = []
    for seed in options.seeds:
        rows.append(run_seed(seed, overrides, options.runs))
        result = {"machine": options.machine, "config": "configs/gsm8k_tiny.yaml", "runs": rows}
        (options.results / "gsm8k_tiny.json").write_text(json.dumps(result, indent=2) + "\n")
        (options.results / "gsm8k_tiny.md").write_text(table(rows, options.machine))


if __name__ == "__main__":
    main()
