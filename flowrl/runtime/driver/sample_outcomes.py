"""Results of a rollout driver's samples: the scorers' answers, and ends not reported yet.

A sample is scored when every scorer has answered. If one of them failed, the failure is reported
once the others have answered too, so that a sample that is requested again receives no answer of an
earlier attempt.

    finished, kept by the filter  -> Collected.groups
    taken out by the filter       -> Collected.filtered     of the batch that names their groups
    dropped                       -> Collected.dropped      of the next batch

A batch stays here until the trainer takes it. What no batch has reported yet is written with a
checkpoint (`unused`), so that a resumed run reports the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from flowrl.backend.protocols import ScoreResult
from flowrl.data import PromptItem
from flowrl.ids import GroupId, RoleName, SampleId
from flowrl.rollout.actions import Deliver
from flowrl.runtime.checkpoint.unused_samples import EndedSample, UnusedSamples
from flowrl.runtime.driver.collected_batch import (
    CollectedBatch,
    Scorers,
    merged_terms,
    score_request,
)
from flowrl.runtime.driver.payloads import Payload, PayloadStore
from flowrl.runtime.scoring.pool import ScoreFailure


class SampleOutcomes:
    """See the module.

    Args:
        store: The payload store; batches take their payloads out of it.
        unused: The value of `unused` in a checkpoint; its payloads are put into the store.

    Attributes:
        batches: Delivered batches that were not taken yet, by number.
    """

    def __init__(self, store: PayloadStore, unused: UnusedSamples | None = None) -> None:
        before = UnusedSamples() if unused is None else unused
        store.restore(before.payloads)
        self._store = store
        self.batches: dict[int, CollectedBatch] = dict(before.batches)
        self._dropped: list[EndedSample] = list(before.dropped)
        self._verdicts: dict[GroupId, str] = dict(before.verdicts)
        self._judged: dict[GroupId, tuple[SampleId, ...]] = dict(before.judged)  # of those groups
        self._further: list[PromptItem] = []

    def unused(self) -> UnusedSamples:
        """Samples that no batch has used yet, and what no batch has reported."""
        return UnusedSamples(
            payloads=self._store.all(),
            verdicts=self._verdicts,
            judged=self._judged,
            dropped=self._dropped,
            batches=self.batches,
        ).copy()

    def judged(
        self,
        members: Mapping[GroupId, tuple[SampleId, ...]],
        verdicts: Iterable[tuple[GroupId, str | None]],
    ) -> None:
        """Groups that a filter has looked at, with its reason against them."""
        for group, reason in verdicts:
            if reason is not None:
                self._verdicts[group] = reason
                self._judged[group] = members[group]

    def dropped(self, sample: SampleId, payload: Payload, reason: str) -> None:
        """Notes a sample that ended unused."""
        self._dropped.append((sample, payload, reason))

    def offered(self, items: Sequence[PromptItem]) -> None:
        """Prompts in the place of groups that were lost."""
        self._further += items

    def deliver(self, action: Deliver) -> None:
        """Makes a batch, with all that it reports."""
        collected = CollectedBatch(
            dropped=self._dropped, further=self._further, version=action.version
        )
        self._dropped, self._further = [], []
        for delivered in action.groups:
            collected.groups.append((delivered.group, self._store.take(delivered.samples)))
        for group in action.filtered:
            reason = self._verdicts.pop(group, None)
            if reason is None:
                continue  # the group was dropped; its samples are among those already
            collected.num_filtered_groups += 1
            for sample, payload in self._store.take(self._judged.pop(group)):
                collected.filtered.append((sample, payload, reason))
        self.batches[action.batch] = collected


@dataclass(slots=True)
class ScoreCounts:
    """The scorers' answers since the last poll.

    Attributes:
        num: Answers of single scorers.
        scored: Samples that all scorers have answered now, with the reported score.
        failed: Samples for which one of them failed, the first one.
    """

    num: int = 0
    scored: list[tuple[SampleId, float]] = field(default_factory=list)
    failed: list[ScoreFailure] = field(default_factory=list)


class ScorerResults:
    """See the module.

    Args:
        scorers: Scorers by role.
        reported: The role whose score is that of a sample, if it is one of them.
        store: The payload store, in which scores are noted.
        failure_score: The score of a sample whose reward fails; None if it is dropped.
        at_once: True if answers are given out when none is due, in an order without time.

    Attributes:
        due: Samples that are with scorers, and how many of them have not answered.
    """

    def __init__(
        self,
        scorers: Mapping[RoleName, Scorers],
        reported: RoleName | None,
        store: PayloadStore,
        failure_score: float | None = None,
        at_once: bool = False,
    ) -> None:
        self.at_once = at_once
        self._kept = ScoreCounts()
        self._failure_score = failure_score
        self._scorers = scorers
        self._reported = reported
        self._store = store
        self._terms: dict[SampleId, dict[RoleName, Mapping[str, float]]] = {}
        self._failures: dict[SampleId, ScoreFailure] = {}
        self.due: dict[SampleId, int] = {}

    def ask(self, payloads: Sequence[tuple[SampleId, Payload]]) -> None:
        """Sends samples to every scorer."""
        requests = [score_request(sample, payload) for sample, payload in payloads]
        for sample, _ in payloads:
            self.due[sample] = len(self._scorers)
        for pool in self._scorers.values():
            pool.submit(requests)

    def wait(self, timeout_s: float) -> None:
        """Waits until a scorer has an answer."""
        any(pool.wait(timeout_s) for pool in self._scorers.values())

    def poll(self) -> ScoreCounts:
        """Returns the answers since the last call; returns at once."""
        num, answers = 0, self._kept
        for role, pool in self._scorers.items():
            for result in pool.poll():
                num += 1
                self._take(role, result, answers)
        if self.at_once:
            if self.due:
                return ScoreCounts(num=num)
            answers.scored.sort()
            answers.failed.sort(key=attrgetter("sample"))
        self._kept = ScoreCounts()
        return replace(answers, num=num)

    def forget(self, sample: SampleId) -> None:
        """Notes that the sample was dropped; answers that are still to come are ignored."""
        self._terms.pop(sample, None)
        self._failures.pop(sample, None)

    def _take(
        self, role: RoleName, result: ScoreResult | ScoreFailure, answers: ScoreCounts
    ) -> None:
        sample = result.sample
        due = self.due.pop(sample) - 1
        if due:
            self.due[sample] = due
        payload = self._store.get(sample)
        if payload is None:
            return  # dropped meanwhile
        if isinstance(result, ScoreFailure):
            term = f"{role}/{result.term}" if result.term else ""
            if self._failure_score is None:
                self._failures.setdefault(sample, replace(result, term=term))
            else:
                payload.failure, payload.failed_term = result.message, term
                self._note(
                    payload,
                    role,
                    ScoreResult(sample=sample, score=self._failure_score, terms={}),
                )
        else:
            self._note(payload, role, result)
        if due:
            return
        failure = self._failures.pop(sample, None)
        if failure is None:
            answers.scored.append((sample, payload.score or 0.0))
        else:
            answers.failed.append(failure)

    def _note(self, payload: Payload, role: RoleName, result: ScoreResult) -> None:
        payload.scores[role] = result.score
        if role == self._reported:
            payload.score = result.score
        if len(self._scorers) == 1 and not payload.terms:
            payload.terms = result.terms
            return
        terms = self._terms.setdefault(result.sample, {})
        terms[role] = result.terms
        if len(terms) == len(self._scorers):
            # In the order of roles, whichever answered first; an environment has answered before.
            of_role = {role: terms[role] for role in self._scorers}
            if payload.is_episode:
                of_role = {next(iter(payload.scores)): payload.terms, **of_role}
            payload.terms = merged_terms(of_role)
            del self._terms[result.sample]
