"""The spans of a process: how calls become spans, and how spans cross to the run."""

from __future__ import annotations

from flowrl.runtime.spans import Spans


def test_calls_that_follow_each_other_closely_are_one_span():
    spans = Spans()
    for begin_s in (1.0, 1.021, 1.042):
        spans.add("actor.generate[0]", "generate", begin_s, begin_s + 0.02)
    spans.add("actor.generate[0]", "load weights", 1.07, 1.08)
    spans.add("actor.generate[0]", "generate", 1.5, 1.6)
    merged, load, last = spans.take()
    assert (merged.operation, merged.begin_s, merged.end_s, merged.calls) == (
        "generate",
        1.0,
        1.062,
        3,
    )
    assert (load.operation, load.calls, last.begin_s) == ("load weights", 1, 1.5)
    assert spans.take() == []


def test_the_spans_of_a_worker_come_with_its_messages_and_go_on_where_they_were_cut():
    worker, run = Spans(), Spans()
    worker.add("actor.train", "update", 1.0, 1.2)
    first = worker.message()
    worker.add("actor.train", "update", 1.201, 1.4)
    second = worker.message()
    assert first is not None
    assert second is not None
    assert worker.message() is None
    assert run.without([("ready",), first, second]) == [("ready",)]
    (span,) = run.take()
    assert (span.begin_s, span.end_s, span.calls) == (1.0, 1.4, 2)


def test_spans_that_nobody_takes_are_bounded(monkeypatch):
    monkeypatch.setattr("flowrl.runtime.spans._MOST", 10)
    spans = Spans()
    for number in range(100):
        spans.add("actor.train", "update", number, number + 0.5)
    assert len(spans.take()) == 11
    spans.add("actor.train", "update", 200.0, 200.5)
    assert spans.take()[0].begin_s == 200.0
