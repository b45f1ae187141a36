"""Reads a plan's file, and writes one."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import ConfigError, PlanError
from flowrl.files import write_text_atomic
from flowrl.plan.check.file_lines import at_line
from flowrl.plan.check.predicted import check_predicted
from flowrl.plan.schema import PlacementPlan
from flowrl.wording import nearest_file


def load_plan(path: Path, *, alone: bool = True) -> PlacementPlan:
    """Reads a plan: JSON where the name ends in `.json`, YAML otherwise.

    Args:
        alone: What it predicts is to be that of its decisions; else both are priced anew.

    Raises:
        ConfigError: the file cannot be read, or is no plan; names key and line.
        PlanError: the parts of the plan contradict each other; likewise.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be read: {error.strerror}",
            where=str(path),
            hint=nearest_file(path) or "`flowrl plan CONFIG -o FILE.json` writes one",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the plan is not UTF-8 text",
            where=str(path),
            found=f"byte {error.object[error.start]:#04x} at {error.start}",
            hint="`flowrl plan CONFIG -o FILE.json` writes one",
        ) from error
    read = PlacementPlan.from_json if path.suffix == ".json" else PlacementPlan.from_yaml
    try:
        plan = read(text, where=str(path))
        if alone:
            check_predicted(plan, str(path))
    except (ConfigError, PlanError) as error:
        if error.where is not None and error.where.startswith(f"{path}: "):
            error.where = at_line(path, error.where.removeprefix(f"{path}: "))
        raise
    return plan


def save_plan(plan: PlacementPlan, path: Path) -> None:
    """Writes a plan: JSON where the name ends in `.json`, YAML otherwise."""
    write_text_atomic(path, plan.to_json() if path.suffix == ".json" else plan.to_yaml())
