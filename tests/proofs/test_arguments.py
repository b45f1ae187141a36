"""Files that checks and benchmarks write: their places are made or refused before the work."""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arguments import json_file, result_file, result_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *sorted((ROOT / "benchmarks").glob("*.py")),
    ROOT / "tests" / "proofs" / "rollout_grid.py",
)
WRITTEN = ("output", "--output", "--results", "--json", "--small")
"""What scripts call the files that they write."""


def options() -> Iterator[tuple[str, str, str]]:
    """Each such option of a script, and what reads its value. Importing them all takes long."""
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                name = ast.literal_eval(node.args[0])
                reads = next(
                    (ast.unparse(k.value) for k in node.keywords if k.arg == "type"), "str"
                )
                if name in WRITTEN:
                    yield script.name, name, reads


def test_every_script_checks_the_place_of_its_results_when_it_reads_its_command_line():
    found = list(options())
    assert len(found) > 10
    known = {"json_file", "result_file", "result_folder"}
    assert [each for each in found if each[2] not in known] == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    results = tmp_path / "file" / "below"
    monkeypatch.setattr(sys, "argv", ["vs_trl_cpu.py", "--results", str(results)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "vs_trl_cpu.py"), run_name="__main__")
    assert ended.value.code == 2
    assert f"--results: {results} cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "given", "made"),
    [
        (result_file, "new/folder/log.txt", "new/folder"),
        (json_file, "new/folder/table.json", "new/folder"),
        (result_folder, "new/folder", "new/folder"),
    ],
)
def test_the_folder_of_a_result_is_made_and_nothing_is_left_in_it(
    kind: Callable[[str], Path], given: str, made: str, tmp_path: Path
):
    assert kind(str(tmp_path / given)) == tmp_path / given
    assert list((tmp_path / made).iterdir()) == []


def test_a_result_that_is_there_stays_until_the_new_one_is_written(tmp_path: Path):
    file = tmp_path / "table.json"
    file.write_text("earlier")
    assert json_file(str(file)) == file
    assert file.read_text() == "earlier"


@pytest.mark.parametrize("name", ["table.html", "table.yaml", "table.png"])
def test_json_is_not_written_to_a_name_of_another_format(name: str, tmp_path: Path):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{name} is written as JSON"):
        json_file(str(tmp_path / name))


def test_a_folder_in_the_place_of_a_result_is_refused(tmp_path: Path):
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: Is a directory"):
        result_file(str(tmp_path))
