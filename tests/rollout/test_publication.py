"""What becomes of running samples when weights are published, and partial rollouts."""

from __future__ import annotations

import pytest

from flowrl.rollout.actions import Abort, Deliver, Dispatch, Submit, UpdateEngine
from flowrl.rollout.events import (
    BatchAsked,
    EngineLost,
    EngineUpdated,
    PromptsOffered,
    WeightsPublished,
)
from flowrl.rollout.policies.engines import AbortRunning, FinishRunning, KeepRunning


def running(play, publication, **rules):
    """Two samples on e0, at version 0."""
    p = play(group_size=1, max_staleness=3, publication=publication, **rules)
    p.join(capacity=2)
    p.offer("0/0", "0/1")
    return p


def test_kept_samples_run_on_under_the_new_weights(play):
    p = running(play, KeepRunning())
    assert p(WeightsPublished, version=1) == []
    assert p.runs("e0") == ["0/0/0", "0/1/0"]


def test_aborted_samples_go_on_from_their_tokens_with_the_new_weights(play, only):
    p = running(play, AbortRunning())
    actions = p(WeightsPublished, version=1)
    assert actions == [Abort(engine="e0", samples=("0/0/0", "0/1/0"))]
    assert p.finish("0/0/0", tokens=3, version=0, reason="abort") == []
    actions = p.finish("0/1/0", tokens=5, version=0, reason="abort")
    assert actions == [UpdateEngine(engine="e0", version=1)]
    submit = only(p(EngineUpdated, engine="e0", version=1), Submit)
    assert submit.samples == (
        Dispatch(sample="0/0/0", attempt=1, kept_tokens=3),
        Dispatch(sample="0/1/0", attempt=1, kept_tokens=5),
    )
    p.finish("0/0/0", tokens=4, version=1)
    assert p.scheduler.spans("0/0/0") == ((0, 3), (1, 4))


def test_an_aborted_sample_goes_on_at_once_where_the_new_weights_are_already(play, where):
    p = running(play, AbortRunning())
    p.join("e1", 1)
    p(WeightsPublished, version=1)
    p(EngineUpdated, engine="e1", version=1)
    assert where(p.finish("0/1/0", tokens=5, version=0, reason="abort")) == {"e1": ["0/1/0"]}


def test_samples_that_finish_keep_their_weights_and_the_engine_takes_nothing_new(play, only, where):
    p = running(play, FinishRunning())
    assert p(WeightsPublished, version=1) == []
    p.offer("0/2")
    assert where(p.finish("0/0/0", version=0)) == {}
    actions = p.finish("0/1/0", version=0)
    assert only(actions, UpdateEngine) == UpdateEngine(engine="e0", version=1)
    assert where(p(EngineUpdated, engine="e0", version=1)) == {"e0": ["0/2/0"]}


def test_an_idle_engine_is_updated_at_once(play):
    p = play(group_size=1, publication=FinishRunning())
    p.join("e0", 2)
    p.join("e1", 2)
    assert p(WeightsPublished, version=1) == [
        UpdateEngine(engine="e0", version=1),
        UpdateEngine(engine="e1", version=1),
    ]


def test_weights_that_come_while_others_are_loaded_are_loaded_next(play, where):
    p = play(group_size=1, publication=AbortRunning())
    p.join()
    p(WeightsPublished, version=1)
    assert p(WeightsPublished, version=2) == []
    assert p(EngineUpdated, engine="e0", version=1) == [UpdateEngine(engine="e0", version=2)]
    assert where(p.offer("0/0")) == {}
    assert where(p(EngineUpdated, engine="e0", version=2)) == {"e0": ["0/0/0"]}


def test_an_update_that_nobody_asked_for_is_fenced(play):
    p = play(publication=AbortRunning())
    p.join()
    assert p(EngineUpdated, engine="e0", version=0) == []
    assert p(EngineUpdated, engine="e7", version=0) == []
    assert p.scheduler.fenced == 2


@pytest.mark.parametrize("publication", [KeepRunning(), AbortRunning(), FinishRunning()])
def test_an_engine_that_joins_with_old_weights_is_updated_before_it_gets_samples(
    play, where, publication
):
    p = play(group_size=1, publication=publication)
    p(WeightsPublished, version=3)
    p.offer("0/0")
    assert p.join(version=1) == [UpdateEngine(engine="e0", version=3)]
    assert where(p(EngineUpdated, engine="e0", version=3)) == {"e0": ["0/0/0"]}


def test_an_engine_that_dies_while_it_loads_is_forgotten_and_another_goes_on(play, where):
    p = running(play, AbortRunning())
    p(WeightsPublished, version=1)
    p.finish("0/0/0", "0/1/0", tokens=2, version=0, reason="abort")
    p(EngineLost, engine="e0", reason="killed")
    assert where(p.join("e1", 2)) == {"e1": ["0/0/0", "0/1/0"]}
    assert p(EngineUpdated, engine="e0", version=1) == []


def test_a_partial_sample_keeps_counts_and_spans_over_engines_failures_and_restarts(play, only):
    p = play(group_size=1, max_staleness=5)
    p.join("e0", 1)
    p.offer("0/0")
    p.finish("0/0/0", tokens=4, version=0, reason="abort")
    p(WeightsPublished, version=1)
    p.finish("0/0/0", tokens=2, version=1, reason="abort")
    # The third attempt is lost with its engine: its own tokens are gone, the six before are not.
    p(EngineLost, engine="e0", reason="killed")
    written = p.scheduler.to_json()
    p.scheduler = type(p.scheduler).from_json(written, validate=True)
    p(WeightsPublished, version=2)
    submit = only(p.join("e1", 1), Submit)
    assert submit.samples == (Dispatch(sample="0/0/0", attempt=3, kept_tokens=6),)
    p.finish("0/0/0", tokens=3, version=2)
    assert p.scheduler.spans("0/0/0") == ((0, 4), (1, 2), (2, 3))
    p.score("0/0/0")
    assert only(p(BatchAsked, batch=0, groups=1), Deliver).version == 2


def test_publishing_the_same_version_again_changes_nothing(play):
    p = running(play, AbortRunning())
    p(WeightsPublished, version=1)
    assert p(WeightsPublished, version=1) == []
    assert isinstance(p.events[-1], WeightsPublished)
    assert any(isinstance(event, PromptsOffered) for event in p.events)
