"""`flowrl run`: runs a configuration from its first stage to its models, or resumes a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowrl.errors import ConfigError, FlowError, raise_all
from flowrl.wording import suggestion

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.config.load import LoadedConfig

_CHANGEABLE = (
    "train.steps",
    "train.refill_limit",
    "runtime.",
    "tracking.",
    "eval.every",
    "rewards.timeout_s",
    "rewards.max_failures",
    "executor",
)
"""The keys that a resumed run may change and still be the same run."""

_CHANGEABLE_OF_ONE = re.compile(r"stage\.[^.=]+\.train\.refill_limit\b|roles\.[^.=]+\.timeout_s\b")
"""Such keys with a name in them. An earlier stage may be over, so its steps are not among them."""

_INTERRUPTED = 130
"""The exit code of shells for SIGINT: 128 + its number."""


def run(config: Path, overrides: Sequence[str], plan: Path | None = None) -> None:
    """Compiles and runs.

    Args:
        plan: A plan's file that replaces the plan of its stage.

    Raises:
        FlowError: The run ended early.
    """
    from flowrl.config.load import load_config

    with _compiled(load_config(config, overrides), plan) as compiled:
        _interruptible(lambda: _print_comparison(compiled, compiled.run().folder))


def dry_run(config: Path, overrides: Sequence[str], plan: Path | None = None) -> None:
    """Compiles, and checks what would run.

    Raises:
        FlowError: It would end early.
    """
    from flowrl.cli.dry_run import check_run, noted
    from flowrl.config.check import check_config
    from flowrl.config.load import load_config

    loaded = load_config(config, overrides)
    problems: list[FlowError] = []
    with noted(problems):
        check_config(loaded)
    # A run without its data is compiled too, so that the machine and the roles are checked.
    with noted(problems), _compiled(loaded, plan, runs=False) as compiled:
        check_run(compiled, problems)
    raise_all(problems)


@contextmanager
def _compiled(loaded: LoadedConfig, plan: Path | None, *, runs: bool = True) -> Iterator[Compiled]:
    """Compiles a run; errors in the block get the lines of its files.

    Args:
        runs: As in `flowrl.api.compile`.
    """
    from flowrl import api
    from flowrl.cli.files import refuse_many_devices, run_by
    from flowrl.config.load import locating
    from flowrl.plan.check.file_lines import lines_of

    with locating(loaded):
        if plan is not None:
            # A plan of this machine is made first, in which the job of such a file may not fit.
            refuse_many_devices(plan)
        compiled = api.compile(None, loaded, runs=runs)
        if plan is not None:
            compiled = run_by(compiled, plan)
        with lines_of(plan):
            yield compiled


def resume(
    path: Path, overrides: Sequence[str], plan: Path | None = None, *, accept_changes: bool = False
) -> None:
    """Resumes the run in folder `path` from its latest checkpoint, by the plans in its folder.

    These plans may have been edited.

    Args:
        accept_changes: True to go on with files that have changed since the run began.

    Raises:
        ConfigError: An override would make another run of it.
        PlanError: The executor cannot run an edited plan; the error has line and key.
        CheckpointError: The folder has no run, its checkpoint is damaged, or a file has changed.
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
        key, equals, _ = override.partition("=")
        if not override.startswith(_CHANGEABLE) and not _CHANGEABLE_OF_ONE.match(override):
            other = "start a new run for anything else" if equals else f"leave {override} out"
            raise ConfigError(
                "a resumed run keeps its configuration",
                where=f"command line ({override})",
                expected=f"keys that begin with {', '.join(_CHANGEABLE)}, "
                "stage.NAME.train.refill_limit, roles.NAME.timeout_s",
                hint=suggestion(key, (each for each in _CHANGEABLE if each[-1] != ".")) or other,
            )
    RunFolder.open(path)
    compiled = api.compile(None, path / "config.yaml", overrides=overrides)
    _interruptible(lambda: api.resume(compiled, path, accept_changes=accept_changes))


def _print_comparison(compiled: Compiled, folder: Path) -> None:
    """Prints the predicted and measured times of the last stage, where there is a profile.

    It goes to standard error, because the last line of standard output is the run's own.
    """
    from flowrl.cli.simulate import compare_run

    try:
        text = compare_run(compiled, folder)
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
