"""Reads a configuration: YAML, files that it extends, `key=value` overrides, then validation.

Later values beat earlier ones: the defaults of `flowrl.config.schema`, `base`, the file named by
`extends`, the file, then the overrides in their order. `flowrl.config.tree` says how they merge.

- `stages=[grpo]` on the command line removes a stage together with its section of the file.
- `extends: OTHER.yaml` (at the top of a file, relative to that file) takes over another file.
- `${seed}` and the other interpolations are OmegaConf's.
- Paths of data, models and reward functions are relative to the current directory, as on the
  command line; `extends` alone is relative to its file.

    loaded = load_config(Path("configs/quickstart.yaml"), ["train.steps=300", "seed=3"])
    loaded.config.train.steps        # 300
    loaded.where("train.steps")      # 'command line (train.steps=300)'
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flowrl.config.problems import validated
from flowrl.config.schema import RunConfig
from flowrl.config.tree import LONGEST_QUOTE, Node, Origin, Places, Value, merged, remove_nulls
from flowrl.config.yaml_tree import YAML_SUFFIXES, read_yaml_file, read_yaml_value
from flowrl.errors import ConfigError, FlowError
from flowrl.wording import excerpt, listing


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A validated configuration that knows where each value was written.

    Attributes:
        config: The tree; it never changes.
        path: The file it was read from; None where there was none.
        places: The place of each key.
        interpolated: The dotted keys that interpolations name.
    """

    config: RunConfig
    path: Path | None
    places: Places
    interpolated: frozenset[str]

    def where(self, key: str) -> str:
        """Returns the place where the value of dotted `key` is written, for messages.

        `configs/quickstart.yaml:12 (train.steps)`, `command line (train.steps=abc)`; without a
        line for a default.
        """
        return self.places.where(key)

    def where_within(self, key: str) -> str:
        """Returns the overrides that wrote below `key`, or else the place of `key`.

        It is for a section that is right in its file until the command line changes it.
        """
        changed = self.places.overrides_below(key)
        return f"command line ({', '.join(changed)})" if changed else self.where(key)

    def located(self, where: str | None) -> str | None:
        """Returns a message's place with each dotted key replaced by the place of that key.

        Checks of programs and graphs know no configuration and say `roles.actor`; people look for
        its line.
        """
        if where is None:
            return None
        places = [self.where(part) if _is_key(part) else part for part in where.split(" and ")]
        return " and ".join(dict.fromkeys(places)).replace(") and command line (", ", ")

    def is_set(self, key: str) -> bool:
        """True if `key` was written anywhere, rather than left at its default."""
        return key in self.places.origins

    def is_changed(self, key: str) -> bool:
        """True if the command line has the last word on `key`."""
        origin = self.places.origins.get(key)
        return origin is not None and bool(origin.override)

    def is_taken_over(self, key: str) -> bool:
        """True if `key` may have been written for other workflows than those that run.

        That is so for keys of a file that `extends` names, and of a file whose `workflow` or
        `stages` the command line replaces.
        """
        origin = self.places.origins.get(key)
        if origin is None or origin.file is None:
            return False
        return origin.file != self.path or self.is_changed("workflow") or self.is_changed("stages")

    def where_all(self, *keys: str) -> str | None:
        """Returns the places of those of `keys` that were written; None if all are defaults."""
        return " and ".join(self.where(key) for key in keys if self.is_set(key)) or None

    def defaults_among(self, *keys: str) -> str | None:
        """Returns which of `keys` are defaults, for messages; None if all were written."""
        unset = [key for key in keys if not self.is_set(key)]
        if not unset:
            return None
        return f"{listing(unset)} left at {'its default' if len(unset) == 1 else 'defaults'}"

    def stage_prefixes(self) -> Iterator[tuple[str, str]]:
        """Yields each stage's name and the prefix of its keys, which is empty for the last."""
        *earlier, last = self.config.stages
        for name in earlier:
            yield name, f"stage.{name}."
        yield last, ""


@contextmanager
def locating(loaded: LoadedConfig) -> Iterator[None]:
    """Adds to errors inside the places of the keys that they name."""
    try:
        yield
    except FlowError as error:
        for problem in (error, *error.others):
            problem.where = loaded.located(problem.where)
        raise


def _is_key(text: str) -> bool:
    is_dotted = re.fullmatch(r"[a-z_]+(\.[\w-]+)*", text) is not None
    return is_dotted and text.split(".")[0] in RunConfig.model_fields


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
    root = Node({}, Origin())
    if base is not None:
        root = merged(root, Node.of(base, Origin()), RunConfig)
    if path is not None:
        root = merged(root, _read_config(path, ()), RunConfig)
    for override in overrides:
        root = merged(root, _read_override(override), RunConfig)
    _drop_unused_stages(root)
    remove_nulls(root, RunConfig)
    places = Places.of(root, path)
    config = validated(RunConfig, _interpolated(root, places), places)
    interpolated = frozenset(re.findall(r"\$\{\s*([\w.-]+)\s*\}", str(root.plain)))
    return LoadedConfig(config=config, path=path, places=places, interpolated=interpolated)


