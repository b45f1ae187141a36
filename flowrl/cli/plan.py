"""`flowrl plan`: where every role runs, memory by role and phase, what a step does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.cli.output import write_output
from flowrl.errors import ConfigError

__all__ = ["run"]


def run(config: Path, overrides: Sequence[str], output: Path | None, *, as_json: bool) -> None:
    """Compiles a configuration and prints or writes the plan of its last stage.

    Raises:
        FlowError: anything that is wrong with the configuration, or a job that does not fit.
    """
    from flowrl import api

    compiled = api.compile(None, config, overrides=overrides)
    if output is not None:
        if output.suffix not in (".json", ".yaml", ".yml"):
            raise ConfigError(
                "a plan is written as JSON or YAML",
                where="--output",
                found=str(output),
                expected="a name that ends in .json or .yaml",
            )
        json_wanted = output.suffix == ".json"
        write_output(output, compiled.plan.to_json() if json_wanted else compiled.plan.to_yaml())
        return
    if as_json:
        sys.stdout.write(compiled.plan.to_json())
        return
    from flowrl.plan.render import plan_renderable, plan_text

    for stage in compiled.stages:
        if sys.stdout.isatty():
            from rich.console import Console

            Console(highlight=False).print(plan_renderable(stage.plan))
        else:
            print(plan_text(stage.plan))
