"""Finding workflows by name and by file."""

from __future__ import annotations

import re
import sys
from importlib import metadata

import pytest

import flowrl as fl
from flowrl.errors import ConfigError, TraceError
from flowrl.program.registry import load_workflow

SOURCE = """
from __future__ import annotations
import flowrl as fl

@fl.workflow
def {name}(examples: fl.Examples, actor: fl.Policy):
    actor.update(examples)
"""


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _imports_are_undone(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_only_workflow_of_a_file_needs_no_name(tmp_path):
    path = write(tmp_path / "mine.py", SOURCE.format(name="mine"))
    assert load_workflow(str(path)).name == "mine"
    assert load_workflow(f"{path}:mine").trace().roles == ("actor",)


def test_a_file_is_imported_once(tmp_path):
    path = write(tmp_path / "mine.py", SOURCE.format(name="mine"))
    assert load_workflow(str(path)) is load_workflow(f"{path}:mine")


def test_files_of_one_name_in_two_folders_do_not_mix(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = write(tmp_path / "a" / "mine.py", SOURCE.format(name="one"))
    two = write(tmp_path / "b" / "mine.py", SOURCE.format(name="two"))
    assert (load_workflow(str(one)).name, load_workflow(str(two)).name) == ("one", "two")


def test_a_file_imports_its_siblings_and_its_own_workflow_comes_first(tmp_path):
    write(tmp_path / "flowrl_test_sibling.py", SOURCE.format(name="base"))
    text = "from flowrl_test_sibling import base\n" + SOURCE.format(name="mine").replace(
        "from __future__ import annotations", ""
    )
    path = write(tmp_path / "mine.py", text)
    assert load_workflow(str(path)).name == "mine"
    assert load_workflow(f"{path}:base").name == "base"


def test_of_several_workflows_one_must_be_named(tmp_path):
    text = SOURCE.format(name="one") + SOURCE.format(name="two").replace(
        "from __future__ import annotations", ""
    )
    path = write(tmp_path / "both.py", text)
    with pytest.raises(ConfigError) as caught:
        load_workflow(str(path))
    assert caught.value.found == "one, two"
    assert f"{path}:one" in caught.value.hint
    with pytest.raises(ConfigError, match="has no workflow 'tow'") as caught:
        load_workflow(f"{path}:tow")
    assert "did you mean 'two'?" in str(caught.value)


def test_a_file_without_workflow_says_how_to_make_one(tmp_path):
    path = write(tmp_path / "none.py", "x = 1\n")
    with pytest.raises(ConfigError, match="holds no workflow") as caught:
        load_workflow(str(path))
    assert "@fl.workflow" in caught.value.hint


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "arithmetic.py", SOURCE.format(name="mine"))
    with pytest.raises(ConfigError) as caught:
        load_workflow(str(tmp_path / "arithmetics.py"), where="workflow")
    assert caught.value.where == "workflow"
    assert "arithmetic.py" in caught.value.hint


def test_a_file_that_raises_is_shown_with_its_own_frames(tmp_path):
    path = write(tmp_path / "bad.py", "def f():\n    return 1 / 0\n\nf()\n")
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(TraceError) as caught:
            load_workflow(str(path))
        error = caught.value
        assert "raised ZeroDivisionError: division by zero" in error.what
        assert error.where.endswith("bad.py:2")
        assert "in f" in error.user_frames
        assert "registry.py" not in error.user_frames
        assert "importlib" not in error.user_frames


def test_a_syntax_error_is_shown_with_its_line(tmp_path):
    path = write(tmp_path / "typo.py", "x = 1\ndef f(:\n")
    with pytest.raises(TraceError) as caught:
        load_workflow(str(path))
    assert "typo.py raised SyntaxError: invalid syntax" in caught.value.what
    assert caught.value.found == "def f(:"
    assert caught.value.where.endswith("typo.py:2")


def test_a_file_that_ends_the_program_is_an_error_and_not_the_end(tmp_path):
    path = write(tmp_path / "ends.py", "raise SystemExit(3)\n")
    with pytest.raises(TraceError, match="SystemExit"):
        load_workflow(str(path))


def test_mistakes_of_a_signature_keep_their_own_message(tmp_path):
    path = write(tmp_path / "sig.py", "import flowrl as fl\n\n@fl.workflow\ndef mine(actor): ...\n")
    with pytest.raises(TraceError, match="has no annotation") as caught:
        load_workflow(str(path))
    assert caught.value.where.endswith("sig.py:4")


def test_registered_names_are_found_and_misspelt_ones_get_the_nearest(monkeypatch):
    points = metadata.EntryPoints(
        [
            metadata.EntryPoint("grpo", "flowrl_graphs.grpo:grpo", "flowrl.graphs"),
            metadata.EntryPoint("odd", "flowrl_graphs:__doc__", "flowrl.graphs"),
        ]
    )
    monkeypatch.setattr(metadata, "entry_points", lambda: points)
    assert isinstance(load_workflow("grpo"), fl.Workflow)
    with pytest.raises(ConfigError) as caught:
        load_workflow("grop")
    assert "did you mean 'grpo'?" in str(caught.value)
    with pytest.raises(ConfigError, match="registered as a workflow, but is none"):
        load_workflow("odd")


def test_a_folder_is_no_workflow(tmp_path):
    with pytest.raises(ConfigError, match=r"FILE\.py:NAME"):
        load_workflow(str(tmp_path))


def test_a_file_that_is_not_there_is_sought_in_the_folders_beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape("no file mine.py")) as caught:
        load_workflow("mine.py")
    assert f"paths are relative to the current directory, {tmp_path}" in str(caught.value)
    (tmp_path / "examples").mkdir()
    write(tmp_path / "examples" / "mine.py", SOURCE.format(name="mine"))
    with pytest.raises(ConfigError, match=re.escape("did you mean examples/mine.py?")):
        load_workflow("mine.py")
    with pytest.raises(ConfigError, match=re.escape("no file none/mine.py, and no folder none")):
        load_workflow("none/mine.py")
