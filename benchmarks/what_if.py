"""What kind of schedule a step is fastest with, by job, devices and spread of lengths, with plots.

    python benchmarks/what_if.py                 plans, writes results, table and plots
    python benchmarks/what_if.py --small FILE    GRPO 7B on 8 and 16 devices alone

The best temporal, spatial, hybrid and asynchronous schedule of each job and pool of H100, with the
analytic costs and the lengths of the config. Hybrid contains the first two. Asynchronous ones learn
from samples that are one publication old at most, and in a table of their own two and four: batches
overlap as far as that lets them, and samples go on across updates. Predictions, not measurements.

Results go to results/what_if.json, a table to results/what_if.md, plots to docs/plots/.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import json_file
from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.files import require_writable, write_result, write_text_atomic
from flowrl.plan.assign import busy_seconds
from flowrl.plan.groups import cost_of, host_share
from flowrl.plan.problem_of import Posed, pose
from flowrl.plan.search import Found, Kind, Leaf, Problem, Schedule, draw, evaluate, leaves, search
from flowrl.plan.sizing import pool_of_devices
from line_plots import Line, Plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"

DEVICE = "H100-SXM-80GB"
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
KINDS = (Kind.TEMPORAL, Kind.SPATIAL, Kind.HYBRID, Kind.ASYNCHRONOUS)
SIGMAS = (0.0, 0.3, 0.8, 1.2)
AGES = (1, 2, 4)

_32B = "roles.actor.model=configs/models/qwen2.5-32b.json"
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "GRPO 7B": ("configs/grpo_qwen25_7b.yaml", ()),
    "GRPO 32B": ("configs/grpo_qwen25_32b.yaml", ()),
    "PPO 7B": ("configs/ppo_qwen25_7b.yaml", ()),
    "PPO 32B": ("configs/ppo_qwen25_7b.yaml", (_32B,)),
}

_LONG = (
    *("train.prompts_per_step=512", "train.group_size=16", "train.sampling.max_tokens=27648"),
    *("plan.mean_prompt_tokens=100", "plan.mean_response_tokens=14550", "plan.sigma=1"),
    "roles.actor.num_slots=128",
)
"""RLinf's batch: 8,192 samples, contexts of at most 28,672 tokens, 120 million tokens a step."""

PUBLISHED: dict[str, tuple[int, tuple[str, ...]]] = {
    "RLinf, 1.5B, 128": (128, (*_LONG, "roles.actor.model=configs/models/qwen2.5-1.5b.json")),
    "RLinf, 7B, 128": (128, _LONG),
    "NeMo RL, 30B-A3B, 32": (
        32,
        (
            *("train.prompts_per_step=64", "train.group_size=32", "data.max_prompt_tokens=512"),
            *("train.sampling.max_tokens=3584", "plan.mean_prompt_tokens=100"),
            *("plan.mean_response_tokens=3054", "plan.sigma=1"),
            "roles.actor.model=configs/models/qwen3-30b-a3b.json",
        ),
    ),
}
"""Devices and overrides of configs/grpo_qwen25_7b.yaml. Sigma is what predict_published assumes."""

Row = dict[str, Any]


def posed(config: str, overrides: Sequence[str], devices: int, age: int = 0) -> Posed:
    """The problem of a job on so many devices, with samples up to `age` publications old."""
    words = (*overrides, f"train.max_staleness={age}")
    graph, request, _ = api.ask_for_plan(ROOT / config, overrides=words)
    pool = pool_of_devices(device_spec(DEVICE), devices)
    (group,) = pool.groups()
    return pose(graph, request, group, cost_of(request), host=host_share(pool, group))


def of_one_kind(problem: Posed, devices: int, kind: Kind) -> Problem:
    """The problem on so many devices with schedules of one kind."""
    stale = kind is Kind.ASYNCHRONOUS
    return replace(
        problem.problem,
        num_devices=devices,
        kinds=frozenset({kind}),
        staleness=problem.problem.staleness if stale else 0,
        ahead=problem.problem.ahead if stale else frozenset(),
    )


def best(problem: Posed, devices: int, kind: Kind) -> Found | None:
    """The best schedule of one kind, or None where none fits."""
    found = search(of_one_kind(problem, devices, kind), top=1).best
    return found[0] if found else None


def row(problem: Posed, devices: int, kind: Kind) -> Row:
    """A kind's best schedule as data; `step_s` is None where none fits."""
    found = best(problem, devices, kind)
    if found is None:
        return {"devices": devices, "kind": str(kind), "step_s": None}
    ways = [problem.candidate(leaf.task, leaf.option) for leaf in leaves(found.schedule)]
    busy = busy_seconds(of_one_kind(problem, devices, kind), found.schedule)
    return {
        "devices": devices,
        "kind": str(kind),
        "step_s": round(found.evaluation.step_s, 2),
        "sync_s": round(found.evaluation.sync_s, 2),
        "peak_gib": round(found.evaluation.peak / 2**30, 1),
        "idle": round(1 - busy / (found.evaluation.step_s * devices), 3),
        "schedule": draw(found.schedule).splitlines(),
        "layouts": [way.layout.describe() for way in ways],
    }


