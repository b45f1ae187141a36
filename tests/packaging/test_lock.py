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


def test_every_requirement_of_the_core_torch_and_dev_is_locked(
    repository: Path, locked: dict[str, str]
) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["torch"], *extras["dev"]]:
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}, but {version} is locked"


def test_the_lock_keeps_the_constraints(repository: Path, locked: dict[str, str]) -> None:
    for line in (repository / "requirements/constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            assert locked[canonicalize_name(name)] == version
