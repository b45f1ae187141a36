"""What published remedies for long responses gain in simulation, with plots.

    python benchmarks/simulated_gains.py               simulates, writes results and plots
    python benchmarks/simulated_gains.py ratio 0.5     one experiment, of one sigma of lengths
    python benchmarks/simulated_gains.py plots         plots of the results that are there

The cluster is 16 GPUs with an 8 billion parameter model; a step learns from 512 samples (64
prompts x 8) of lognormal length, mean 2,000 tokens, at most 16,384. Decode times are those of one
H100 (shared anchors: Qwen3-8B, SGLang, bf16); training takes 6 P operations a token at 400
teraflops a GPU. Speed-ups are of steps a second on the same GPUs, after the first steps, over the
synchronous run that learns on the GPUs it draws with.

Results go to results/simulated_gains.json, plots to docs/plots/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flowrl.files import require_writable
from flowrl.rollout.policies.engines import AbortRunning, FinishRunning, KeepRunning, RepackTail
from flowrl.rollout.policies.prompts import AgeBudget, OverSampling
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.costs import LinearCost
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.report import SimReport
from flowrl.sim.run import simulate
from flowrl.sim.step_time import DecodeTable, LinearPrefill, TableStep
from flowrl.sim.workload import Assumed, PromptLengths
from line_plots import Line, Plot, Rule

RESULTS = Path(__file__).resolve().parent / "results" / "simulated_gains.json"
PLOTS = Path(__file__).resolve().parents[1] / "docs" / "plots"

GPUS, SLOTS, GROUPS, SIZE = 16, 64, 64, 8
MEAN, LONGEST, PROMPT = 2000, 16_384, 200
TRAIN_TOKEN_S = 6 * 8.19e9 / 400e12
"""Of one GPU; on n of them a token takes 1/n of it."""
LOAD_S = 1.0
"""16 GB of weights at some 20 GB/s, and the pause around it."""
SIGMAS = (0.5, 0.75, 1.0, 1.25)
WARM_UP = 20
"""Steps, of twice as many; half of them where a step is larger."""

STEP_TIME = TableStep(
    # anchors/engine_steps.json: Qwen3-8B, SGLang, bf16, one H100.
    decode=DecodeTable(
        [
            *((1, 512, 0.00683), (1, 8192, 0.00701), (8, 512, 0.00685), (8, 8192, 0.00992)),
            *((32, 512, 0.00768), (32, 8192, 0.0192), (64, 512, 0.00886), (64, 2048, 0.01345)),
        ]
    ),
    prefill=LinearPrefill(call_s=0.008, token_s=3e-5),
)


def model(
    settings: SchedulerSettings, engines: int, *, shared: bool, groups: int = GROUPS
) -> SimModel:
    """Engines of one GPU each, and a trainer on the others, or on all of them where `shared`."""
    names = tuple(f"gpu[{i}]" for i in range(engines))
    trainer = names if shared else ("trainer",)
    gpus = engines if shared else GPUS - engines
    ahead = settings.max_staleness
    return SimModel(
        name="gains",
        lanes=tuple(
            LaneModel(name=name, device=name) for name in dict.fromkeys((*names, *trainer, "cpu"))
        ),
        engines=tuple(
            EngineModel(
                name=name,
                role="actor",
                lane=name,
                times=STEP_TIME,
                num_slots=SLOTS,
                capacity=SLOTS,
                load_s=LOAD_S,
            )
            for name in names
        ),
        rollouts=(RolloutModel(name="generate", role="actor", groups=groups, settings=settings),),
        ops=(
            OpModel(
                name="update",
                op="update",
                lanes=trainer,
                cost=LinearCost(token_s=TRAIN_TOKEN_S / gpus),
                rollout="generate",
                publishes=("actor",),
            ),
        ),
        driver="cpu",
        ahead=ahead,
    )


def run(
    settings: SchedulerSettings,
    sigma: float,
    *,
    engines: int = GPUS,
    shared: bool = True,
    groups: int = GROUPS,
) -> SimReport:
    """A run of some steps."""
    workload = Assumed(
        Lognormal(mean=MEAN, sigma=sigma),
        seed=0,
        prompts=PromptLengths(values=(PROMPT,)),
        longest=LONGEST,
    )
    made = model(settings, engines, shared=shared, groups=groups)
    steps = max(2 * WARM_UP * GROUPS // groups, 12)
    return simulate(made, steps=steps, workloads={"generate": workload})


def step_s(report: SimReport) -> float:
    """Mean seconds of a step, the first ones left out: they fill what later ones find."""
    return mean(step.wall_s for step in report.steps[len(report.steps) // 2 :])


def tokens_per_s(report: SimReport) -> float:
    """Response tokens that steps learned from in a second."""
    later = report.steps[len(report.steps) // 2 :]
    return sum(step.num_tokens for step in later) / sum(step.wall_s for step in later)


def synchronous(sigma: float) -> SimReport:
    """The baseline."""
    return run(SchedulerSettings(group_size=SIZE), sigma)


def asynchronous(
    sigma: float, age: int, *, groups: int = GROUPS, **policies: Any
) -> tuple[int, SimReport]:
    """Engines beside the trainer: the best way to share the GPUs out, and its run."""
    settings = SchedulerSettings(
        group_size=SIZE,
        max_staleness=age,
        admission=AgeBudget(groups=groups),
        **policies,
    )
    runs = [
        (n, run(settings, sigma, engines=n, shared=False, groups=groups)) for n in (8, 10, 12, 14)
    ]
    return max(runs, key=lambda pair: tokens_per_s(pair[1]))


# What is simulated


def ratios(sigma: float) -> Iterator[dict[str, Any]]:
    """How old samples may be."""
    base = tokens_per_s(synchronous(sigma))
    yield {"age": 0, "engines": GPUS, "speedup": 1.0}
    for age in (1, 2, 4, 8):
        engines, report = asynchronous(sigma, age)
        yield {"age": age, "engines": engines, "speedup": tokens_per_s(report) / base}


def partial(sigma: float) -> Iterator[dict[str, Any]]:
    """What becomes of running samples when weights are published, at an age of at most 4."""
    for groups in (GROUPS, 4 * GROUPS):
        drained = asynchronous(sigma, 4, groups=groups, publication=FinishRunning())[1]
        for name, policy in (("keep", KeepRunning()), ("abort", AbortRunning())):
            report = asynchronous(sigma, 4, groups=groups, publication=policy)[1]
            yield {
                "publication": name,
                "samples": groups * SIZE,
                "step_s": step_s(report),
                "speedup": tokens_per_s(report) / tokens_per_s(drained),
            }


def over_sampling(sigma: float) -> Iterator[dict[str, Any]]:
    """Spare members that are thrown away; and spare prompts whose samples go on in the next step.

    Both learn on the GPUs that draw. With spare prompts a batch takes what is ready first, and
    what runs then stops for the update and goes on behind it, one publication older.
    """
    plain = synchronous(sigma)
    for spare in (1, 2, 4, 8):
        members = SchedulerSettings(group_size=SIZE, over_sampling=OverSampling(members=spare))
        prompts = SchedulerSettings(
            group_size=SIZE,
            max_staleness=4,
            refill=True,
            # Slack: of what may be in flight, no more than a batch and the spare prompts.
            admission=AgeBudget(groups=GROUPS, slack=4 * GROUPS),
            over_sampling=OverSampling(prompts=spare * GROUPS // SIZE),
        )
        for kind, settings in (("members", members), ("prompts", prompts)):
            report = run(settings, sigma)
            yield {
                "kind": kind,
                "share": spare / SIZE,
                "speedup": tokens_per_s(report) / tokens_per_s(plain),
                "steps": step_s(plain) / step_s(report),
                "age_mean": sum(a * n for a, n in report.ages.items()) / sum(report.ages.values()),
                "dropped": report.samples["dropped"] / report.samples["admitted"],
            }


def repacking(sigma: float) -> Iterator[dict[str, Any]]:
    """The tail of a synchronous step on fewer engines: what is freed, and what it costs."""
    plain = synchronous(sigma)
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2):
        packed = run(SchedulerSettings(group_size=SIZE, repack=RepackTail(share=share)), sigma)
        yield {
            "share": share,
            "speedup": tokens_per_s(packed) / tokens_per_s(plain),
            "gpu_time": busy_s(packed) / busy_s(plain),
        }


def busy_s(report: SimReport) -> float:
    """Seconds that GPUs draw or learn, be it for a single row."""
    return sum(lane.busy_s for lane in report.lanes if lane.lane.startswith("gpu"))


EXPERIMENTS = {
    "ratio": ratios,
    "partial": partial,
    "over_sampling": over_sampling,
    "repack": repacking,
}


# Plots


def plots(found: dict[str, list[dict[str, Any]]]) -> dict[str, Plot]:
    """By name, with published figures as rules."""
    return {
        "asynchronous_ratio": ratio_plot(found["ratio"]),
        "partial_rollouts": partial_plot(found["partial"]),
        "over_sampling": spare_prompts_plot(found["over_sampling"]),
        "spare_members": spare_members_plot(found["over_sampling"]),
        "tail_repacking": repack_plot(found["repack"]),
    }


def ratio_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """Asynchronous runs."""
    return Plot(
        title="Asynchronous over synchronous, same GPUs",
        x="age of samples at most (asynchronous ratio)",
        y="speed-up",
        lines=by_sigma(rows, "age"),
        rules=(
            Rule(y=2.24, name="ROLL Flash, RLVR, at most"),
            Rule(y=2.77, name="AReaL, at most"),
            Rule(y=1.70, name="RLinf, reasoning, at most"),
        ),
    )


def partial_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """What running samples do when there are new weights; those without a run have no line."""
    lines = {
        f"{name}, {samples:,} a step": tuple(
            (row["sigma"], row["speedup"])
            for row in rows
            if (row["publication"], row["samples"]) == (name, samples)
        )
        for name in ("keep", "abort")
        for samples in (GROUPS * SIZE, 4 * GROUPS * SIZE)
    }
    return Plot(
        title="Interrupting at new weights, over finishing first (age 4)",
        x="sigma of lengths",
        y="speed-up",
        lines=tuple(Line(name=name, points=points) for name, points in lines.items() if points),
        rules=(Rule(y=1.12, name="AReaL 1.5B"), Rule(y=1.17, name="AReaL 7B")),
    )


def spare_prompts_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """Over-sampling of prompts."""
    return Plot(
        title="Spare prompts that go on in the next step",
        x="spare prompts, share of a batch",
        y="speed-up",
        lines=by_sigma([row for row in rows if row["kind"] == "prompts"], "share"),
        rules=(Rule(y=1.225, name="APRIL, mean"), Rule(y=1.44, name="APRIL, at most")),
    )


def spare_members_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """Over-sampling within groups; a sigma without a run has no line."""
    members = [row for row in rows if row["kind"] == "members"]
    lines = by_sigma(members, "share", value="steps")
    return Plot(
        title="Spare members that are thrown away",
        x="spare members, share of a group",
        y="speed-up of steps",
        lines=tuple(line for line in lines if line.points),
        rules=(),
    )


def repack_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """Tails on fewer engines."""
    return Plot(
        title="GPU time of the same samples with the tail repacked",
        x="share of the GPUs in use that the tail must fit on",
        y="of that without",
        lines=by_sigma(rows, "share", value="gpu_time"),
        rules=(),
    )


def by_sigma(rows: Sequence[dict[str, Any]], x: str, value: str = "speedup") -> tuple[Line, ...]:
    """A line for each sigma."""
    return tuple(
        Line(
            name=f"sigma {sigma:g}",
            points=tuple((row[x], row[value]) for row in rows if row["sigma"] == sigma),
        )
        for sigma in SIGMAS
    )


def simulated(name: str, sigma: float) -> list[dict[str, Any]]:
    """The rows of an experiment, shown as they come."""
    rows = []
    for row in EXPERIMENTS[name](sigma):
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        rows.append({"sigma": sigma, **rounded})
        print(name, rows[-1], flush=True)
    return rows


def main() -> None:
    """See the module."""
    match sys.argv[1:]:
        case ["plots"]:
            parts: list[tuple[str, float]] = []
        case [word, number]:
            parts = [(word, float(number))]
        case _:
            parts = [(name, sigma) for name in EXPERIMENTS for sigma in SIGMAS]
    require_writable(RESULTS)
    PLOTS.mkdir(parents=True, exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, sigma in parts:
        others = [row for row in known.get(name, []) if row["sigma"] != sigma]
        known[name] = sorted(others + simulated(name, sigma), key=lambda row: row["sigma"])
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    if any(len({row["sigma"] for row in known.get(name, [])}) < 2 for name in EXPERIMENTS):
        return  # there is not enough to draw yet
    for name, plot in plots(known).items():
        (PLOTS / f"{name}.svg").write_text(plot.svg())


if __name__ == "__main__":
    main()
