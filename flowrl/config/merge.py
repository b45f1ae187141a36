"""Merges the values of files and overrides, and remembers where each was written.

Mappings merge key by key, and lists are replaced. A mapping whose `kind` changes is replaced too,
because the keys of the old kind mean nothing to the new one. A mapping over a list changes the
items of these names: `terms: {closeness: {weight: 2}}`.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin

from pydantic import BaseModel

from flowrl.config.rewards import RewardTerm
from flowrl.config.section import fitting_model, item_type, members_of, models_in
from flowrl.config.yaml_tree import Value
from flowrl.errors import ConfigError
from flowrl.wording import listing, suggestion

__all__ = ["Draft", "Origin", "Origins", "paths_in", "quoted"]

_LONGEST_QUOTE = 160
"""Characters of an override that messages quote."""


def quoted(override: str) -> str:
    """Returns an override as messages quote it."""
    is_long = len(override) > _LONGEST_QUOTE
    return f"{override[:_LONGEST_QUOTE]}..." if is_long else override


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where one value was written: a file's line, an override, or Python (`given`)."""

    file: Path | None = None
    line: int = 0
    override: str = ""
    given: bool = False

    def describe(self, key: str) -> str:
        """Returns the origin of `key` as messages show it."""
        if self.given:
            return f"the given configuration ({key})"
        if self.file is None:
            return f"command line ({quoted(self.override)})"
        return f"{self.file}:{self.line} ({key})"


class Origins(dict[str, Origin]):
    """The origin of each written value by dotted key; a default has no entry."""

    def where(self, key: str, path: Path | None) -> str:
        """Returns the place of `key` for messages; `path` is the file to which defaults belong."""
        origin = self.get(key)
        if origin is None:
            return f"{path} ({key})" if path is not None else key
        where = origin.describe(key)
        if origin.override:
            return where
        # The section may be right in the file and wrong by what the command line changed in it.
        changed = self.overrides_below(key)
        return f"{where} with {', '.join(changed)} of the command line" if changed else where

    def where_nearest(self, key: str, path: Path | None) -> str:
        """Returns the place of `key`, or of the nearest section above it that was written."""
        above = key
        while above and above not in self:
            above = above.rpartition(".")[0]
        return self.where(above or key, path)

    def overrides_below(self, key: str) -> list[str]:
        """Returns the overrides that changed something inside a section, as messages quote them."""
        below = (origin for name, origin in self.items() if name.startswith(f"{key}."))
        return list(dict.fromkeys(quoted(origin.override) for origin in below if origin.override))

    def forget(self, key: str) -> None:
        """Removes a key and all keys below it."""
        for known in [k for k in self if k == key or k.startswith(f"{key}.")]:
            del self[known]

    def move_up(self, key: str) -> None:
        """Renames the later items of a list whose item `key` was removed."""
        above, _, index = key.rpartition(".")
        for known in [k for k in self if k.startswith(f"{above}.")]:
            place, dot, rest = known.removeprefix(f"{above}.").partition(".")
            if place.isdecimal() and int(place) > int(index):
                self[f"{above}.{int(place) - 1}{dot}{rest}"] = self.pop(known)


def paths_in(value: Value) -> list[str]:
    """Returns the dotted keys of everything inside `value`."""
    match value:
        case dict():
            items = list(value.items())
        case list():
            items = [(str(index), inner) for index, inner in enumerate(value)]
        case _:
            return []
    return [
        path for key, inner in items for path in (key, *(f"{key}.{p}" for p in paths_in(inner)))
    ]


