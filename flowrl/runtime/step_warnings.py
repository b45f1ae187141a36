"""What steps show that people should know of: told once a stage, or where it lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from flowrl.observe.rows import StepMetrics
from flowrl.runtime.step_report import UNNAMED_TOKENS
from flowrl.wording import counted

__all__ = ["StepWarnings"]

IDLE_STEPS = 3
"""Steps in a row without a sample to learn from that are told of. One may be chance."""


class StepWarnings:
    """Looks at the metrics of each step, in order.

    Args:
        warn: Tells of what was found.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._told: set[tuple[str, str]] = set()
        self._idle: Counter[str] = Counter()  # steps in a row, by stage

    def of(self, metrics: StepMetrics) -> None:
        """Tells of what a step shows for the first time in its stage."""
        self._of_cut_episodes(metrics)
        self._of_unnamed_tokens(metrics)
        self._of_skipped_updates(metrics)
        self._of_idle_steps(metrics)

    def _once(self, stage: str, what: str) -> bool:
        """Whether it is the first time."""
        before = len(self._told)
        self._told.add((stage, what))
        return len(self._told) > before

    def _of_cut_episodes(self, metrics: StepMetrics) -> None:
        """Episodes that end before they are done."""
        cut = sum(n for key, n in metrics.extra.items() if key.endswith("cut_episodes"))
        if not cut or not self._once(metrics.stage, "cut"):
            return
        were = "was" if cut == 1 else "were"
        self._warn(
            f"{metrics.stage} step {metrics.step}: {counted(cut, 'episode')} {were} cut, for what "
            "the environment said next was longer than max_observation_tokens of fl.interact "
            "(the term cut_observation in samples.jsonl) or left no room for another turn in the "
            "model's max_length (cut_length); cut_episodes in metrics.jsonl counts more of them"
        )

    def _of_unnamed_tokens(self, metrics: StepMetrics) -> None:
        """Tokens of the model that the tokenizer does not have."""
        drawn = sum(n for key, n in metrics.extra.items() if key.endswith(UNNAMED_TOKENS))
        if drawn and self._once(metrics.stage, "unnamed"):
            self._warn(
                f"{metrics.stage} step {metrics.step}: {counted(drawn, 'token')} drawn that the "
                "tokenizer does not have, for the model's embedding has more rows than that has "
                "tokens. Rewards see them as <unused900>, by their ids; unnamed_tokens in "
                "metrics.jsonl counts more of them. An untrained model draws them until it has "
                "learnt not to; a trained one never should: look whether the tokenizer is its own"
            )

    def _of_skipped_updates(self, metrics: StepMetrics) -> None:
        if metrics.skipped_updates and self._once(metrics.stage, "skipped"):
            self._warn(
                f"{metrics.stage} step {metrics.step}: an update was skipped, its "
                "gradient is not finite; skipped_updates in metrics.jsonl counts more of them. "
                "Lower the learning rate, or look at the rewards"
            )

    def _of_idle_steps(self, metrics: StepMetrics) -> None:
        """Steps that change nothing, because a filter removed every group."""
        if metrics.num_samples or not metrics.filtered_groups:
            self._idle[metrics.stage] = 0
            return
        self._idle[metrics.stage] += 1
        if self._idle[metrics.stage] == IDLE_STEPS and self._once(metrics.stage, "idle"):
            scored = (
                "" if metrics.reward_mean is None else f", at {metrics.reward_mean:g} on average"
            )
            self._warn(
                f"{metrics.stage} step {metrics.step}: {IDLE_STEPS} steps in a row made no update, "
                f"for the filter removed all of their groups (the samples of each score alike"
                f"{scored}). Take prompts that the policy solves now and then, train it on "
                "examples for longer first, or raise train.group_size"
            )
