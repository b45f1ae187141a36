"""A command line in this process, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., tuple[int, str, str]]
"""Words of a command to its exit code, output and errors."""


def runner(capsys: pytest.CaptureFixture[str], *first: str) -> Run:
    """Runs commands that begin with `first`."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*first, *words])
        told = capsys.readouterr()
        return int(str(ended.value.code)), told.out, told.err

    return run
