"""How well the simulator predicts runs of this machine, and how large a job it can simulate.

    python benchmarks/simulator.py predict [--rounds 2] [--attempts 3] [--clock wall|processor]
                                           [--work FOLDER] [--only quickstart] [--case CASE]
    python benchmarks/simulator.py scale
    python benchmarks/simulator.py report            results/simulator.json as a document

`predict` warms a model up, takes the lengths of a base run of it, and then in turns profiles the
base config and runs configs that nobody profiled: another seed, twice the prompts, two engines, a
trainer that learns while an engine draws. Each is predicted from the latest profile and the base
run's lengths. Numbers are medians of steps, the first three left out, then of rounds.

With `--work` the warm model, the base run and results stay in a folder, and further calls go on
from there, so that rounds can be made one by one, when the machine is quiet.

A machine that others use makes every time longer, and short measurements less than long steps. So
each profile and run notes how many cores others kept busy meanwhile, by the kernel's count, and is
made again, up to `--attempts` times, where that is more than a tenth of a core; the quietest one
counts. With `--clock processor` all times, of profiles and of runs, are processor seconds of the
main process: what the model has to explain, without the waiting for a core. Engines in processes of
their own are left out there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.files import require_writable
from flowrl.observe.run_folder import RunFolder
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.compare import rest_s
from flowrl.sim.costs import LinearCost
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.run import simulate
from flowrl.sim.step_time import DecodeTable, LinearPrefill, TableStep
from flowrl.sim.workload import Assumed, PromptLengths

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
WARM_UP = 3

MAIN = "from flowrl.cli import main; main()"
ON_PROCESSOR = f"import time; time.monotonic = time.perf_counter = time.process_time; {MAIN}"


@dataclass(frozen=True)
class Subject:
    """A config to predict.

    Attributes:
        warm: Overrides of the run that makes the model.
        steps: Of the base run and of every other.
    """

    config: str
    common: tuple[str, ...]
    warm: tuple[str, ...]
    steps: int
    cases: dict[str, tuple[str, ...]] = field(default_factory=dict)


_DATA = (
    "data.train=tests/data/gsm8k_train.jsonl",
    "data.eval=tests/data/gsm8k_test.jsonl",
)
SUBJECTS = {
    "quickstart": Subject(
        config="configs/quickstart.yaml",
        common=("eval.num=32", "eval.every=0"),
        warm=("train.steps=1",),
        steps=30,
        cases={
            "another seed": ("seed=11",),
            "twice the prompts": ("train.prompts_per_step=128",),
            "two engines": ("roles.actor.num_engines=2", "roles.actor.num_slots=256"),
            "asynchronous": ("workflow=async_grpo", "train.max_staleness=1"),
        },
    ),
    "gsm8k_tiny": Subject(
        config="configs/gsm8k_tiny.yaml",
        common=(*_DATA, "eval.num=4", "eval.every=0", "train.prompts_per_step=8"),
        warm=("train.steps=1", "stage.sft.train.steps=120", "stage.sft.stop=null"),
        steps=8,
        cases={
            "another seed": ("seed=11",),
            "twice the prompts": ("train.prompts_per_step=16",),
            "two engines": ("roles.actor.num_engines=2", "roles.actor.num_slots=128"),
            "asynchronous": ("workflow=async_grpo", "train.max_staleness=1"),
        },
    ),
}


QUIET = 0.1
"""Cores that others may keep busy while something is measured."""


@dataclass(frozen=True)
class Told:
    """What a command printed, and how many cores others kept busy meanwhile."""

    text: str
    others: float


def _busy_s() -> float:
    """Seconds that all cores have worked since the machine began, stolen ones included."""
    user, nice, system, _, _, *rest = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def quietly(attempts: int, *command: str) -> Iterator[Told]:
    """Runs a command until nobody else works meanwhile; at most so many times."""
    for _ in range(attempts):
        own, busy, began = _children_s(), _busy_s(), time.monotonic()
        text = flowrl(*command)
        others = (_busy_s() - busy - (_children_s() - own)) / (time.monotonic() - began)
        yield Told(text=text, others=round(max(0.0, others), 2))
        if others <= QUIET:
            return


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def flowrl(program: str, *words: str) -> str:
    """Runs a command of flowrl in a process of its own; gives what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"flowrl {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def measured(folder: Path, stage: str) -> dict[str, float]:
    """Median seconds of a run's steps by kind, and of whole steps."""
    rows = [row for row in RunFolder.open(folder).steps() if row.stage == stage][WARM_UP:]
    kinds = dict.fromkeys(kind for row in rows for kind in row.seconds)
    found = {kind: median(row.seconds.get(kind, 0.0) for row in rows) for kind in kinds}
    rest = median(rest_s(row) for row in rows)
    return {"step": median(row.wall_s for row in rows), **found, "host": rest}


