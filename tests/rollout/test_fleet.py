"""Engines that leave, fall silent, are paused, fail again and again, or let a sample hang."""

from __future__ import annotations

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import (
    Abort,
    ContinueEngine,
    Dispatch,
    Drop,
    PauseEngine,
    ReleaseEngine,
    Submit,
    Wake,
)
from flowrl.rollout.events import (
    AbortAsked,
    DeadlineReached,
    EngineCapacityChanged,
    EngineContinueAsked,
    EngineLeaving,
    EngineLost,
    EnginePauseAsked,
    HeartbeatLost,
    HeartbeatSeen,
    Progressed,
    Resumed,
    SampleFailed,
    StopAsked,
)
from flowrl.rollout.policies.engines import Quarantine
from flowrl.rollout.policies.limits import Patience, Retries


def fail(p, sample, engine="e0", error="oom"):
    _, attempt, _ = p.attempts[sample]
    return p(SampleFailed, engine=engine, sample=sample, attempt=attempt, error=error)


# Leaving


def test_a_leaving_engine_gives_its_samples_back_and_is_let_go_when_it_is_empty(play, where):
    p = play(group_size=1)
    p.join("e0", 2)
    p.offer("0/0", "0/1")
    p.join("e1", 1)
    assert p(EngineLeaving, engine="e0") == [Abort(engine="e0", samples=("0/0/0", "0/1/0"))]
    actions = p.finish("0/0/0", tokens=3, reason="abort")
    assert actions[0] == Submit(
        engine="e1", samples=(Dispatch(sample="0/0/0", attempt=1, kept_tokens=3),)
    )
    assert ReleaseEngine(engine="e0") in p.finish("0/1/0", tokens=1, reason="abort")
    assert "e0" not in p.scheduler.state.placement.engines


def test_a_leaving_engine_may_finish_what_it_has(play, where):
    p = play(group_size=1)
    p.join("e0", 1)
    p.offer("0/0", "0/1")
    assert p(EngineLeaving, engine="e0", running="finish") == []
    actions = p.finish("0/0/0")
    assert ReleaseEngine(engine="e0") in actions
    assert where(actions) == {}


def test_an_idle_engine_leaves_at_once_and_an_unknown_one_is_fenced(play):
    p = play()
    p.join()
    assert p(EngineLeaving, engine="e0") == [ReleaseEngine(engine="e0")]
    assert p(EngineLeaving, engine="e0") == []
    assert p.scheduler.fenced == 1


# Silence


def test_without_patience_a_silent_engine_is_given_up_at_once(play):
    p = play(group_size=1)
    p.join("e0", 1)
    p.offer("0/0")
    assert p(HeartbeatLost, engine="e0") == [ReleaseEngine(engine="e0")]
    assert p.scheduler.counts.queued == 1


def test_a_silent_engine_gets_nothing_and_is_given_up_at_the_deadline(play, where):
    p = play(group_size=1, patience=Patience(heartbeat_s=10.0))
    p.join("e0", 2)
    p.offer("0/0")
    p.now_s = 100.0
    assert p(HeartbeatLost, engine="e0") == [Wake(at_s=110.0)]
    assert where(p.offer("0/1")) == {}
    p.join("e1", 1)
    p.now_s = 109.0
    assert p(DeadlineReached) == []
    p.now_s = 110.0
    assert p(DeadlineReached) == [ReleaseEngine(engine="e0")]
    assert p.scheduler.counts.queued == 1
    assert where(p.join("e2", 1)) == {"e2": ["0/0/0"]}


@pytest.mark.parametrize("sign", ["heartbeat", "progress", "end"])
def test_any_sign_of_life_opens_a_silent_engine_again(play, where, sign):
    p = play(group_size=1, patience=Patience(heartbeat_s=10.0))
    p.join("e0", 2)
    p.offer("0/0")
    p(HeartbeatLost, engine="e0")
    p.now_s = 30.0  # the sign comes before anybody looked at the clock
    if sign == "heartbeat":
        p(HeartbeatSeen, engine="e0")
    elif sign == "progress":
        p(Progressed, engine="e0", progress=(("0/0/0", 0, 1),))
    else:
        p.finish("0/0/0")
    assert where(p.offer("0/1")) == {"e0": ["0/1/0"]}
    assert p.wait(60.0) == []


def test_a_second_lost_heartbeat_does_not_move_the_deadline(play):
    p = play(patience=Patience(heartbeat_s=10.0))
    p.join()
    assert p(HeartbeatLost, engine="e0") == [Wake(at_s=10.0)]
    p.now_s = 5.0
    assert p(HeartbeatLost, engine="e0") == []
    assert p.wait(5.0) == [ReleaseEngine(engine="e0")]


def test_a_clock_that_jumps_back_stands_still(play):
    p = play(patience=Patience(heartbeat_s=10.0))
    p.join()
    p.now_s = 100.0
    p(HeartbeatLost, engine="e0")
    assert p(DeadlineReached, at_s=0.0) == []
    assert p(DeadlineReached, at_s=110.0) == [ReleaseEngine(engine="e0")]


