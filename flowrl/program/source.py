"""Lines of the user's program: source references and tracebacks without our own frames."""

from __future__ import annotations

import dis
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType

from flowrl.graph.ir import SourceRef

__all__ = [
    "DEBUG",
    "assigned_at",
    "breakpoints_left_out",
    "innermost_user_line",
    "user_calls",
    "user_frames",
    "user_line",
]


DEBUG = "correct this line; with --debug the command shows the whole traceback"
"""The hint for an error that the user's own lines raise."""

_OURS = str(Path(__file__).parent) + os.sep
_FLOWRL = str(Path(__file__).parent.parent) + os.sep
_MOST_CALLS = 3
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_IMPORT_MACHINERY = "<frozen importlib"


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, _IMPORT_MACHINERY))


def user_line() -> SourceRef:
    """The nearest line of the call stack that is the user's own.

    Frames of installed libraries are passed over (numpy asks a handle for `mean`), unless the
    program itself is one of an installed distribution. For a call that spans several lines, the
    line of the called name.
    """
    frame = sys._getframe(1)
    while _is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    nearest = frame
    # The program's own frames end where flowrl called it.
    while not _is_ours(frame.f_code.co_filename):
        if not _is_installed(frame.f_code.co_filename):
            return SourceRef(file=frame.f_code.co_filename, line=frame.f_lineno)
        nearest = frame
        if frame.f_back is None:
            break
        frame = frame.f_back
    return SourceRef(file=nearest.f_code.co_filename, line=nearest.f_lineno)


def _summary(tb: TracebackType | None) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(tb) if not _is_ours(f.filename)]


def user_frames(error: BaseException) -> str:
    """The error's traceback as Python prints it, from the user's first frame on, without ours."""
    frames = _summary(error.__traceback__)
    start = next((i for i, f in enumerate(frames) if not _is_flowrl(f.filename)), 0)
    shown = traceback.format_list(frames[start:]) if frames else []
    head = ["Traceback (most recent call last):\n"] if shown else []
    return "".join([*head, *shown, *traceback.format_exception_only(error)]).rstrip()


def user_calls(error: BaseException) -> str | None:
    """The line that raised as it is written, and the lines of the user's own that led there."""
    frames = [f for f in _summary(error.__traceback__) if not _is_installed(f.filename)]
    if not frames:
        return None
    *outer, last = frames
    calls = [
        f"{SourceRef(file=f.filename, line=f.lineno or 0)} (in {f.name})"
        for f in reversed(outer[-_MOST_CALLS:])
    ]
    return ", called from ".join([f"`{last.line}`", *calls])


def innermost_user_line(error: BaseException) -> SourceRef | None:
    """The deepest line of the error's traceback that is in a file of the user's own."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return SourceRef(file=error.filename, line=error.lineno)
    frames = [f for f in _summary(error.__traceback__) if not _is_installed(f.filename)]
    if not frames:
        return None
    return SourceRef(file=frames[-1].filename, line=frames[-1].lineno or 0)


def assigned_at(error: NameError) -> tuple[str, list[SourceRef]]:
    """The name that an error misses, and the lines below the one that raised which assign it.

    Of a function's own names, and of a file's where its lines raised.
    """
    quoted = re.search(r"'([^']+)'", str(error))
    name = error.name or (quoted.group(1) if quoted else "")
    last: tuple[CodeType, int] | None = None
    tb = error.__traceback__
    while tb is not None:
        if not _is_ours(tb.tb_frame.f_code.co_filename):
            last = tb.tb_frame.f_code, tb.tb_lineno
        tb = tb.tb_next
    if last is None or not name:
        return name, []
    code, raised_at = last
    lines: dict[int, None] = {}
    at = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        at = instruction.starts_line or at
        if instruction.opname in _STORES and instruction.argval == name and at > raised_at:
            lines[at] = None
    return name, [SourceRef(file=code.co_filename, line=line) for line in sorted(lines)]


def _is_flowrl(filename: str) -> bool:
    return filename.startswith(_FLOWRL)


def _is_installed(filename: str) -> bool:
    """True for files of the standard library, of installed distributions and of flowrl."""
    return (
        _is_flowrl(filename)
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
