"""The commands that show what a run has left in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.options import Debug, Json, RunPath


def samples(
    run: RunPath,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Of this step.")] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", metavar="K", help="The K lowest scores.", min=1)
    ] = None,
    contains: Annotated[
        str | None,
        typer.Option("--contains", metavar="TEXT", help="With this in prompt, response or answer."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show samples of a run: those of its last step, of one step, the worst, or with a text."""
    from flowrl.cli import samples as command

    command.run(run, step=step, worst=worst, contains=contains, as_json=json)


def trace(
    run: RunPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A page (.html), or .json for Perfetto."
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps", metavar="A:B", help="Steps of the page; the last three by default."
        ),
    ] = None,
    simulated: Annotated[
        Path | None,
        typer.Option(
            "--simulated", metavar="FILE", help="Draw this trace of `flowrl simulate` below them."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each worker of a run did and waited for, or write it to a file."""
    from flowrl.cli import trace as command

    options = command.TraceOptions(output=output, steps=steps, simulated=simulated, json=json)
    command.run(run, options)


def report(
    run: RunPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the page goes; RUN/report.html by default.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run as one page for a browser: its numbers, times, samples and configuration."""
    from flowrl.cli import report as command

    command.run(run, output)


def watch(
    run: RunPath,
    every: Annotated[
        float, typer.Option("--every", metavar="S", help="Seconds between two looks.", min=0.1)
    ] = 1.0,
    debug: Debug = False,
) -> None:
    """Show what a run does now, anew every second until it ends."""
    from flowrl.cli import watch as command

    command.run(run, every)
