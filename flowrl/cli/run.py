"""`flowrl run`: a configuration from the first stage to the exported model, or on from a stop."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowrl.errors import ConfigError, FlowError

if TYPE_CHECKING:
    from flowrl.api import Compiled

__all__ = ["resume", "run"]

_CHANGEABLE = (
    "train.steps",
    "train.refill_limit",
    "runtime.",
    "eval.every",
    "rewards.timeout_s",
    "rewards.max_failures",
    "executor",
)
"""Keys that a resumed run may change without ceasing to be the same run."""

_CHANGEABLE_OF_ONE = re.compile(r"stage\.[^.=]+\.train\.refill_limit\b|roles\.[^.=]+\.timeout_s\b")
"""Such keys with a name in them. The steps of an earlier stage are none: it may be over."""

_INTERRUPTED = 130
"""128 + SIGINT, as shells count it."""


def run(config: Path, overrides: Sequence[str], plan: Path | None = None) -> None:
    """Compiles and runs.

    Args:
        plan: Takes the place of the plan of the stage that it is of.

    Raises:
        FlowError: whatever ends the run early.
    """
    from flowrl import api
    from flowrl.cli.plan_inputs import refuse_many_devices, run_by
    from flowrl.config.load import load_config, locating
    from flowrl.plan.check.file_lines import lines_of

    loaded = load_config(config, overrides)
    with locating(loaded):
        if plan is not None:
            # A plan of this machine is made first, in which the job of such a file may not fit.
            refuse_many_devices(plan)
        compiled = api.compile(None, loaded)
        if plan is not None:
            compiled = run_by(compiled, plan)
        with lines_of(plan):
            _interruptible(lambda: _tell_beside(compiled, compiled.run().folder))


def resume(
    path: Path, overrides: Sequence[str], plan: Path | None = None, *, accept_changes: bool = False
) -> None:
    """Goes on with the run in folder `path` from its latest checkpoint, by the plans that it began
    with, as a hand may have edited them.

    Args:
        accept_changes: Goes on with files that have changed since the run began.

    Raises:
        ConfigError: an override that would make another run of it.
        PlanError: an edited plan that the executor cannot run; with line and key.
        CheckpointError: no run is there, its checkpoint is damaged, or a file has changed.
    """
    from flowrl import api
    from flowrl.observe.run_folder import RunFolder

    if plan is not None:
        raise ConfigError(
            "a resumed run keeps its plans",
            where=f"--plan {plan}",
            hint=f"edit {path}/plan.STAGE.json to go on by another one",
        )
    for override in overrides:
        if not override.startswith(_CHANGEABLE) and not _CHANGEABLE_OF_ONE.match(override):
            raise ConfigError(
                "a resumed run keeps its configuration",
                where=f"command line ({override})",
                expected=f"keys that begin with {', '.join(_CHANGEABLE)}, "
                "stage.NAME.train.refill_limit, roles.NAME.timeout_s",
                hint="start a new run for anything else",
            )
    RunFolder.open(path)
    compiled = api.compile(None, path / "config.yaml", overrides=overrides)
    _interruptible(lambda: api.resume(compiled, path, accept_changes=accept_changes))


def _tell_beside(compiled: Compiled, folder: Path) -> None:
    """Where there is a profile: what the simulator predicts of the last stage, and what it was.

    On standard error, for the last line of standard output is the run's own.
    """
    from flowrl.cli.simulate import beside_run

    try:
        text = beside_run(compiled, folder)
    except FlowError as reason:
        text = f"no prediction to compare with: {reason.what}"
    if text:
        print(text, file=sys.stderr)


def _interruptible(work: Callable[[], object]) -> None:
    try:
        work()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
