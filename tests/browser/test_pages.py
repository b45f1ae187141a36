"""Pages in a real browser: they show what they should, answer to mouse and keys, and load nothing.

`make test-browser` runs these; without a Chromium they are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flowrl import api
from flowrl.graph import Graph, Level, Node, Op
from flowrl.ids import NodeId
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.trace import run_spans, work_of
from flowrl.passes import Context, run_passes
from flowrl.viz import render
from flowrl.viz.plan import render_plan
from flowrl.viz.report import render_report
from flowrl.viz.run_diff import render_run_diff
from flowrl.viz.timeline import render_timeline
from flowrl_graphs.grpo import grpo
from tests.browser.chromium import Tab, chromium, find_chromium
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")

MARKUP = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
PAGES = ("report", "graph", "plan", "timeline", "run_diff")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_chromium()
    assert program is not None
    with chromium(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(tmp_path_factory.mktemp("runs"))
    config["train"] = {**config["train"], "steps": 3}
    return api.run(None, config, display=WatchedDisplay()).folder


@pytest.fixture(scope="module")
def pages(run: Path, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A folder with each page."""
    folder = tmp_path_factory.mktemp("pages")
    words = [
        f"cluster={repository / 'configs/clusters/h100_8x8.yaml'}",
        f"data.train={repository / 'tests/data/gsm8k_test.jsonl'}",
    ]
    compiled = api.compile(None, repository / "configs/grpo_qwen25_7b.yaml", overrides=words)
    spans = run_spans(run)
    texts = {
        "report": render_report(run),
        "graph": render(run_passes(grpo.trace(), Context()), "html"),
        "plan": render_plan(compiled.stages[-1].plan),
        "timeline": render_timeline("trace", spans, None, work_of(spans)[1]),
        "run_diff": render_run_diff((run, run), ["seed: 0 -> 1"]),
    }
    assert tuple(texts) == PAGES
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_nothing_and_complains_of_nothing_in_both_themes(tab, pages, page, dark):
    tab.open(pages / f"{page}.html", dark=dark)
    assert tab.value("document.querySelector('h1').textContent")
    assert tab.complaints == []
    ground, ink = tab.value(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour))) for colour in (ground, ink)]
    assert (brightness[0] < brightness[1]) == dark


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_narrow_window(tab, pages, page):
    tab.open(pages / f"{page}.html")
    tab.resize(420)
    try:
        assert tab.value("document.documentElement.scrollWidth") <= 420
    finally:
        tab.resize(None)


def test_a_report_draws_each_chart_and_any_other_number(tab, run, pages):
    tab.open(pages / "report.html")
    data = json.loads(tab.value("document.getElementById('data').textContent"))
    for at, table in enumerate(data["tables"]):
        figures = f"[data-table='{at}'] figure"
        titles = tab.value(
            f'[...document.querySelectorAll("{figures} figcaption")].map(e => e.textContent)'
        )
        assert titles[:-1] == [chart["title"] for chart in table["charts"]]
        canvases = tab.value(
            f'[...document.querySelectorAll("{figures} canvas")].map(e => e.width > 100)'
        )
        assert canvases == [True] * len(titles)
    rows = [row for row in RunFolder.open(run).steps() if row.stage == "grpo"]
    tab.value(
        "(() => { const s = document.querySelector(\"[data-table='0'] select\");"
        "s.value = 'num_tokens'; s.dispatchEvent(new Event('change')); })()"
    )
    legend = tab.value("document.querySelector(\"[data-table='0'] figure:last-child\").textContent")
    assert legend.endswith(f"num_tokens{rows[-1].num_tokens}")


def test_the_arrow_keys_read_a_chart(tab, run, pages):
    tab.open(pages / "report.html")
    rows = [row for row in RunFolder.open(run).steps() if row.stage == "grpo"]
    tab.value("document.querySelector('figure').focus()")
    read = []
    for key in ("Home", "ArrowRight", "End"):
        tab.press(key)
        read.append(tab.value("document.querySelector('figure .u-legend').textContent"))
    for text, row in zip(read, rows, strict=True):
        assert text.startswith(f"step{row.step}reward_mean{float(f'{row.reward_mean:.4g}'):g}")


def test_samples_are_searched_sorted_and_followed(tab, pages):
    tab.open(pages / "report.html")
    data = json.loads(tab.value("document.getElementById('data').textContent"))
    samples = data["samples"]
    found = "document.getElementById('found').textContent"
    heads = "[...document.querySelectorAll('.sample p:first-child')].map(e => e.textContent)"
    assert tab.value(found) == f"{len(samples)} of {len(samples)}"
    tab.click("#search")
    wanted = samples[0]["prompt"]
    tab.type(wanted)
    texts = [[row[name] for name in ("prompt", "response", "answer", "reason")] for row in samples]
    number = sum(any(wanted in text for text in each) for each in texts)
    assert tab.value(found) == f"{number} of {len(samples)}"
    tab.value(
        "(() => { search.value = ''; order.value = 'worst';"
        "order.dispatchEvent(new Event('input')); })()"
    )
    scores = [float(re.findall(r"score (\S+)", head)[0]) for head in tab.value(heads)]
    assert scores == sorted(scores)
    assert scores[0] == min(row["score"] for row in samples)
    tab.click(".sample button")
    assert tab.value("search.value") in {row["prompt"] for row in samples}
    assert "grpo" in tab.value(heads)[0]


def test_a_block_of_a_plan_leads_to_its_costs(tab, pages):
    tab.open(pages / "plan.html")
    tab.click(".gantt a[href='#cost-0'] rect")
    assert tab.value("location.hash") == "#cost-0"
    assert tab.value("document.querySelector('tr:target b').textContent") == "actor.generate"


def test_the_texts_of_a_picture_can_be_selected(tab, pages):
    tab.open(pages / "graph.html")
    tab.value("getSelection().selectAllChildren(document.querySelector('svg'))")
    selected = tab.value("getSelection().toString()")
    for text in ("actor.generate", "group_relative", "per token"):
        assert text in selected


def test_no_text_of_a_user_runs_as_a_script(tab, run, tmp_path):
    row = next(RunFolder.open(run).samples())
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("metrics.jsonl", "trace.json", "plan.grpo.json", "plan.sft.json"):
        (copy / name).write_bytes((run / name).read_bytes())
    odd = replace(row, prompt=MARKUP, response=MARKUP, answer=MARKUP, reason=MARKUP)
    (copy / "samples.jsonl").write_text(json.dumps(odd.to_json()) + "\n")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["name"] = "<script>window.ran = 1<"
    config["rewards"]["terms"][0]["pattern"] = MARKUP
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    node = Node(id=NodeId(MARKUP), op=Op.SOURCE, attrs=(("data", MARKUP),))
    graph = Graph(name="<script>window.ran = 1<", level=Level.TRACED, nodes=(node,), edges=())
    for name, text in (("report", render_report(copy)), ("graph", render(graph, "html"))):
        page = tmp_path / f"{name}.html"
        page.write_text(text)
        tab.open(page)
        assert tab.value("typeof window.ran") == "undefined"
        assert tab.value("document.querySelectorAll('img').length") == 0
        assert "<script>window.ran" in tab.value("document.body.textContent")
        assert tab.complaints == []
