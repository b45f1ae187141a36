"""What the `--output` option of the reading commands writes to."""

from __future__ import annotations

import sys
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.files import write_text_atomic

__all__ = ["write_output"]


def write_output(path: Path, text: str, what: str | None = None) -> None:
    """Writes a file as a whole, or into a device or pipe.

    Args:
        what: Is told on standard error to be in a file; None tells nothing.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")  # /dev/stdout must not be replaced by a file
        else:
            write_text_atomic(path, text)
    except OSError as error:
        missing = not path.parent.is_dir()
        raise ConfigError(
            "the output cannot be written",
            where="--output",
            found=f"no folder {path.parent}" if missing else f"{path}: {error.strerror}",
            hint=f"make the folder first: mkdir -p {path.parent}"
            if missing
            else "name a file that may be written",
        ) from error
    if what is not None and path.is_file():  # who reads a pipe sees what comes
        print(f"written to {path}: {what}", file=sys.stderr)