def predict(
    name: str, rounds: int, attempts: int, clock: str, runs: Path, only: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Rows of one subject: a case, its prediction and what was measured.

    Args:
        runs: Where the warm model and the base run are, or will be.
        only: Cases, in place of all.
    """
    subject = SUBJECTS[name]
    program = ON_PROCESSOR if clock == "processor" else MAIN
    common = [*subject.common, f"runtime.runs={runs}"]
    if not (runs / "warm" / "summary.json").exists():
        flowrl(MAIN, "run", subject.config, *common, *subject.warm, "name=warm")
    common += ["stages=[grpo]", f"roles.actor.model={runs / 'warm' / 'model'}"]
    common += ["roles.actor.tokenizer=null", f"train.steps={subject.steps}"]
    if not (runs / "base" / "summary.json").exists():
        flowrl(MAIN, "run", subject.config, *common, "name=base")
    cases = {"base": (), **subject.cases}
    if clock == "processor":
        cases = {case: cases[case] for case in ("base", "another seed", "twice the prompts")}
    for _ in range(rounds):
        profile = runs / "base.profile.json"
        profiled = _profiled(profile, attempts, program, subject.config, *common)
        for case, changes in cases.items():
            if only and case not in only:
                continue
            words = [subject.config, *common, *changes, "name=case"]
            told = min(quietly(attempts, program, "run", *words), key=lambda told: told.others)
            folder = runs / told.text.split(f"{runs}/")[1].split()[0]
            report = json.loads(
                flowrl(
                    MAIN,
                    *("simulate", *words, "--json", "--steps", str(subject.steps)),
                    *("--profile", str(profile), "--lengths", str(runs / "base")),
                    *("--trace", str(runs / "trace.json")),
                )
            )
            steps = report["steps"][WARM_UP:]
            yield {
                "subject": name,
                "case": case,
                "clock": clock,
                "others": [profiled, told.others],
                "predicted": {
                    "step": median(step["wall_s"] for step in steps),
                    **{
                        kind: median(step["seconds"].get(kind, 0.0) for step in steps)
                        for kind in report["seconds"]
                    },
                },
                "measured": measured(folder, "grpo"),
            }


def _profiled(path: Path, attempts: int, program: str, *words: str) -> float:
    """Writes the profile that was measured with the fewest cores busy; how many.

    One of an earlier call counts too, where it is quieter.
    """
    note = path.with_suffix(".others")
    least = float(note.read_text()) if note.exists() and path.exists() else float("inf")
    if least <= QUIET:
        return least
    trial = path.with_suffix(".trial.json")
    for told in quietly(attempts, program, "profile", *words, "--output", str(trial)):
        if told.others < least:
            least = told.others
            trial.replace(path)
            note.write_text(str(least))
    return least


# Scale


def scale_model(engines: int, slots: int, groups: int, staleness: int) -> SimModel:
    """Engines with the step times of an 8 billion parameter model on an H100, and a trainer."""
    times = TableStep(
        # anchors/engine_steps.json: Qwen3-8B, SGLang, bf16, one H100.
        decode=DecodeTable(
            [
                *((1, 512, 0.00683), (1, 8192, 0.00701), (8, 512, 0.00685), (8, 8192, 0.00992)),
                *((32, 512, 0.00768), (32, 8192, 0.0192), (64, 512, 0.00886), (64, 2048, 0.01345)),
                *((128, 512, 0.01057), (128, 2048, 0.01975)),
            ]
        ),
        prefill=LinearPrefill(call_s=0.008, token_s=3e-5),
    )
    names = [f"engine[{i}]" for i in range(engines)]
    return SimModel(
        name="scale",
        lanes=tuple(LaneModel(name=n, device=n) for n in (*names, "trainer", "driver")),
        engines=tuple(
            EngineModel(name=n, role="actor", lane=n, times=times, num_slots=slots, capacity=slots)
            for n in names
        ),
        rollouts=(
            RolloutModel(
                name="generate",
                role="actor",
                groups=groups,
                settings=SchedulerSettings(group_size=8, max_staleness=staleness),
            ),
        ),
        ops=(
            OpModel(
                name="update",
                op="update",
                lanes=("trainer",),
                cost=LinearCost(call_s=60.0),
                rollout="generate",
                publishes=("actor",),
            ),
        ),
        driver="driver",
        ahead=staleness,
    )


def scale() -> Iterator[dict[str, Any]]:
    """Rows of growing jobs: processor seconds, and microseconds a sample."""
    for engines, samples in ((16, 1024), (32, 2048), (64, 4096), (128, 8192), (256, 16_384)):
        for staleness in (0, 1):
            model = scale_model(engines, 64, samples // 8, staleness)
            workload = Assumed(
                Lognormal(mean=2000, sigma=1.0),
                seed=0,
                prompts=PromptLengths(values=(200,)),
                longest=16_384,
            )
            began = time.process_time()
            report = simulate(model, steps=10, workloads={"generate": workload})
            spent = time.process_time() - began
            yield {
                "engines": engines,
                "samples_per_step": samples,
                "staleness": staleness,
                "in_flight": samples * (1 + staleness),
                "processor_s": round(spent, 2),
                "us_per_sample": round(1e6 * spent / report.samples["admitted"], 1),
                "tokens": report.engines["tokens"],
                "simulated_s": round(report.sim_s, 1),
            }


# Results


def record(key: str, rows: Sequence[dict[str, Any]]) -> None:
    """Puts rows into results/simulator.json, in the place of those of before."""
    path = RESULTS / "simulator.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known["machine"] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    known[key] = list(rows)
    path.write_text(json.dumps(known, indent=1) + "\n")


def report() -> str:
    """The results as a Markdown document."""
    known = json.loads((RESULTS / "simulator.json").read_text())
    lines = ["# The simulator, measured", ""]
    lines += [
        "Made by `python benchmarks/simulator.py predict` (and `scale`). Predictions come "
        "from a profile of the base config alone and the lengths of its run; errors are predicted "
        "over measured, less 1. "
        "*Others* is how many cores other processes kept busy while the profile and the run were "
        "measured.",
        "",
    ]
    for clock in ("wall", "processor"):
        rows = known.get(f"predict, {clock}", [])
        if not rows:
            continue
        lines += [
            f"## Median step time, {clock} clock",
            "",
            "| config | case | predicted ms | measured ms | error | others: profile, run |",
            "|---|---|---|---|---|---|",
        ]
        for (subject, case), some in _grouped(rows).items():
            guess = median(row["predicted"]["step"] for row in some)
            found = median(row["measured"]["step"] for row in some)
            others = "; ".join(f"{row['others'][0]:g}, {row['others'][1]:g}" for row in some)
            lines.append(
                f"| {subject} | {case} | {1e3 * guess:.1f} | {1e3 * found:.1f} | "
                f"{guess / found - 1:+.1%} | {others} |"
            )
        lines += ["", "By kind of work, predicted / measured in ms:", ""]
        for (subject, case), some in _grouped(rows).items():
            kinds = dict.fromkeys(
                k for row in some for k in (*row["predicted"], *row["measured"]) if k != "step"
            )
            told = ", ".join(
                f"{kind} {1e3 * median(r['predicted'].get(kind, 0.0) for r in some):.1f} / "
                f"{1e3 * median(r['measured'].get(kind, 0.0) for r in some):.1f}"
                for kind in kinds
            )
            lines.append(f"- {subject}, {case}: {told}")
        lines.append("")
    if rows := known.get("scale"):
        lines += [
            "## Scale",
            "",
            "10 steps, lognormal lengths of mean 2,000 and sigma 1, 64 slots an engine; processor "
            "seconds of one core.",
            "",
            "| engines | samples a step | staleness | samples in flight | seconds | µs a sample |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['engines']} | {r['samples_per_step']:,} | {r['staleness']} | "
            f"{r['in_flight']:,} | {r['processor_s']} | {r['us_per_sample']} |"
            for r in rows
        ]
    return "\n".join(lines) + "\n"


def _grouped(
    rows: Sequence[dict[str, Any]],
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["subject"], row["case"]), []).append(row)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("predict", "scale", "report"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--only", choices=tuple(SUBJECTS))
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    require_writable(RESULTS / "simulator.json")
    if options.what == "scale":
        rows = []
        for row in scale():
            print(row, flush=True)
            rows.append(row)
        record("scale", rows)
    elif options.what == "predict":
        with tempfile.TemporaryDirectory(prefix="flowrl-bench-") as scratch:
            _predict_all(options, options.work or Path(scratch))
    (RESULTS / "simulator.md").write_text(report())


def _predict_all(options: argparse.Namespace, work: Path) -> None:
    log = work / f"rows-{options.clock}.jsonl"
    for name in [options.only] if options.only else SUBJECTS:
        runs = work / name
        runs.mkdir(parents=True, exist_ok=True)
        for row in predict(
            name, options.rounds, options.attempts, options.clock, runs, options.case
        ):
            guess, found = row["predicted"]["step"], row["measured"]["step"]
            print(
                f"{row['subject']}, {row['case']}: predicted {1e3 * guess:.1f} ms, measured "
                f"{1e3 * found:.1f} ms ({guess / found - 1:+.1%}), others {row['others']}",
                flush=True,
            )
            with log.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    record(f"predict, {options.clock}", rows)


if __name__ == "__main__":
    main()
