"""One sample: its way, its attempts, and what late reports do to it."""

from __future__ import annotations

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import Abort, Dispatch, Drop, Score, Submit
from flowrl.rollout.events import (
    AbortAsked,
    EngineCapacityChanged,
    EngineJoined,
    EngineLost,
    Progressed,
    PromptsOffered,
    Resumed,
    RewardFailed,
    SampleEnd,
    SampleFailed,
    SamplesFinished,
    StopAsked,
)
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import State
from flowrl.specs import FinishReason


def test_a_sample_goes_from_the_queue_to_ready(play, only):
    p = play(group_size=1)
    p.offer("0/0")
    submit = only(p.join(), Submit)
    assert submit.samples == (Dispatch(sample="0/0/0", attempt=0, kept_tokens=0),)
    assert only(p.finish("0/0/0"), Score).samples == ("0/0/0",)
    p.score("0/0/0")
    assert p.moves("0/0/0") == ["queued", "running", "generated", "scoring", "ready"]
    assert p.scheduler.counts.ready == 1


def test_a_finished_sample_is_scored_while_its_group_still_generates(play, only):
    p = play(group_size=3)
    p.join()
    p.offer("0/0")
    assert only(p.finish("0/0/1"), Score).samples == ("0/0/1",)
    counts = p.scheduler.counts
    assert (counts.running, counts.scoring) == (2, 1)


def test_an_aborted_sample_goes_on_from_its_tokens(play, only):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    assert only(p(AbortAsked, samples=("0/0/0",)), Abort).samples == ("0/0/0",)
    submit = only(p.finish("0/0/0", tokens=5, reason="abort"), Submit)
    assert submit.samples == (Dispatch(sample="0/0/0", attempt=1, kept_tokens=5),)
    assert p.moves("0/0/0")[-3:] == ["partial", "queued", "running"]


def test_version_spans_of_an_aborted_sample_join_without_a_gap(play):
    p = play(group_size=1, max_staleness=3)
    p.join()
    p.offer("0/0")
    p.finish("0/0/0", tokens=5, version=0, reason="abort")
    p.finish("0/0/0", tokens=2, version=0, reason="abort")
    p.finish("0/0/0", tokens=4, version=1)
    sample = p.scheduler.state.machine.samples["0/0/0"]
    assert sample.versions == ((0, 7), (1, 4))
    assert (sample.kept_tokens, sample.first_version) == (11, 0)


def test_asking_twice_for_an_abort_aborts_once(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    assert p(AbortAsked, samples=("0/0/0", "0/0/0"))
    assert p(AbortAsked, samples=("0/0/0", "5/5/5")) == []


def test_a_sample_that_finishes_in_spite_of_an_abort_is_kept(play, only):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    p(AbortAsked, samples=("0/0/0",))
    assert only(p.finish("0/0/0"), Score).samples == ("0/0/0",)


def test_a_failed_attempt_is_retried_and_then_given_up(play, only):
    p = play(group_size=1, retries=Retries(attempts=3))
    p.join()
    p.offer("0/0")
    for attempt in range(2):
        actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=attempt, error="oom")
        assert only(actions, Submit).samples[0].attempt == attempt + 1
    actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=2, error="oom")
    assert actions == [Drop(sample="0/0/0", reason="retries")]
    assert p.scheduler.counts.dropped == 1


def test_a_failure_loses_only_the_tokens_of_its_own_attempt(play, only):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    p.finish("0/0/0", tokens=5, reason="abort")
    p(Progressed, engine="e0", progress=(("0/0/0", 1, 9),))
    actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=1, error="oom")
    assert only(actions, Submit).samples == (Dispatch(sample="0/0/0", attempt=2, kept_tokens=5),)


def test_an_engine_that_gives_a_sample_back_again_and_again_uses_up_its_attempts(play):
    p = play(group_size=1, retries=Retries(attempts=2))
    p.join()
    p.offer("0/0")
    p.finish("0/0/0", tokens=0, reason="abort")
    p.finish("0/0/0", tokens=0, reason="abort")
    assert p.drops() == {"0/0/0": "retries"}


def test_samples_of_a_lost_engine_run_elsewhere_and_its_late_reports_are_fenced(play, only):
    p = play()
    p.join()
    p.offer("0/0")
    late = SamplesFinished(id=10, engine="e0", ends=(p.end("0/0/0"), p.end("0/0/1")))
    assert p(EngineLost, engine="e0", reason="killed") == []
    assert only(p.join("e1"), Submit).samples == (
        Dispatch(sample="0/0/0", attempt=1, kept_tokens=0),
        Dispatch(sample="0/0/1", attempt=1, kept_tokens=0),
    )
    assert p.scheduler.step(late) == []
    assert p.scheduler.fenced == 2
    assert p.scheduler.counts.running == 2


def test_an_engine_that_joins_anew_under_its_name_lost_what_it_ran(play, only):
    p = play()
    p.join()
    p.offer("0/0")
    submit = only(p(EngineJoined, engine="e0", capacity=4), Submit)
    assert [(d.sample, d.attempt) for d in submit.samples] == [("0/0/0", 1), ("0/0/1", 1)]


def test_losing_an_engine_that_is_not_there_changes_nothing(play):
    p = play()
    assert p(EngineLost, engine="e7", reason="?") == []
    assert p(EngineCapacityChanged, engine="e7", capacity=3) == []
    assert p.scheduler.fenced == 2


