"""What planning costs, as a command and in process.

A command's time is its CPU time, user and system, on one thread, less that of `flowrl --help`: what
stays is reading the configuration and the cluster, importing what plans, and planning itself. Every
command runs once to fill the caches of bytecode (an installation has them; they lie in a temporary
folder here, whatever the environment says about writing them), and then the median of several runs
counts. In process, the same compilation is timed in a fresh interpreter after its imports, split
into its parts. Parts inside others are named with a slash.

Published: the planner of RLinf on its graph of three nodes, without memory or layouts, on one core
of another machine (RLinf repository, toolkits/auto_placement; not measured here).

    python benchmarks/plan_speed.py --output benchmarks/results/plan_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from arguments import json_file
from flowrl.files import write_result

PUBLISHED_S = {64: 0.06, 1024: 9.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to make; `target_s` is over the time of `flowrl --help`."""

    name: str
    config: str
    cluster: str
    devices: int
    target_s: float


CASES = (
    Case(name="GRPO", config="grpo_qwen25_7b", cluster="h100_8x8", devices=64, target_s=0.1),
    Case(name="PPO", config="ppo_qwen25_7b", cluster="h100_128x8", devices=1024, target_s=1.0),
    Case(name="PPO", config="ppo_qwen25_7b", cluster="h100_1024x8", devices=8192, target_s=5.0),
)

# Run in a fresh interpreter: prints seconds of CPU by part, as JSON.
IN_PROCESS = """
import functools, gc, importlib, json, sys, time
from pathlib import Path

import flowrl.cli.app
gc.disable()  # as the command does
seconds = {}

def timed(name, call):
    @functools.wraps(call)
    def inner(*args, **named):
        begin = time.process_time()
        try:
            return call(*args, **named)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
    return inner

def imported():
    import flowrl.api
    import flowrl.cli.plan
    import flowrl.plan.groups
    import flowrl.plan.show.plan
timed("imports", imported)()

PARTS = {
    "configuration": ("flowrl.config.load", "load_config"),
    "candidates": ("flowrl.plan.problem_of", "pose"),
    "search": ("flowrl.plan.search.best", "search"),
    "writing the plan": ("flowrl.plan.write.many", "write_plan"),
}
for name, (module, attribute) in PARTS.items():
    plain = getattr(importlib.import_module(module), attribute)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("flowrl"):
            if getattr(other, attribute, None) is plain:
                setattr(other, attribute, timed(name, plain))

from flowrl import api
overrides = [f"cluster={sys.argv[2]}"]
made = timed("planning", api.compile)(None, Path(sys.argv[1]), overrides=overrides)

def rendered():
    from flowrl.plan.show.plan import plan_text
    plan_text(made.plan)
timed("rendering", rendered)()
print(json.dumps(seconds))
"""


def main() -> None:
    """Runs all cases and writes them as JSON, with a table beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=json_file, required=True)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        bench = _Bench(environment=environment, runs=options.runs)
        help_s = bench.command_s(["--help"])
        rows = [_row(case, bench, help_s) for case in CASES]
    result = {
        "what": "CPU seconds on one thread; medians",
        "runs": options.runs,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "help_s": round(help_s, 3),
        "published_s": PUBLISHED_S,
        "published": "planner of RLinf, graph of 3 nodes, another machine, its own figures",
        "rows": rows,
    }
    write_result(options.output, json.dumps(result, indent=2) + "\n")
    table = _table(rows, help_s, options.runs)
    write_result(options.output.with_suffix(".md"), table)
    print(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Runs commands and adds up what their processes used."""

    environment: dict[str, str]
    runs: int

    def command_s(self, words: list[str]) -> float:
        """The median of `flowrl WORDS`, in CPU seconds, after one run that does not count."""
        command = [sys.executable, "-m", "flowrl.cli", *words]
        return statistics.median([self._once_s(command) for _ in range(1 + self.runs)][1:])

    def _once_s(self, command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def parts_s(self, case: Case) -> dict[str, float]:
        """Of planning in a fresh process, by part: the median of each."""
        command = [sys.executable, "-c", IN_PROCESS, *_files(case)]
        found: list[dict[str, float]] = []
        for _ in range(self.runs):
            run = subprocess.run(
                command, env=self.environment, check=True, capture_output=True, text=True
            )
            found.append(json.loads(run.stdout))
        return {
            name: round(statistics.median([one[name] for one in found]), 3) for name in found[0]
        }


def _files(case: Case) -> tuple[str, str]:
    return f"configs/{case.config}.yaml", f"configs/clusters/{case.cluster}.yaml"


def _row(case: Case, bench: _Bench, help_s: float) -> dict[str, object]:
    config, cluster = _files(case)
    over_s = bench.command_s(["plan", config, "--cluster", cluster]) - help_s
    return {
        "job": case.name,
        "devices": case.devices,
        "config": config,
        "cluster": cluster,
        "over_help_s": round(over_s, 3),
        "target_s": case.target_s,
        "met": over_s < case.target_s,
        "in_process_s": bench.parts_s(case),
    }


def _table(rows: list[dict[str, object]], help_s: float, runs: int) -> str:
    lines = [
        f"CPU seconds on one thread, medians of {runs}; `flowrl --help` takes {help_s:.2f}. In"
        " process, planning holds configuration, candidates, search and writing. Published: the"
        " planner of RLinf, its own figures, another machine; not measured here.",
        "",
        "| job | devices | over --help | target | met | imports | planning | configuration"
        " | candidates | search | writing | rendering | published planner, 3 nodes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = row["in_process_s"]
        assert isinstance(parts, dict)
        names = ("imports", "planning", "configuration", "candidates", "search")
        shown = [f"{parts[name]:.3f}" for name in (*names, "writing the plan", "rendering")]
        published = PUBLISHED_S.get(int(str(row["devices"])))
        lines.append(
            f"| {row['job']} | {row['devices']:,} | {row['over_help_s']:.2f} |"
            f" {row['target_s']} | {'yes' if row['met'] else 'no'} | {' | '.join(shown)} |"
            f" {published if published is not None else '-'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
