"""Checks by simulation, over a grid, the bounds that no schedule of samples may break.

K slots work on N samples a step. A sample of n tokens takes n decode steps of its slot, m on
average and L at most; learning from a sample takes E t of a slot, and a samples' weights may be so
many publications old. Then

1. one batch takes at most `sum / K + L` (list scheduling: Graham, 1966);
2. a sample takes at most `m / K + L / Q` on average, with Q = N, or (a + 1) N when asynchronous;
3. a step takes at most `N (m + E t) / K + L / (a + 1)`, where sampling and learning share the
   slots as they need them;
4. an asynchronous run is at most `1 + K L / (N (m + E t))` times as fast as a synchronous one.

2 to 4 are those of "ROLL Flash", 2025, with the mean and maximum of all samples that were offered
in the run: what is learned from first is shorter on average, for it was ready first. Times are
decode steps.

    python -m tests.proofs.schedule_bounds            checks a part of the grid, as the tests do
    python -m tests.proofs.schedule_bounds --whole    checks the whole grid in a few minutes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.costs import LinearCost
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.report import SimReport
from flowrl.sim.run import simulate
from flowrl.sim.step_time import ConstantStep
from flowrl.sim.workload import Assumed, GroupDraw, PromptLengths

__all__ = ["PART", "WHOLE", "BoundCase", "BoundCheck", "check_case", "main"]

_MEAN, _LONGEST = 200.0, 4000
_STEPS = 10
"""At least a + 1: at the end of a run slots have worked on samples of later steps, up to L each."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCase:
    """One point of the grid.

    Attributes:
        slots: K, the number of slots.
        samples: N, the number of samples of a step.
        staleness: a, in publications; 0 is synchronous.
        sigma: Standard deviation of the logarithm of lengths.
        group_size: Samples of a prompt.
        slots_per_engine: Slots of one engine.
        seed: Seed of the lengths.
    """

    slots: int
    samples: int
    staleness: int
    sigma: float
    group_size: int = 8
    slots_per_engine: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCheck:
    """A bound and the value that the simulation found."""

    name: str
    found: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the bound holds."""
        return self.found <= self.bound * (1 + _ROUNDING)


def _grid(
    slots: Sequence[int], samples: Sequence[int], ages: Sequence[int], sigmas: Sequence[float]
) -> tuple[BoundCase, ...]:
    return tuple(
        BoundCase(slots=k, samples=n, staleness=a, sigma=sigma)
        for k, n, a, sigma in product(slots, samples, ages, sigmas)
    )


WHOLE = _grid((8, 64, 256), (64, 512, 4096), (0, 1, 2, 8), (0.0, 0.5, 1.0, 1.5))
PART = [
    *_grid((8, 64), (64,), (0, 1, 8), (0.0, 1.5)),
    *_grid((8,), (512,), (1,), (0.0, 1.5)),
]


class _Steps:
    """Lengths as decode steps: the first token of a sample comes with its prefill, for nothing."""

    def __init__(self, case: BoundCase) -> None:
        self._inner = Assumed(
            Lognormal(mean=_MEAN, sigma=case.sigma),
            seed=case.seed,
            prompts=PromptLengths(values=(1,)),
            longest=_LONGEST,
        )

    def group(self, number: int, size: int) -> GroupDraw:
        draw = self._inner.group(number, size)
        return GroupDraw(prompt_tokens=1, lengths=tuple(n + 1 for n in draw.lengths))

    def __str__(self) -> str:
        return str(self._inner)

    def steps_of(self, num_groups: int, size: int) -> list[int]:
        """Returns the decode steps of all samples of the first `num_groups` groups."""
        return [n for g in range(num_groups) for n in self._inner.group(g, size).lengths]


def check_case(case: BoundCase) -> list[BoundCheck]:
    """Simulates a case and compares it with every bound that applies to it."""
    k, n, a = case.slots, case.samples, case.staleness
    workload = _Steps(case)
    first = workload.steps_of(n // case.group_size, case.group_size)
    one = _run(case, workload, staleness=0, learn_s=0.0, steps=1)
    batch = BoundCheck(name="one batch", found=one.sim_s, bound=sum(first) / k + max(first))
    sampling = _Run.of(_run(case, workload, staleness=a, learn_s=0.0), workload, case)
    sample = BoundCheck(
        name="sample",
        found=sampling.step / n,
        bound=sampling.mean / k + sampling.longest / ((a + 1) * n),
    )
    # Learning takes as much of the slots as sampling does: E t = m.
    learn_s = n * _MEAN / k
    run = _Run.of(_run(case, workload, staleness=a, learn_s=learn_s), workload, case)
    work = n * run.mean / k + learn_s
    step = BoundCheck(name="step", found=run.step, bound=work + run.longest / (a + 1))
    if a == 0:
        return [batch, sample, step]
    plain = _run(case, workload, staleness=0, learn_s=learn_s)
    synchronous = _Run.of(plain, workload, case)
    both = max(run.longest, synchronous.longest)
    return [
        batch,
        sample,
        step,
        BoundCheck(name="speed-up", found=synchronous.step / run.step, bound=1 + both / work),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Results of a simulation, in decode steps.

    Attributes:
        step: Mean length of a step.
        mean: Mean length of the samples that were offered (m).
        longest: Maximum length of these samples (L).
    """

    step: float
    mean: float
    longest: int

    @staticmethod
    def of(report: SimReport, workload: _Steps, case: BoundCase) -> _Run:
        groups = report.samples["admitted"] // case.group_size
        lengths = workload.steps_of(groups, case.group_size)
        return _Run(
            step=report.sim_s / len(report.steps),
            mean=sum(lengths) / len(lengths),
            longest=max(lengths),
        )


