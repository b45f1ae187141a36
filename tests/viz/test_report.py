"""The report of a run: what it shows, that it loads nothing, and that no text in it is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from flowrl import api
from flowrl.observe.rows import SampleRow, StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.viz.report import render_report
from tests.cli.command_line import runner
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts and of the rest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        (self.data,) = map(json.loads, self.scripts[:1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.lasttag = ""

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages of two steps, with held-out data."""
    config = tiny_config(tmp_path_factory.mktemp("runs"))
    config["train"] = {**config["train"], "steps": 2}
    return api.run(None, config, display=WatchedDisplay()).folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def write(run: Path, steps: list[StepMetrics], samples: list[SampleRow]) -> None:
    for name, rows in (("metrics", steps), ("samples", samples)):
        text = "".join(json.dumps(row.to_json()) + "\n" for row in rows)
        (run / f"{name}.jsonl").write_text(text)


def test_the_charts_have_the_numbers_of_the_run(run: Path):
    page = Page(render_report(run))
    rows = [row for row in RunFolder.open(run).steps() if row.stage == "grpo"]
    tables = {table["name"]: table for table in page.data["tables"]}
    assert list(tables) == ["stage grpo", "held-out, grpo", "stage sft", "held-out, sft"]
    table = tables["stage grpo"]
    assert table["x"] == [row.step for row in rows]
    for name, values in (
        ("reward_mean", [row.reward_mean for row in rows]),
        ("entropy", [row.extra["entropy"] for row in rows]),
        ("tokens/s generate", [row.tokens_per_second("generate") for row in rows]),
    ):
        assert table["series"][name] == pytest.approx(values, rel=1e-4)
    charts = {chart["title"]: chart["series"] for chart in table["charts"]}
    assert charts["reward terms, before their weights"] == ["terms/digit/mean"]
    assert charts["KL to the reference"] == ["kl"]
    assert "seconds/update" in charts["seconds of a step"]
    shown = {name for names in charts.values() for name in names}
    assert shown <= set(table["series"])
    accuracy = [row for row in RunFolder.open(run).evaluations() if row.stage == "grpo"]
    assert tables["held-out, grpo"]["x"] == [row.step for row in accuracy]


def test_the_page_says_how_the_run_ended_where_time_went_and_what_was_configured(run: Path):
    page = Page(render_report(run))
    for text in ("run tiny", "ended; all steps are made", "stage grpo, step 2", "actor.train on"):
        assert text in page.text
    assert page.text.count("(longest)") == 2
    assert "roles.actor.model.hidden_size" in page.text
    assert "torch" in page.text
    assert "train.optimizer.beta1" not in page.text  # a default


def test_samples_are_rows_of_the_run_over_the_range_of_scores(run: Path):
    page = Page(render_report(run))
    rows = {(row.step, row.sample): row for row in RunFolder.open(run).samples()}
    assert {shown["step"] for shown in page.data["samples"]} == {1, 2}
    for shown in page.data["samples"]:
        row = rows[shown["step"], shown["sample"]]
        assert (shown["prompt"], shown["response"]) == (row.prompt, row.response)
    for step in (1, 2):
        scores = {s["score"] for s in page.data["samples"] if s["step"] == step}
        assert scores >= {0.0, 1.0}


def test_groups_of_the_last_step_are_listed_from_the_worst_to_the_best(run: Path):
    row = replace(next(RunFolder.open(run).samples()), rollout="")
    rows = [
        replace(row, step=2, sample=f"0/{group}/{member}", prompt=f"<p>{group}", score=score / 8)
        for group in range(12)
        for member, score in enumerate((group, group + 2))
    ]
    unscored = replace(row, step=2, sample="0/99/0", score=None)
    write(run, list(RunFolder.open(run).steps()), [replace(row, step=1), *rows[::-1], unscored])
    cells = re.findall(r"<tr><td>(0/\d+)</td>(.*?)</tr>", render_report(run), re.DOTALL)
    assert [group for group, _ in cells] == [
        f"0/{group}" for group in (0, 1, 2, 3, 4, 7, 8, 9, 10, 11)
    ]
    values = re.findall(r">([^<]+)</td>", cells[0][1])
    assert values == ["&lt;p&gt;0", "2", "0.125", "0.125"]


