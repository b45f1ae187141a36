"""Commands of `tests.proofs` that documents name have arguments that the commands accept."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = [
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "benchmarks" / "results").glob("*.md")),
]
NAMED = re.compile(
    r"^ {4}python -m (tests\.proofs\.\w+)([^\n]*)$"
    r"|^\$ python -m (tests\.proofs\.\w+)([^\n]*)$"
    r"|`python -m (tests\.proofs\.\w+)([^`]*)`",
    re.MULTILINE,
)


class _Parsed(Exception):
    """Arguments are understood; what the command does with them is no matter of this test."""


def named() -> list[tuple[str, str, str]]:
    found = []
    for path in TEXTS:
        for match in NAMED.finditer(path.read_text(encoding="utf-8")):
            module, words = (one for one in match.groups() if one is not None)
            found.append((path.name, module, words.replace("...", "").strip()))
    return found


@pytest.mark.parametrize(("text", "module", "words"), named())
def test_a_command_that_a_text_names_has_the_arguments_that_it_needs(
    text: str, module: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *given: object) -> None:
        raise _Parsed(whole(parser, shlex.split(words)))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    found = importlib.import_module(module)
    main = importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found
    with pytest.raises(_Parsed):
        main.main()


def test_files_that_these_commands_name_are_there() -> None:
    files = [word for _, _, words in named() for word in words.split() if "/" in word]
    assert "tests/data/oracles_small.json" in files
    assert all((REPOSITORY / one).exists() for one in files)
