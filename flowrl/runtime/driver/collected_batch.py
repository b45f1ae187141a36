"""What a rollout driver is given and what it gives: scorers, budgets, delivered batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from flowrl.backend.protocols import ScoreRequest, ScoreResult
from flowrl.data import PromptItem
from flowrl.errors import RewardError
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.sample_set import GroupRows
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.specs import FinishReason

__all__ = [
    "Clock",
    "CollectedBatch",
    "EventStamp",
    "FailureBudget",
    "Scorers",
    "Seconds",
    "merged_terms",
    "score_request",
]


class EventStamp(TypedDict):
    """What every event has."""

    id: int
    at_s: float


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def __call__(self) -> float: ...


class Scorers(Protocol):
    """What scores samples for a role: processes (`ScoringPool`), or this one (`InlineScorer`)."""

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Takes samples to score."""
        ...

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        """Answers since the last call; returns at once."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Waits until `poll` has something to give; false after `timeout_s` seconds without."""
        ...

    def close(self) -> None:
        """Frees what it holds; idempotent."""
        ...


@dataclass(slots=True)
class FailureBudget:
    """Rewards that may fail before the run stops; shared by all rollouts of a run."""

    allowed: int
    failed: int = 0

    def spend(self, failure: ScoreFailure | EpisodeFailure, payload: Payload) -> None:
        """Counts a failed reward, or an episode that its environment broke off.

        Raises:
            RewardError: it is one more than allowed; names the sample and what it said.
        """
        self.failed += 1
        if self.failed > self.allowed:
            raise RewardError(
                f"the {_whose(failure)} of this sample {failure.message}",
                where=f"sample {failure.sample}",
                found=f"prompt {_excerpt(payload.item.prompt)}, response {_excerpt(payload.text)}",
                expected=f"at most {self.allowed} failed rewards (rewards.max_failures)",
                hint=f"mend the {_whose(failure)}, or raise rewards.max_failures to drop such "
                "samples",
            )


def _whose(failure: ScoreFailure | EpisodeFailure) -> str:
    return "environment" if isinstance(failure, EpisodeFailure) else "reward"


@dataclass(slots=True)
class Seconds:
    """Where the driver's time went; the last three are its own work.

    Of a batch that is drawn beside the trainer: since the one before was delivered.

    Attributes:
        generate: Engines that it drives; waiting for those in other processes. Beside the trainer
            the time of all engines together.
        score_wait: Waiting for scorers when everything is drawn; nobody does beside the trainer.
        offer: Prompts offered, and requests sent to engines.
        drive: Ends of samples taken, texts made, scorers asked.
        answer: Scores taken, groups judged, batches delivered.
    """

    generate: float = 0.0
    score_wait: float = 0.0
    offer: float = 0.0
    drive: float = 0.0
    answer: float = 0.0


@dataclass(slots=True, kw_only=True)
class CollectedBatch:
    """A delivered batch.

    Attributes:
        groups: Delivered groups in offer order, each with its members' payloads in member order.
        filtered: Samples of groups that the filter took out, with its reason.
        num_filtered_groups: How many groups those were.
        dropped: Samples that ended unused, with the reason.
        further: Prompts that were offered for it beside those it was asked for, in order.
        seconds: Time of this collection.
        version: Publications when it was delivered.
        ready: Samples that are scored and wait for a later batch.
        under_way: Samples that are drawn or scored now.
    """

    groups: list[GroupRows] = field(default_factory=list)
    filtered: list[tuple[SampleId, Payload, str]] = field(default_factory=list)
    num_filtered_groups: int = 0
    dropped: list[tuple[SampleId, Payload, str]] = field(default_factory=list)
    further: list[PromptItem] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    version: int = 0
    ready: int = 0
    under_way: int = 0


def score_request(sample: SampleId, payload: Payload) -> ScoreRequest:
    """What a scorer is told of a sample whose response is decoded."""
    row = payload.item.row
    return ScoreRequest(
        sample=sample,
        prompt=row.prompt,
        response=payload.text,
        answer=row.answer,
        row=row.fields,
        finish=payload.finish or FinishReason.LENGTH,
        num_tokens=len(payload.tokens) if payload.mask is None else payload.num_sampled,
    )


def merged_terms(terms: Mapping[RoleName, Mapping[str, float]]) -> dict[str, float]:
    """The terms of several scorers; a name that more than one has stands behind its role's.

    >>> merged_terms({"verifier": {"format": 1.0, "accuracy": 0.0}, "judge": {"format": 0.5}})
    {'verifier/format': 1.0, 'accuracy': 0.0, 'judge/format': 0.5}
    """
    names = Counter(name for of_role in terms.values() for name in of_role)
    return {
        name if names[name] == 1 else f"{role}/{name}": value
        for role, of_role in terms.items()
        for name, value in of_role.items()
    }


def _excerpt(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
