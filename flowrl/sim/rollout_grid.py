"""Planned rollouts beside the scheduler and engines that draw their samples, over a grid.

What a plan takes in closed form (`flowrl.cost.rollout_time`) the simulator plays: R replicas of an
engine, each with slots and a cache, are given groups of a lognormal length by the scheduler that
runs have. Both ask the same cost for the seconds of a step and of a prompt, so what is left between
them is what plans assume of samples: who starts when, who is put back, who ends last.

    python -m flowrl.sim.rollout_grid              a part of the grid, as the tests run it
    python -m flowrl.sim.rollout_grid --whole      all of it, a quarter of an hour
    python -m flowrl.sim.rollout_grid --json FILE  every case too, as JSON

Of each case it prints the seconds that are planned and simulated, their ratio, and the standard
error of the latter, for lengths are drawn; then the median of the errors and how many there are of
more than 5 and 10 %. A case is far off where the ratio differs from 1 by more than `FAR`, beyond
twice the standard error; one is enough for exit code 1.
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

from flowrl.backend.capabilities import GIVEN_PER_SLOT
from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths, lognormal_before_cut
from flowrl.cost.models import ModelShape
from flowrl.cost.occupancy import reserve_tokens
from flowrl.files import write_result
from flowrl.rollout import SchedulerSettings
from flowrl.sim.cost_steps import AnalyticStep
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.run import simulate
from flowrl.sim.workload import Assumed, PromptLengths
from flowrl.testing.arguments import json_file
from flowrl.wording import percent

__all__ = ["FAR", "PART", "WHOLE", "RolloutCase", "RolloutCheck", "check_case", "main"]

FAR = 0.15
"""Of simulated seconds: what no case may be off by."""

GROUP, PROMPT, MEAN, LONGEST = 8, 256, 1000.0, 8192
AMPLE = 0.0
"""A cache that is never full."""

RUNS, SAMPLES = 6, 4096
"""Rollouts of a case that are simulated at least, and samples of all of them."""

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
        slots: Rows of a replica at most; as many as it has samples where they are no limit.
        samples: Of each replica.
        sigma: Of the logarithm of lengths.
        cache: Of a replica, in multiples of the longest sample with its prompt; `AMPLE`.
    """

    replicas: int
    samples: int
    slots: int
    sigma: float
    cache: float

    @property
    def kv_tokens(self) -> int:
        """Tokens that a replica has room for."""
        return round((self.cache or 2 * self.slots) * (PROMPT + LONGEST))

    @property
    def fills(self) -> bool:
        """Whether so many of the longest but one in a thousand fill the cache."""
        most = PROMPT + self.lengths.quantile(0.999)
        return self.slots * most > self.kv_tokens

    @property
    def lengths(self) -> Lengths:
        """Of responses."""
        return lognormal_before_cut(mean=MEAN, sigma=self.sigma, maximum=LONGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCheck:
    """A case and what came of it.

    Attributes:
        error_s: Standard error of the simulated seconds.
    """

    case: RolloutCase
    planned_s: float
    simulated_s: float
    error_s: float

    @property
    def ratio(self) -> float:
        """Planned over simulated."""
        return self.planned_s / self.simulated_s

    @property
    def far(self) -> bool:
        """Whether it is off by more than chance explains."""
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
    """Slots that are no limit are there once, so are caches that are never full, and no batch has
    more samples than `most`."""
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
PART = _grid((1, 8), (32,), (16,), (0.3, 1.5), (AMPLE, 1.2), 256)


def check_case(case: RolloutCase) -> RolloutCheck:
    """Plans a case, and simulates it some times with other lengths."""
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
    """Seconds of the rollout as plans have it."""
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
    """Seconds of a rollout whose lengths are drawn from a seed."""
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
    """The median of the errors and how many are large, over all and by cache."""
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
    """Plays the grid and prints a table; 1 where a case is far off."""
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
