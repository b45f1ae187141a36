"""What the scorers of a rollout say of its samples, put together sample by sample.

A sample is scored when every scorer has answered. Where one of them failed, that is told when the
others have answered too: so a sample that is then asked for again gets no answer from the time
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowrl.backend.protocols import ScoreResult
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.collecting import Scorers, merged_terms, score_request
from flowrl.runtime.payloads import Payload, PayloadStore
from flowrl.runtime.scoring.pool import ScoreFailure

__all__ = ["Answers", "ScorerAnswers"]


@dataclass(slots=True)
class Answers:
    """What has come.

    Attributes:
        num: Answers of single scorers.
        scored: Samples that all have answered now, with the score that is told of them.
        failed: Samples for which one of them failed, the first one.
    """

    num: int = 0
    scored: list[tuple[SampleId, float]] = field(default_factory=list)
    failed: list[ScoreFailure] = field(default_factory=list)


class ScorerAnswers:
    """See the module.

    Args:
        scorers: By role.
        reported: The role whose score is told of a sample.
        store: Where scores are noted.

    Attributes:
        due: Samples that are with scorers, and how many of them have not answered.
    """

    def __init__(
        self,
        scorers: Mapping[RoleName, Scorers],
        reported: RoleName | None,
        store: PayloadStore,
    ) -> None:
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
        """Waits until one of them has something to say."""
        any(pool.wait(timeout_s) for pool in self._scorers.values())

    def poll(self) -> Answers:
        """What they have said since the last call; returns at once."""
        answers = Answers()
        for role, pool in self._scorers.items():
            for result in pool.poll():
                answers.num += 1
                self._take(role, result, answers)
        return answers

    def forget(self, sample: SampleId) -> None:
        """The sample was dropped; answers that are still to come change nothing."""
        self._terms.pop(sample, None)
        self._failures.pop(sample, None)

    def _take(self, role: RoleName, result: ScoreResult | ScoreFailure, answers: Answers) -> None:
        sample = result.sample
        due = self.due.pop(sample) - 1
        if due:
            self.due[sample] = due
        payload = self._store.get(sample)
        if payload is None:
            return  # dropped meanwhile
        if isinstance(result, ScoreFailure):
            term = f"{role}/{result.term}" if result.term else ""
            self._failures.setdefault(sample, replace(result, term=term))
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
            # In the order of roles, whichever answered first; an environment has spoken before.
            of_role = {role: terms[role] for role in self._scorers}
            if payload.is_episode:
                of_role = {next(iter(payload.scores)): payload.terms, **of_role}
            payload.terms = merged_terms(of_role)
            del self._terms[result.sample]
