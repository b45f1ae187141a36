"""`flowrl trace` says what workers did, and writes it in the trace-event format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowrl.observe.trace import Span, TraceFile
from tests.cli.command_line import Run, runner

BEGIN_S = 1_800_000_000.1


def span(worker: str, operation: str, begin_s: float, end_s: float, **more: object) -> Span:
    times = {"begin_s": BEGIN_S + begin_s, "end_s": BEGIN_S + end_s}
    return Span(where="node <1>", worker=worker, operation=operation, **times, **more)  # type: ignore[arg-type]


SPANS = [
    span("actor.train", "update", 0.5, 1.0),
    span("driver", "wait", 0.25, 0.5, waits_for="a batch"),
    span("driver", "step 1", 0.0, 1.0),
    span("actor.train", "update", 1.0, 2.0, calls=3),
    span("driver", "step 2", 1.0, 2.0),
]


@pytest.fixture
def flowrl(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The first spans are in the file that was full, as in a long run."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/config.yaml").touch()
    for spans, name in ((SPANS[:3], "trace.earlier.json"), (SPANS[3:], "trace.json")):
        file = TraceFile(Path("a"), 1 << 20)
        file.append(spans)
        file.close()
        Path("a/trace.json").rename(f"a/{name}")
    return runner(capsys, "trace", "a")


def test_the_file_has_the_fields_of_the_trace_event_format(flowrl: Run):
    code, out, err = flowrl("-o", "run.json")
    assert (code, out) == (0, "")
    assert "written to run.json: 5 slices of 2 workers" in err
    trace = json.loads(Path("run.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    names, slices = {}, []
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            slices.append(event)
    assert set(names.values()) == {"node <1>", "actor.train", "driver"}
    shown = [
        (names["thread_name", e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"])
        for e in slices
    ]
    # By their begin, in microseconds from 0, and the outer one first: so viewers nest them.
    assert shown == [
        ("driver", "step 1", 0, 1e6, {}),
        ("driver", "wait", 250_000, 250_000, {"waits_for": "a batch"}),
        ("actor.train", "update", 500_000, 500_000, {}),
        ("actor.train", "update", 1e6, 1e6, {"calls": 3}),
        ("driver", "step 2", 1e6, 1e6, {}),
    ]


def test_the_table_has_the_time_of_each_worker_and_operation(flowrl: Run):
    assert flowrl()[1].splitlines() == [
        "2.0s from the first slice to the last",
        "worker                   operation         time  share  calls",
        "driver on node <1>       step              2.0s  100 %  2",
        "                         wait for a batch  0.2s  12 %   1",
        "actor.train on node <1>  update            1.5s  75 %   4",
    ]
    value = json.loads(flowrl("--json")[1])
    assert value["seconds"] == pytest.approx(2)
    assert [(row["worker"], row["operation"], row["calls"]) for row in value["work"]] == [
        ("driver", "step", 2),
        ("driver", "wait for a batch", 1),
        ("actor.train", "update", 4),
    ]


@pytest.mark.parametrize("text", [None, "[\n"])
def test_a_run_without_a_trace_is_an_error(flowrl: Run, text: str | None):
    Path("a/trace.earlier.json").unlink()
    Path("a/trace.json").unlink()
    if text is not None:
        Path("a/trace.json").write_text(text)
    code, out, err = flowrl("-o", "run.json")
    assert (code, out, Path("run.json").exists()) == (2, "", False)
    assert "this run has no trace" in err
    assert "runtime.trace_mb" in err


def test_another_format_is_refused(flowrl: Run):
    assert "a name that ends in .json or .html" in flowrl("-o", "run.svg")[2]


def bars(page: str) -> list[tuple[str, float, float]]:
    """The first line of the title of each bar, its begin and its width."""
    found = re.findall(
        r'<title>([^<\n]*)[^<]*</title>\s*<rect x="(\S+)" y="\S+" width="(\S+)"', page
    )
    return sorted((title, float(x), float(width)) for title, x, width in found)


def test_the_page_draws_each_worker_over_the_chosen_steps(flowrl: Run):
    code, out, err = flowrl("-o", "run.html", "--steps", "1")
    assert (code, out) == (0, "")
    assert "written to run.html: timeline" in err
    page = Path("run.html").read_text()
    assert "<h2>step 1</h2>" in page
    assert bars(page) == [
        ("step 1: 1.0 s", 0, 1000),
        ("update: 500 ms", 500, 500),
        ("wait for a batch: 250 ms", 250, 250),
    ]
    assert "driver on node &lt;1&gt;" in page


def test_the_page_draws_the_last_steps_where_none_are_chosen(flowrl: Run):
    flowrl("-o", "run.html")
    page = Path("run.html").read_text()
    assert "<h2>steps 1 to 2</h2>" in page
    # Slices without a gap are one bar, with the calls of all.
    assert ("update: 1.5 s, 4 calls", 250.0, 750.0) in bars(page)


def test_a_simulation_is_drawn_below_from_its_begin_and_as_long(flowrl: Run):
    file = TraceFile(Path(), 1 << 20)
    at = {"where": "cuda:0", "begin_s": 3.0}
    file.append(
        [
            Span(worker="cuda:0", operation="generate", end_s=3.5, **at),
            Span(worker="actor.generate[0] row 000", operation="0/1/2", end_s=3.2, **at),
            Span(worker="cuda:0", operation="update", where="cuda:0", begin_s=3.5, end_s=9.0),
        ]
    )
    file.close()
    flowrl("-o", "run.html", "--simulated", "trace.json")
    _, simulated = Path("run.html").read_text().split("<h2>simulated</h2>")
    assert bars(simulated) == [("generate: 500 ms", 0, 250), ("update: 1.5 s", 250, 750)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "run.html", "--steps", "5:9"], "expected: steps from 1 to 2"),
        (["-o", "run.html", "--steps", "first"], "such as 10:12"),
        (["-o", "run.html", "--simulated", "no.json"], "this is no trace of a simulation"),
        (["-o", "run.html", "--simulated", "a/config.yaml"], "is empty"),
        (["--steps", "1"], "--steps belongs to a page"),
        (["-o", "run.json", "--simulated", "s.json"], "--simulated belongs to a page"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(flowrl: Run, words: list[str], said: str):
    code, out, err = flowrl(*words)
    assert (code, out) == (2, "")
    assert said in err
