"""Errors of the user's code as text: what was raised, and at which of the user's lines."""

from __future__ import annotations

import sysconfig
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import flowrl
from flowrl.specs.user_functions import NO_DEBUGGER

_MAX_FRAMES = 3
_MAX_TEXT = 300


def library_folders() -> tuple[Path, ...]:
    """Folders whose code is not the user's: flowrl's, Python's own and installed libraries'."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return (Path(flowrl.__file__).parent, *map(Path, libraries))


def user_frames(
    frames: Sequence[FrameSummary], own: Sequence[Path], *, or_any: bool = True
) -> tuple[str, ...]:
    """Returns the user's innermost frames, outermost first: `rewards.py:12 in f`.

    Args:
        frames: Outermost first, as tracebacks have them.
        own: Folders whose code is not the user's.
        or_any: Take the innermost frames of all where none is the user's.
    """
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in own)
    ]
    shown = (theirs or (list(frames) if or_any else []))[-_MAX_FRAMES:]
    return tuple(f"{short_path(f.filename)}:{f.lineno} in {f.name}" for f in shown)


def short_path(filename: str) -> str:
    """Returns the path, relative to the working folder if it is below it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def described(reason: BaseException) -> str:
    """Returns `KeyError: 'x'`, in one line, cut where it is long."""
    try:
        text = str(reason)
    # An exception of the user's may fail to print itself.
    except Exception:
        text = "no message"
    if isinstance(reason, BdbQuit):
        return NO_DEBUGGER
    text = " ".join(text.split())  # an error stays within its lines
    return (f"{type(reason).__name__}: {text}" if text else type(reason).__name__)[:_MAX_TEXT]
