"""A configuration with a plan that was written, and perhaps edited, in the place of a new one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.config.load import LoadedConfig
    from flowrl.plan import PlacementPlan

__all__ = ["compiled_by", "refuse_many_devices", "run_by"]


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
    return run_by(api.compile(None, loaded), path)


def run_by(compiled: Compiled, path: Path) -> Compiled:
    """What was compiled for this machine, by a plan's file for one device.

    What follows from edits of it is made anew, and told on standard error.

    Raises:
        ConfigError: the file is no plan, or of no stage of the configuration.
        PlanError: its parts contradict each other, or the executor cannot run it.
    """
    from flowrl import api
    from flowrl.plan import load_plan
    from flowrl.plan.priced.changes import local_changes

    given = load_plan(path, alone=False)
    stages = [stage for stage in compiled.stages if stage.graph.name == given.graph]
    if not stages or stages[-1].local is None:
        return compiled.with_plan(path)
    is_last = stages[-1] is compiled.stages[-1]
    plan = api.by_file(compiled.config, stages, given, path, timed=is_last)
    for line in local_changes(given, plan, path):
        print(f"warning: {line}", file=sys.stderr)
    return compiled.with_plan(plan)


def refuse_many_devices(path: Path) -> None:
    """Raises PlanError for a plan's file over many devices, which this machine cannot run."""
    from flowrl.plan import load_plan
    from flowrl.runtime.local.plan_checks import require_plan_for_one

    require_plan_for_one(load_plan(path, alone=False), str(path))


def _priced(loaded: LoadedConfig, given: PlacementPlan, path: Path) -> Compiled:
    from flowrl import api
    from flowrl.plan.check.file_lines import lines_of
    from flowrl.plan.priced.changes import changes

    with lines_of(path):
        compiled = api.compile(None, loaded, plan=given)
    for stage in compiled.stages:
        for line in changes(given, stage.plan):
            print(f"warning: {_told(path, line)}", file=sys.stderr)
    return compiled


def _told(path: Path, line: str) -> str:
    """A line of what a file says otherwise, with the line of its key where it begins with one."""
    from flowrl.plan.check.file_lines import at_line, line_of

    key, colon, rest = line.partition(": ")
    is_key = colon and line_of(path.read_text(encoding="utf-8"), key) is not None
    return f"{at_line(path, key)}: {rest}" if is_key else f"{path}: {line}"