def rows(config: str, overrides: Sequence[str], sizes: Sequence[int]) -> Iterator[Row]:
    """Each kind on each number of devices."""
    # One problem serves all sizes, with the parts of a node that are looked at in the largest pool.
    strict, stale = (posed(config, overrides, max(DEVICES), age) for age in (0, 1))
    for devices in sizes:
        for kind in KINDS:
            yield row(stale if kind is Kind.ASYNCHRONOUS else strict, devices, kind)


def ages(config: str, overrides: Sequence[str], sizes: Sequence[int]) -> Iterator[Row]:
    """The best asynchronous schedule by the age that samples may have, beside the temporal one."""
    strict = posed(config, overrides, max(DEVICES))
    for age in AGES:
        problem = posed(config, overrides, max(DEVICES), age)
        for devices in sizes:
            found = best(problem, devices, Kind.ASYNCHRONOUS)
            turns = best(strict, devices, Kind.TEMPORAL)
            if found is None or turns is None:
                continue
            yield {
                "devices": devices,
                "age": age,
                "step_s": round(found.evaluation.step_s, 2),
                "temporal_s": round(turns.evaluation.step_s, 2),
                "schedule": draw(found.schedule).splitlines(),
            }


# Streams


def streams(sizes: Sequence[int]) -> Iterator[Row]:
    """GRPO 7B on policy, its streams with groups as they are complete, and as if they came evenly.

    Two plans beside the temporal one: what a stream gives, and what one would expect of it who
    takes chunks to be equal and to come at even intervals; then what that second plan really takes.
    """
    config, overrides = JOBS["GRPO 7B"]
    for sigma in SIGMAS:
        problem = posed(config, (*overrides, f"plan.sigma={sigma}"), max(sizes))
        smooth = _even(problem)
        for devices in sizes:
            turns = best(problem, devices, Kind.TEMPORAL)
            mixed = best(problem, devices, Kind.HYBRID)
            hoped = best(smooth, devices, Kind.HYBRID)
            assert turns is not None
            assert mixed is not None
            assert hoped is not None
            true = evaluate(problem.problem, _true(problem, hoped.schedule))
            yield {
                "sigma": sigma,
                "devices": devices,
                "temporal_s": round(turns.evaluation.step_s, 2),
                "hybrid_s": round(mixed.evaluation.step_s, 2),
                "hybrid": draw(mixed.schedule).splitlines()[0],
                "even_s": round(hoped.evaluation.step_s, 2),
                "even_true_s": round(true.step_s, 2),
            }


def _even(problem: Posed) -> Posed:
    """The same, with results that come evenly."""
    tasks = tuple(
        replace(task, options=tuple(replace(option, arrivals=None) for option in task.options))
        for task in problem.problem.tasks
    )
    return replace(problem, problem=replace(problem.problem, tasks=tasks))


def _true(problem: Posed, schedule: Schedule) -> Schedule:
    """A schedule with the options of `problem` in place of even ones."""
    if isinstance(schedule, Leaf):
        options = problem.problem.task(schedule.task).options
        return replace(schedule, option=options[schedule.option.label])
    first, second = (_true(problem, part) for part in (schedule.first, schedule.second))
    return replace(schedule, first=first, second=second)


# What is written


def of_kind(found: Sequence[Row], kind: Kind) -> dict[int, float]:
    """Seconds of a step by number of devices, where it fits."""
    return {
        one["devices"]: one["step_s"]
        for one in found
        if one["kind"] == str(kind) and one["step_s"] is not None
    }


def plot(title: str, lines: dict[str, dict[int, float]]) -> str:
    """Ratios over the logarithm of the number of devices."""
    drawn = Plot(
        title=title,
        x="log2 of devices",
        y="of the temporal step",
        lines=tuple(
            Line(name=name, points=tuple((math.log2(n), y) for n, y in points.items()))
            for name, points in lines.items()
        ),
        rules=(),
    )
    return drawn.svg()


def ratios(found: Sequence[Row], kind: Kind) -> dict[int, float]:
    """A kind's step over the temporal one."""
    base = of_kind(found, Kind.TEMPORAL)
    return {n: y / base[n] for n, y in of_kind(found, kind).items() if n in base}


