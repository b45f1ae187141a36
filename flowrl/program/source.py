"""Distinguishes lines of the user's program from those of flowrl and of installed libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.graph.ir import SourceRef

__all__ = ["breakpoints_left_out", "is_flowrl", "is_installed", "is_ours", "user_line"]

_OURS = str(Path(__file__).parent) + os.sep
_FLOWRL = str(Path(__file__).parent.parent) + os.sep
_IMPORT_MACHINERY = "<frozen importlib"


def is_ours(filename: str) -> bool:
    """Returns True for files of the workflow language and of Python's import machinery."""
    return filename.startswith((_OURS, _IMPORT_MACHINERY))


def user_line() -> SourceRef:
    """Returns the nearest line of the call stack that is the user's own.

    Frames of installed libraries are passed over (numpy asks a handle for `mean`), unless the
    program itself is one of an installed distribution. For a call that spans several lines, the
    line of the called name.
    """
    frame = sys._getframe(1)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    nearest = frame
    # The program's own frames end where flowrl called it.
    while not is_ours(frame.f_code.co_filename):
        if not is_installed(frame.f_code.co_filename):
            return SourceRef(file=frame.f_code.co_filename, line=frame.f_lineno)
        nearest = frame
        if frame.f_back is None:
            break
        frame = frame.f_back
    return SourceRef(file=nearest.f_code.co_filename, line=nearest.f_lineno)


def is_flowrl(filename: str) -> bool:
    """Returns True for files of flowrl."""
    return filename.startswith(_FLOWRL)


def is_installed(filename: str) -> bool:
    """Returns True for files of the standard library, of installed distributions and of flowrl."""
    return (
        is_flowrl(filename)
        or "site-packages" in filename
        or filename.startswith((sys.base_prefix + "/lib/python", "<"))
    )


@contextmanager
def breakpoints_left_out() -> Iterator[None]:
    """`breakpoint()` does nothing while the block runs; `pdb.set_trace()` does."""
    before = sys.breakpointhook

    def go_on(*args: object, **kwargs: object) -> None:
        return None

    sys.breakpointhook = go_on
    try:
        yield
    finally:
        sys.breakpointhook = before
