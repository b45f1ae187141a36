"""Seconds that the search for schedules takes as the pool grows.

PPO has six tasks (generate, reference logprobs, rewards, values, both updates), GRPO four. Every
task has an option for every node-aligned device count that its batch can be shared out over: 1, 2,
4 and whole nodes of 8, times tensor and pipeline parallel degrees, recomputation and offload, less
those that another one beats. Costs are a rough roofline of a 7B model, made up to have realistic
shapes (a rollout's tail, pipeline bubbles, overheads that do not shrink); where memory is scarce,
80 GB cards pretend to have half. What is timed is the search alone, on data; making the options is
timed beside it. "thinned" looks at 128 device counts, by the rule that the result names.

Published: the planner of RLinf on its graph of three nodes, without memory or layouts, on one core
of another machine (RLinf repository, toolkits/auto_placement; not measured here).

    python benchmarks/planner.py --output benchmarks/results/planner.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from arguments import json_file
from flowrl.files import write_result
from flowrl.plan.search import Option, Problem, Sync, Task, kind_of, search

PUBLISHED_S = {8: 0.0007, 64: 0.06, 128: 0.19, 256: 0.63, 512: 2.7, 1024: 9.5}

PARAMETERS = 7.6e9
GIB = 1 << 30
NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A task's work on one device, in seconds, and its kind."""

    seconds: float
    kind: str  # "generate", "forward" or "train"


def counts_of(num_devices: int) -> tuple[int, ...]:
    """Parts of a node, and whole nodes."""
    parts = [count for count in (1, 2, 4) if count <= num_devices]
    return (*parts, *range(NODE, num_devices + 1, NODE))


def options_of(work: Work, num_devices: int, samples: int) -> tuple[Option, ...]:
    """All options of a task but those that another of the same device count beats."""
    options: list[Option] = []
    for devices in counts_of(num_devices):
        options += _best_of(list(_ways(work, devices, samples)))
    return tuple(replace(option, label=at) for at, option in enumerate(options))


def _ways(work: Work, devices: int, samples: int) -> Iterator[Option]:
    recompute = (False, True) if work.kind == "train" else (False,)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            replicas, rest = divmod(devices, tp * pp)
            if rest or replicas > samples:
                continue
            for again in recompute:
                for offload in (False, True):
                    yield _way(work, (devices, tp, pp, replicas), samples, again, offload)


def _way(
    work: Work, layout: tuple[int, int, int, int], samples: int, again: bool, offload: bool
) -> Option:
    devices, tp, pp, replicas = layout
    share = math.ceil(samples / replicas) / samples / (tp * pp)
    weights = 2 * PARAMETERS / (tp * pp)
    slower = (1 + 0.08 * math.log2(tp)) * (1 + (pp - 1) / 8)
    seconds = work.seconds * share * slower
    if work.kind == "train":
        optimizer = 16 * PARAMETERS / (tp * pp * replicas)
        held = weights + optimizer
        peak = held + weights + (8 if again else 40) * GIB / (tp * pp)
        seconds = seconds * (1.3 if again else 1.0) + 1.0
    elif work.kind == "generate":
        held, peak = weights, weights + 24 * GIB
        seconds = seconds + 30.0 / tp**0.6 * (1 + 0.2 * (pp - 1))  # the tail decodes alone
    else:
        held, peak = weights, weights + 6 * GIB / tp
        seconds = seconds + 0.3
    if offload:
        seconds += 2 * held / 20e9
    return Option(
        devices=devices,
        seconds=seconds,
        chunk_s=0.05 * pp,
        resident=0 if offload else int(held),
        peak=int(peak),
        weight_bytes=0 if offload else int(weights),
        form=f"{work.kind} tp{tp} pp{pp}",
    )


def _best_of(options: list[Option]) -> list[Option]:
    def beats(one: Option, other: Option) -> bool:
        mine = (one.seconds, one.chunk_s, one.resident, one.peak)
        theirs = (other.seconds, other.chunk_s, other.resident, other.peak)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    return [one for one in options if not any(beats(other, one) for other in options)]


def problem_of(algorithm: str, num_devices: int, memory_gib: int) -> Problem:
    """PPO or GRPO of a 7B model; a batch of 8,192 samples or, for large pools, one for each."""
    samples = max(8192, num_devices)
    judges = ["reference", "reward"] + (["values"] if algorithm == "ppo" else [])
    forward = options_of(Work(seconds=6e3, kind="forward"), num_devices, samples)
    train = options_of(Work(seconds=2e4, kind="train"), num_devices, samples)
    generate = options_of(Work(seconds=4e4, kind="generate"), num_devices, samples)
    weights = {"reference": "reference", "reward": "reward", "values": "critic"}
    tasks = [Task(id="generate", options=generate, weights="policy")]
    tasks += [
        Task(id=name, after=("generate",), options=forward, weights=weights[name], max_chunks=16)
        for name in judges
    ]
    updates = {"actor": judges}
    if algorithm == "ppo":
        updates["critic"] = ["reward", "values"]
    for name, reads in updates.items():
        held = "policy" if name == "actor" else "critic"
        after = ("generate", *reads)
        tasks.append(Task(id=name, after=after, options=train, weights=held, max_chunks=4))
    return Problem(
        tasks=tuple(tasks),
        num_devices=num_devices,
        counts=counts_of(num_devices),
        memory_bytes=memory_gib * GIB,
        syncs=(Sync(source="actor", destination="generate", together_s=0.5, apart_s=2.0),),
    )


def measure(
    algorithm: str, num_devices: int, memory_gib: int, max_counts: int | None, repeats: int
) -> dict[str, object]:
    """One row."""
    began = time.perf_counter()
    problem = problem_of(algorithm, num_devices, memory_gib)
    made_s = time.perf_counter() - began
    walls, processor = [], []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        result = search(problem, max_counts=max_counts)
        walls.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_cpu)
    best = result.best[0] if result.best else None
    return {
        "algorithm": algorithm,
        "devices": num_devices,
        "memory_gib": memory_gib,
        "block_sizes": len(problem.block_sizes()),
        "options": sum(len(task.options) for task in problem.tasks),
        "thinned": result.thinned,
        "search_s": round(min(walls), 4),
        "search_cpu_s": round(min(processor), 4),
        "options_made_s": round(made_s, 4),
        "step_s": None if best is None else round(best.evaluation.step_s, 6),
        "kind": None if best is None else str(kind_of(best.schedule)),
        "published_s": PUBLISHED_S.get(num_devices),
    }


def main() -> None:
    """Prints and writes the curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
    )
    parser.add_argument("--repeats", type=int, default=2, help="the fastest is kept")
    parser.add_argument("--output", type=json_file)
    asked = parser.parse_args()
    rows = []
    for algorithm, memory_gib, max_counts in (
        ("grpo", 80, None),
        ("ppo", 80, None),
        ("ppo", 40, None),
        ("ppo", 40, 128),
    ):
        for devices in asked.devices:
            if max_counts is not None and devices < NODE * max_counts:
                continue
            row = measure(algorithm, devices, memory_gib, max_counts, asked.repeats)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if asked.output:
        machine = f"{platform.machine()}, Python {platform.python_version()}, one core"
        table = {"machine": machine, "published": "RLinf, 3 nodes, other machine", "rows": rows}
        write_result(asked.output, json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
