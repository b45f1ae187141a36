"""Lines of the user's program, distinguished from those of flowrl and of installed libraries."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import TraceError

_FLOWRL = str(Path(__file__).parent) + os.sep
_PROGRAM = str(Path(__file__).parent / "program") + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_MOST_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRef:
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        """`file:line`; files below the current folder are named from there, for people to click."""
        return f"{_shown(self.file)}:{self.line}"


def _shown(path: str) -> str:
    if not Path(path).is_absolute():
        return path
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if relative.startswith("..") else relative


def _is_installed(filename: str) -> bool:
    """Returns True for files of the standard library, of installed distributions and of flowrl."""
    return "site-packages" in filename or filename.startswith((_FLOWRL, _LIBRARY, "<"))


def user_line() -> SourceRef:
    """Returns the nearest line of the call stack that is the user's own.

    Frames of installed libraries are passed over (numpy asks a handle for `mean`), unless the
    program itself is one of an installed distribution. For a call that spans several lines, the
    line of the called name.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((_FLOWRL, "<frozen importlib")):
        if frame.f_back is None:
            break
        frame = frame.f_back
    nearest = frame
    # The program's own frames end where flowrl called it.
    while not frame.f_code.co_filename.startswith(_PROGRAM):
        if not _is_installed(frame.f_code.co_filename):
            return SourceRef(file=frame.f_code.co_filename, line=frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return SourceRef(file=nearest.f_code.co_filename, line=nearest.f_lineno)


def trace_error(
    what: str, *, found: str | None = None, expected: str | None = None, hint: str | None = None
) -> TraceError:
    """Returns an error at the user's line."""
    return TraceError(what, where=str(user_line()), found=found, expected=expected, hint=hint)


def user_line_of(error: BaseException, default: str | None = None) -> str | None:
    """Returns `file:line` of the deepest line of an error's traceback in the user's own files."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return str(SourceRef(file=error.filename, line=error.lineno))
    own = _user_frames(error)
    return _place(own[-1]) if own else default


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not _is_installed(frame.filename)]


def _place(frame: traceback.FrameSummary) -> str:
    return str(SourceRef(file=frame.filename, line=frame.lineno or 0))


def explained(subject: str, error: BaseException, *, otherwise: str | None = None) -> TraceError:
    """Returns the message for an error that the user's own lines raised.

    Args:
        subject: What raised it: `workflow 'mine'`.
        error: The error.
        otherwise: The place where none of the user's lines raised it.
    """
    text = str(error).strip().splitlines()
    message = TraceError(
        f"{subject} raised {type(error).__name__}: {text[0] if text else ''}".rstrip(": "),
        where=user_line_of(error, otherwise),
        hint="correct this line; with --debug the command shows the whole traceback",
    )
    own = _user_frames(error)
    if isinstance(error, SyntaxError):
        message.found = (error.text or "").strip() or None
    elif own:
        calls = [f"{_place(frame)} (in {frame.name})" for frame in own[-2 : -2 - _MOST_CALLS : -1]]
        message.found = ", called from ".join([f"`{own[-1].line}`", *calls])
    message.user_frames = _traceback(error)
    return message


def _traceback(error: BaseException) -> str:
    """Returns the traceback as Python prints it, from the user's first frame on."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((i for i, f in enumerate(frames) if not f.filename.startswith(_FLOWRL)), 0)
    shown = [
        f for f in frames[start:] if not f.filename.startswith((_PROGRAM, "<frozen importlib"))
    ]
    head = ["Traceback (most recent call last):\n"] if shown else []
    lines = [*head, *traceback.format_list(shown), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


def definition_of(function: Callable[..., object]) -> SourceRef | None:
    """Returns the line of a function's `def`, below its decorators; None without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    first = code.co_firstlineno
    for line in range(first, first + 20):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return SourceRef(file=code.co_filename, line=line)
    return SourceRef(file=code.co_filename, line=first)


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
