"""Compares planned rollout times with simulated ones, over a grid.

A plan computes the seconds of a rollout in closed form (`flowrl.cost.rollout_time`). The simulator
plays the same rollout: the real scheduler gives groups of lognormal length to R replicas of an
engine, each with slots and a KV cache. Both take the seconds of a decode step and of a prefill from
the same cost model. They differ only in what plans assume of samples: when each starts, which are
preempted, which ends last.

    python -m tests.proofs.rollout_grid              compares a part of the grid, as the tests do
    python -m tests.proofs.rollout_grid --whole      compares the whole grid in 15 minutes
    python -m tests.proofs.rollout_grid --json FILE  writes every case as JSON too

For each case it prints the planned and the simulated seconds, their ratio, and the standard error
of the simulated seconds, because lengths are sampled; then the median error and the number of
errors above 5 and 10 %. A case is far off where the difference is larger than `FAR` of the
simulated seconds plus twice the standard error. The exit code is 1 where any case is far off.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product

from benchmarks.arguments import json_file
from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths, lognormal_before_cut
from flowrl.cost.models import ModelShape
from flowrl.cost.occupancy import reserve_tokens
from flowrl.files import write_result
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.cost_steps import AnalyticStep
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.run import simulate
from flowrl.sim.workload import Assumed, PromptLengths
from flowrl.wording import percent

__all__ = ["FAR", "PART", "WHOLE", "RolloutCase", "RolloutCheck", "check_case", "main"]

FAR = 0.15
"""Largest allowed error, as a share of the simulated seconds."""

GROUP, PROMPT, MEAN, LONGEST = 8, 256, 1000.0, 8192
AMPLE = 0.0
"""Value of `RolloutCase.cache` for a cache that is never full."""

RUNS, SAMPLES = 6, 4096
"""Minimum number of simulated rollouts of a case, and of samples in all of them."""

_COST = AnalyticCost()
_MACHINE = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
_SHAPE = ModelShape.from_hf_config(
    {
        "model_type": "qwen2",  # Qwen2.5-7B
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCase:
    """One point of the grid.

    Attributes:
        replicas: Number of engine replicas.
        samples: Samples of each replica.
        slots: Maximum number of samples that a replica decodes at once.
        sigma: Standard deviation of the logarithm of lengths.
        cache: KV cache of a replica in multiples of the longest sample with its prompt, or `AMPLE`.
    """

    replicas: int
    samples: int
    slots: int
    sigma: float
    cache: float

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of a replica holds."""
        return round((self.cache or 2 * self.slots) * (PROMPT + LONGEST))

    @property
    def fills(self) -> bool:
        """Whether `slots` samples of the 99.9 % quantile of lengths fill the cache."""
        most = PROMPT + self.lengths.quantile(0.999)
        return self.slots * most > self.kv_tokens

    @property
    def lengths(self) -> Lengths:
        """The distribution of response lengths."""
        return lognormal_before_cut(mean=MEAN, sigma=self.sigma, maximum=LONGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCheck:
    """A case with its planned and simulated seconds.

    Attributes:
        case: The case.
        planned_s: Seconds of the rollout by the plan.
        simulated_s: Mean seconds of the simulated rollouts.
        error_s: Standard error of the simulated seconds.
    """

    case: RolloutCase
    planned_s: float
    simulated_s: float
    error_s: float

    @property
    def ratio(self) -> float:
        """Planned seconds divided by simulated seconds."""
        return self.planned_s / self.simulated_s

    @property
    def far(self) -> bool:
        """Whether the error is larger than allowed and than chance explains."""
        off = abs(self.planned_s - self.simulated_s)
        return off > FAR * self.simulated_s + 2 * self.error_s


def _grid(
    replicas: Sequence[int],
    samples: Sequence[int],
    slots: Sequence[int],
    sigmas: Sequence[float],
    caches: Sequence[float],
    most: int,
) -> tuple[RolloutCase, ...]:
    """Returns the cases without those in which slots or cache repeat another case.

    No batch has more samples than `most`.
    """
    found = (
        RolloutCase(replicas=r, samples=n, slots=k, sigma=sigma, cache=cache)
        for r, n in product(replicas, samples)
        if r * n <= most
        for k in (*(k for k in slots if k < n), n)
        for sigma, cache in product(sigmas, caches)
    )
    return tuple(case for case in found if case.cache == AMPLE or case.fills)


WHOLE = _grid(
    (1, 2, 8, 32),
    (8, 32, 128, 512),
    (8, 16, 64),
    (0.1, 0.3, 0.5, 1.0, 1.5),
    (AMPLE, 4.0, 2.0, 1.2),
    4096,
)
PART = [
    *_grid((1,), (32,), (16,), (1.5,), (AMPLE, 1.2), 256),
    *_grid((8,), (32,), (16,), (0.3, 1.5), (AMPLE, 1.2), 256),
]


def check_case(case: RolloutCase) -> RolloutCheck:
    """Plans a case, and simulates it several times with different lengths."""
    play = _player(case)
    number = max(RUNS, math.ceil(SAMPLES / (case.replicas * case.samples)))
    took = [play(seed) for seed in range(number)]
    return RolloutCheck(
        case=case,
        planned_s=planned_s(case),
        simulated_s=statistics.fmean(took),
        error_s=statistics.stdev(took) / math.sqrt(number),
    )


def planned_s(case: RolloutCase) -> float:
    """Returns the seconds of the rollout as a plan computes them."""
    return _COST.rollout(
        _SHAPE,
        Layout(dp=case.replicas),
        _MACHINE,
        samples=case.replicas * case.samples,
        group_size=GROUP,
        prompt_tokens=PROMPT,
        lengths=case.lengths,
        slots=case.slots,
        kv_tokens=case.kv_tokens,
    ).seconds


@lru_cache(maxsize=1)
def _step() -> AnalyticStep:
    return AnalyticStep(_COST, _SHAPE, Layout(), _MACHINE)


def _player(case: RolloutCase) -> Callable[[int], float]:
    """Returns a function that simulates the rollout with lengths of a seed, in seconds."""
    names = [f"engine[{i}]" for i in range(case.replicas)]
    model = SimModel(
        name="rollout",
        lanes=tuple(LaneModel(name=lane, device=lane) for lane in (*names, "driver")),
        engines=tuple(
            EngineModel(
                name=name,
                role="actor",
                lane=name,
                times=_step(),
                num_slots=case.slots,
                capacity=GIVEN_PER_SLOT * case.slots,
                kv_tokens=case.kv_tokens,
                keeps_prefixes=True,
                reserve=round(reserve_tokens(case.lengths.mean)),
            )
            for name in names
        ),
        rollouts=(
            RolloutModel(
                name="generate",
                role="actor",
                groups=case.replicas * case.samples // GROUP,
                settings=SchedulerSettings(group_size=GROUP),
            ),
        ),
        ops=(OpModel(name="update", op="update", lanes=tuple(names), rollout="generate"),),
        driver="driver",
    )

    def play(seed: int) -> float:
        drawn = Assumed(
            Lognormal(mean=MEAN, sigma=case.sigma),
            seed=seed,
            prompts=PromptLengths(values=(PROMPT,)),
            longest=LONGEST,
        )
        return simulate(model, steps=1, workloads={"generate": drawn}).sim_s

    return play


def _lines(checks: Sequence[RolloutCheck]) -> Iterator[str]:
    """Yields the median error and the number of large errors, in total and by cache."""
    rows = [("all", list(checks))]
    for cache in sorted({check.case.cache for check in checks}):
        some = [check for check in checks if check.case.cache == cache]
        rows.append((f"cache x{cache:g}" if cache else "ample cache", some))
    for name, some in rows:
        off = [abs(check.ratio - 1) for check in some]
        ratios = [check.ratio for check in some]
        yield (
            f"{name:<12} {len(off):>4} cases, median {percent(statistics.median(off), 1)} off, "
            f"{sum(one > 0.05 for one in off)} above 5 %, {sum(one > 0.1 for one in off)} above "
            f"10 %, planned over simulated {min(ratios):.3f} to {max(ratios):.3f}"
        )


def _json(checks: Sequence[RolloutCheck]) -> str:
    return json.dumps([{**asdict(check), "ratio": check.ratio} for check in checks], indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the grid and prints a table; returns 1 where a case is far off."""
    parser = argparse.ArgumentParser(description="Planned rollouts beside simulated ones.")
    parser.add_argument("--whole", action="store_true", help="the whole grid")
    parser.add_argument("--json", type=json_file, help="write every case there")
    options = parser.parse_args(argv)
    began = time.monotonic()
    print("replicas samples slots sigma cache  planned simulated  ratio   error")
    checks = []
    for case in WHOLE if options.whole else PART:
        check = check_case(case)
        checks.append(check)
        cache = f"x{case.cache:g}" if case.cache else "ample"
        print(
            f"{case.replicas:>8} {case.samples:>7} {case.slots:>5} {case.sigma:>5g} {cache:>5} "
            f"{check.planned_s:>8.2f} {check.simulated_s:>9.2f} {check.ratio:>6.3f} "
            f"{percent(check.error_s / check.simulated_s, 1):>7}{'  far' if check.far else ''}",
            flush=True,
        )
    for line in _lines(checks):
        print(line)
    if options.json is not None:
        write_result(options.json, _json(checks) + "\n")
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(check.far for check in checks))


if __name__ == "__main__":
    sys.exit(main())
