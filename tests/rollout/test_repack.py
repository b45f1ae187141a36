"""The tail of a step on fewer engines."""

from __future__ import annotations

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import Abort, ContinueEngine, NeedPrompts, PauseEngine
from flowrl.rollout.events import EngineCapacityChanged, EngineLost
from flowrl.rollout.policies.engines import RepackTail
from flowrl.rollout.policies.prompts import AgeBudget


def tail(play, engines=4, **rules):
    """Four engines of two slots with two samples each."""
    p = play(**{"group_size": 1, "repack": RepackTail(share=0.5), **rules})
    for number in range(engines):
        p.join(f"e{number}", 2)
    p.offer(*(f"0/{n}" for n in range(2 * engines)))
    return p


def finish_on(p, engine):
    return p.finish(p.runs(engine)[0])


def test_the_tail_moves_onto_the_fewest_engines_that_hold_it(play, where):
    p = tail(play)
    for engine in ("e0", "e1", "e2"):
        assert not any(isinstance(action, PauseEngine) for action in finish_on(p, engine))
    # Four samples, one on each engine, fit on two of them.
    actions = finish_on(p, "e3")
    moved = {name: p.runs(name) for name in ("e2", "e3")}
    assert [a for a in actions if isinstance(a, Abort)] == [
        Abort(engine=name, samples=tuple(samples)) for name, samples in moved.items()
    ]
    assert [a.engine for a in actions if isinstance(a, PauseEngine)] == ["e2", "e3"]
    (sample,) = moved["e2"]
    assert where(p.finish(sample, tokens=3, reason="abort")) == {"e0": [sample]}


def test_a_full_engine_is_left_alone(play):
    p = tail(play, engines=2)
    assert not any(isinstance(action, PauseEngine) for action in finish_on(p, "e0"))


def test_two_halves_become_one_whole(play, where):
    p = tail(play, engines=2)
    finish_on(p, "e0")
    moved = p.runs("e1")[0]
    actions = finish_on(p, "e1")
    other = p.runs("e1")[0]
    assert Abort(engine="e1", samples=(other,)) in actions
    assert PauseEngine(engine="e1", reason="repacked") in actions
    assert other != moved
    assert where(p.finish(other, tokens=1, reason="abort")) == {"e0": [other]}
    assert p.scheduler.counts.running == 2


def test_freed_engines_come_back_when_there_is_work_for_them(play, where):
    p = tail(play, engines=2)
    finish_on(p, "e0")
    finish_on(p, "e1")
    p.finish(p.runs("e1")[0], tokens=1, reason="abort")
    actions = p.offer("1/0", "1/1")
    assert actions[0] == ContinueEngine(engine="e1")
    assert where(actions) == {"e1": ["1/0/0", "1/1/0"]}


def test_new_work_is_spread_over_all_engines_again(play, where):
    p = tail(play)
    for engine in ("e0", "e1", "e2", "e3"):
        finish_on(p, engine)
    p.finish(p.runs("e2")[0], tokens=1, reason="abort")
    p.finish(p.runs("e3")[0], tokens=1, reason="abort")
    actions = p.offer("1/0", "1/1", "1/2")
    assert [a.engine for a in actions if isinstance(a, ContinueEngine)] == ["e2", "e3"]
    assert {name: len(samples) for name, samples in where(actions).items()} == {"e2": 2, "e3": 1}


def test_one_sample_opens_one_engine(play, where):
    p = tail(play)
    for engine in ("e0", "e1", "e2", "e3"):
        finish_on(p, engine)
    p.finish(p.runs("e2")[0], tokens=1, reason="abort")
    p.finish(p.runs("e3")[0], tokens=1, reason="abort")
    actions = p.offer("1/0")
    assert [a.engine for a in actions if isinstance(a, ContinueEngine)] == ["e2"]
    assert where(actions) == {"e2": ["1/0/0"]}


def test_a_freed_engine_that_takes_nothing_any_more_is_passed_over(play, where):
    p = tail(play)
    for engine in ("e0", "e1", "e2", "e3"):
        finish_on(p, engine)
    p.finish(p.runs("e2")[0], tokens=1, reason="abort")
    p.finish(p.runs("e3")[0], tokens=1, reason="abort")
    p(EngineCapacityChanged, engine="e2", capacity=0)
    actions = p.offer("1/0")
    assert [a.engine for a in actions if isinstance(a, ContinueEngine)] == ["e3"]
    assert where(actions) == {"e3": ["1/0/0"]}


def test_freed_engines_come_back_when_another_one_dies(play, where):
    p = tail(play, engines=2)
    finish_on(p, "e0")
    finish_on(p, "e1")
    p.finish(p.runs("e1")[0], tokens=1, reason="abort")
    both = p.runs("e0")
    actions = p(EngineLost, engine="e0", reason="killed")
    assert ContinueEngine(engine="e1") in actions
    assert where(actions) == {"e1": both}


def test_it_is_not_the_tail_while_prompts_are_under_way(play):
    p = play(group_size=1, repack=RepackTail(), admission=AgeBudget(groups=4), max_staleness=1)
    p.join("e0", 2)
    p.join("e1", 2)
    p.offer("0/0", "0/1")
    # Two samples would fit on one engine, but six groups were asked for.
    assert not any(isinstance(a, PauseEngine) for a in p.score())
    assert p.scheduler.state.admission.requested == {"": 6}


def test_without_the_policy_nothing_moves(play):
    p = tail(play, repack=type(play().scheduler.settings.repack)())
    for engine in ("e0", "e1", "e2", "e0", "e1"):
        actions = finish_on(p, engine)
        assert not any(isinstance(action, PauseEngine | NeedPrompts) for action in actions)


def test_a_share_of_one_would_move_samples_for_nothing():
    with pytest.raises(SchedulerError, match="share is out of range"):
        RepackTail(share=1.0)
