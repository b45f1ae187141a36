"""`flowrl plan`: where each role runs, memory by role and phase, and what a step takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.files import (
    compiled_by,
    format_of,
    given_options,
    is_plan,
    machine_words,
    offering_cluster,
    refuse_plan,
    refuse_together,
    require_output,
    stage_named,
    write_output,
)
from flowrl.errors import FlowError

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.compiler import CompiledStage
    from flowrl.plan import PlacementPlan

_FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".html": "html"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of the command line; `flowrl.cli.app` describes each."""

    output: Path | None = None
    json: bool = False
    cluster: str | None = None
    explain: bool = False
    top: int | None = None
    pin: Sequence[str] = ()
    plan: Path | None = None
    routes: str | None = None
    stage: str | None = None


_EXCLUDES = {
    "--routes": ("--output", "--top", "--explain"),
    "--plan": ("--cluster", "--pin", "--top", "--stage"),
    "--output": ("--json", "--explain"),
    "--json": ("--explain",),
}
"""The options that cannot be given together with each one."""

_FOR_CONFIGS = ("--plan", "--routes", "--cluster", "--pin", "--stage")
"""Options that need a configuration, from which another plan follows than a file's."""


def run(config: Path, overrides: Sequence[str], options: PlanOptions) -> None:
    """Compiles a configuration and prints or writes the plan of a stage.

    Without `--stage` all plans are printed, or the plan of the last stage is written.

    Raises:
        FlowError: The configuration or an option is wrong, or the job does not fit.
    """
    given = given_options(options)
    for option, excluded in _EXCLUDES.items():
        refuse_together(given, option, *excluded)
    if is_plan(config) and (needs := [*(o for o in _FOR_CONFIGS if o in given), *overrides]):
        refuse_plan(config, needs[0], f"write flowrl plan CONFIG --plan {config}")
    if options.output is not None:
        format_of(options.output, _FORMATS)
        require_output(options.output)
    words = [*overrides, *_as_overrides(options, overrides)]
    with offering_cluster(config, words, "--cluster FILE"):
        if options.routes is not None:
            _print_routes(config, words, options.routes, options)
        elif options.plan is not None:
            _print_evaluated(config, options.plan, words, options)
        else:
            _print_plan(config, words, options)


def _as_overrides(options: PlanOptions, overrides: Sequence[str]) -> list[str]:
    """Returns `--cluster`, `--pin`, `--top` and `--explain` as overrides.

    Raises:
        ConfigError: A pin is wrong, as in `machine_words`.
    """
    words = machine_words(options.cluster, options.pin, overrides)
    if options.top is not None:
        words.append(f"plan.alternatives={options.top - 1}")
    if options.explain and not any(word.startswith("plan.try_batches=") for word in overrides):
        words.append("plan.try_batches=true")
    return words


def _print_plan(config: Path, words: Sequence[str], options: PlanOptions) -> None:
    here: list[str] = []
    if is_plan(config):
        from flowrl.plan import load_plan

        plans = [load_plan(config)]
        steps = [one.step_s for one in plans[0].alternatives if one.step_s is not None]
        by_time = steps == sorted(steps)  # a file does not say its objective, but keeps the order
    else:
        from flowrl import api

        compiled = api.compile(None, config, overrides=words)
        plans = [stage.plan for stage in _asked(compiled.stages, options, config)]
        by_time = compiled.config.plan.objective == "step_time"
        if options.output is None and not options.json:
            here = _not_here(compiled, plans[0])
    last = plans[-1]
    if options.top is not None and options.output is None and not options.json:
        from flowrl.plan.explain.top import top_lines
        from flowrl.plan.show.plan import not_here

        lines = top_lines(last, options.top, of_file=is_plan(config), by_time=by_time)
        print("\n".join([*here, *not_here(plans[0]), *lines]))
        if options.explain:
            from flowrl.plan.show.plan import plan_text

            print("\n" + plan_text(last, explain=True))
        return
    print("".join(f"{line}\n" for line in here), end="")
    _show(plans, options)
    if is_plan(config) and not (options.output or options.json):
        command = f"flowrl plan CONFIG --plan {config}"
        print(f"\ntimes and memory are the file's; to evaluate its decisions again: {command}")