def test_deadlines_are_kept_over_a_restart_with_another_clock(play):
    p = play(
        group_size=1,
        retries=Retries(attempts=9),
        quarantine=Quarantine(failures=1, seconds=30.0, most_seconds=30.0),
    )
    p.join()
    p.offer("0/0")
    p.now_s = 1000.0
    fail(p, "0/0/0")
    p.now_s = 1010.0
    p(DeadlineReached)
    p.now_s = 3.0
    assert p(Resumed) == [Wake(at_s=23.0)]  # twenty seconds are left
    assert p.join() == [PauseEngine(engine="e0", reason="quarantined")]
    assert p.wait(20.0)[0] == ContinueEngine(engine="e0")


# Hanging samples


def test_an_attempt_without_a_token_for_long_is_aborted_and_begins_elsewhere(play):
    p = play(group_size=1, patience=Patience(stall_s=8.0))
    p.join("e0", 1)
    assert Wake(at_s=8.0) in p.offer("0/0")
    p.join("e1", 1)
    actions = p.wait(8.0)
    assert actions[:2] == [
        Abort(engine="e0", samples=("0/0/0",)),
        Submit(engine="e1", samples=(Dispatch(sample="0/0/0", attempt=1, kept_tokens=0),)),
    ]
    # Its late answer is of a dead attempt.
    p.attempts["0/0/0"] = ("e0", 0, 0)
    assert p.finish("0/0/0") == []
    assert p.scheduler.fenced == 1


def test_tokens_move_the_deadline_and_it_is_looked_at_often_enough(play):
    p = play(group_size=1, patience=Patience(stall_s=8.0))
    p.join("e0", 1)
    p.offer("0/0")
    p.now_s = 6.0
    p(Progressed, engine="e0", progress=(("0/0/0", 0, 1),))
    p.now_s = 8.0
    assert p(DeadlineReached) == [Wake(at_s=14.0)]
    p.now_s = 14.0
    p(Progressed, engine="e0", progress=(("0/0/0", 0, 1),))  # no more tokens than before
    assert p.scheduler.counts.running == 1
    assert p.attempts["0/0/0"] == ("e0", 1, 0)


def test_a_sample_that_hangs_again_and_again_uses_up_its_attempts(play):
    p = play(group_size=1, retries=Retries(attempts=2), patience=Patience(stall_s=8.0))
    p.join("e0", 1)
    p.offer("0/0")
    p.wait(8.0)
    assert Drop(sample="0/0/0", reason="retries") in p.wait(8.0)


def test_an_abort_that_is_not_answered_counts_as_hanging(play):
    p = play(group_size=1, patience=Patience(stall_s=8.0))
    p.join("e0", 1)
    p.join("e1", 0)
    p.offer("0/0")
    p.now_s = 7.0
    p(AbortAsked, samples=("0/0/0",))
    p(EnginePauseAsked, engine="e0")
    p(EngineCapacityChanged, engine="e1", capacity=1)
    assert p.wait(1.0) == [Wake(at_s=15.0)]
    assert p.wait(7.0)[0] == Submit(
        engine="e1", samples=(Dispatch(sample="0/0/0", attempt=1, kept_tokens=0),)
    )


def test_a_paused_engine_is_not_expected_to_make_tokens(play):
    p = play(group_size=1, patience=Patience(stall_s=8.0))
    p.join("e0", 1)
    p.offer("0/0")
    p(EnginePauseAsked, engine="e0")
    p.wait(1000.0)
    p(EngineContinueAsked, engine="e0")
    p.wait(7.0)
    assert p.attempts["0/0/0"] == ("e0", 0, 0)
    p.wait(2.0)
    assert p.attempts["0/0/0"] == ("e0", 1, 0)


# Pauses


def test_a_paused_engine_keeps_its_samples_and_gets_no_others(play, where):
    p = play(group_size=1)
    p.join("e0", 2)
    p.offer("0/0")
    assert p(EnginePauseAsked, engine="e0") == [PauseEngine(engine="e0", reason="asked")]
    assert where(p.offer("0/1")) == {}
    assert p(EngineContinueAsked, engine="e0") == [
        ContinueEngine(engine="e0"),
        Submit(engine="e0", samples=(Dispatch(sample="0/1/0", attempt=0, kept_tokens=0),)),
    ]


def test_a_paused_engine_can_give_its_samples_to_others(play, where):
    p = play(group_size=1)
    p.join("e0", 1)
    p.offer("0/0")
    p.join("e1", 1)
    assert p(EnginePauseAsked, engine="e0", running="abort") == [
        Abort(engine="e0", samples=("0/0/0",)),
        PauseEngine(engine="e0", reason="asked"),
    ]
    assert where(p.finish("0/0/0", tokens=2, reason="abort")) == {"e1": ["0/0/0"]}


