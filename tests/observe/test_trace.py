"""The trace of a run: what is written, what is read again, and how large it may become."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from flowrl.observe.trace import Span, TraceFile, read_spans


def span(number: int, worker: str = "actor.train", **changes: object) -> Span:
    values = {"operation": "update", "begin_s": number, "end_s": number + 0.5, **changes}
    return Span(where="node", worker=worker, **values)  # type: ignore[arg-type]


WAITED = span(2, "driver", operation="wait", waits_for="actor.update", calls=3)


def test_what_is_written_is_an_array_of_events_that_gives_the_same_spans_again(tmp_path: Path):
    file = TraceFile(tmp_path, 1 << 20)
    file.append([span(1), WAITED])
    file.append([span(3)])
    file.close()
    text = (tmp_path / "trace.json").read_text()
    events = json.loads(text.rstrip(",\n") + "]")  # viewers do without the bracket
    assert [event["ph"] for event in events] == ["M", "M", "X", "M", "M", "X", "X"]
    assert list(read_spans(tmp_path / "trace.json")) == [span(1), WAITED, span(3)]


def test_a_trace_goes_on_behind_a_line_that_a_crash_has_torn(tmp_path: Path):
    file = TraceFile(tmp_path, 1 << 20)
    file.append([span(1)])
    file.close()
    path = tmp_path / "trace.json"
    path.write_text(path.read_text() + '{"name":"upd')
    assert list(read_spans(path)) == [span(1)]
    file = TraceFile(tmp_path, 1 << 20)
    file.append([span(2)])
    file.close()
    assert list(read_spans(path)) == [span(1), span(2)]


def test_the_oldest_part_of_a_trace_is_removed_where_it_is_full(tmp_path: Path):
    file = TraceFile(tmp_path, 4000)
    for number in range(100):
        file.append([span(number)])
    file.close()
    earlier, now = tmp_path / "trace.earlier.json", tmp_path / "trace.json"
    assert sorted(tmp_path.iterdir()) == [earlier, now]
    assert earlier.stat().st_size + now.stat().st_size < 4000 + 1000
    kept = [*read_spans(earlier), *read_spans(now)]
    assert kept == [span(number) for number in range(100 - len(kept), 100)]


def test_a_trace_goes_on_once_the_disk_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = TraceFile(tmp_path, 4000)
    file.append([span(1)])

    def full(lines: object, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("flowrl.observe.trace.JsonLines.write", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                file.append([span(2)])
    file.append([span(3)])
    file.close()
    assert list(read_spans(tmp_path / "trace.json")) == [span(1), span(3)]