@dataclass(slots=True)
class Draft:
    """Values before validation, and their origins.

    Later values win: `merge` is called for each file, `assign` for each override, and
    `remove_nulls` once at the end.
    """

    values: dict[str, Value] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)

    def merge(self, values: dict[str, Value], origins: Mapping[str, Origin]) -> None:
        """Merges the values of a file over those that are there."""
        self._merge_keys(self.values, values, "", origins)
        self.origins.update(origins)

    def assign(self, keys: Sequence[str], value: Value, origin: Origin) -> None:
        """Sets the value at a dotted key; sections on the way to it are created."""
        parent: Value = self.values
        *above, last = keys
        path = ""
        for key in above:
            parent, path = self._child(parent, path, key, origin)
        match parent:
            case dict():
                path = _join(path, last)
                parent[last] = self._merged(parent.get(last), value, path, {path: origin})
            case list():
                index = self._index(parent, path, last, origin)
                path = f"{path}.{index}"
                self.origins.forget(path)
                parent[index] = value
            case _:
                raise self._no_keys(parent, path, last, origin)
        for child in ("", *paths_in(value)):
            self.origins[f"{path}.{child}" if child else path] = origin

    def drop_unused_stages(self) -> None:
        """Drops the file's sections of stages that an override of `stages` leaves out.

        Sections that an override touches stay, for the checks to refuse.
        """
        stages, sections = self.values.get("stages"), self.values.get("stage")
        if not isinstance(stages, list) or not isinstance(sections, dict):
            return
        if "stages" not in self.origins or not self.origins["stages"].override:
            return
        for name in [name for name in sections if name not in stages]:
            path = f"stage.{name}"
            written = (o for k, o in self.origins.items() if k == path or k.startswith(f"{path}."))
            if not any(origin.override for origin in written):
                del sections[name]
                self.origins.forget(path)

    def remove_nulls(self, root: type[BaseModel]) -> None:
        """Removes every null that stands for a section or a named entry of the model `root`."""
        for path in _remove_nulls(self.values, root, ""):
            self.origins.forget(path)
            if path.rpartition(".")[2].isdecimal():
                self.origins.move_up(path)

    def _merge_keys(
        self,
        old: dict[str, Value],
        new: dict[str, Value],
        path: str,
        origins: Mapping[str, Origin],
    ) -> None:
        for key, value in new.items():
            old[key] = self._merged(old.get(key), value, _join(path, key), origins)

    def _merged(self, old: Value, new: Value, path: str, origins: Mapping[str, Origin]) -> Value:
        """Returns the value at `path` once `new` is laid over `old`; `origins` are for messages."""
        if isinstance(old, dict) and isinstance(new, dict) and not _kind_changes(old, new):
            self._merge_keys(old, new, path, origins)
            return old
        if isinstance(old, list) and isinstance(new, dict) and _item_names(old):
            for name, value in new.items():
                origin = origins.get(f"{path}.{name}") or origins.get(path, Origin(given=True))
                index = self._index(old, path, name, origin)
                item = old[index]
                if isinstance(item, dict) and isinstance(value, dict):
                    self._merge_keys(item, value, f"{path}.{index}", origins)
                else:
                    self.origins.forget(f"{path}.{index}")
                    old[index] = value
            return old
        self.origins.forget(path)
        return new

    def _child(self, parent: Value, path: str, key: str, origin: Origin) -> tuple[Value, str]:
        """Returns the value of a key and its dotted path; a missing section is created."""
        match parent:
            case dict():
                path = _join(path, key)
                if parent.get(key) is None:
                    parent[key] = {}
                    self.origins[path] = origin
                return parent[key], path
            case list():
                index = self._index(parent, path, key, origin)
                return parent[index], f"{path}.{index}"
            case _:
                raise self._no_keys(parent, path, key, origin)

    def _index(self, items: list[Value], path: str, key: str, origin: Origin) -> int:
        """Returns the index of an item by its number or its name."""
        if key.isdecimal() and int(key) < len(items):
            return int(key)
        named = [index for index, item in enumerate(items) if _item_name(item) == key]
        if len(named) == 1:
            return named[0]
        last, names = len(items) - 1, _item_names(items)
        by_name = f", or a name: {listing(names)}" if names else ""
        numbers = f"a number from 0 to {last}" if last > 0 else "its only item, 0"
        raise ConfigError(
            f"{path} is a list of {len(items)}, which has no item {key!r}",
            where=origin.describe(f"{path}.{key}"),
            expected=f"{numbers}{by_name}" if items else "the list as a whole",
            hint=suggestion(key, names) or f"set the whole list: '{path}=[...]'",
        )

    def _no_keys(self, parent: Value, path: str, key: str, origin: Origin) -> ConfigError:
        return ConfigError(
            f"{path} is {parent!r}, which has no key {key!r}",
            where=origin.describe(f"{path}.{key}"),
            found=f"{path} set at {self.origins.where(path, None)}",
            hint=f"set it as a whole: '{path}={{{key}: ...}}'",
        )


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _kind_changes(old: dict[str, Value], new: dict[str, Value]) -> bool:
    return "kind" in new and old.get("kind", new["kind"]) != new["kind"]


def _item_names(items: Sequence[Value]) -> list[str]:
    """Returns the names of a list's items, such as reward terms, that have one."""
    return [name for name in map(_item_name, items) if name is not None]


def _item_name(item: Value) -> str | None:
    """Returns the name that an item says, or that its kind has by default."""
    if not isinstance(item, dict):
        return None
    name = item.get("name")
    if name is None and isinstance(item.get("kind"), str):
        model = fitting_model(RewardTerm, item)
        name = None if model is None else model.model_fields["name"].default
    return name if isinstance(name, str) else None


def _remove_nulls(value: Value, declared: object, path: str) -> list[str]:
    """Removes nulls from a value of a declared type; returns their keys, later items first."""
    removed: list[str] = []
    match value:
        case dict():
            model = fitting_model(declared, value)
            for key, inner in list(value.items()):
                if model is None:
                    own: object = item_type(declared, dict, 1)
                    is_removable = own is not None and NoneType not in members_of(own)
                else:
                    info = model.model_fields.get(key)
                    own = None if info is None else info.annotation
                    is_removable = _is_section(own)
                if inner is None and is_removable:
                    del value[key]
                    removed.append(_join(path, key))
                else:
                    removed += _remove_nulls(inner, own, _join(path, key))
        case list():
            own = item_type(declared, tuple, 0)
            for index in reversed(range(len(value))):
                if value[index] is None and models_in(own):
                    del value[index]
                    removed.append(f"{path}.{index}")
                else:
                    removed += _remove_nulls(value[index], own, f"{path}.{index}")
        case _:
            pass
    return removed


def _is_section(declared: object) -> bool:
    """True if a declared type consists of mappings or lists and excludes None."""
    members = members_of(declared)
    several = any(get_origin(member) in (dict, tuple) and get_args(member) for member in members)
    return NoneType not in members and (several or bool(models_in(declared)))