def test_a_second_end_of_the_same_attempt_is_fenced(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    end = p.end("0/0/0")
    p(SamplesFinished, engine="e0", ends=(end, end))
    assert (p.scheduler.fenced, p.scheduler.counts.scoring) == (1, 1)


def test_reports_from_an_engine_that_does_not_run_the_sample_are_fenced(play):
    p = play(group_size=1)
    p.join()
    p.join("e1")
    p.offer("0/0")
    p(SamplesFinished, engine="e1", ends=(p.end("0/0/0"),))
    p(Progressed, engine="e1", progress=(("0/0/0", 0, 4),))
    p(SampleFailed, engine="e1", sample="0/0/0", attempt=0, error="?")
    assert (p.scheduler.fenced, p.scheduler.counts.running) == (3, 1)


def test_a_score_that_nobody_asked_for_is_fenced(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    p.score("0/0/0", "8/8/8")
    p(RewardFailed, sample="0/0/0", error="?")
    assert (p.scheduler.fenced, p.scheduler.counts.running) == (3, 1)


def test_a_sample_without_a_score_is_dropped_never_scored_zero(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    p.finish("0/0/0")
    assert p(RewardFailed, sample="0/0/0", error="raised") == [
        Drop(sample="0/0/0", reason="reward_failed")
    ]
    assert p.scheduler.counts.ready == 0


def test_progress_never_falls(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    for tokens in (4, 2):
        p(Progressed, engine="e0", progress=(("0/0/0", 0, tokens),))
    assert p.scheduler.state.machine.samples["0/0/0"].num_tokens == 4


@pytest.mark.parametrize(
    ("num_tokens", "versions"),
    [(3, ((0, 2),)), (3, ()), (-1, ()), (2, ((0, 3), (1, -1)))],
)
def test_spans_that_do_not_add_up_to_the_tokens_are_an_error(num_tokens, versions):
    scheduler = RolloutScheduler(SchedulerSettings(group_size=1))
    scheduler.step(EngineJoined(id=0, engine="e0", capacity=1))
    scheduler.step(PromptsOffered(id=1, groups=("0/0",)))
    end = SampleEnd(
        sample="0/0/0",
        attempt=0,
        reason=FinishReason.STOP,
        num_tokens=num_tokens,
        versions=versions,
    )
    with pytest.raises(SchedulerError, match=r"sample 0/0/0, attempt 0: .*spans do not add up"):
        scheduler.step(SamplesFinished(id=2, engine="e0", ends=(end,)))


def test_a_stop_drops_everything_alive_and_aborts_what_runs(play, only):
    p = play(group_size=1)
    p.join(capacity=1)
    p.offer("0/0", "0/1", "0/2")
    p.finish("0/0/0")
    actions = p(StopAsked, reason="Ctrl-C")
    assert only(actions, Abort) == Abort(engine="e0", samples=("0/1/0",))
    assert set(p.drops().values()) == {"stopped"}
    assert (p.scheduler.counts.live, p.scheduler.counts.dropped) == (0, 3)
    assert p.finish("0/1/0", reason="abort") == []
    assert p.offer("0/3") == []
    assert p(StopAsked, reason="again") == []
    assert p.scheduler.stopped == "Ctrl-C"


def test_after_a_resume_running_samples_are_queued_and_scores_asked_for_again(play, only):
    p = play(group_size=2, retries=Retries(attempts=1))
    p.join()
    p.offer("0/0")
    p.finish("0/0/1")
    actions = p(Resumed)
    assert only(actions, Score).samples == ("0/0/1",)
    assert p.scheduler.counts.queued == 1
    assert only(p.join(), Submit).samples == (Dispatch(sample="0/0/0", attempt=1, kept_tokens=0),)


def test_an_impossible_transition_tells_the_samples_story(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    machine = p.scheduler.state.machine
    with pytest.raises(SchedulerError) as caught:
        machine.move(machine.samples["0/0/0"], State.CONSUMED)
    text = str(caught.value)
    assert "sample 0/0/0: impossible transition running -> consumed" in text
    assert "event 1: new -> queued" in text
    assert "event 1: queued -> running on e0 attempt 0" in text
    assert "expected: generated, partial, queued, dropped" in text


def test_without_the_validator_the_story_is_the_last_states():
    scheduler = RolloutScheduler(SchedulerSettings(group_size=1))
    scheduler.step(EngineJoined(id=0, engine="e0", capacity=1))
    scheduler.step(PromptsOffered(id=1, groups=("0/0",)))
    assert scheduler.history("0/0/0").startswith("queued -> running on e0, attempt 0, 0 failures")
    for number in range(2, 12):
        end = SampleEnd(
            sample="0/0/0",
            attempt=number - 2,
            reason=FinishReason.ABORT,
            num_tokens=number,
            versions=((0, 2 if number == 2 else 1),),
        )
        scheduler.step(SamplesFinished(id=number, engine="e0", ends=(end,)))
    assert scheduler.history("0/0/0").startswith("partial -> queued -> running")
    assert scheduler.history("0/0/0").count("->") == 14


def test_the_journal_names_attempt_engine_version_and_reason(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    p(SampleFailed, engine="e0", sample="0/0/0", attempt=0, error="out of memory")
    told = [(s.before, s.after, s.reason, s.attempt, s.engine) for s in p.journal]
    assert told == [
        (None, "queued", "", -1, None),
        ("queued", "running", "", 0, "e0"),
        ("running", "queued", "out of memory", 0, "e0"),
        ("queued", "running", "", 1, "e0"),
    ]