def test_pauses_of_unknown_engines_are_fenced(play):
    p = play()
    assert p(EnginePauseAsked, engine="e7") == []
    assert p(EngineContinueAsked, engine="e7") == []
    assert p(HeartbeatLost, engine="e7") == []
    assert p.scheduler.fenced == 3


# Quarantine


def quarantined(play, **rules):
    """e0 has just failed two different samples in a row; e1 is full."""
    p = play(
        **{
            "group_size": 1,
            "retries": Retries(attempts=99),
            "quarantine": Quarantine(failures=2, seconds=10.0, growth=3.0, most_seconds=50.0),
            **rules,
        }
    )
    p.join("e1", 0)
    p.join("e0", 3)
    p.offer("0/0", "0/1", "0/2")
    fail(p, "0/0/0")
    return p, fail(p, "0/1/0")


def test_an_engine_that_fails_again_and_again_is_closed_and_gives_its_samples_away(play, where):
    p, actions = quarantined(play)
    assert actions == [
        Abort(engine="e0", samples=("0/0/0", "0/2/0")),
        PauseEngine(engine="e0", reason="quarantined"),
        Wake(at_s=10.0),
    ]
    assert where(p(EngineCapacityChanged, engine="e1", capacity=1)) == {"e1": ["0/1/0"]}
    assert "engine e0 holds 2 of 3 samples, first 0/2/0; closed: quarantined" in p.scheduler.waits()


def test_after_its_time_it_is_tried_with_one_sample_and_a_success_opens_it(play, where):
    p, _ = quarantined(play)
    p.finish("0/0/0", "0/2/0", tokens=1, reason="abort")
    actions = p.wait(10.0)
    assert actions[0] == ContinueEngine(engine="e0")
    assert where(actions) == {"e0": ["0/1/0"]}
    assert where(p.finish("0/1/0")) == {"e0": ["0/0/0", "0/2/0"]}


def test_a_failure_on_trial_closes_it_for_longer(play):
    p, _ = quarantined(play)
    p.finish("0/0/0", "0/2/0", tokens=1, reason="abort")
    p.wait(10.0)
    assert Wake(at_s=40.0) in fail(p, "0/1/0")
    p.wait(30.0)
    sample = p.runs("e0")[0]
    assert Wake(at_s=90.0) in fail(p, sample)  # 50 s at most


def test_one_sample_that_breaks_every_engine_closes_none(play):
    p = play(group_size=1, retries=Retries(attempts=9), quarantine=Quarantine(failures=2))
    p.join()
    p.offer("0/0")
    for _ in range(5):
        assert not any(isinstance(action, PauseEngine) for action in fail(p, "0/0/0"))


def test_a_success_in_between_begins_the_count_anew(play):
    p = play(group_size=1, retries=Retries(attempts=9), quarantine=Quarantine(failures=2))
    p.join()
    p.offer("0/0", "0/1", "0/2")
    fail(p, "0/0/0")
    p.finish("0/1/0")
    assert p.scheduler.state.health == {}
    assert not any(isinstance(action, PauseEngine) for action in fail(p, "0/2/0"))


def test_an_engine_that_dies_again_and_again_is_closed_when_it_comes_back(play):
    p = play(quarantine=Quarantine(failures=2, seconds=10.0))
    for _ in range(2):
        p.join()
        actions = p(EngineLost, engine="e0", reason="killed")
    assert actions == [Wake(at_s=10.0)]
    assert p.join() == [PauseEngine(engine="e0", reason="quarantined")]
    assert p.wait(10.0) == [ContinueEngine(engine="e0")]


def test_a_refused_sample_counts_against_the_engine_too(play):
    p = play(
        group_size=1, retries=Retries(attempts=9), quarantine=Quarantine(failures=1, seconds=10.0)
    )
    p.join()
    p.offer("0/0")
    actions = p.finish("0/0/0", tokens=0, reason="abort")
    assert PauseEngine(engine="e0", reason="quarantined") in actions


def test_the_tokens_of_a_sample_that_waited_for_a_healthy_engine_are_kept(play, only):
    p, _ = quarantined(play)
    p.finish("0/2/0", tokens=7, reason="abort")
    submit = only(p(EngineCapacityChanged, engine="e1", capacity=9), Submit)
    assert Dispatch(sample="0/2/0", attempt=1, kept_tokens=7) in submit.samples


def test_nobody_is_woken_for_nothing_after_a_stop(play):
    p, _ = quarantined(play)
    p(StopAsked, reason="done")
    assert p.wait(10.0) == [ContinueEngine(engine="e0")]
    assert p.wait(1000.0) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Quarantine(failures=0),
        lambda: Quarantine(seconds=0.0),
        lambda: Quarantine(seconds=10.0, most_seconds=5.0),
        lambda: Quarantine(growth=float("nan")),
        lambda: Patience(heartbeat_s=-1.0),
        lambda: Patience(stall_s=float("inf")),
    ],
)
def test_impossible_times_are_refused(make):
    with pytest.raises(SchedulerError, match="out of range"):
        make()