def plots(results: Row) -> Iterator[tuple[str, str]]:
    """Names and pictures."""
    for job, found in results["jobs"].items():
        lines = {str(kind): ratios(found, kind) for kind in KINDS[1:]}
        name = job.lower().replace(" ", "_")
        yield f"what_if_{name}", plot(f"{job} on H100: a step, over the temporal one", lines)
    for kind in (Kind.HYBRID, Kind.ASYNCHRONOUS):
        lines = {f"sigma {s}": ratios(found, kind) for s, found in results["sigma"].items()}
        title = f"GRPO 7B, {kind}, by spread of lengths"
        yield f"what_if_sigma_{kind}", plot(title, lines)


def table(found: Sequence[Row], first: str, key: str = "devices") -> Iterator[str]:
    """Rows of a Markdown table."""
    yield f"| {first} | {' | '.join(str(kind) for kind in KINDS)} | hybrid is |"
    yield "|---|---|---|---|---|---|"
    for value in dict.fromkeys(one[key] for one in found):
        here = {one["kind"]: one for one in found if one[key] == value}
        cells = [_cell(here[str(kind)]) for kind in KINDS]
        schedule = "; ".join(here[str(Kind.HYBRID)].get("schedule", ["-"])[:1])
        yield f"| {value} | {' | '.join(cells)} | {schedule} |"


def _cell(one: Row) -> str:
    return "-" if one["step_s"] is None else f"{one['step_s']:.1f} s"


def report(results: Row) -> Iterator[str]:
    """The table as a document."""
    yield "# What if: kinds of schedules\n"
    yield "Seconds of a step by the analytic costs, written by `python benchmarks/what_if.py`; the"
    yield "schedules and layouts are in what_if.json. The planning guide says what they mean."
    for job, found in results["jobs"].items():
        yield f"\n## {job}\n"
        yield from table(found, "H100")
    for sigma, found in results["sigma"].items():
        yield f"\n## GRPO 7B, sigma {sigma}\n"
        yield from table(found, "H100")
    yield "\n## Published jobs, as far as they are known\n"
    yield from table(results["published"], "job", "job")
    yield "\n## Asynchronous, by the age that samples may have\n"
    yield "Seconds of a step, and how many times as fast as the temporal one.\n"
    yield "| job | H100 | temporal | " + " | ".join(f"age {age}" for age in AGES) + " |"
    yield "|---|---|---|" + "---|" * len(AGES)
    for job, found in results["ages"].items():
        for devices in dict.fromkeys(one["devices"] for one in found):
            here = {one["age"]: one for one in found if one["devices"] == devices}
            base = here[AGES[0]]["temporal_s"]
            steps = [here[age]["step_s"] for age in AGES]
            cells = " | ".join(f"{step:.1f} s ({base / step:.2f})" for step in steps)
            yield f"| {job} | {devices} | {base:.1f} s | {cells} |"
    yield "\n## Streams: groups as they are complete, and as if they came evenly\n"
    yield "GRPO 7B on policy. The last two columns are of the plan that one would take who expects"
    yield "even chunks: what he expects, and what it takes.\n"
    yield "| sigma | H100 | temporal | hybrid | hybrid, even | that one, truly | hybrid is |"
    yield "|---|---|---|---|---|---|---|"
    for one in results["streams"]:
        seconds = (one[name] for name in ("temporal_s", "hybrid_s", "even_s", "even_true_s"))
        cells = " | ".join(f"{value:.1f} s" for value in seconds)
        yield f"| {one['sigma']:g} | {one['devices']} | {cells} | {one['hybrid']} |"


def study() -> Row:
    """All of it."""
    grpo = JOBS["GRPO 7B"]
    published = []
    for name, (devices, overrides) in PUBLISHED.items():
        published += [{"job": name, **one} for one in rows(grpo[0], overrides, (devices,))]
    return {
        "device": DEVICE,
        "jobs": {name: list(rows(*job, DEVICES)) for name, job in JOBS.items()},
        "sigma": {
            f"{sigma:g}": list(rows(grpo[0], (f"plan.sigma={sigma}",), DEVICES)) for sigma in SIGMAS
        },
        "ages": {name: list(ages(*job, DEVICES)) for name, job in JOBS.items()},
        "published": published,
        "streams": list(streams((64, 128, 256, 512, 1024))),
    }


def small() -> Row:
    """A case that takes a second."""
    return {"device": DEVICE, "jobs": {"GRPO 7B": list(rows(*JOBS["GRPO 7B"], (8, 16)))}}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", type=json_file, metavar="FILE")
    options = parser.parse_args()
    if options.small is not None:
        write_result(options.small, json.dumps(small(), indent=1) + "\n")
        return
    require_writable(RESULTS / "what_if.json")
    PLOTS.mkdir(exist_ok=True)
    results = study()
    write_text_atomic(RESULTS / "what_if.json", json.dumps(results, indent=1) + "\n")
    write_text_atomic(RESULTS / "what_if.md", "\n".join(report(results)) + "\n")
    for name, picture in plots(results):
        write_text_atomic(PLOTS / f"{name}.svg", picture)


if __name__ == "__main__":
    main()
