"""Arguments on the command lines of checks and benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.files import require_writable

__all__ = ["at_least_one", "json_file", "result_file", "result_folder"]


def at_least_one(text: str) -> int:
    """Reads a count of at least 1, because a check of nothing would always succeed.

    Raises:
        ArgumentTypeError: The number is less than 1.
        ValueError: The text is not a whole number.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1, so nothing would be checked")
    return number


at_least_one.__name__ = "whole number"  # what argparse calls it in messages


def result_file(text: str) -> Path:
    """A file that is written after long work. Its folder is made, before that work.

    Raises:
        ArgumentTypeError: it cannot be written.
    """
    return _writable(Path(text), Path(text))


def json_file(text: str) -> Path:
    """A `result_file` whose name does not promise another format than JSON.

    Raises:
        ArgumentTypeError: it does, or cannot be written.
    """
    if Path(text).suffix not in ("", ".json"):
        raise argparse.ArgumentTypeError(f"{text} is written as JSON: give a name in .json")
    return result_file(text)


def result_folder(text: str) -> Path:
    """A folder that files are written to after long work. It is made before that work.

    Raises:
        ArgumentTypeError: it cannot be made or written to.
    """
    _writable(Path(text) / "result", Path(text))
    return Path(text)


def _writable(file: Path, named: Path) -> Path:
    """The file; errors speak of what was named."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        require_writable(file)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{named} cannot be written: {error.strerror}") from None
    return file
