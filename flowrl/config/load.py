"""Reads a configuration: YAML, what it extends, `key=value` overrides, then validation.

Later beats earlier: defaults in `flowrl.config.schema`, `base`, the file named by `extends`, the
file, overrides in their order. Mappings merge key by key and lists are replaced; a mapping whose
`kind` changes is replaced too, because the keys of the old kind mean nothing to the new.

- `null` takes a section or a named entry away (`flowrl.config.nulls`), and a mapping over a list
  speaks of the items by their names: `terms: {closeness: null}`.
- `stages=[grpo]` on the command line takes a stage out together with its section of the file.
- `extends: OTHER.yaml` (at the top of a file, relative to that file) takes over another file.
- `${seed}` and the other interpolations are OmegaConf's.
- Paths of data, models and reward functions are relative to the current directory, as on the
  command line; `extends` alone is relative to its file.

    loaded = load_config(Path("configs/quickstart.yaml"), ["train.steps=300", "seed=3"])
    loaded.config.train.steps        # 300
    loaded.where("train.steps")      # 'command line (train.steps=300)'
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from flowrl.config.misplaced import refuse_plan, way_for_file
from flowrl.config.nearest import listing, suggestion
from flowrl.config.nulls import item_named, item_names, remove_nulls
from flowrl.config.places import places_together
from flowrl.config.problems import validation_error
from flowrl.config.schema import RunConfig
from flowrl.config.yaml_tree import Value, read_yaml_file, read_yaml_value
from flowrl.errors import ConfigError, FlowError

__all__ = ["LoadedConfig", "load_config", "locating"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value was written: a file's line, an override, or values given in Python."""

    file: Path | None = None
    line: int = 0
    override: str = ""
    given: bool = False

    def describe(self, key: str) -> str:
        """The origin in words."""
        if self.given:
            return f"the given configuration ({key})"
        if self.file is None:
            return f"command line ({_short(self.override)})"
        return f"{self.file}:{self.line} ({key})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A validated configuration that knows where each value was written.

    Attributes:
        config: The tree; never changes.
        path: The file it was read from; None where there was none.
        origins: Where each value was written, by dotted key; a default has no entry.
    """

    config: RunConfig
    path: Path | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Where the value of dotted `key` is written, for messages.

        `configs/quickstart.yaml:12 (train.steps)`, `command line (train.steps=abc)`; without a
        line for a default.
        """
        return _where(key, self.path, self.origins)

    def where_within(self, key: str) -> str:
        """The same; where only the command line wrote of what is below `key`, that alone.

        For what stands in a file rightly, until somebody changes something in it.
        """
        changed = _overrides_below(key, self.origins)
        return f"command line ({', '.join(changed)})" if changed else self.where(key)

    def located(self, where: str | None) -> str | None:
        """A place of a message with each dotted key in it as `where` has it.

        Those who know no configuration say `roles.actor`; people look for its line.
        """
        if where is None:
            return None
        parts = [
            self.where(part) if _KEY.fullmatch(part) and part.split(".")[0] in _SECTIONS else part
            for part in where.split(" and ")
        ]
        return places_together(parts)

    def is_set(self, key: str) -> bool:
        """Whether `key` was written anywhere, rather than left at its default."""
        return key in self.origins

    def is_changed(self, key: str) -> bool:
        """Whether the command line has the last word on `key`."""
        origin = self.origins.get(key)
        return origin is not None and bool(origin.override)

    def is_taken_over(self, key: str) -> bool:
        """Whether `key` was written for other workflows, maybe, than those that run.

        It was where it stands in a file that `extends` names, or in a file whose `workflow` or
        `stages` the command line replaces.
        """
        origin = self.origins.get(key)
        if origin is None or origin.file is None:
            return False
        chosen = (self.origins.get(name) for name in ("workflow", "stages"))
        return origin.file != self.path or any(one is not None and one.override for one in chosen)

    def where_all(self, *keys: str) -> str | None:
        """Where those of `keys` stand that were written; None where all are defaults."""
        return " and ".join(self.where(key) for key in keys if self.is_set(key)) or None

    def defaults_among(self, *keys: str) -> str | None:
        """Those of `keys` that nobody wrote, for messages; None where all were."""
        unset = [key for key in keys if not self.is_set(key)]
        if not unset:
            return None
        return f"{listing(unset)} left at {'its default' if len(unset) == 1 else 'defaults'}"

    def stage_prefixes(self) -> Iterator[tuple[str, str]]:
        """Each stage's name and what stands before its keys; nothing, for the last."""
        *earlier, last = self.config.stages
        for name in earlier:
            yield name, f"stage.{name}."
        yield last, ""


