"""Values that remember where they were written, and how those of files and overrides merge.

Mappings merge key by key, and lists are replaced. A mapping whose `kind` names another section is
replaced too, because the keys of the old kind mean nothing to the new one. A mapping over a list
changes the items of these names: `terms: {closeness: {weight: 2}}`. A `preset` of rows takes the
place of the keys of a layout (`prompt`, `answer`, ...) in earlier files.

`null` removes a section or a named entry, as though no file had written it:

    stage: {sft: null}                      the section of a stage
    roles: {critic: null}                   a role
    rewards: null                           all rewards, and so for `train`, `eval` and `roles`
    rewards: {terms: {closeness: null}}     the reward term of that name
    bind: {student: null}                   one entry

Where None is a value (`stop`, `data.eval`, `roles.NAME.model`, values of `args`), null is that
value. A single value that is never None (`train.steps`) stays null, which the validation refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TypeAlias, get_origin

from flowrl.config.data import PRESETS, DataConfig, FileData, HubData
from flowrl.config.rewards import RewardTerm
from flowrl.config.section import (
    declared_child,
    fitting_model,
    kind_of,
    members_of,
    models_in,
)
from flowrl.errors import ConfigError
from flowrl.wording import excerpt, listing, suggestion

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"

LONGEST_QUOTE = 160
"""Characters of an override that messages quote."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was written: a file's line, an override, or else Python."""

    file: Path | None = None
    line: int = 0
    override: str = ""

    def __str__(self) -> str:
        if self.override:
            return f"command line ({excerpt(self.override, LONGEST_QUOTE)})"
        return "the given configuration" if self.file is None else f"{self.file}:{self.line}"

    def describe(self, key: str) -> str:
        """Returns the origin of `key` as messages show it."""
        return str(self) if self.override else f"{self} ({key})"


