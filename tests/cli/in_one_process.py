"""Runs several command lines in one fresh interpreter: importing once, and nothing before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 120.0

_SCRIPT = """
import contextlib, io, json, sys
from flowrl.cli import main

def run(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(argv)
        except SystemExit as end:
            code = end.code
    heavy = sorted({"torch", "transformers", "ray"} & set(sys.modules))
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "heavy": heavy}

commands = json.load(sys.stdin)
print(json.dumps({name: run(argv) for name, argv in commands.items()}))
"""


@dataclass(frozen=True)
class Ended:
    """How a command line ended.

    Attributes:
        heavy: Which of torch, transformers and ray had been imported by then.
    """

    code: int
    out: str
    err: str
    heavy: Sequence[str] = ()

    @property
    def error_lines(self) -> list[str]:
        """Standard error, line by line."""
        return self.err.strip().splitlines()


def run_all(commands: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Ended]:
    """Runs command lines one after another, in `folder`."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    return {name: Ended(**values) for name, values in json.loads(ended.stdout).items()}


def run_flowrl(*argv: str, folder: Path) -> Ended:
    """Runs one command line as a process of its own, in `folder`."""
    ended = subprocess.run(
        [sys.executable, "-m", "flowrl.cli", *argv],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=DEADLINE_S,
    )
    return Ended(code=ended.returncode, out=ended.stdout, err=ended.stderr)