@contextmanager
def locating(loaded: LoadedConfig) -> Iterator[None]:
    """Errors that name keys of a configuration name the places where these are written too."""
    try:
        yield
    except FlowError as error:
        error.where = loaded.located(error.where)
        raise


_KEY = re.compile(r"[a-z_]+(\.[\w-]+)*")
_SECTIONS = frozenset(RunConfig.model_fields)


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Reads and validates a configuration.

    Args:
        path: A YAML file; None starts from `base` and the defaults alone.
        overrides: `key=value` texts, applied in order.
        base: Plain values beneath the file, by nested key.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    draft = _Draft()
    if base is not None:
        values = cast("dict[str, Value]", copy.deepcopy(dict(base)))
        draft.merge(values, dict.fromkeys(_paths(values), Origin(given=True)))
    if path is not None:
        _add_file(draft, path, ())
    for override in overrides:
        _add_override(draft, override, path)
    draft.drop_stages_left_out()
    draft.drop_nulls()
    values = _interpolate(draft, path)

    def where(key: str) -> str:
        # What is missing was written nowhere; the section that it is missing in was.
        above = key
        while above and above not in draft.origins:
            above = above.rpartition(".")[0]
        return _where(above or key, path, draft.origins)

    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise validation_error(error, values, RunConfig, where) from None
    return LoadedConfig(config=config, path=path, origins=draft.origins)


