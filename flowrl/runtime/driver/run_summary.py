"""What a run adds up and says over its steps: totals and warnings.

Totals are kept in every checkpoint. A warning is given once in a stage, or when its cause persists.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.config.schema import PAIR_ACCURACY, RunConfig
from flowrl.errors import CheckpointError
from flowrl.graph.serialization import parse_attr
from flowrl.observe.rows import EvaluationRow, StepMetrics, Summary, seconds_by_kind
from flowrl.observe.run_folder import RunFolder, installed_versions
from flowrl.observe.run_text import remover_text
from flowrl.runtime.driver.step_report import UNNAMED_TOKENS, StepResult
from flowrl.specs import RowCondition
from flowrl.specs.filters import Difficulty, Threshold
from flowrl.wording import counted, percent

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
        self._best: float | None = None
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

    def is_best(self, value: float) -> bool:
        """True if the value of `eval.metric` is above all before; it is remembered then."""
        if self._best is not None and not value > self._best:
            return False
        self._best = value
        return True

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
                "best": self._best,
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
        self._seconds = {stage: seconds_by_kind(of) for stage, of in ledger["seconds"].items()}
        self._steps = dict(ledger["steps"])
        self._samples = dict(ledger["samples"])
        self._num_tokens = int(ledger["num_tokens"])
        self._num_example_tokens = int(ledger.get("num_example_tokens", 0))
        settled = ledger["settled"]
        self._settled = None if settled is None else (settled[0], settled[1], settled[2])
        self._best = ledger.get("best")
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
            temperature=config.eval.metric_temperature,
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
        """Returns the metric of the last line: the configured one, or else the score, or of pairs.

        A name that the user wrote is measured, as the configuration's checks prove; the default
        need not be.
        """
        asked, measured = self._config.eval.metric, self.after or self.before
        if measured is None or asked in measured:
            return asked
        return "score" if "score" in measured else PAIR_ACCURACY

    def _elapsed(self) -> float:
        return self._wall_s + self._clock() - self._started


IDLE_STEPS = 3
"""Steps in a row without a sample to train on, or after a collapse, before the warning. One may be
chance."""


class StepWarnings:
    """Looks at the metrics of each step, in order.

    Args:
        warn: Shows a warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()
        # By stage: steps in a row, and what the steps before had.
        self._idle: Counter[str] = Counter()
        self._collapsed: Counter[str] = Counter()
        self._best: dict[str, StepMetrics] = {}
        self._rates: dict[str, float] = {}

    def check(self, metrics: StepMetrics) -> None:
        """Warns of what a step shows for the first time in its stage."""
        self._check_cut_episodes(metrics)
        self._check_unnamed_tokens(metrics)
        self._check_skipped_updates(metrics)
        self._check_collapse(metrics)
        self._check_idle_steps(metrics)

    def _once(self, stage: str, what: str) -> bool:
        """True for the first warning of this kind in the stage."""
        before = len(self._warned)
        self._warned.add((stage, what))
        return len(self._warned) > before

    def _check_cut_episodes(self, metrics: StepMetrics) -> None:
        """Episodes that end before they are done."""
        cut = sum(n for key, n in metrics.extra.items() if key.endswith("cut_episodes"))
        if not cut or not self._once(metrics.stage, "cut"):
            return
        were = "was" if cut == 1 else "were"
        self._warn(
            f"{metrics.stage} step {metrics.step}: {counted(cut, 'episode')} {were} cut, for what "
            "the environment said next was longer than max_observation_tokens of fl.interact "
            "(the term cut_observation in samples.jsonl) or left no space for another turn in the "
            "model's max_length (cut_length); cut_episodes in metrics.jsonl counts more of them"
        )

    def _check_unnamed_tokens(self, metrics: StepMetrics) -> None:
        """Tokens of the model that the tokenizer does not have."""
        unnamed = sum(n for key, n in metrics.extra.items() if key.endswith(UNNAMED_TOKENS))
        if unnamed and self._once(metrics.stage, "unnamed"):
            self._warn(
                f"{metrics.stage} step {metrics.step}: {counted(unnamed, 'token')} sampled that "
                "the tokenizer does not have, for the model's embedding has more rows than it has "
                "tokens. Rewards see them as <unused900>, by their ids; unnamed_tokens in "
                "metrics.jsonl counts more of them. An untrained model samples them until it has "
                "learnt not to; a trained one never should: look whether the tokenizer is its own"
            )

    def _check_skipped_updates(self, metrics: StepMetrics) -> None:
        if metrics.skipped_updates and self._once(metrics.stage, "skipped"):
            self._warn(
                f"{metrics.stage} step {metrics.step}: an update was skipped, its "
                "gradient is not finite; skipped_updates in metrics.jsonl counts more of them. "
                "Lower the learning rate, or look at the rewards"
            )

    def _check_collapse(self, metrics: StepMetrics) -> None:
        """Warns of a policy that answered before, and now ends at once or does not stop.

        Nearly all responses have one token, or are truncated; their scores no longer differ, and
        are worse than they have been.
        """
        stage, mean = metrics.stage, metrics.reward_mean
        if metrics.learning_rate is not None:
            self._rates[stage] = metrics.learning_rate
        if mean is None or metrics.length_mean is None:
            return
        best = self._best.get(stage)
        if best is None or best.reward_mean is None or mean > best.reward_mean:
            self._best[stage] = metrics
        elif _is_worthless(metrics, mean) and mean < best.reward_mean and _shrank(best, metrics):
            self._collapsed[stage] += 1
            if self._collapsed[stage] == IDLE_STEPS and self._once(stage, "collapse"):
                self._warn_of_collapse(metrics, mean, best)
            return
        self._collapsed[stage] = 0

    def _warn_of_collapse(self, metrics: StepMetrics, mean: float, best: StepMetrics) -> None:
        how = "end at their first token" if _is_silent(metrics) else "do not stop any more"
        rate = self._rates.get(metrics.stage)
        rates = "" if rate is None else f" (it was {rate:g} at the last update)"
        self._warn(
            f"{metrics.stage} step {metrics.step}: the policy has collapsed. Its responses {how} "
            f"and score {_figures(metrics)}; at step {best.step} it was {_figures(best)}. Neither "
            f"other prompts nor filters cure that: lower the learning rate{rates}, and begin from "
            "an earlier checkpoint"
        )

    def _check_idle_steps(self, metrics: StepMetrics) -> None:
        """Steps that change nothing, because filters and selections removed every group."""
        stage = metrics.stage
        if metrics.num_samples or not metrics.filtered_groups:
            self._idle[stage] = 0
            return
        self._idle[stage] += 1
        if self._idle[stage] != IDLE_STEPS or (stage, "collapse") in self._warned:
            return
        if not self._once(stage, "idle"):
            return
        removers = [parse_attr(text) for text in metrics.filtered_by]
        called = " and ".join(f"fl.{remover_text(text)}" for text in metrics.filtered_by)
        rule, hint = _removal(removers[0] if removers else None, metrics.reward_mean)
        self._warn(
            f"{stage} step {metrics.step}: {IDLE_STEPS} steps in a row were left without samples, "
            f"for {called or 'the filter'} removed all of their groups ({rule}). {hint}"
        )


