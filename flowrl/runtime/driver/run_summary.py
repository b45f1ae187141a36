"""The counters of a run for its summary, kept in every checkpoint, and metrics of evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.config.schema import RunConfig
from flowrl.errors import CheckpointError, RewardError
from flowrl.observe.rows import EvaluationRow, Summary
from flowrl.observe.run_folder import RunFolder, installed_versions
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.step_report import StepResult
from flowrl.specs import FinishReason

__all__ = ["RunTotals", "ended_at", "evaluation_metrics"]


_LIBRARIES = ("flowrl", "torch", "transformers", "numpy", "tokenizers")


def ended_at(state: Mapping[str, object], stage: str, step: int) -> bool:
    """True if, by a checkpoint's state, a stop criterion ended the stage after `step`."""
    ledger = state.get("ledger")
    settled = ledger.get("settled") if isinstance(ledger, Mapping) else None
    return settled == [stage, step, True]


class RunTotals:
    """Adds up steps, samples, tokens and seconds over all resumptions of a run.

    Args:
        clock: Returns seconds that only grow.

    Attributes:
        before: Held-out metrics before the last stage; None until measured.
        after: Held-out metrics at the end.
    """

    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._started = clock()
        self._wall_s = 0.0
        self._seconds: dict[str, dict[str, float]] = {}
        self._steps: dict[str, int] = {}
        self._samples: dict[str, int] = {}
        self._num_tokens = 0
        self._num_example_tokens = 0
        self._settled: tuple[str, int, bool] | None = None
        self.before: Mapping[str, float] | None = None
        self.after: Mapping[str, float] | None = None

    def add(self, result: StepResult, *, logging_s: float) -> None:
        """Counts a step."""
        metrics = result.metrics
        seconds = self._seconds.setdefault(metrics.stage, {})
        for kind, spent in (*metrics.seconds.items(), ("log", logging_s)):
            seconds[kind] = seconds.get(kind, 0.0) + spent
        seconds["step"] = seconds.get("step", 0.0) + metrics.wall_s
        self._steps[metrics.stage] = metrics.step
        if result.samples:
            self._num_tokens += metrics.num_tokens
        else:
            self._num_example_tokens += metrics.num_tokens
        for row in result.samples:
            self._samples[row.end] = self._samples.get(row.end, 0) + 1

    def add_evaluation(self, row: EvaluationRow) -> None:
        """Counts the time of an evaluation."""
        seconds = self._seconds.setdefault(row.stage, {})
        seconds["evaluate"] = seconds.get("evaluate", 0.0) + row.seconds

    def step_of(self, stage: str) -> int:
        """Steps of a stage made so far."""
        return self._steps.get(stage, 0)

    def settle(self, stage: str, step: int, reached: bool) -> None:
        """Marks the boundary after `step` as done; `reached` ends the stage there."""
        self._settled = (stage, step, reached)

    def settled(self, stage: str, step: int) -> bool | None:
        """True if the stage ended at that boundary; None if it is not settled yet."""
        if self._settled is None or self._settled[:2] != (stage, step):
            return None
        return self._settled[2]

    def state(self) -> dict[str, object]:
        """Returns the totals as JSON for a checkpoint."""
        return {
            "ledger": {
                "wall_s": self._elapsed(),
                "seconds": self._seconds,
                "steps": self._steps,
                "samples": self._samples,
                "num_tokens": self._num_tokens,
                "num_example_tokens": self._num_example_tokens,
                "settled": self._settled,
                "before": self.before,
                "after": self.after,
            }
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Goes on from what `state` gave.

        Raises:
            CheckpointError: the checkpoint holds none.
        """
        ledger: Any = state.get("ledger")
        if not isinstance(ledger, Mapping):
            raise CheckpointError("the checkpoint holds no ledger", where="state.json")
        self._wall_s = float(ledger["wall_s"])
        self._seconds = {stage: dict(kinds) for stage, kinds in ledger["seconds"].items()}
        self._steps = dict(ledger["steps"])
        self._samples = dict(ledger["samples"])
        self._num_tokens = int(ledger["num_tokens"])
        self._num_example_tokens = int(ledger.get("num_example_tokens", 0))
        settled = ledger["settled"]
        self._settled = None if settled is None else (settled[0], settled[1], settled[2])
        self.before, self.after = ledger["before"], ledger["after"]

    def summary(self, folder: RunFolder, num_held_out: int) -> Summary:
        """Returns the summary at the end of the run."""
        config = self._config
        metric = self._metric()
        return Summary(
            name=config.name,
            folder=str(folder),
            seed=config.seed,
            metric=metric,
            temperature=config.eval.temperature,
            before=None if self.before is None else self.before.get(metric),
            after=None if self.after is None else self.after.get(metric),
            num_held_out=num_held_out,
            wall_s=self._elapsed(),
            seconds=self._seconds,
            steps=self._steps,
            samples=self._samples,
            num_tokens=self._num_tokens,
            num_example_tokens=self._num_example_tokens,
            libraries=installed_versions(_LIBRARIES),
        )

    def _metric(self) -> str:
        """Returns the metric of the last line: the configured one, or the score without one.

        A name that the user wrote is measured, as the configuration's checks prove; the default
        need not be.
        """
        asked, measured = self._config.eval.metric, self.after or self.before
        return asked if measured is None or asked in measured else "score"

    def _elapsed(self) -> float:
        return self._wall_s + self._clock() - self._started


def evaluation_metrics(payloads: Sequence[Payload]) -> dict[str, float]:
    """Means over scored samples: each term by name, `score`, `length` in response tokens, and
    `truncated`, the share that met max_tokens (of episodes: that ended before they were done).

    A term that an episode does not have counts as 0 there.

    Raises:
        RewardError: no sample has a score.
    """
    if not payloads:
        raise RewardError(
            "no held-out sample was scored: the reward failed for all of them",
            where="eval",
            hint="fix the reward function; with rewards.max_failures=0 the run stops at the first",
        )
    names = sorted({name for payload in payloads for name in payload.terms})
    # An environment counts what happens; what never happened in an episode is no term of it.
    metrics = {
        name: float(np.mean([payload.terms.get(name, 0.0) for payload in payloads]))
        for name in names
    }
    metrics["score"] = float(np.mean([payload.score for payload in payloads]))
    metrics["length"] = float(np.mean([payload.num_sampled for payload in payloads]))
    metrics["truncated"] = float(
        np.mean([payload.finish is FinishReason.LENGTH for payload in payloads])
    )
    return metrics
