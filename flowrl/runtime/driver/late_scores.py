"""Rule scores of sets that are known only when a batch is there: parts by row, joins, examples.

The samples of a rollout are scored by its driver as they end. What `fl.where` splits off, what
`fl.concat` joins and what comes with data rows is scored here, by the same scorers, which no driver
uses while the batch part runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flowrl.backend.batch import Floats
from flowrl.backend.protocols import ScoreResult
from flowrl.errors import RewardError, SchedulerError
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.driver.collected_batch import FailureBudget, Scorers, score_request
from flowrl.runtime.driver.payloads import Payload, SampleSet
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.specs import FinishReason

_WAIT_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LateScores:
    """Scores sets of samples by rules.

    Attributes:
        pools: The scorers of a run, by role.
        failures: Rewards that may fail.
        beat: Called whenever something moved.
        stall_timeout_s: Seconds without an answer after which the run ends.
    """

    pools: Mapping[RoleName, Scorers]
    failures: FailureBudget
    beat: Callable[[], None]
    stall_timeout_s: float

    def score(self, role: RoleName, samples: SampleSet, texts: Texts) -> Floats:
        """Returns float32 `[N]`, the scores of a role; payloads know them too.

        Raises:
            RewardError: a reward failed, more often than it may, or without a score in its place:
                a sample of the batch part cannot be dropped.
            SchedulerError: nothing was answered for the stall timeout.
        """
        pool, payloads = self.pools[role], dict[SampleId, Payload]()
        pool.poll()  # answers for a step that was given up are nobody's
        requests = []
        for place, payload in enumerate(samples.payloads):
            # Samples of two rollouts of the same prompts have the same ids.
            name = SampleId(f"{samples.samples[place]}#{place}")
            payloads[name] = payload
            finish = payload.finish or FinishReason.STOP
            text = texts.response(samples.origin, payload)
            requests.append(replace(score_request(name, payload), response=text, finish=finish))
        pool.submit(requests)
        missing, end = set(payloads), time.monotonic() + self.stall_timeout_s
        while missing:
            for result in pool.poll():
                missing.remove(result.sample)
                self._take(role, result, payloads[result.sample])
                end = time.monotonic() + self.stall_timeout_s
                self.beat()
            if missing and not pool.wait(_WAIT_S) and time.monotonic() > end:
                raise SchedulerError(
                    "the scorers do not answer",
                    where=f"role {role}",
                    found=f"{len(missing)} samples without a score",
                )
        return np.array([payload.scores[role] for payload in samples.payloads], np.float32)

    def _take(self, role: RoleName, result: ScoreResult | ScoreFailure, payload: Payload) -> None:
        terms: Mapping[str, float] = {}
        if isinstance(result, ScoreFailure):
            term = f"{role}/{result.term}" if result.term else ""
            payload.failure, payload.failed_term = result.message, term
            if self.failures.score is None:
                self.failures.spend(result, payload)
                raise RewardError(
                    f"the reward {result.message}",
                    where=f"sample {result.sample.partition('#')[0]}",
                    expected="a score: samples of fl.where, fl.concat and data are not dropped",
                    hint="correct the reward, or set rewards.failure_score",
                )
            score = self.failures.score
        else:
            score, terms = result.score, result.terms
        known = payload.terms
        if role not in payload.scores:  # else it was scored in another set too, by the same terms
            payload.terms = {
                **known,
                **{name if name not in known else f"{role}/{name}": x for name, x in terms.items()},
            }
        payload.scores[role] = score
        payload.score = score if payload.score is None else payload.score