def _asked(
    stages: Sequence[CompiledStage], options: PlanOptions, config: Path
) -> Sequence[CompiledStage]:
    """Returns the stage that `--stage` names; without a name all.

    Raises:
        ConfigError: The configuration has no such stage.
    """
    if options.stage is None:
        return stages
    name = stage_named([stage.name for stage in stages], options.stage, config)
    return [stage for stage in stages if stage.name == name]


def _not_here(compiled: Compiled, shown: PlacementPlan) -> list[str]:
    """Returns why this machine would refuse a run, where the plan `shown` does not say it."""
    from flowrl.compiler.stage import require_here
    from flowrl.plan.show.many import NOT_HERE
    from flowrl.plan.show.plan import not_here

    plans = [stage.plan for stage in compiled.stages]
    lines = dict.fromkeys(line for plan in plans for line in not_here(plan))
    if lines:
        return [line for line in lines if line not in not_here(shown)]
    try:
        require_here(compiled.config, compiled.stages)
    except FlowError as error:
        return [f"{NOT_HERE}{error.what} ({error.found})"]
    return []


def _show(plans: Sequence[PlacementPlan], options: PlanOptions) -> None:
    """Writes the last plan, or prints all."""
    if options.output is not None:
        _write(plans, options.output)
        return
    if options.json:
        sys.stdout.write(plans[-1].to_json())
        return
    from flowrl.plan.show.plan import plan_renderable, plan_text

    for plan in plans:
        if sys.stdout.isatty():
            from rich.console import Console

            Console(highlight=False).print(plan_renderable(plan, explain=options.explain))
        else:
            print(plan_text(plan, explain=options.explain))


def _print_evaluated(
    config: Path, written: Path, words: Sequence[str], options: PlanOptions
) -> None:
    """Prints or writes the plan that follows from the decisions of a file."""
    from flowrl.plan import load_plan

    graph = load_plan(written, alone=False).graph
    compiled = _compiled_by_file(config, written, words)
    plans = [stage.plan for stage in compiled.stages if stage.graph.name == graph]
    if options.output is None and not options.json:
        print("".join(f"{line}\n" for line in _not_here(compiled, plans[-1])), end="")
    _show(plans[-1:], options)


def _compiled_by_file(config: Path, written: Path, words: Sequence[str]) -> Compiled:
    from flowrl.config.load import load_config, locating

    loaded = load_config(config, words)
    with locating(loaded):
        return compiled_by(loaded, written)


def _print_routes(config: Path, words: Sequence[str], names: str, options: PlanOptions) -> None:
    """Prints the transfers of a stage's parameters, by a plan's file or a new plan."""
    from flowrl import api
    from flowrl.cli.routes import print_routes

    if options.plan is not None:
        stages = _compiled_by_file(config, options.plan, words).stages
    else:
        stages = api.compile(None, config, overrides=words).stages
    print_routes(_asked(stages, options, config)[-1], names, options)


def _write(plans: Sequence[PlacementPlan], output: Path) -> None:
    """Writes the last plan, and a line about it on standard error."""
    from flowrl.plan.explain.top import one_line

    plan = plans[-1]
    last = (
        f", the last of {len(plans)} stages (--stage NAME writes another)" if len(plans) > 1 else ""
    )
    match _FORMATS[output.suffix]:
        case "html":
            from flowrl.viz.plan import render_plan

            text = render_plan(plan)
        case "json":
            text = plan.to_json()
        case _:
            text = plan.to_yaml()
    write_output(output, text, f"plan of {plan.graph}{last}, {one_line(plan)}")
