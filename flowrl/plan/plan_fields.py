"""In which fields two plans differ, one by one; beside texts for people, which follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from flowrl.plan.schema import PlacementPlan
from flowrl.wording import counted

FREE_TEXTS = ("notes", "reasons", "alternatives", "pool.warnings")
"""Parts of a plan that are written for people, and that nothing is made of."""

Difference = tuple[str, object, object]
"""The dotted key in the first plan, and what each of them has there."""

_NOTHING = "nothing"


def differences(old: PlacementPlan, new: PlacementPlan, near: float = 0.0) -> Iterator[Difference]:
    """Each field in which plans differ, in the order of the format.

    Args:
        near: Of numbers with a fraction: what differs less, relatively, is equal.
    """
    one, other = old.to_dict(), new.to_dict()
    for path in FREE_TEXTS:
        _without(one, path)
        _without(other, path)
    yield from _of("", one, other, near)


def _without(raw: dict[str, object], path: str) -> None:
    first, _, rest = path.partition(".")
    inner = raw.get(first)
    if rest and isinstance(inner, dict):
        _without(inner, rest)
    else:
        raw.pop(first, None)


def _of(key: str, old: object, new: object, near: float) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            inner = f"{key}.{name}" if key else str(name)
            yield from _of(inner, old.get(name, _NOTHING), new.get(name, _NOTHING), near)
    elif _are_rows(old) and _are_rows(new):
        yield from _of_rows(key, old, new, near)  # type: ignore[arg-type]
    elif not _equal(old, new, near):
        yield key, old, new


def _of_rows(
    key: str, old: list[dict[str, object]], new: list[dict[str, object]], near: float
) -> Iterator[Difference]:
    """Rows that have a name are compared by it, others by their place."""
    names, others = _names(old), _names(new)
    if names == others or names is None or others is None or set(names) & set(others) == set():
        if len(old) != len(new):
            yield key, old, new
            return
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _of(f"{key}.{i}", one, other, near)
        return
    numbers = {name: i for i, name in enumerate(others)}
    for i, name in enumerate(names):
        if name in numbers:
            yield from _of(f"{key}.{i}", old[i], new[numbers[name]], near)
        else:
            yield f"{key}.{i}", old[i], _NOTHING
    for name, i in numbers.items():
        if name not in names:
            yield key, _NOTHING, new[i]


def _names(rows: list[dict[str, object]]) -> list[str] | None:
    """What tells rows apart; None where that is not one name a row."""
    for label in ("address", "role", "node"):
        names = [row.get(label) for row in rows]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            return [str(name) for name in names]
    return None


def _are_rows(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _equal(old: object, new: object, near: float) -> bool:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(_equal(one, other, near) for one, other in zip(old, new, strict=True))
    if isinstance(old, int | float) and isinstance(new, int | float) and near:
        both_whole = isinstance(old, int) and isinstance(new, int)
        return old == new if both_whole else math.isclose(old, new, rel_tol=near, abs_tol=1e-9)
    return old == new


_MOST_ENTRIES = 4
"""Entries of long lists that are shown where lists differ."""


def texts_apart(one: object, other: object, near: float = 0.0) -> tuple[str, str]:
    """Two values of a field in a line each; of long lists the entries in which they differ.

    Args:
        near: As of `differences`.

    >>> texts_apart([[n, n] for n in range(30)], [[n, n + (n == 7)] for n in range(30)])
    ('[7, 7] as entry 7 of 30', '[7, 8]')
    """
    if not isinstance(one, list | tuple) or not isinstance(other, list | tuple):
        return field_text(one), field_text(other)
    if max(len(str(one)), len(str(other))) <= _MOST_SHOWN:
        return field_text(one), field_text(other)
    if len(one) == len(other):
        places = [i for i in range(len(one)) if not _equal(one[i], other[i], near)]
        shown = ", ".join(str(i) for i in places[:_MOST_ENTRIES])
        more = f" and {len(places) - _MOST_ENTRIES} more" if len(places) > _MOST_ENTRIES else ""
        noun = "entry" if len(places) == 1 else "entries"
        texts = _entries(one[i] for i in places), _entries(other[i] for i in places)
        return f"{texts[0]} as {noun} {shown}{more} of {len(one)}", texts[1]
    return _beyond(one, other), _beyond(other, one)


def _beyond(one: Sequence[object], other: Sequence[object]) -> str:
    """How many entries there are, and which of them others have not."""
    left = list(other)
    own = []
    for entry in one:
        if entry in left:
            left.remove(entry)
        else:
            own.append(entry)
    number = counted(len(one), "entry", "entries")
    return f"{number}, of them {_entries(own)} alone" if own else number


def _entries(entries: Iterable[object]) -> str:
    texts = [_entry_text(entry) for entry in entries]
    more = [f"{len(texts) - _MOST_ENTRIES} more"] if len(texts) > _MOST_ENTRIES else []
    return ", ".join([*texts[:_MOST_ENTRIES], *more])


def _entry_text(entry: object) -> str:
    """An entry of a list; a row by its name."""
    if isinstance(entry, dict):
        named = [str(entry[name]) for name in ("address", "role", "node") if entry.get(name)]
        ends = [str(entry[name]) for name in ("source", "destination") if entry.get(name)]
        if named or ends:
            return (named or [" to ".join(ends)])[0]
    return field_text(entry)


_MOST_SHOWN = 80
"""Letters of a value in a line."""


def field_text(value: object) -> str:
    """A field of a plan in a line."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple | dict) and len(str(value)) > _MOST_SHOWN:
        return counted(len(value), "entry", "entries")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(field_text, value))}]"
    return "null" if value is None else str(value)