def _read_config(path: Path, extended_by: tuple[Path, ...]) -> Node:
    """Returns the values of a file over those of the file that it extends."""
    tree = read_yaml_file(path)
    _refuse_plan(path, tree.entries)
    extends = tree.entries.pop("extends", None)
    if extends is None:
        return tree
    where, name = extends.origin.describe("extends"), extends.value
    if not isinstance(name, str):
        raise ConfigError(
            "extends must be the path of one file",
            where=where,
            found=repr(extends.plain),
            hint="name one file; that one may extend another",
        )
    parent, chain = path.parent / name, (*extended_by, path)
    if parent.resolve() in [file.resolve() for file in chain]:
        raise ConfigError(
            "a file extends itself",
            where=where,
            found=" -> ".join(str(file) for file in (*chain, parent)),
            hint="take one `extends` of the circle out",
        )
    try:
        return merged(_read_config(parent, chain), tree, RunConfig)
    except ConfigError as error:
        # The error is about the other file; this one is why that file is read at all.
        if error.where == str(parent):
            error.where = f"{where}: {parent}"
        raise


def _refuse_plan(path: Path, values: Mapping[str, object]) -> None:
    if {"version", "graph", "placements"} <= values.keys():
        raise ConfigError(
            "this is a plan that was written, not a config",
            where=str(path),
            expected="a config; a plan is given with the one that it was made for",
            hint=f"flowrl run CONFIG --plan {path}, or flowrl plan {path} to look at it",
        )


def _read_override(override: str) -> Node:
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"{excerpt(override, LONGEST_QUOTE)!r} is no override",
            where="command line",
            expected="key=value, such as train.steps=300",
            hint=_override_hint(override),
        )
    origin = Origin(override=override)
    node = read_yaml_value(text, origin)
    for key in reversed(keys):
        node = Node({key: node}, origin, leads_to_key=True)
    return node


def _drop_unused_stages(root: Node) -> None:
    """Drops the file's sections of stages that an override of `stages` leaves out.

    Sections that an override touches stay, for the checks to refuse.
    """
    stages, sections = root.entries.get("stages"), root.entries.get("stage")
    if stages is None or sections is None or not stages.origin.override:
        return
    names = [node.value for _, node in stages.items]
    for name, section in sections.items:
        nodes = [section, *(node for _, node in section.below())]
        if name not in names and not any(node.origin.override for node in nodes):
            del sections.entries[name]


def _override_hint(word: str) -> str:
    """Returns what to write in place of a word that is no override."""
    if "=" in word:
        return "write the dotted key in front of `=`: train.steps=300"
    if Path(word.partition(":")[0]).suffix in (".py", ".json", *YAML_SUFFIXES):
        return (
            "one configuration comes first, and other files are values: workflow=FILE.py, "
            "cluster=FILE.yaml, roles.actor.model=FILE.json, --plan FILE.json; a file takes over "
            f"another with `extends: {word}`"
        )
    return f"write {word.lstrip('-') or 'KEY'}=VALUE"


def _interpolated(root: Node, places: Places) -> Value:
    """Returns the plain values, with the values that `${key}` stands for in its place."""
    values = root.plain
    if "${" not in str(values):
        return values
    # Its grammar takes longer to import than a configuration to read, and few interpolate.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # The defaults take part, so that `${seed}` means the seed even where none is written.
    complete = merged(Node.of(_defaults(), Origin()), root, RunConfig)
    try:
        tree = OmegaConf.create(cast("dict[str, Value]", complete.plain))
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"cannot be interpolated: {str(error).splitlines()[0]}",
            where=places.where(str(error.full_key or "")),
            hint="`${a.b}` stands for the value of a.b; `\\${` is the text itself",
        ) from None
    return _written(cast("Value", resolved), values)


def _defaults() -> dict[str, object]:
    required = [name for name, info in RunConfig.model_fields.items() if info.is_required()]
    # Required keys have no value to build the tree with; None stands for them and is left out.
    blank = RunConfig.model_construct(**dict.fromkeys(required))  # type: ignore[arg-type]
    return blank.model_dump(mode="json", exclude=set(required))


def _written(resolved: Value, values: Value) -> Value:
    """Returns the part of `resolved` for which `values` has keys."""
    if isinstance(resolved, dict) and isinstance(values, dict):
        return {key: _written(resolved[key], inner) for key, inner in values.items()}
    return resolved
