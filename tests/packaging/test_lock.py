"""The lock holds names and versions alone, and satisfies what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.fixture(scope="module")
def locked(repository: Path) -> dict[str, str]:
    lines = (repository / "requirements/lock.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    for line in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    names = [canonicalize_name(line.partition("==")[0]) for line in pins]
    assert len(set(names)) == len(names)
    return dict(zip(names, (line.partition("==")[2] for line in pins), strict=True))


def test_every_requirement_that_tests_need_is_locked(
    repository: Path, locked: dict[str, str]
) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [text for extra in ("torch", "grammar", "dev") for text in extras[extra]]
    for text in [*project["dependencies"], *needed]:
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}, but {version} is locked"


def test_a_fresh_lock_would_hold_what_tests_need(repository: Path) -> None:
    """`make lock` installs two extras, so that what tests need of others stands in one of them."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (asked,) = re.findall(r"'\.\[([a-z,]+)\]' \$\(QUIETLY\)", recipe_of_lock(repository))
    installed = {text for extra in asked.split(",") for text in extras[extra]}
    assert set(extras["grammar"]) <= installed


def recipe_of_lock(repository: Path) -> str:
    return (repository / "Makefile").read_text().partition("\nlock:\n")[2].partition("\n\n")[0]


def test_the_lock_keeps_the_constraints(repository: Path, locked: dict[str, str]) -> None:
    for line in (repository / "requirements/constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            assert locked[canonicalize_name(name)] == version
