"""The commands as people and scripts use them: what goes where, and how each one ends."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import yaml

from flowrl import api
from flowrl.cli import main
from flowrl.plan import PlacementPlan
from tests.cli.in_one_process import Ended, run_all, run_flowrl
from tests.runtime.tiny_runs import write_config
from tests.warm_processes import WarmProcesses

PROGRAM = """\
import flowrl as fl

@fl.workflow
def mine(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    actor.update(rollout, scores)
"""

OTHER = PROGRAM.replace("scores = ", "found = ").replace("rollout, scores", "rollout, found")
OTHER = OTHER.replace(", found)", ", found, loss=fl.loss.policy_clip(0.1))")

AFTER = ["--print-after", "fill_defaults", "--print-after", "insert_weight_sync"]
LOWERED_WITHOUT_KL = ["--level", "lowered", "args.kl=0"]

# Reading commands by name; none of them needs a tensor library.
READING = {
    "tree": ["graph", "mine.py"],
    "text": ["graph", "mine.py", "--format", "text"],
    "mermaid": ["graph", "mine.py", "--format", "mermaid"],
    "dot": ["graph", "mine.py", "--format=dot"],
    "json": ["graph", "--format", "json", "mine.py"],
    "--json": ["graph", "mine.py", "--json"],
    "file and name": ["graph", "mine.py:mine"],
    "registered": ["graph", "grpo", "--format", "text"],
    "lowered": ["graph", "tiny.yaml", "--level", "lowered", "args.kl=0", "--format", "text"],
    "to a file": ["graph", "mine.py", "-o", "graph.mmd", "--format", "mermaid"],
    "lowered as a tree": ["graph", "tiny.yaml", "--level", "lowered", "args.kl=0"],
    "lowered as JSON": ["graph", "tiny.yaml", "--level", "lowered", "args.kl=0", "--json"],
    "after passes": ["graph", "mine.py", *AFTER],
    "after a pass of a config": ["graph", "tiny.yaml", "--print-after", "annotate_cost"],
    "without a pass": ["graph", "mine.py", "--disable-pass", "insert_weight_sync"],
    "diff": ["diff", "mine.py", "other.py"],
    "diff with itself": ["diff", "mine.py", "mine.py:mine", "--level", "lowered"],
    "diff with a config": ["diff", "mine.py", "tiny.yaml", *LOWERED_WITHOUT_KL],
    "plan": ["plan", "tiny.yaml"],
    "plan --json": ["plan", "tiny.yaml", "--json"],
    "plan, overrides around": ["plan", "tiny.yaml", "train.group_size=2", "--json", "seed=1"],
    "plan to JSON": ["plan", "tiny.yaml", "-o", "plan.json"],
    "plan to YAML": ["plan", "tiny.yaml", "train.group_size=2", "--output", "plan.yaml"],
    "plan of a stage": ["plan", "tiny.yaml", "--stage", "sft", "-o", "sft.yaml"],
    "backends": ["backends"],
    "backends --json": ["backends", "--json"],
    "help": ["--help"],
    "version": ["--version"],
    "run --help": ["run", "--help"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    write_config(path)
    (path / "mine.py").write_text(PROGRAM)
    (path / "other.py").write_text(OTHER)
    return path


@pytest.fixture(scope="module")
def reading(folder: Path) -> dict[str, Ended]:
    return run_all(READING, folder)


@pytest.mark.parametrize("name", READING)
def test_a_reading_command_writes_to_standard_output_alone_and_imports_no_tensor_library(
    reading: dict[str, Ended], name: str
):
    ended, words = reading[name], READING[name]
    writes = "-o" in words or "--output" in words
    assert (ended.code, bool(ended.err)) == (0, writes)
    assert bool(ended.out) != writes
    assert not ended.heavy


def test_what_was_written_where_is_told_in_one_line(reading: dict[str, Ended]):
    told = {name: one.err.splitlines() for name, one in reading.items() if one.err}
    assert told["to a file"] == ["written to graph.mmd: graph of mine, traced, as mermaid"]
    (line,) = told["plan to JSON"]
    said = (
        "written to plan.json: plan of grpo, the last of 2 stages (--stage NAME writes another), "
    )
    assert line.startswith(said)
    assert line.endswith(" a step")
    assert [len(lines) for lines in told.values()] == [1, 1, 1, 1]


def test_graphs_are_drawn_in_the_form_asked_for(reading: dict[str, Ended], folder: Path):
    assert "actor.generate" in reading["tree"].out
    assert reading["file and name"].out == reading["tree"].out
    assert reading["mermaid"].out.startswith(("flowchart", "graph", "---"))
    assert reading["dot"].out.startswith("digraph")
    assert (folder / "graph.mmd").read_text() == reading["mermaid"].out
    nodes = json.loads(reading["json"].out)["nodes"]
    assert [node["id"] for node in nodes][:2] == ["prompts", "actor.generate"]
    assert reading["--json"].out == reading["json"].out
    assert "sync" in reading["lowered"].out
    assert "reference" not in reading["lowered"].out


def test_costs_stand_in_the_lowered_graph_of_a_config(reading: dict[str, Ended]):
    assert re.search(r"at most [\d.]+ MFLOP, output .* KV cache", reading["lowered as a tree"].out)
    nodes = {node["id"]: node for node in json.loads(reading["lowered as JSON"].out)["nodes"]}
    assert nodes["actor.update"]["attrs"]["cost"]["flops"] > 0
    assert "attr cost = cost:upper_bound(flops=" in reading["after a pass of a config"].out


def test_the_graph_is_shown_after_each_pass_that_was_asked_for_and_nothing_else(
    reading: dict[str, Ended],
):
    first, second = reading["after passes"].out.split("# after ")[1:]
    assert first.startswith("fill_defaults\n\ngraph mine traced\n")
    assert "loss:policy_clip" in first
    assert "actor.sync" not in first
    assert second.startswith("insert_weight_sync\n\ngraph mine traced\n")
    assert "actor.sync = sync by actor" in second


def test_a_graph_without_a_pass_is_lowered_by_the_others(reading: dict[str, Ended]):
    out = reading["without a pass"].out
    assert "actor.sync" not in out
    assert "advantage  group_relative" in out


def test_a_diff_shows_what_differs_and_not_how_variables_are_called(reading: dict[str, Ended]):
    assert reading["diff"].out.splitlines() == [
        "mine (traced) -> mine (traced): 1 changed",
        "",
        "actor.update",
        "  - attr loss = null",
        '  + attr loss = loss:policy_clip(clip_low=0.1, clip_high=0.1, aggregation="token-mean")',
    ]
    assert reading["diff with itself"].out == "mine (lowered) -> mine (lowered): no difference\n"
    with_config = reading["diff with a config"].out
    assert with_config.startswith("mine (lowered) -> grpo (lowered): 1 added, 4 changed\n")
    assert "\n+ filter = filter\n" in with_config
    assert "cost" not in with_config


def test_a_plan_is_json_and_nothing_else_and_reads_back(reading: dict[str, Ended], folder: Path):
    plan = PlacementPlan.from_json(reading["plan --json"].out)
    assert {placement.role for placement in plan.placements} >= {"actor", "verifier", "reference"}
    assert plan.sizes.group_size == 4
    assert PlacementPlan.from_json(reading["plan, overrides around"].out).sizes.group_size == 2
    # Not the same text: the memory that is free has changed between the two commands.
    assert PlacementPlan.from_json((folder / "plan.json").read_text()).sizes == plan.sizes
    assert yaml.safe_load((folder / "plan.yaml").read_text())["sizes"]["group_size"] == 2


def test_each_stages_plan_can_be_written(reading: dict[str, Ended], folder: Path):
    assert yaml.safe_load((folder / "sft.yaml").read_text())["graph"] == "sft"
    assert yaml.safe_load((folder / "plan.yaml").read_text())["graph"] == "grpo"
    assert "plan of sft, temporal" in reading["plan of a stage"].err


def test_the_plan_tells_every_stage_and_what_each_role_needs(reading: dict[str, Ended]):
    out = reading["plan"].out
    for word in ("sft", "grpo", "actor", "reference", "verifier"):
        assert word in out


def test_backends_are_listed_as_json(reading: dict[str, Ended]):
    rows = {row["name"]: row for row in json.loads(reading["backends --json"].out)["backends"]}
    assert rows["torch"]["usable"]
    assert set(rows["torch"]["services"]) == {"generate", "train"}


def test_a_run_ends_with_its_numbers_on_the_last_line_and_in_its_summary(tmp_path: Path):
    write_config(tmp_path)
    ended = run_flowrl(
        "run", "tiny.yaml", "train.steps=2", "--debug", "seed=3", "eval.num=8", folder=tmp_path
    )
    assert ended.code == 0, ended.err
    assert ended.err == ""
    run = tmp_path / "runs" / "tiny"
    summary = json.loads((run / "summary.json").read_text())
    match = re.fullmatch(
        r"held-out sampled digit: before (\d\.\d\d) after (\d\.\d\d)", ended.out.splitlines()[-1]
    )
    assert match is not None
    assert match[1] == f"{summary['before']:.2f}"
    assert match[2] == f"{summary['after']:.2f}"
    assert (summary["seed"], summary["steps"]["grpo"], summary["num_held_out"]) == (3, 2, 8)
    # Not a terminal: no control characters, no progress bars.
    assert "\x1b" not in ended.out
    assert "\r" not in ended.out
    names = {path.name for path in run.iterdir()}
    assert names >= {
        *("config.yaml", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "summary.json"),
        *("graph.grpo.txt", "graph.grpo.json", "plan.grpo.json", "plan.grpo.yaml"),
        *("model", "checkpoints"),
    }
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["steps"] == 2


def in_process(capfd: pytest.CaptureFixture[str], *argv: str) -> Ended:
    with pytest.raises(SystemExit) as end:
        main(list(argv))
    out, err = capfd.readouterr()
    assert isinstance(end.value.code, int)
    return Ended(code=end.value.code, out=out, err=err)


def test_a_fault_of_ours_ends_with_1_and_a_line(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("inside the engine")

    monkeypatch.setattr(api, "compile", broken)
    ended = in_process(capfd, "plan", str(folder / "tiny.yaml"))
    assert ended.code == 1
    assert ended.out == ""
    assert ended.err.startswith("internal error: ZeroDivisionError: inside the engine\n")
    assert "Traceback" not in ended.err
    assert "--debug" in ended.err

    ended = in_process(capfd, "plan", str(folder / "tiny.yaml"), "--debug")
    assert ended.code == 1
    assert "Traceback (most recent call last)" in ended.err
    assert "in broken" in ended.err


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 2), (errno.EACCES, 2), (errno.EIO, 1)])
def test_a_full_disk_is_no_fault_of_ours(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, code: int
):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), "runs/x/samples.jsonl")

    monkeypatch.setattr(api, "compile", full)
    ended = in_process(capfd, "plan", "tiny.yaml")
    assert ended.code == code
    assert "runs/x/samples.jsonl" in ended.err
    assert "Traceback" not in ended.err


def test_debug_shows_the_traceback_of_a_mistake_too(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    ended = in_process(capfd, "plan", str(folder / "tiny.yaml"), "train.stepz=1", "--debug")
    assert ended.code == 2
    assert "Traceback (most recent call last)" in ended.err
    assert "error: command line (train.stepz=1)" in ended.err


def test_ctrl_c_while_a_command_reads_ends_with_130(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api, "compile", lambda *a, **k: signal.raise_signal(signal.SIGINT))
    ended = in_process(capfd, "plan", str(folder / "tiny.yaml"))
    assert ended.code == 130
    assert ended.out == ""


def test_a_usage_error_ends_with_2(capfd: pytest.CaptureFixture[str]):
    ended = in_process(capfd, "plan", "--jsn", "tiny.yaml")
    assert ended.code == 2
    assert ended.out == ""
    assert "--json" in ended.err
    assert in_process(capfd, "plna").code == 2


def test_warnings_of_the_library_reach_standard_error_once(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def warns(*args: object, **kwargs: object) -> None:
        logging.getLogger("flowrl.runtime.checkpoint.store").warning("%s: not finished", "0001")
        logging.getLogger("flowrl.runtime.checkpoint.store").info("not for everyone")

    monkeypatch.setattr("flowrl.cli.plan.run", warns)
    for _ in range(2):
        ended = in_process(capfd, "plan", str(folder / "tiny.yaml"))
        assert (ended.code, ended.err) == (0, "warning: 0001: not finished\n")


@contextmanager
def unread() -> Iterator[IO[bytes]]:
    """An output that nobody reads: every write to it fails, also the last flush."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        yield pipe


@pytest.mark.parametrize("command", [["graph", "mine.py"], ["plan", "tiny.yaml", "--json"]])
def test_a_reader_that_leaves_is_no_error(folder: Path, command: list[str]):
    words = [sys.executable, "-m", "flowrl.cli", *command]
    with unread() as pipe:
        ended = subprocess.run(
            words, stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=folder, timeout=120
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_run_goes_on_without_a_reader(folder: Path, warm: WarmProcesses):
    words = ["run", "tiny.yaml", "train.steps=1", "name=unread"]
    error = folder / "unread.err"
    with unread() as pipe, error.open("w") as err:
        process = warm.start(
            "flowrl.cli", words, streams=(subprocess.DEVNULL, pipe, err), cwd=folder
        )
        assert process.wait(120) == 0
    said = "warning: nobody reads the output any more; the run goes on without it\n"
    assert error.read_text() == said
    assert (folder / "runs" / "unread" / "summary.json").is_file()


def test_an_output_that_is_a_link_is_written_through(tmp_path: Path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    ended = run_all({"link": ["graph", "mine.py", "-o", "link"]}, tmp_path)["link"]
    assert (ended.code, ended.err) == (0, "written to link: graph of mine, traced, as tree\n")
    assert (tmp_path / "link").is_symlink()
    assert "actor.generate" in (tmp_path / "target").read_text()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_a_closed_output_is_no_fault(folder: Path, closed: str):
    command = f"{sys.executable} -m flowrl.cli plan {folder / 'tiny.yaml'} {closed}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert ended.stderr == ""


def test_a_terminal_without_unicode_shows_what_it_can(folder: Path):
    ended = subprocess.run(
        [sys.executable, "-m", "flowrl.cli", "graph", str(folder / "tiny.yaml")],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 0
    assert "\u2514\u2500 " in ended.stdout.decode("utf-8")