@dataclass(slots=True)
class _Draft:
    """Values before validation; `origins` has an entry for each written value and no other."""

    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def merge(self, values: dict[str, Value], origins: dict[str, Origin]) -> None:
        for key, value in values.items():
            self._put(self.values, key, value, key, origins)
        self.origins.update(origins)

    def assign(self, keys: list[str], value: Value, origin: Origin) -> None:
        """Sets the value at a dotted key, making mappings on the way."""
        parent: Value = self.values
        keys = list(keys)
        for depth, key in enumerate(keys[:-1]):
            if isinstance(parent, list):
                keys[depth] = key = str(self._index(parent, keys[: depth + 1], origin))
            parent = self._child(parent, keys[: depth + 1], key, origin)
        path, key = ".".join(keys), keys[-1]
        match parent:
            case dict():
                self._put(parent, key, value, path, {path: origin})
            case list():
                index = self._index(parent, keys, origin)
                path = ".".join([*keys[:-1], str(index)])
                parent[index] = value
                self._forget(path)
            case _:
                raise self._no_keys(keys[:-1], key, parent, origin)
        for child in ("", *_paths(value)):
            self.origins[f"{path}.{child}" if child else path] = origin

    def drop_stages_left_out(self) -> None:
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
                self._forget(path)

    def drop_nulls(self) -> None:
        """Takes away what null takes away; the names of later items of a list move up."""
        for path in remove_nulls(self.values, RunConfig):
            self._forget(path)
            above, _, index = path.rpartition(".")
            if not index.isdecimal():
                continue
            for known in [k for k in self.origins if k.startswith(f"{above}.")]:
                place, dot, rest = known.removeprefix(f"{above}.").partition(".")
                if place.isdecimal() and int(place) > int(index):
                    moved = f"{above}.{int(place) - 1}{dot}{rest}"
                    self.origins[moved] = self.origins.pop(known)

    def _put(
        self,
        parent: dict[str, Value],
        key: str,
        value: Value,
        path: str,
        origins: Mapping[str, Origin],
    ) -> None:
        """Lays a value over what stands at a key; `origins` of it are for messages."""
        old = parent.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _kind_changes(old, value):
            for name, inner in value.items():
                self._put(old, name, inner, f"{path}.{name}", origins)
            return
        if isinstance(old, list) and isinstance(value, dict) and item_names(old):
            self._put_by_name(old, value, path, origins)
            return
        self._forget(path)
        parent[key] = value

    def _put_by_name(
        self,
        items: list[Value],
        values: dict[str, Value],
        path: str,
        origins: Mapping[str, Origin],
    ) -> None:
        """Lays values over the items of a list that have these names."""
        for name, value in values.items():
            origin = origins.get(f"{path}.{name}") or origins.get(path, Origin(given=True))
            index = self._index(items, [*path.split("."), name], origin)
            item = items[index]
            if isinstance(item, dict) and isinstance(value, dict):
                for key, inner in value.items():
                    self._put(item, key, inner, f"{path}.{index}.{key}", origins)
            else:
                self._forget(f"{path}.{index}")
                items[index] = value

    def _child(self, parent: Value, keys: list[str], key: str, origin: Origin) -> Value:
        match parent:
            case dict():
                if parent.get(key) is None:
                    parent[key] = {}
                    self.origins[".".join(keys)] = origin
                return parent[key]
            case list():
                return parent[self._index(parent, keys, origin)]
            case _:
                raise self._no_keys(keys[:-1], key, parent, origin)

    def _index(self, parent: list[Value], keys: list[str], origin: Origin) -> int:
        key, path = keys[-1], ".".join(keys[:-1])
        if key.isdecimal() and int(key) < len(parent):
            return int(key)
        if (named := item_named(parent, key)) is not None:
            return named
        last, names = len(parent) - 1, item_names(parent)
        by_name = f", or a name: {listing(names)}" if names else ""
        numbers = f"a number from 0 to {last}" if last > 0 else "its only item, 0"
        raise ConfigError(
            f"{path} is a list of {len(parent)}, which has no item {key!r}",
            where=origin.describe(".".join(keys)),
            expected=f"{numbers}{by_name}" if parent else "the list as a whole",
            hint=suggestion(key, names) or f"set the whole list: '{path}=[...]'",
        )

    def _no_keys(self, keys: list[str], key: str, parent: Value, origin: Origin) -> ConfigError:
        path = ".".join(keys)
        return ConfigError(
            f"{path} is {parent!r}, which has no key {key!r}",
            where=origin.describe(f"{path}.{key}"),
            found=f"{path} set at {_where(path, None, self.origins)}",
            hint=f"set it as a whole: '{path}={{{key}: ...}}'",
        )

    def _forget(self, path: str) -> None:
        for known in [k for k in self.origins if k == path or k.startswith(f"{path}.")]:
            del self.origins[known]


def _kind_changes(old: dict[str, Value], new: dict[str, Value]) -> bool:
    return "kind" in new and old.get("kind", new["kind"]) != new["kind"]


def _add_file(draft: _Draft, path: Path, below: tuple[Path, ...]) -> None:
    tree = read_yaml_file(path)
    refuse_plan(path, tree.values)
    chain = (*below, path)
    extends = tree.values.pop("extends", None)
    if extends is not None:
        where = Origin(file=path, line=tree.lines["extends"]).describe("extends")
        if not isinstance(extends, str):
            raise ConfigError(
                "extends must be the path of one file",
                where=where,
                found=repr(extends),
                hint="name one file; that one may extend another",
            )
        parent = path.parent / extends
        if parent.resolve() in [file.resolve() for file in chain]:
            raise ConfigError(
                "a file extends itself",
                where=where,
                found=" -> ".join(str(file) for file in (*chain, parent)),
                hint="take one `extends` of the circle out",
            )
        try:
            _add_file(draft, parent, chain)
        except ConfigError as error:
            # The error is about the other file; this one is why that file is read at all.
            if error.where == str(parent):
                error.where = f"{where}: {parent}"
            raise
    origins = {
        key: Origin(file=path, line=line)
        for key, line in tree.lines.items()
        if key and key != "extends"
    }
    draft.merge(tree.values, origins)


