"""How long it takes to compile a program: from its function to a plan.

    python benchmarks/compile.py [--program ppo_rm] [--times 20] [--output FILE]

The largest ready-made program, PPO against a reward model that learns meanwhile, is compiled with
its configuration, all of its stages, so many times in one process; importing is not counted. The
median of a whole compilation is held against `BOUND_MS`; the exit code is 1 where it is above.
`trace`, `passes` and `plan` are of the last stage alone; the rest is reading the configuration,
finding plug-ins and the other stages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import flowrl as fl
from arguments import json_file
from flowrl.cluster.discover import discover
from flowrl.compiler import CompiledStage
from flowrl.files import write_result
from flowrl.passes import run_passes
from flowrl.plan import place

BOUND_MS = 50.0
"""What compiling the largest program may take, in ms (the median of all repetitions)."""

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RESULTS = Path(__file__).resolve().parent / "results" / "compile.json"


def median_ms(work: Callable[[], object], times: int) -> tuple[float, list[float]]:
    """The median, and every repetition, in ms; the first one warms up and is not counted."""
    work()
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        spent.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spent), spent


def parts_of(stage: CompiledStage, times: int) -> dict[str, float]:
    """The median time of each part of one stage, in ms."""
    args, plan = stage.config.args, stage.plan
    parts: dict[str, Callable[[], object]] = {
        "trace": lambda: stage.workflow.trace(args),
        "passes": lambda: run_passes(stage.traced, stage.context),
        "place": lambda: place(stage.graph, plan),
    }
    return {name: round(median_ms(work, times)[0], 2) for name, work in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of a program; times in ms."""

    program: str
    stages: int
    nodes_of_last_stage: int
    median_ms: float
    min_ms: float
    max_ms: float
    bound_ms: float
    last_stage_ms: dict[str, float]


def measure(program: str, times: int) -> Row:
    """Compiles a program of configs/ so many times."""
    config, pool = CONFIGS / f"{program}.yaml", discover()
    compiled = fl.compile(None, config, pool=pool)
    median, spent = median_ms(lambda: fl.compile(None, config, pool=pool), times)
    return Row(
        program=program,
        stages=len(compiled.stages),
        nodes_of_last_stage=len(compiled.graph.nodes),
        median_ms=round(median, 2),
        min_ms=round(min(spent), 2),
        max_ms=round(max(spent), 2),
        bound_ms=BOUND_MS,
        last_stage_ms=parts_of(compiled.stages[-1], times),
    )


def main() -> int:
    """Prints and writes the results; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="ppo_rm", help="a file of configs/")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--output", type=json_file, default=str(RESULTS))
    options = parser.parse_args()
    output = options.output.absolute()
    # Paths of a configuration are taken from the folder that configs/ is in.
    os.chdir(CONFIGS.parent)
    row = measure(options.program, options.times)
    machine = f"{platform.machine()}, Python {platform.python_version()}, one core"
    write_result(output, json.dumps({"machine": machine, **asdict(row)}, indent=2) + "\n")
    print(
        f"{row.program}: {row.stages} stages, {row.nodes_of_last_stage} nodes in the last; "
        f"median {row.median_ms:.1f} ms of {options.times} compilations, bound {BOUND_MS:.0f} ms"
    )
    parts = ", ".join(f"{name} {ms} ms" for name, ms in row.last_stage_ms.items())
    print(f"last stage: {parts}")
    return 0 if row.median_ms <= BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
