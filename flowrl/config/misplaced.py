"""Files in each other's place on a command line: what each of them is, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowrl.config.yaml_tree import read_yaml_file
from flowrl.errors import ConfigError

__all__ = ["refuse_plan", "way_for_file"]

_YAML = (".yaml", ".yml")


def refuse_plan(path: Path, values: Mapping[str, object]) -> None:
    """A plan that was written, in the place of a configuration.

    Raises:
        ConfigError: it is one.
    """
    if {"version", "graph", "placements"} <= values.keys():
        raise ConfigError(
            "this is a plan that was written, not a config",
            where=str(path),
            expected="a config; a plan goes beside the one that it was made for",
            hint=f"flowrl run CONFIG --plan {path}, or flowrl plan {path} to look at it",
        )


def way_for_file(word: str, config: Path) -> str | None:
    """What to write where a file's name stands alone behind a configuration; None for other words.

    Args:
        config: What stands in the configuration's place.
    """
    given = Path(word)
    if word.startswith("-"):
        return None
    if given.suffix == ".py" or ".py:" in word:
        return f"write workflow={word}, for a workflow goes beside a configuration so"
    if given.suffix not in (*_YAML, ".json"):
        return None
    if _describes_machines(config):
        return (
            f"the configuration goes first, and {config} beside it: {word} cluster={config} "
            f"(`flowrl plan` takes --cluster {config} too)"
        )
    if given.suffix in _YAML and _describes_machines(given):
        return f"write cluster={word} (`flowrl plan` takes --cluster {word} too)"
    if given.suffix == ".json":
        return f"write --plan {word} for a plan, roles.actor.model={word} for a model"
    return f"give one configuration; `extends: {word}` at the top of a file takes over another's"


def _describes_machines(path: Path) -> bool:
    if path.suffix not in _YAML:
        return False
    try:
        return "nodes" in read_yaml_file(path).values
    except ConfigError:
        return False