@dataclass(slots=True)
class Node:
    """A value and its origin.

    Attributes:
        value: A single value, or nodes by index or by key.
        origin: The place where it was written; of an entry of a mapping, the place of its key.
        leads_to_key: True for a section in the dotted key of an override: the section itself was
            not written, and what is there already stays.
    """

    value: Scalar | list[Node] | dict[str, Node]
    origin: Origin
    leads_to_key: bool = False

    @classmethod
    def of(cls, value: object, origin: Origin) -> Node:
        """Returns the node of a plain value that was written in one place."""
        match value:
            case Mapping():
                entries = {str(key): cls.of(inner, origin) for key, inner in value.items()}
                return cls(entries, origin)
            case list() | tuple():
                return cls([cls.of(inner, origin) for inner in value], origin)
            case _:
                assert value is None or isinstance(value, str | int | float), value
                return cls(value, origin)

    @property
    def plain(self) -> Value:
        """The value without origins."""
        match self.value:
            case dict() as entries:
                return {key: node.plain for key, node in entries.items()}
            case list() as items:
                return [node.plain for node in items]
            case value:
                return value

    @property
    def entries(self) -> dict[str, Node]:
        """The entries of a mapping; none for another value."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[tuple[str, Node]]:
        """The nodes of a mapping or a list, with their key or index."""
        if isinstance(self.value, list):
            return [(str(index), node) for index, node in enumerate(self.value)]
        return list(self.entries.items())

    @property
    def kind(self) -> object:
        """The section's kind; see `kind_of`."""
        return kind_of({key: node.value for key, node in self.entries.items()})

    def below(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """Yields all nodes inside of this one by their dotted keys, which begin with `path`."""
        for key, node in self.items:
            yield (inner := _join(path, key)), node
            yield from node.below(inner)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of keys for messages: `configs/quickstart.yaml:12 (train.steps)`.

    Attributes:
        path: The file to which defaults belong.
        origins: The origin of each written value by dotted key; a default has no entry.
    """

    path: Path | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Node, path: Path | None) -> Places:
        """Returns the places of all keys of a tree."""
        return cls(path, {key: node.origin for key, node in tree.below()})

    def where(self, key: str) -> str:
        """Returns the place of `key`, without a line for a default."""
        return self._at(key, key)

    def __call__(self, key: str) -> str:
        """Returns the place of `key`, or its name at the nearest section that was written."""
        above = key
        while above and above not in self.origins:
            above = above.rpartition(".")[0]
        return self._at(key, above)

    def _at(self, key: str, written: str) -> str:
        """Returns the place of `key`, which is that of the key `written`."""
        origin = self.origins.get(written)
        if origin is None:
            return f"{self.path} ({key})" if self.path and key else str(self.path or key)
        # The section may be right in the file and wrong by what the command line changed in it.
        changed = [] if origin.override else self.overrides_below(written)
        where = origin.describe(key)
        return f"{where} with {', '.join(changed)} of the command line" if changed else where

    def overrides_below(self, key: str) -> list[str]:
        """Returns the overrides that changed something inside a section, as messages quote them."""
        below = (origin for name, origin in self.origins.items() if name.startswith(f"{key}."))
        written = (origin.override for origin in below if origin.override)
        return list(dict.fromkeys(excerpt(override, LONGEST_QUOTE) for override in written))


def merged(old: Node | None, new: Node, declared: object, path: str = "") -> Node:
    """Returns `old`, which changes, with the values of `new` over its own.

    Args:
        old: The earlier values; None without any.
        new: The later values.
        declared: The declared type of both, such as a section.
        path: Their dotted key, for messages.

    Raises:
        ConfigError: A key that an override names is inside a single value, or is no item of a list.
    """
    if old is None:
        return new
    match old.value, new.value:
        case dict() as entries, dict() as changes if new.leads_to_key or not _differ_in_kind(
            old, new, declared
        ):
            if "preset" in changes and fitting_model(declared, new.kind or old.kind) in _ROWS:
                # Keys that describe another layout of rows go, but for those of the command line.
                for key in {key for preset in PRESETS.values() for key in preset} & entries.keys():
                    if not entries[key].origin.override:
                        del entries[key]
            for key, change in changes.items():
                inner = declared_child(declared, key, new.kind or old.kind)
                entries[key] = merged(entries.get(key), change, inner, _join(path, key))
        case list() as items, dict() as changes:
            inner = declared_child(declared, "0")
            for key, change in changes.items():
                index = _index(items, path, key, change.origin)
                items[index] = merged(items[index], change, inner, f"{path}.{index}")
        case value, dict() as changes if new.leads_to_key and value is not None:
            key = next(iter(changes))
            other = re.fullmatch(r"\$\{([^${}:]+)\}", value) if isinstance(value, str) else None
            hint = f"set it as a whole: '{path}={{{key}: ...}}'"
            if other is not None:
                hint = f"set {other[1]}.{key}=..., which {path} repeats, or {hint}"
            raise ConfigError(
                f"{path} is {value!r}, which has no key {key!r}",
                where=str(new.origin),
                found=f"{path} set at {old.origin.describe(path)}",
                hint=hint,
            )
        case _:
            return new
    if not new.leads_to_key:
        old.origin = new.origin
    return old


def _differ_in_kind(old: Node, new: Node, declared: object) -> bool:
    if old.kind is None or new.kind is None:
        return False
    return fitting_model(declared, old.kind) is not fitting_model(declared, new.kind)


def _index(items: Sequence[Node], path: str, key: str, origin: Origin) -> int:
    """Returns the index of an item by its number or its name."""
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    names = [_item_name(item) for item in items]
    if names.count(key) == 1:
        return names.index(key)
    known = [name for name in names if isinstance(name, str)]
    by_name = f", or a name: {listing(known)}" if known else ""
    numbers = f"a number from 0 to {len(items) - 1}" if len(items) > 1 else "its only item, 0"
    raise ConfigError(
        f"{path} is a list of {len(items)}, which has no item {key!r}",
        where=origin.describe(f"{path}.{key}"),
        expected=f"{numbers}{by_name}" if items else "the list as a whole",
        hint=suggestion(key, known) or f"set the whole list: '{path}=[...]'",
    )


_ROWS = (DataConfig, FileData, HubData)


def _item_name(item: Node) -> object:
    """Returns the name that an item has, or that its kind or its function has by default."""
    name = item.entries.get("name")
    use = item.entries.get("use")
    if name is None and use is not None and item.kind == "python":
        return str(use.value).rpartition(":")[2]
    if name is not None:
        return name.value
    model = None if item.kind is None else fitting_model(RewardTerm, item.kind)
    return None if model is None else model.model_fields["name"].default


def remove_nulls(node: Node, declared: object) -> None:
    """Removes every null inside that stands for a section or a named entry of a declared type."""
    is_section = fitting_model(declared, node.kind) is not None
    for key, inner in reversed(node.items):
        own = declared_child(declared, key, node.kind)
        if inner.value is not None or own is None or NoneType in members_of(own):
            remove_nulls(inner, own)
        elif isinstance(node.value, dict) and (not is_section or _is_container(own)):
            del node.value[key]
        elif isinstance(node.value, list) and _is_container(own):
            del node.value[int(key)]


def _is_container(declared: object) -> bool:
    several = any(get_origin(member) in (dict, tuple) for member in members_of(declared))
    return several or bool(models_in(declared))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
