"""The journal: events as lines, read back, replayed; and one sample's history told from it."""

from __future__ import annotations

import io
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import SchedulerError
from flowrl.rollout.event_history import sample_history
from flowrl.rollout.events import (
    AbortAsked,
    BatchAsked,
    EngineLost,
    Resumed,
    RewardFailed,
    SampleFailed,
    WeightsPublished,
)
from flowrl.rollout.journal import (
    JournalWriter,
    event_from_json,
    event_to_json,
    read_journal,
    replay,
)
from flowrl.rollout.policies.engines import AbortRunning
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.scheduler import RolloutScheduler
from tests.proofs.scheduler_episodes import STORMY, draw_episode
from tests.proofs.scheduler_episodes import play as play_episode


def journal_of(p, start=None):
    """What a writer beside the play would have written."""
    file = io.StringIO()
    writer = JournalWriter(file)
    writer.begin(p.scheduler.settings if start is None else start)
    for event in p.events:
        writer.event(event)
    return file.getvalue()


def lines(text):
    return text.splitlines(keepends=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_event_survives_json_unchanged(seed):
    world, error = play_episode(draw_episode(random.Random(seed), 80, rates=STORMY))
    assert error is None
    for event in world.events:
        assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_fields_with_their_default_are_left_out():
    assert event_to_json(BatchAsked(id=3, batch=0, groups=2)) == {
        "event": "BatchAsked",
        "id": 3,
        "batch": 0,
        "groups": 2,
    }
    assert event_to_json(Resumed(id=4, at_s=1.5)) == {"event": "Resumed", "id": 4, "at_s": 1.5}


@pytest.mark.parametrize(
    "obj",
    [
        {"event": "Nothing", "id": 1},
        {"id": 1},
        {"event": "BatchAsked", "id": 1, "batches": 2},
        {"event": "SamplesFinished", "id": 1, "engine": "e", "ends": [["0/0/0", 1]]},
    ],
)
def test_what_is_no_event_is_an_error(obj):
    with pytest.raises(SchedulerError, match="this is no event of the scheduler"):
        event_from_json(obj)


def test_a_journal_replays_to_the_same_state(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0", "0/1")
    p.finish_and_score("0/0/0")
    p(BatchAsked, batch=0, groups=1)
    journal = read_journal(lines(journal_of(p)))
    assert (len(journal.events), journal.rewinds, journal.torn) == (len(p.events), 0, False)
    assert replay(journal, validate=True).to_json() == p.scheduler.to_json()


def test_a_journal_may_begin_in_mid_run(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0", "0/1")
    start = RolloutScheduler.from_json(p.scheduler.to_json())
    p.events.clear()
    p.finish("0/0/0")
    assert replay(read_journal(lines(journal_of(p, start)))).to_json() == p.scheduler.to_json()


def test_what_was_written_after_the_checkpoint_of_a_resumed_run_is_void(play):
    p = play(group_size=1)
    file = io.StringIO()
    writer = JournalWriter(file)
    writer.begin(p.scheduler.settings)
    p.join()
    p.offer("0/0")
    checkpoint = p.scheduler.to_json()
    p.finish("0/0/0")
    for event in p.events:
        writer.event(event)
    # The process dies, and goes on from its checkpoint.
    p.scheduler = RolloutScheduler.from_json(checkpoint, validate=True)
    writer.rewind(p.scheduler.last_event_id)
    p(Resumed)
    writer.event(p.events[-1])
    journal = read_journal(lines(file.getvalue()))
    assert [type(event).__name__ for event in journal.events] == [
        "EngineJoined",
        "PromptsOffered",
        "Resumed",
    ]
    assert journal.rewinds == 1
    assert replay(journal).to_json() == p.scheduler.to_json()


def test_half_a_line_at_the_end_is_left_out_and_told(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    journal = read_journal(lines(journal_of(p)[:-20]))
    assert (len(journal.events), journal.torn) == (1, True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: [], "the journal is empty"),
        (lambda text: ['{"journal": 99}\n'], "expected the head of a journal of format 1"),
        (lambda text: [*lines(text)[:1], "{\n", *lines(text)[1:]], "line 2.*is broken"),
        (lambda text: [lines(text)[0], '{"event": "X", "id": 0}\n'], "no event"),
    ],
)
def test_a_damaged_journal_is_an_error(play, damage, message):
    p = play(group_size=1)
    p.join()
    with pytest.raises(SchedulerError, match=f"(?s){message}|{message}"):
        read_journal(damage(journal_of(p)))


def test_settings_that_cannot_be_read_are_an_error():
    head = {"journal": 1, "settings": {"group_size": 1, "order": {"kind": "?"}}}
    with pytest.raises(SchedulerError, match="the settings of this journal cannot be read"):
        replay(read_journal([json.dumps(head) + "\n"]))


@pytest.fixture
def eventful(play):
    """0/0/0 is aborted by a publication, fails, loses an engine, waits for a reward, ends."""
    p = play(
        group_size=1,
        max_staleness=3,
        retries=Retries(rewards=2),
        publication=AbortRunning(),
    )
    p.now_s = 1.0
    p.join("e0", 1)
    p.offer("0/0")
    p.now_s = 2.0
    p(WeightsPublished, version=1)
    p.finish("0/0/0", tokens=5, version=0, reason="abort")
    p.join("e1", 1)
    p.now_s = 3.0
    p(SampleFailed, engine="e1", sample="0/0/0", attempt=1, error="out of memory")
    p(SampleFailed, engine="e1", sample="0/0/0", attempt=1, error="out of memory")
    p(EngineLost, engine="e1", reason="killed")
    p.join("e2", 1)
    p(AbortAsked, samples=("0/0/0",))
    p.finish("0/0/0", tokens=2, version=1)
    p(RewardFailed, sample="0/0/0", error="timed out")
    p.score("0/0/0")
    p.now_s = 4.0
    p(BatchAsked, batch=7, groups=1, version=2)
    return p


def test_a_samples_story_says_where_it_ran_and_why_it_was_aborted(eventful):
    history = sample_history(read_journal(lines(journal_of(eventful))), "0/0/0")
    assert str(history).splitlines() == [
        "sample 0/0/0: consumed (in a journal of 14 events); tokens: 5 by version 0, "
        "2 by version 1; 2 versions old when consumed",
        "     1.000 s  event 1: offered",
        "     1.000 s  event 1: attempt 0 starts on e0, weights 0",
        "     2.000 s  event 2: weights 1 are published while it runs",
        "     2.000 s  event 3: attempt 0 on e0 was aborted: updating",
        "     2.000 s  event 3: waits to go on from its tokens",
        "     2.000 s  event 4: attempt 1 starts on e1, weights 1",
        "     3.000 s  event 5: attempt 1 on e1 failed: out of memory",
        "     3.000 s  event 5: attempt 2 starts on e1, weights 1",
        "     3.000 s  event 6: a late report of attempt 1 is ignored",
        "     3.000 s  event 7: attempt 2 on e1 failed: engine lost: killed",
        "     3.000 s  event 8: attempt 3 starts on e2, weights 1",
        "     3.000 s  event 10: attempt 3 finished on e2",
        "     3.000 s  event 10: waits for its score",
        "     3.000 s  event 11: its reward failed: timed out",
        "     3.000 s  event 12: its score is 1",
        "     3.000 s  event 12: is ready",
        "     4.000 s  event 13: consumed: batch 7, trained on at version 2",
    ]
    assert (history.age, history.spans, history.state) == (2, ((0, 5), (1, 2)), "consumed")


def test_a_sample_that_goes_on_is_told_as_such_and_an_unknown_one_too(play):
    p = play(group_size=1)
    p.offer("0/0")
    journal = read_journal(lines(journal_of(p)))
    assert str(sample_history(journal, "0/0/0")).startswith(
        "sample 0/0/0: still queued (in a journal of 1 event)"
    )
    assert str(sample_history(journal, "9/9/9")) == (
        "sample 9/9/9: never offered (in a journal of 1 event)"
    )


def test_a_story_may_begin_in_mid_life(play):
    p = play(group_size=1, max_staleness=3)
    p.join(capacity=2)
    p.offer("0/0", "0/1")
    p.finish("0/0/0", tokens=5, reason="abort")
    p.finish_and_score("0/1/0")
    p(BatchAsked, batch=0, groups=1)
    start = RolloutScheduler.from_json(p.scheduler.to_json())
    p.events.clear()
    p(WeightsPublished, version=1)
    p.finish("0/0/0", tokens=2, version=1)
    journal = read_journal(lines(journal_of(p, start)))
    history = sample_history(journal, "0/0/0")
    assert history.spans == ((0, 5), (1, 2))
    assert history.moments[0].text.startswith(
        "the journal begins: queued -> running -> partial -> queued -> running on e0, attempt 1"
    )
    assert str(sample_history(journal, "0/1/0")) == (
        "sample 0/1/0: ended before this journal begins (in a journal of 2 events)"
    )


def test_every_sample_of_a_storm_has_a_story_that_ends_as_the_reference_model_says():
    for seed in range(6):
        episode = draw_episode(random.Random(f"story/{seed}"), 150, rates=STORMY)
        world, error = play_episode(episode)
        assert error is None
        file = io.StringIO()
        writer = JournalWriter(file)
        writer.begin(world.settings)
        for event in world.events:
            writer.event(event)
        journal = read_journal(lines(file.getvalue()))
        for sample in random.Random(seed).sample(sorted(world.reference.end), k=3):
            history = sample_history(journal, sample)
            assert history.state == world.reference.end[sample]
            if history.state == "consumed":
                assert sum(count for _, count in history.spans) == world.reference.length(sample)
                assert history.age is None or history.age <= world.settings.max_staleness
