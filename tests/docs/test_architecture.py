"""Every file, function and module that docs/architecture.md names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")

_FILE = re.compile(r"((?:flowrl|backends|graphs|benchmarks|tests)/[\w/]+\.py)(?:: ([\w.]+))?")
_TABLE = re.compile(r"^\| module of `([\w.]+)` \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.M)


def _is_defined(file: Path, name: str) -> bool:
    """True if `name`, such as `Class.method`, is a class or a function of the file."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [
            node
            for node in nodes
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        ]
        if not found:
            return False
        nodes = found[0].body
    return True


def _modules() -> set[str]:
    """Dotted names of the modules that the first columns of the module tables name."""
    return {
        f"{package}.{name}"
        for package, rows in _TABLE.findall(TEXT)
        for row in rows.splitlines()
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1])
    }


@pytest.mark.parametrize(("path", "name"), sorted(set(_FILE.findall(TEXT))))
def test_files_and_functions_exist(path, name):
    assert (REPOSITORY / path).is_file()
    assert not name or _is_defined(REPOSITORY / path, name)


def test_modules_of_the_tables_exist():
    bases = {"flowrl": REPOSITORY, "flowrl_backends": REPOSITORY / "backends"}
    names = _modules()
    assert {"flowrl.rollout.scheduler", "flowrl_backends.torch.slots"} <= names
    places = {name: bases[name.split(".")[0]] / name.replace(".", "/") for name in names}
    missing = [
        name
        for name, place in places.items()
        if not (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file())
    ]
    assert not missing
