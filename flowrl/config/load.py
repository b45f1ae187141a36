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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flowrl.config.problems import validated
from flowrl.config.schema import RunConfig
from flowrl.config.tree import Node, Origin, Places, Value, merged, quoted, remove_nulls
from flowrl.config.yaml_tree import YAML_SUFFIXES, read_yaml_file, read_yaml_value
from flowrl.errors import ConfigError, FlowError
from flowrl.wording import listing

__all__ = ["LoadedConfig", "load_config", "locating", "places_together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A validated configuration that knows where each value was written.

    Attributes:
        config: The tree; it never changes.
        path: The file it was read from; None where there was none.
        places: The place of each key.
    """

    config: RunConfig
    path: Path | None
    places: Places

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
        parts = [
            self.where(part) if _KEY.fullmatch(part) and part.split(".")[0] in _SECTIONS else part
            for part in where.split(" and ")
        ]
        return places_together(parts)

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
        error.where = loaded.located(error.where)
        raise


_KEY = re.compile(r"[a-z_]+(\.[\w-]+)*")
_SECTIONS = frozenset(RunConfig.model_fields)

_PLACE = re.compile(
    r"(?:command line|(?P<file>.+):(?P<line>\d+)) \((?P<setting>[\w.-]+(?:=.*)?)\)", re.DOTALL
)

_MIN_JOINED = 3
"""From so many places of one file on, the file is named once."""


def places_together(places: Sequence[str]) -> str:
    """Joins the places of one message: `mine.py:3 and command line (a.b=1)`.

    Three and more of the command line, or of one file, name it and each of their sections once.

    >>> pins = ("tp=2", "pp=4", "cp=1")
    >>> places_together([f"command line (plan.pins.actor.{key})" for key in pins])
    'command line (plan.pins.actor: tp=2, pp=4, cp=1)'
    >>> places_together([f"job.yaml:{line} (plan.pins.actor.{key})" for line, key in
    ...     ((7, "tp"), (8, "pp"), (9, "cp"))])
    'job.yaml:7, 8, 9 (plan.pins.actor: tp, pp, cp)'
    """
    by_source: dict[str, dict[str, re.Match[str] | None]] = {}
    for place in dict.fromkeys(places):
        match = _PLACE.fullmatch(place)
        source = place if match is None else match["file"] or "command line"
        by_source.setdefault(source, {})[place] = match
    joined: list[str] = []
    for source, entries in by_source.items():
        matches = [match for match in entries.values() if match is not None]
        if len(matches) < _MIN_JOINED:
            joined += entries
            continue
        lines = ", ".join(match["line"] for match in matches if match["line"])
        settings = _by_section(match["setting"] for match in matches)
        joined.append(f"{source}{f':{lines}' if lines else ''} ({settings})")
    return " and ".join(joined)


def _by_section(settings: Iterable[str]) -> str:
    """Groups settings: `plan.pins.actor.update: tp=2, pp=4; train.steps=3`."""
    sections: dict[str, list[str]] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name}{equals}{value}")
    groups = []
    for section, names in sections.items():
        separator = "." if len(names) == 1 else ": "
        groups.append(f"{section}{separator if section else ''}{', '.join(names)}")
    return "; ".join(groups)


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
        root = merged(root, _read_override(override, path), RunConfig)
    _drop_unused_stages(root)
    remove_nulls(root, RunConfig)
    places = Places.of(root, path)
    config = validated(RunConfig, _interpolated(root, places), places)
    return LoadedConfig(config=config, path=path, places=places)


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
            expected="a config; a plan goes beside the one that it was made for",
            hint=f"flowrl run CONFIG --plan {path}, or flowrl plan {path} to look at it",
        )


def _read_override(override: str, path: Path | None) -> Node:
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"{quoted(override)!r} is no override",
            where="command line",
            expected="key=value, such as train.steps=300",
            hint=_override_hint(override, path),
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


def _override_hint(word: str, config: Path | None) -> str:
    """Returns what to write in place of a word that is no override.

    Args:
        config: The file in the place of the configuration.
    """
    given = Path(word)
    is_yaml = given.suffix in YAML_SUFFIXES
    if config is not None and not word.startswith("-"):
        if given.suffix == ".py" or ".py:" in word:
            return f"write workflow={word}, for a workflow goes beside a configuration so"
        if (is_yaml or given.suffix == ".json") and _describes_machines(config):
            return (
                f"the configuration goes first, and {config} beside it: {word} cluster={config} "
                f"(`flowrl plan` takes --cluster {config} too)"
            )
        if is_yaml and _describes_machines(given):
            return f"write cluster={word} (`flowrl plan` takes --cluster {word} too)"
        if given.suffix == ".json":
            return f"write --plan {word} for a plan, roles.actor.model={word} for a model"
        if is_yaml:
            return (
                f"give one configuration; `extends: {word}` at the top of a file takes over "
                "another's"
            )
    if "=" in word:
        return "write the dotted key in front of `=`: train.steps=300"
    return f"write {word.lstrip('-') or 'KEY'}=VALUE"


def _describes_machines(path: Path) -> bool:
    if path.suffix not in YAML_SUFFIXES:
        return False
    try:
        return "nodes" in read_yaml_file(path).entries
    except ConfigError:
        return False


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
