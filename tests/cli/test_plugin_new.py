"""`flowrl plugin new`: packages whose own tests pass where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import Run, runner


@pytest.fixture
def new(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner(capsys, "plugin", "new")


def run(*words: str, folder: Path, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (path, *sys.path)))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def install(package: Path, site: Path) -> None:
    """Builds the wheel of a package and installs it alone into a new folder."""
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    wheel = (*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", str(package))
    run(*wheel, folder=package, path=site)
    (built,) = package.glob("*.whl")
    run(
        *pip,
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(built),
        folder=package,
        path=site,
    )


def test_a_scorer_passes_its_own_tests_where_it_is_installed(new: Run, tmp_path: Path):
    code, out, _ = new("short_answers", "--kind", "score")
    assert (code, out.split(":")[0]) == (0, "wrote flowrl-short_answers")
    package, site = tmp_path / "flowrl-short_answers", tmp_path / "site"
    install(package, site)
    assert "2 passed" in run("-m", "pytest", "-q", "tests", folder=package, path=site)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generate", "train"])
def test_an_engine_and_a_trainer_pass_the_conformance_suite_where_they_are_installed(
    new: Run, tmp_path: Path, kind: str
):
    assert new("mine", "--kind", kind)[0] == 0
    package, site = tmp_path / "flowrl-mine", tmp_path / "site"
    install(package, site)
    assert "1 passed" in run("-m", "pytest", "-q", "tests", folder=package, path=site)
    command = "from flowrl.cli import main; main()"
    listed = json.loads(run("-c", command, "plugin", "list", "--json", folder=tmp_path, path=site))
    assert "mine" in {row["name"] for row in listed["plugins"] if not row["problem"]}


def test_the_engine_has_under_100_lines(new: Run, tmp_path: Path):
    assert new("mine")[0] == 0
    engine = tmp_path / "flowrl-mine/flowrl_mine/engine.py"
    assert len(engine.read_text().splitlines()) < 100


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("My",), "NAME: 'My' is no name for a plug-in"),
        (("mine", "--kind", "sing"), "--kind: there is no plug-in of kind 'sing'"),
        (("mine", "--output", "."), ".: the folder exists already"),
    ],
)
def test_nothing_is_written_for_a_mistake(new: Run, tmp_path: Path, words, error: str):
    code, _, told = new(*words)
    assert code == 2
    assert error in told
    assert [*tmp_path.iterdir()] == []
