"""Reads a configuration: YAML, files that it extends, `key=value` overrides, then validation.

Later values beat earlier ones: the defaults of `flowrl.config.schema`, `base`, the file named by
`extends`, the file, then the overrides in their order. `flowrl.config.merge` says how they merge.

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

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from flowrl.config.merge import Draft, Origin, Origins, paths_in, quoted
from flowrl.config.problems import validation_error
from flowrl.config.schema import RunConfig
from flowrl.config.yaml_tree import YAML_SUFFIXES, Value, read_yaml_file, read_yaml_value
from flowrl.errors import ConfigError, FlowError
from flowrl.wording import listing

__all__ = ["LoadedConfig", "load_config", "locating", "places_together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A validated configuration that knows where each value was written.

    Attributes:
        config: The tree; it never changes.
        path: The file it was read from; None where there was none.
        origins: The origin of each written value by dotted key; a default has no entry.
    """

    config: RunConfig
    path: Path | None = None
    origins: Origins = field(default_factory=Origins)

    def where(self, key: str) -> str:
        """Returns the place where the value of dotted `key` is written, for messages.

        `configs/quickstart.yaml:12 (train.steps)`, `command line (train.steps=abc)`; without a
        line for a default.
        """
        return self.origins.where(key, self.path)

    def where_within(self, key: str) -> str:
        """Returns the overrides that wrote below `key`, or else the place of `key`.

        It is for a section that is right in its file until the command line changes it.
        """
        changed = self.origins.overrides_below(key)
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
        return key in self.origins

    def is_changed(self, key: str) -> bool:
        """True if the command line has the last word on `key`."""
        origin = self.origins.get(key)
        return origin is not None and bool(origin.override)

    def is_taken_over(self, key: str) -> bool:
        """True if `key` may have been written for other workflows than those that run.

        That is so for keys of a file that `extends` names, and of a file whose `workflow` or
        `stages` the command line replaces.
        """
        origin = self.origins.get(key)
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

_COMMAND_LINE = re.compile(r"command line \((?P<setting>[\w.-]+(?:=.*)?)\)", re.DOTALL)
_IN_FILE = re.compile(r"(?P<file>.+):(?P<line>\d+) \((?P<setting>[\w.-]+)\)")

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
    by_source: dict[str, list[tuple[str, str, str]]] = {}
    for place in dict.fromkeys(places):
        if match := _COMMAND_LINE.fullmatch(place):
            by_source.setdefault("command line", []).append((place, "", match["setting"]))
        elif match := _IN_FILE.fullmatch(place):
            entry = (place, match["line"], match["setting"])
            by_source.setdefault(match["file"], []).append(entry)
        else:
            by_source.setdefault(place, []).append((place, "", ""))
    joined: list[str] = []
    for source, entries in by_source.items():
        if len(entries) < _MIN_JOINED:
            joined += [place for place, _, _ in entries]
            continue
        lines = ", ".join(line for _, line, _ in entries if line)
        settings = _by_section(setting for _, _, setting in entries)
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
    draft = Draft()
    if base is not None:
        values = cast("dict[str, Value]", copy.deepcopy(dict(base)))
        draft.merge(values, dict.fromkeys(paths_in(values), Origin(given=True)))
    if path is not None:
        _add_file(draft, path, ())
    for override in overrides:
        _add_override(draft, override, path)
    draft.drop_unused_stages()
    draft.remove_nulls(RunConfig)
    values = _interpolate(draft, path)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        # A missing key was written nowhere; the section in which it is missing was.
        raise validation_error(
            error, values, RunConfig, lambda key: draft.origins.where_nearest(key, path)
        ) from None
    return LoadedConfig(config=config, path=path, origins=draft.origins)


def _add_file(draft: Draft, path: Path, extended_by: tuple[Path, ...]) -> None:
    tree = read_yaml_file(path)
    _refuse_plan(path, tree.values)
    chain = (*extended_by, path)
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


def _refuse_plan(path: Path, values: Mapping[str, object]) -> None:
    if {"version", "graph", "placements"} <= values.keys():
        raise ConfigError(
            "this is a plan that was written, not a config",
            where=str(path),
            expected="a config; a plan goes beside the one that it was made for",
            hint=f"flowrl run CONFIG --plan {path}, or flowrl plan {path} to look at it",
        )


def _add_override(draft: Draft, override: str, path: Path | None) -> None:
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
    draft.assign(keys, read_yaml_value(text, origin.describe(key)), origin)


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
        return "nodes" in read_yaml_file(path).values
    except ConfigError:
        return False


def _interpolate(draft: Draft, path: Path | None) -> dict[str, Value]:
    if "${" not in str(draft.values):
        return draft.values
    # Its grammar takes longer to import than a configuration to read, and few interpolate.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # The defaults take part, so that `${seed}` means the seed even where none is written.
        tree = OmegaConf.create(_overlaid(_defaults(), draft.values))
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        raise ConfigError(
            f"cannot be interpolated: {str(error).splitlines()[0]}",
            where=draft.origins.where(key, path) if key else str(path),
            hint="`${a.b}` stands for the value of a.b; `\\${` is the text itself",
        ) from None
    return cast("dict[str, Value]", _written(cast("Value", resolved), draft.values))


def _defaults() -> dict[str, object]:
    required = [name for name, info in RunConfig.model_fields.items() if info.is_required()]
    # Required keys have no value to build the tree with; None stands for them and is left out.
    blank = RunConfig.model_construct(**dict.fromkeys(required))  # type: ignore[arg-type]
    return blank.model_dump(mode="json", exclude=set(required))


def _overlaid(defaults: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Returns the defaults with the values over them; any value may replace a whole section."""
    merged = dict(defaults)
    for key, value in values.items():
        default = merged.get(key)
        if isinstance(default, dict) and isinstance(value, dict):
            merged[key] = _overlaid(default, value)
        else:
            merged[key] = value
    return merged


def _written(resolved: Value, values: Value) -> Value:
    """Returns the part of `resolved` for which `values` has keys."""
    if isinstance(resolved, dict) and isinstance(values, dict):
        return {key: _written(resolved[key], inner) for key, inner in values.items()}
    return resolved
