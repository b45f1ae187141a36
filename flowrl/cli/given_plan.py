"""A configuration with a plan that was written, and perhaps edited, in the place of a new one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.config.load import LoadedConfig
    from flowrl.plan import PlacementPlan

__all__ = ["compiled_by", "lines_of", "refuse_many_devices", "run_by"]

_OF_A_PLAN = re.compile(r"^(?:the )?plan of '[^']*'(?:: |$)")
"""Before the key, in messages about a plan."""


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
    from flowrl.plan.settle_local import settled
    from flowrl.runtime.local_plans import require_local_plan

    given = load_plan(path, alone=False)
    stages = [stage for stage in compiled.stages if stage.graph.name == given.graph]
    local = stages[-1].local if stages else None
    if local is None:
        return compiled.with_plan(path)
    plan = settled(given, local.base, stages[-1].graph)
    by_file = compiled.with_plan(plan)
    with lines_of(path):
        for stage in by_file.stages:
            if stage.graph.name == given.graph:
                require_local_plan(stage, in_process=compiled.config.executor == "eager")
    if stages[-1] is compiled.stages[-1]:  # others have no times
        plan = api.priced_here(compiled.config, stages[-1], plan)
        by_file = compiled.with_plan(plan)
    for line in _follows(given, plan, path):
        print(f"warning: {line}", file=sys.stderr)
    return by_file


def _follows(given: PlacementPlan, plan: PlacementPlan, path: Path) -> Iterator[str]:
    """What a file for one device says otherwise than its decisions have it."""
    from flowrl.plan.plan_fields import differences, texts_apart
    from flowrl.plan.priced.changes import memory_changes, step_changes

    told = [one for one in differences(given, plan) if not one[0].startswith("prediction.")]
    # Ways of samples are as many as edges, and follow from what else is told.
    few = [one for one in told if not one[0].startswith("channels.")] or told
    for key, before, after in few:
        follows, said = texts_apart(after, before)
        yield f"{_at(path, key)}: {follows} follows from the rest, the file says {said}"
    for line in (*memory_changes(given, plan), *step_changes(given, plan)):
        yield f"{path}: {line}"


def refuse_many_devices(path: Path) -> None:
    """Raises PlanError for a plan's file over many devices, which this machine cannot run."""
    from flowrl.plan import load_plan
    from flowrl.runtime.local_plans import require_plan_for_one

    require_plan_for_one(load_plan(path, alone=False), str(path))


@contextmanager
def lines_of(path: Path | None) -> Iterator[None]:
    """Errors about a plan inside name the line of its file; without one, nothing is changed."""
    try:
        yield
    except (ConfigError, PlanError) as error:
        found = _OF_A_PLAN.match(error.where or "")
        if path is not None and found is not None:
            error.where = _at(path, (error.where or "")[found.end() :])
        raise


def _at(path: Path, key: str) -> str:
    from flowrl.plan.check.file_lines import at_line

    return at_line(path, key) if key else str(path)


def _priced(loaded: LoadedConfig, given: PlacementPlan, path: Path) -> Compiled:
    from flowrl import api
    from flowrl.plan.priced.changes import changes

    with lines_of(path):
        compiled = api.compile(None, loaded, plan=given)
    for stage in compiled.stages:
        for line in changes(given, stage.plan):
            print(f"warning: {_told(path, line)}", file=sys.stderr)
    return compiled


def _told(path: Path, line: str) -> str:
    """A line of what a file says otherwise, with the line of its key where it begins with one."""
    from flowrl.plan.check.file_lines import line_of

    key, colon, rest = line.partition(": ")
    is_key = colon and line_of(path.read_text(encoding="utf-8"), key) is not None
    return f"{_at(path, key)}: {rest}" if is_key else f"{path}: {line}"
