"""A configuration with a plan that was written, and perhaps edited, in the place of a new one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import PlanError

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.config.load import LoadedConfig
    from flowrl.plan import PlacementPlan

__all__ = ["compiled_by"]


def compiled_by(loaded: LoadedConfig, path: Path) -> Compiled:
    """The configuration by a plan's file; one over many devices is priced by its decisions.

    What the file says otherwise than its decisions have it is told on standard error.

    Raises:
        ConfigError: the file is no plan, or of no stage of the configuration.
        PlanError: its decisions contradict each other, or do not fit.
    """
    from flowrl import api
    from flowrl.plan import load_plan

    given = load_plan(path, alone=False)
    if given.schedule is not None:
        return _priced(loaded, given, path)
    return api.compile(None, loaded).with_plan(load_plan(path))


def _priced(loaded: LoadedConfig, given: PlacementPlan, path: Path) -> Compiled:
    from flowrl import api
    from flowrl.plan.file_lines import at_line
    from flowrl.plan.priced_changes import changes

    try:
        compiled = api.compile(None, loaded, plan=given)
    except PlanError as error:
        said = f"the plan of {given.graph!r}: "
        if error.where is not None and error.where.startswith(said):
            error.where = at_line(path, error.where.removeprefix(said))
        raise
    for stage in compiled.stages:
        for line in changes(given, stage.plan):
            print(f"warning: {path}: {line}", file=sys.stderr)
    return compiled