def _run(
    case: BoundCase, workload: _Steps, *, staleness: int, learn_s: float, steps: int = _STEPS
) -> SimReport:
    """Simulates engines and a trainer that takes all of their slots while it learns."""
    each = min(case.slots_per_engine, case.slots)
    names = [f"engine[{i}]" for i in range(case.slots // each)]
    model = SimModel(
        name="bounds",
        lanes=tuple(LaneModel(name=name, device=name) for name in (*names, "driver")),
        engines=tuple(
            EngineModel(
                name=name,
                role="actor",
                lane=name,
                times=ConstantStep(step_s=1.0, prefill=0.0),
                num_slots=each,
                capacity=each,
            )
            for name in names
        ),
        rollouts=(
            RolloutModel(
                name="generate",
                role="actor",
                groups=case.samples // case.group_size,
                settings=SchedulerSettings(group_size=case.group_size, max_staleness=staleness),
            ),
        ),
        ops=(
            OpModel(
                name="update",
                op="update",
                lanes=tuple(names),
                cost=LinearCost(call_s=learn_s),
                rollout="generate",
                publishes=("actor",),
            ),
        ),
        driver="driver",
        ahead=staleness,
    )
    return simulate(model, steps=steps, workloads={"generate": workload})


def _lines(cases: Sequence[BoundCase]) -> Iterator[tuple[str, bool]]:
    """Yields a line per bound: cases, broken cases, and the largest share of the bound."""
    nearest: dict[str, float] = {}
    broken: dict[str, list[str]] = {}
    number: dict[str, int] = {}
    for case in cases:
        for check in check_case(case):
            number[check.name] = number.get(check.name, 0) + 1
            share = check.found / check.bound
            nearest[check.name] = max(nearest.get(check.name, 0.0), share)
            if not check.holds:
                broken.setdefault(check.name, []).append(
                    f"K={case.slots} N={case.samples} a={case.staleness} sigma={case.sigma:g}: "
                    f"{check.found:.6g} > {check.bound:.6g}"
                )
    for name, cases_of in number.items():
        found = broken.get(name, [])
        yield (
            f"{name:<10} {cases_of:>4} cases, {len(found)} broken, nearest {nearest[name]:.4f}",
            not found,
        )
        for text in found:
            yield f"  {text}", False


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the grid and prints a table; returns 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description="Checks the bounds of schedules by simulation.")
    parser.add_argument("--whole", action="store_true", help="the whole grid")
    options = parser.parse_args(argv)
    began = time.monotonic()
    held = True
    for line, good in _lines(WHOLE if options.whole else PART):
        print(line)
        held = held and good
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
