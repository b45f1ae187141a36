"""The inputs and results of a rollout driver: scorers, failure budgets, delivered batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from flowrl.backend.protocols import GenerateRequest, ScoreRequest, ScoreResult
from flowrl.data import PromptItem, Tokenizer
from flowrl.errors import RewardError
from flowrl.ids import RoleName, SampleId
from flowrl.rollout.actions import Dispatch
from flowrl.runtime.driver.payloads import GroupRows, Payload
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.specs import FinishReason, Grammar, Sampling


class EventStamp(TypedDict):
    """Fields that every event has."""

    id: int
    at_s: float


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def __call__(self) -> float: ...


class Scorers(Protocol):
    """Scores samples for a role: in processes (`ScoringPool`) or in this one (`InlineScorer`)."""

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
    """Rewards that may fail before the run stops; shared by all rollouts of a run.

    Attributes:
        allowed: Failures that are allowed.
        failed: Failures until now.
        score: The score of a sample whose reward fails, which then counts as no failure here; None
            if the sample is dropped.
    """

    allowed: int
    failed: int = 0
    score: float | None = None

    def spend(self, failure: ScoreFailure | EpisodeFailure, payload: Payload) -> None:
        """Counts a failed reward, or an episode that its environment could not finish.

        Raises:
            RewardError: it is one more than allowed; names the sample and the failure's message.
        """
        self.failed += 1
        if self.failed > self.allowed:
            raise RewardError(
                f"the {_culprit(failure)} of this sample {failure.message}",
                where=f"sample {failure.sample}",
                found=f"prompt {_excerpt(payload.item.prompt)}, response {_excerpt(payload.text)}",
                expected=f"at most {self.allowed} failed rewards (rewards.max_failures)",
                hint=f"correct the {_culprit(failure)}, or raise rewards.max_failures to drop such "
                "samples",
            )


def _culprit(failure: ScoreFailure | EpisodeFailure) -> str:
    return "environment" if isinstance(failure, EpisodeFailure) else "reward"


@dataclass(slots=True)
class Seconds:
    """The driver's time in seconds; the last three fields are its own work.

    In an asynchronous stage it is counted from the delivery of the batch before.

    Attributes:
        generate: Running in-process engines, or waiting for engine processes; in an asynchronous
            stage the time of all engines together.
        score_wait: Waiting for scorers when all samples are generated; 0 in an asynchronous stage.
        dispatch: Prompts offered, and requests sent to engines.
        collect: Finished samples received, texts made, scorers asked.
        assemble: Scores received, groups filtered, batches delivered.
    """

    generate: float = 0.0
    score_wait: float = 0.0
    dispatch: float = 0.0
    collect: float = 0.0
    assemble: float = 0.0


@dataclass(slots=True, kw_only=True)
class CollectedBatch:
    """A delivered batch.

    Attributes:
        groups: Delivered groups in offer order, each with its members' payloads in member order.
        filtered: Samples of groups that the filter took out, with its reason.
        num_filtered_groups: Number of filtered groups.
        dropped: Samples that ended unused, with the reason.
        further: Prompts that were offered for it in addition to the requested ones, in order.
        seconds: Time of this collection.
        version: Publications when it was delivered.
        ready: Samples that are scored and wait for a later batch.
        under_way: Samples that are being generated or scored.
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


def decode_responses(tokenizer: Tokenizer, payloads: Sequence[Payload]) -> None:
    """Gives samples their text, without the stop token."""
    texts = tokenizer.decode_many([tokenizer.without_end(p.response) for p in payloads])
    for payload, text in zip(payloads, texts, strict=True):
        payload.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMaker:
    """Makes the requests of a rollout to engines.

    Attributes:
        sampling: The sampling options of every request.
        grammar: The grammar of every response, or of every turn.
        seed_of: The seed of a sample's random stream.
    """

    sampling: Sampling
    grammar: Grammar | None
    seed_of: Callable[[SampleId], int]

    def request(self, dispatch: Dispatch, payload: Payload) -> GenerateRequest:
        """Returns the request for an attempt, which the payload has from now on."""
        payload.attempt = dispatch.attempt
        return GenerateRequest(
            sample=dispatch.sample,
            attempt=dispatch.attempt,
            prompt=payload.item.prompt_ids,
            response=payload.tokens,
            sampling=self.sampling,
            seed=self.seed_of(dispatch.sample),
            shares_prompt=payload.item.group,
            grammar=self.grammar,
        )


def score_request(sample: SampleId, payload: Payload) -> ScoreRequest:
    """Makes the request for a scorer from a sample whose response is decoded."""
    row = payload.item.row
    return ScoreRequest(
        sample=sample,
        prompt=row.prompt,
        response=payload.text,
        answer=row.answer,
        row=row.fields,
        finish=payload.finish or FinishReason.LENGTH,
        num_tokens=payload.num_sampled + payload.item.num_continued,
        tokens=payload.response.tolist(),
    )


def merged_terms(terms: Mapping[RoleName, Mapping[str, float]]) -> dict[str, float]:
    """Joins the terms of several scorers; a name that several have is prefixed with the role.

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
