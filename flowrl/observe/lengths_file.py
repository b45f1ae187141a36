"""Lengths of samples in a file: a number a line, or rows such as those of samples.jsonl."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import DataError
from flowrl.files import read_json_lines

__all__ = ["lengths_in"]


def lengths_in(path: Path, text: str) -> list[int]:
    """The lengths of a file that was read, in tokens; blank lines have none.

    Raises:
        DataError: a row without `num_tokens`, with its line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if all(line.isdecimal() for line in lines):
        return [int(line) for line in lines]
    found = []
    for number, row in enumerate(read_json_lines(path), start=1):
        tokens = row.get("num_tokens")
        if not isinstance(tokens, int) or tokens < 0:
            raise DataError(
                "this row has no length",
                where=f"{path}:{number}",
                found=repr(tokens),
                expected="num_tokens, a whole number",
                hint="fix or remove the line; samples.jsonl of a run is such a file",
            )
        found.append(tokens)
    return found
