"""The page of a simulation."""

from __future__ import annotations

import re

import pytest

from flowrl.observe.trace import Span
from flowrl.viz.timeline import render_simulation

STEPS = [(float(begin), begin + 1.0) for begin in range(4)]


def spans(device: str, operation: str) -> list[Span]:
    """In each step a quarter of generation, with a row of its engine, and then training."""
    found = []
    for begin_s, end_s in STEPS:
        middle_s = begin_s + 0.25
        for worker, what, first_s, last_s in (
            ("main", operation, begin_s, middle_s),
            ("e[0] row 000", "0/1/2", begin_s, end_s),
            ("main", "update", middle_s, end_s),
        ):
            found.append(
                Span(worker=worker, where=device, operation=what, begin_s=first_s, end_s=last_s)
            )
    return found


def bars(page: str) -> list[tuple[str, float, float]]:
    """The first line of the title of each bar, its begin and its width."""
    found = re.findall(
        r'<title>([^<\n]*)\n[^<]*</title>\s*<rect x="(\S+)" y="\S+" width="(\S+)"', page
    )
    return sorted((title, float(x), float(width)) for title, x, width in found)


def near(x: float) -> float:
    return pytest.approx(x, abs=0.1)


def test_the_last_three_steps_are_drawn_and_the_times_of_all_are_below():
    page = render_simulation("tiny", spans("cuda:0", "generate"), STEPS, "step time: 1.0 s")
    assert "<pre>step time: 1.0 s</pre>" in page
    assert "<h2>steps 2 to 4</h2>" in page
    third = 1000 / 3
    assert bars(page) == [
        *(("generate: 250 ms", near(third * n), near(third / 4)) for n in range(3)),
        *(("update: 750 ms", near(third * (n + 0.25)), near(third * 0.75)) for n in range(3)),
    ]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert cells == [
        *("main on cuda:0", "update", "3.0 s", "75 %", "4"),
        *("main on cuda:0", "generate", "1.0 s", "25 %", "4"),
    ]


def test_a_single_step_is_named_by_its_number():
    page = render_simulation("tiny", spans("cuda:0", "generate"), STEPS[:1], "")
    assert "<h2>step 1</h2>" in page
    assert bars(page) == [("generate: 250 ms", 0, 250), ("update: 750 ms", 250, 750)]


def test_names_and_the_summary_are_text_whatever_is_in_them():
    name = "<script>alert('x')</script>"
    page = render_simulation(name, spans(name, name), STEPS, name)
    assert "<script>alert" not in page
    escaped = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;"
    assert f"<h1>{escaped}</h1>" in page
    assert f"<pre>{escaped}</pre>" in page
    assert f"<td>main on {escaped}</td><td>{escaped}</td>" in page