def test_the_page_loads_nothing_and_runs_no_script_but_its_own(run: Path):
    page = Page(render_report(run))
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "object", "img")
        assert "src" not in attrs
        assert str(attrs.get("href", "#")).startswith("#")
        assert not any(name.startswith("on") for name in attrs)
    policy = next(str(a["content"]) for _, a in page.elements if "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert len(page.scripts) == 2


def test_texts_of_the_run_are_no_markup(run: Path):
    row = next(RunFolder.open(run).samples())
    odd = replace(row, prompt=MARKUP, response=MARKUP, answer=MARKUP, reason=MARKUP)
    write(run, list(RunFolder.open(run).steps()), [odd])
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["name"] = "<script>"
    config["rewards"]["terms"][0]["pattern"] = MARKUP
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = render_report(run)
    page = Page(text)
    assert (text.count("<script"), text.count("</script"), text.count("<img")) == (2, 2, 0)
    assert "run <script>" in page.text
    assert MARKUP in page.text
    assert page.data["samples"][0]["response"] == MARKUP


def test_what_is_not_a_number_is_a_gap_and_a_warning(run: Path):
    first, second = (row for row in RunFolder.open(run).steps() if row.stage == "grpo")
    first = replace(first, loss=float("nan"), skipped_updates=2, extra={"failed_rewards": 3.0})
    write(run, [first, replace(second, dropped_samples=1)], [])
    page = Page(render_report(run))
    (table, _) = page.data["tables"]
    assert table["series"]["loss"][0] is None
    for text in (
        "grpo: loss is not a number in 1 step, first in 1",
        "grpo: 2 updates skipped, because the gradient was not finite, in 1 step",
        "grpo: 1 samples dropped, in 1 step",
        "grpo: 3 rewards failed, in 1 step",
        "This run has no samples.",
    ):
        assert text in page.text


def test_a_run_that_goes_on_has_a_report(run: Path):
    for name in ("summary.json", "status.json", "trace.json", "samples.jsonl", "plan.grpo.json"):
        (run / name).unlink()
    page = Page(render_report(run))
    assert "Versions of libraries are written when a run ends." in page.text
    assert "killed" in page.text


def test_a_thousand_steps_of_long_samples_take_less_than_three_megabytes(run: Path):
    step = [row for row in RunFolder.open(run).steps() if row.stage == "grpo"][-1]
    sample = next(RunFolder.open(run).samples())
    long = replace(sample, prompt="p" * 2000, response="r" * 2000)
    steps = [replace(step, step=number, reward_mean=number / 7) for number in range(1, 1001)]
    samples = [
        replace(long, step=number, sample=f"0/{number}/{member}")
        for number in range(1, 1001)
        for member in range(6)
    ]
    write(run, steps, samples)
    text = render_report(run)
    assert len(text.encode()) < 3_000_000
    data = Page(text).data
    assert len(data["tables"][0]["x"]) == 1000
    assert len({row["step"] for row in data["samples"]}) == 40
    assert data["samples"][-1]["step"] == 1000
    assert {len(row["prompt"]) for row in data["samples"]} == {1502}


def test_of_more_steps_the_page_has_some_from_the_first_to_the_last(run: Path):
    step = [row for row in RunFolder.open(run).steps() if row.stage == "grpo"][-1]
    write(run, [replace(step, step=number) for number in range(1, 4002)], [])
    x = Page(render_report(run)).data["tables"][0]["x"]
    assert (len(x), x[0], x[-1]) == (2000, 1, 4001)


def test_the_command_writes_into_the_run_or_where_it_is_told(run: Path, capsys, tmp_path: Path):
    flowrl = runner(capsys, "report", str(run))
    code, out, err = flowrl()
    assert (code, out) == (0, "")
    assert f"written to {run / 'report.html'}: report" in err
    code, _, err = flowrl("-o", str(tmp_path / "a.html"))
    assert (tmp_path / "a.html").read_text() == (run / "report.html").read_text()
    code, _, err = flowrl("-o", str(tmp_path / "a.pdf"))
    assert code == 2
    assert "a name that ends in .html" in err
