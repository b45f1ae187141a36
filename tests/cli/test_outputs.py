"""Files that commands write: the name's end says the format, and the place is checked first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command_line import ROOT, Run, runner

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture
def flowrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner(capsys)


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("g.mmd", '---\ntitle: "grpo (traced)"'),
        ("g.mermaid", '---\ntitle: "grpo (traced)"'),
        ("g.dot", "digraph"),
        ("g.gv", "digraph"),
        ("g.json", "{"),
        ("g.svg", "<svg"),
        ("g.html", "<!doctype html>"),
        ("g.txt", "grpo"),
        ("g", "grpo"),
    ],
)
def test_the_end_of_a_name_says_how_a_graph_is_drawn(flowrl: Run, name: str, begins: str):
    assert flowrl("graph", "grpo", "-o", name)[0] == 0
    assert Path(name).read_text().startswith(begins)


def test_a_graph_is_drawn_in_pixels(flowrl: Run):
    code, out, err = flowrl("graph", "grpo", "-o", "g.png")
    assert (code, out) == (0, "")
    assert "written to g.png: graph of grpo, traced, as png" in err
    picture = Path("g.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(picture[16:20]) > 500  # its width
    assert flowrl("graph", "grpo", "--format", "png", "-o", "h.png")[0] == 0
    assert "expected: tree | text" in flowrl("graph", "grpo", "--format", "png")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["graph", "grpo", "-o", "g.pdf"], "a name that ends in .txt or .mmd"),
        (["graph", "grpo", "-o", "g.svg", "--format", "dot"], "--format svg for .svg"),
        (["graph", "grpo", "-o", "g.json", "--format", "dot"], "--format json for .json"),
        (["graph", "grpo", "-o", "g.mmd", "--json"], "--format mermaid for .mmd"),
        (
            ["graph", "grpo", "-o", "g.dot", "--print-after", "fill_defaults"],
            "--print-after gives text, and no dot",
        ),
        (["plan", QUICKSTART, "-o", "p.svg"], "a name that ends in .json or .yaml"),
        (["plan", QUICKSTART, "-o", "p"], "a name that ends in .json or .yaml"),
        (["profile", QUICKSTART, "-o", "p.yaml"], "a name that ends in .json"),
        (["simulate", QUICKSTART, "--trace", "t.html"], "a name that ends in .json"),
    ],
)
def test_a_format_that_is_not_offered_is_refused(flowrl: Run, words: list[str], said: str):
    code, out, err = flowrl(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["graph", "grpo", "-o"], "flowrl.cli.graph.load_graph"),
        (["plan", QUICKSTART, "-o"], "flowrl.api.compile"),
        (["profile", QUICKSTART, "-o"], "flowrl.api.compile"),
        (["simulate", QUICKSTART, "--trace"], "flowrl.cli.simulate._compiled"),
    ],
)
@pytest.mark.parametrize(
    ("place", "said"),
    [("none/x.json", "no folder none"), ("folder.json", "folder.json: Is a directory")],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    flowrl: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], made: str, place: str, said: str
):
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(made, work)
    Path("folder.json").mkdir()
    code, _, err = flowrl(*words, place)
    assert code == 2
    assert words[-1].replace("-o", "--output") + ": the " in err
    assert said in err


def test_an_output_of_a_device_has_the_format_that_is_asked_for(flowrl: Run):
    assert flowrl("graph", "grpo", "--json", "-o", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()


def test_a_refused_output_leaves_an_earlier_file_as_it_was(flowrl: Run):
    Path("g.json").write_text("earlier")
    assert flowrl("graph", "nothing", "-o", "g.json")[0] == 2
    assert Path("g.json").read_text() == "earlier"
    assert flowrl("graph", "grpo", "-o", "g.json")[0] == 0
    assert json.loads(Path("g.json").read_text())
    assert [path.name for path in Path().iterdir()] == ["g.json"]
