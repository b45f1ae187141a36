"""Output files of commands; their paths are checked before the work, which may take long."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from flowrl.errors import ConfigError
from flowrl.files import require_writable, write_result

__all__ = ["format_of", "require_json", "require_output", "write_output"]

_F = TypeVar("_F")


def format_of(
    path: Path, formats: Mapping[str, _F], default: _F | None = None, option: str = "--output"
) -> _F:
    """Returns the format that the suffix of a file's name means.

    Args:
        formats: The formats by suffix: `{".json": "json"}`.
        default: The format of a name without a suffix; None refuses such a name.
        option: The option that names the file.

    Raises:
        ConfigError: The suffix is none of the formats'.
    """
    format = formats.get(path.suffix, None if path.suffix else default)  # noqa: A001
    if format is not None:
        return format
    ends = list(formats)
    raise ConfigError(
        "the end of the file's name says its format, and this one is not offered",
        where=option,
        found=str(path),
        expected=f"a name that ends in {' or '.join(ends)}",
        hint=f"{option} {path.with_suffix(ends[0])}",
    )


def require_output(path: Path, option: str = "--output") -> None:
    """Checks before the work begins that a file can be written.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        require_writable(path)
    except OSError as error:
        raise _not_written(path, option, error) from error


def require_json(given: Path | None, default: Path, option: str) -> Path:
    """Returns the path of a JSON file, checked before the work begins.

    Args:
        given: The path that the option gives; its folder must exist.
        default: The path where the option is not given; its folder is made.

    Raises:
        ConfigError: It cannot be written, or its suffix is that of another format.
    """
    if given is None:
        try:
            default.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_written(default, option, error) from error
    else:
        format_of(given, {".json": "json"}, "json", option)
    require_output(given or default, option)
    return given or default


def write_output(path: Path, text: str, what: str | None = None) -> None:
    """Writes a file as a whole, or into a device or pipe.

    Args:
        what: The contents, which are named on standard error; None prints nothing.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_result(path, text)
    except OSError as error:
        raise _not_written(path, "--output", error) from error
    if what is not None and path.is_file():  # the reader of a pipe sees the contents
        print(f"written to {path}: {what}", file=sys.stderr)


def _not_written(path: Path, option: str, error: OSError) -> ConfigError:
    missing = not path.parent.is_dir()
    return ConfigError(
        f"the {option.lstrip('-')} cannot be written",
        where=option,
        found=f"no folder {path.parent}" if missing else f"{path}: {error.strerror}",
        hint=f"make the folder first: mkdir -p {path.parent}"
        if missing
        else f"name a file that may be written: {option} FILE",
    )
