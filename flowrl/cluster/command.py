"""Runs a vendor's query tool with a deadline; replaceable, so that tests feed recorded output."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

TOOL_TIMEOUT_S = 10.0
"""A healthy nvidia-smi answers within 2 s, without persistence mode within about 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str = ""
    stderr: str = ""


Runner: TypeAlias = Callable[[Sequence[str], float], CommandResult]
"""`(argv, timeout_s) -> result`; raises FileNotFoundError or TimeoutError."""


class ToolFailed(Exception):
    """A tool is there but gave no answer; the text says why, in one sentence."""


def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Runs `argv` without a shell.

    Raises:
        FileNotFoundError: no such program.
        TimeoutError: it ran longer than `timeout_s` and was killed.
    """
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{argv[0]} gave no answer in {timeout_s:g} s") from error
    return CommandResult(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


def run_tool(run: Runner, argv: Sequence[str]) -> str | None:
    """Standard output of a query tool; None where the tool is not installed.

    Raises:
        ToolFailed: it hangs, cannot be started, or ends with a status other than 0.
    """
    try:
        result = run(argv, TOOL_TIMEOUT_S)
    except FileNotFoundError:
        return None
    except (OSError, TimeoutError) as error:
        raise ToolFailed(str(error)) from error
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()
        raise ToolFailed(f"{' '.join(argv)} ended with status {result.returncode}: {lines[0]}")
    return result.stdout