def _add_override(draft: _Draft, override: str, path: Path | None) -> None:
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    where = f"command line ({_short(override)})"
    if not equals or not all(keys):
        raise ConfigError(
            f"{_short(override)!r} is no override",
            where="command line",
            expected="key=value, such as train.steps=300",
            hint=(path and way_for_file(override, path)) or _way_for_word(override, equals),
        )
    draft.assign(keys, read_yaml_value(text, where), Origin(override=override))


def _short(override: str) -> str:
    """An override as messages quote it."""
    return override if len(override) <= _QUOTED else f"{override[:_QUOTED]}..."


_QUOTED = 160
"""Characters of an override that messages quote."""


def _way_for_word(override: str, equals: str) -> str:
    if equals:
        return "write the dotted key in front of `=`: train.steps=300"
    return f"write {override.lstrip('-') or 'KEY'}=VALUE"


def _interpolate(draft: _Draft, path: Path | None) -> dict[str, Value]:
    if not _has_interpolation(draft.values):
        return draft.values
    # Its grammar takes longer to import than a configuration to read, and few interpolate.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # The defaults take part, so that `${seed}` means the seed even where none is written.
        tree = OmegaConf.merge(OmegaConf.create(_defaults()), OmegaConf.create(draft.values))
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        raise ConfigError(
            f"cannot be interpolated: {str(error).splitlines()[0]}",
            where=_where(key, path, draft.origins) if key else str(path),
            hint="`${a.b}` stands for the value of a.b; `\\${` is the text itself",
        ) from None
    return cast("dict[str, Value]", _written(cast("Value", resolved), draft.values))


def _defaults() -> dict[str, object]:
    required = [name for name, info in RunConfig.model_fields.items() if info.is_required()]
    # Required keys have no value to build the tree with; None stands for them and is left out.
    blank = RunConfig.model_construct(**dict.fromkeys(required))  # type: ignore[arg-type]
    return blank.model_dump(mode="json", exclude=set(required))


def _written(resolved: Value, values: Value) -> Value:
    """The part of `resolved` that `values` has keys for."""
    if isinstance(resolved, dict) and isinstance(values, dict):
        return {key: _written(resolved[key], inner) for key, inner in values.items()}
    return resolved


def _has_interpolation(value: Value) -> bool:
    match value:
        case str():
            return "${" in value
        case dict():
            return any(_has_interpolation(inner) for inner in value.values())
        case list():
            return any(_has_interpolation(inner) for inner in value)
        case _:
            return False


def _paths(value: Value) -> list[str]:
    """Dotted keys of everything inside `value`."""
    match value:
        case dict():
            items = list(value.items())
        case list():
            items = [(str(index), inner) for index, inner in enumerate(value)]
        case _:
            return []
    return [path for key, inner in items for path in (key, *(f"{key}.{p}" for p in _paths(inner)))]


def _where(key: str, path: Path | None, origins: Mapping[str, Origin]) -> str:
    origin = origins.get(key)
    if origin is None:
        return f"{path} ({key})" if path is not None else key
    where = origin.describe(key)
    if origin.override:
        return where
    # What a section holds may be right in the file and wrong by what the command line changed.
    changed = _overrides_below(key, origins)
    return f"{where} with {', '.join(changed)} of the command line" if changed else where


def _overrides_below(key: str, origins: Mapping[str, Origin]) -> list[str]:
    """Overrides that changed something inside of a section."""
    below = (origin for name, origin in origins.items() if name.startswith(f"{key}."))
    return list(dict.fromkeys(_short(origin.override) for origin in below if origin.override))
