"""The nearest name to a misspelt one, and lists of names for messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

from flowrl.wording import nearest

__all__ = [
    "listing",
    "nearest",
    "nearest_below",
    "nearest_file",
    "nearest_in",
    "nearest_name",
    "one_of_them",
    "suggestion",
]

MAX_LISTED = 24


def suggestion(name: str, choices: Iterable[str]) -> str | None:
    """`did you mean 'steps'?`, or None where no choice is alike."""
    match = nearest(name, choices)
    return f"did you mean {match!r}?" if match is not None else None


def nearest_file(path: Path, suffixes: tuple[str, ...] = ("",)) -> str | None:
    """`did you mean FOLDER/NAME?` of a file that is not there; None where none beside is alike.

    Args:
        suffixes: Ends of names to look among; by default all.
    """
    if path.exists() or not path.parent.is_dir():
        return None
    beside = sorted(one.name for one in path.parent.iterdir() if one.name.endswith(suffixes))
    match = nearest_name(path, beside)
    return None if match is None else f"did you mean {path.parent / match}?"


def nearest_in(folder: Path | None, path: Path, suffixes: tuple[str, ...]) -> str | None:
    """`did you mean FOLDER/NAME?` of a name without a folder, where `folder` has one like it."""
    if len(path.parts) != 1 or folder is None or not folder.is_dir():
        return None
    match = nearest_name(path, sorted(o.name for o in folder.iterdir() if o.suffix in suffixes))
    return None if match is None else f"did you mean {folder / match}?"


def nearest_below(path: Path) -> str | None:
    """`did you mean FOLDER/SUB/NAME?` of a file that lies in a folder where it was sought."""
    if not path.parent.is_dir():
        return None
    folders = sorted(one for one in path.parent.iterdir() if one.is_dir())
    found = next((one / path.name for one in folders if (one / path.name).is_file()), None)
    return None if found is None else f"did you mean {found}?"


def nearest_name(path: Path, names: Iterable[str]) -> str | None:
    """The name of a file most like that of `path`, or None where none is alike.

    Ends make no name alike: `nope.yaml` is not next to `laptop.yaml`. Of names that differ in
    nothing else, one with the same end is taken.
    """
    by_stem: dict[str, str] = {}
    for name in names:
        stem = PurePath(name).stem
        if stem not in by_stem or PurePath(name).suffix == path.suffix:
            by_stem[stem] = name
    match = nearest(path.stem, by_stem)
    return None if match is None else by_stem[match]


def one_of_them(name: str, choices: Iterable[str]) -> str:
    """What to do about a name that is none of the choices, which the message lists."""
    return suggestion(name, choices) or "take one of them"


def listing(choices: Iterable[str]) -> str:
    """The choices in one line, cut after `MAX_LISTED`; `nothing` where there are none."""
    names = list(choices)
    if not names:
        return "nothing"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