def _is_worthless(metrics: StepMetrics, mean: float) -> bool:
    """True if the scores of a step give nothing to prefer."""
    equal = metrics.reward_std is not None and metrics.reward_std <= 1e-6 * max(1.0, abs(mean))
    return equal or (not metrics.num_samples and metrics.filtered_groups > 0)


def _shrank(best: StepMetrics, now: StepMetrics) -> bool:
    """True if responses are now empty or truncated, while those of a better step were not."""
    if _is_silent(now):
        return best.length_mean is not None and best.length_mean > 1.5
    return (now.truncated or 0.0) >= 0.95 and (best.truncated or 0.0) < 0.5


def _figures(metrics: StepMetrics) -> str:
    """Returns `0 (length 1.0, truncated 0 %)`."""
    cut = percent(metrics.truncated or 0.0)
    return f"{metrics.reward_mean:.3g} (length {metrics.length_mean:.1f}, truncated {cut})"


def _is_silent(metrics: StepMetrics) -> bool:
    return metrics.length_mean is not None and metrics.length_mean <= 1.05


def _removal(spec: object, mean: float | None) -> tuple[str, str]:
    """Returns by which rule groups were removed, and a hint."""
    at = "" if mean is None else f", at {mean:g} on average"
    match spec:
        case Difficulty(low=low, high=high):
            rule = (
                f"it keeps groups with {low:g} < mean score < {high:g}, which excludes the bounds; "
                f"these scored outside{at}"
            )
            if mean is not None and mean >= high:
                return rule, (
                    "Write a high above the best score to keep groups that are always right, or "
                    "take harder prompts"
                )
            if mean is not None and mean <= low:
                return rule, (
                    "Write a low below the worst score to keep groups that are never right, or "
                    "take prompts that the policy solves more often"
                )
            return rule, "Groups lie on both sides of the bounds: set these further apart"
        case Threshold(at_least=at_least):
            return f"it keeps samples that score at least {at_least:g}; these scored less{at}", (
                "Write a lower at_least, or train the policy on examples for longer first"
            )
        case RowCondition():
            return "the rows of these have other values", (
                "A greater train.prompts_per_step takes such rows more often"
            )
        case _:
            return f"the samples of each score alike{at}", (
                "Take prompts that the policy solves now and then: easier ones, or after training "
                "on examples, where all score low; harder ones where all are right. A greater "
                "train.group_size finds more differences"
            )
