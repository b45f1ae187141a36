"""Rules score data, parts by row and joined sets when the batch is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from flowrl.backend.protocols import ScoreRequest, ScoreResult
from flowrl.data import PromptItem, Row
from flowrl.errors import RewardError, SchedulerError
from flowrl.ids import GroupId, NodeId, RoleName, sample_id
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.late_scores import LateScores
from flowrl.runtime.driver.payloads import Payload, SampleSet, sample_set
from flowrl.runtime.driver.texts import Texts
from flowrl.runtime.scoring.pool import FailureKind, ScoreFailure
from flowrl.specs import FinishReason

RULES = RoleName("rules")


class Pool:
    """Scores a text by its length, the last one first; fails at the text `bad`."""

    def __init__(self, *, silent: bool = False) -> None:
        self.asked: list[ScoreRequest] = []
        self._done: list[ScoreResult | ScoreFailure] = []
        self._silent = silent

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self.asked += requests
        for request in () if self._silent else reversed(requests):
            score = float(len(request.response))
            self._done.append(
                ScoreFailure(sample=request.sample, kind=FailureKind.RAISED, message="is bad")
                if request.response == "bad"
                else ScoreResult(sample=request.sample, score=score, terms={"length": score})
            )

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        return bool(self._done)

    def close(self) -> None:
        pass


def responses(*texts: str, finish: FinishReason | None = FinishReason.LENGTH) -> SampleSet:
    row = Row(index=1, prompt="?", answer="!", solution="", fields={}, where="rows:1")
    group = GroupId("0/1")
    item = PromptItem(epoch=0, index=1, group=group, row=row, prompt_ids=np.array([1]))
    members = [
        (
            sample_id(group, 0),  # as two rollouts of the same prompts have
            Payload(item=item, tokens=np.array([2]), text=text, finish=finish),
        )
        for text in texts
    ]
    return sample_set(NodeId("concat"), [(group, members)])


def late(pool: Pool, **failures: float) -> LateScores:
    budget = replace(FailureBudget(allowed=0), **failures)  # type: ignore[arg-type]
    return LateScores(pools={RULES: pool}, failures=budget, beat=lambda: None, stall_timeout_s=0.01)


def test_samples_with_equal_ids_have_their_own_scores():
    pool, samples = Pool(), responses("a", "abc", "ab")
    assert late(pool).score(RULES, samples, Texts({})).tolist() == [1, 3, 2]
    assert [payload.scores[RULES] for payload in samples.payloads] == [1, 3, 2]
    assert [dict(payload.terms) for payload in samples.payloads] == [
        {"length": 1.0},
        {"length": 3.0},
        {"length": 2.0},
    ]
    assert {request.finish for request in pool.asked} == {FinishReason.LENGTH}


def test_a_second_role_keeps_the_score_and_the_terms_of_the_first():
    samples = responses("abc")
    (payload,) = samples.payloads
    late(Pool()).score(RULES, samples, Texts({}))
    other = replace(late(Pool()), pools={RoleName("other"): Pool()})
    other.score(RoleName("other"), responses("abc"), Texts({}))
    other.score(RoleName("other"), samples, Texts({}))
    assert (payload.score, dict(payload.terms)) == (3.0, {"length": 3.0, "other/length": 3.0})


def test_a_sample_that_a_role_scores_in_two_sets_has_its_terms_once():
    samples = responses("abc")
    for _ in range(2):
        assert late(Pool()).score(RULES, samples, Texts({})).tolist() == [3]
    assert dict(samples.payloads[0].terms) == {"length": 3.0}


def test_a_failed_reward_ends_the_run_or_has_the_configured_score():
    with pytest.raises(RewardError, match="is bad"):
        late(Pool()).score(RULES, responses("a", "bad"), Texts({}))
    with pytest.raises(RewardError, match=r"rewards\.failure_score"):
        late(Pool(), allowed=5).score(RULES, responses("bad"), Texts({}))
    samples = responses("a", "bad")
    assert late(Pool(), score=-1.0).score(RULES, samples, Texts({})).tolist() == [1, -1]
    assert samples.payloads[1].failure == "is bad"


def test_a_step_that_is_made_again_takes_no_answers_of_the_one_that_was_given_up():
    class Stopped(Pool):
        def submit(self, requests: Sequence[ScoreRequest]) -> None:
            first = not self.asked
            super().submit(requests[:1] if first else requests)
            if first:
                raise KeyboardInterrupt

    scores, samples = late(pool := Stopped()), responses("a", "abc")
    with pytest.raises(KeyboardInterrupt):
        scores.score(RULES, samples, Texts({}))
    assert scores.score(RULES, samples, Texts({})).tolist() == [1, 3]
    assert not pool.poll()


def test_scorers_that_do_not_answer_end_the_run():
    with pytest.raises(SchedulerError, match="1 samples without a score"):
        late(Pool(silent=True)).score(RULES, responses("a"), Texts({}))
