"""The commands that have commands: `flowrl data`, `flowrl backends` and `flowrl plugin`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.options import Config, Debug, Json, Overrides, config_file

data = typer.Typer(
    help="Show and check data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@data.command("show")
def data_show(
    config: Config,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option("--split", help="train, eval, or of eval.sets.")] = "train",
    skip: Annotated[int, typer.Option("--skip", metavar="N", help="Rows to skip.", min=0)] = 0,
    num: Annotated[int, typer.Option("--num", metavar="N", help="Rows to show.", min=1)] = 3,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show rows as the model reads them, and what rewards get."""
    from flowrl.cli import data as command

    path = config_file(config, "data show")
    command.show(path, overrides or [], split=split, skip=skip, num=num, as_json=json)


@data.command("check")
def data_check(
    config: Config,
    overrides: Overrides = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Count rows that are unreadable, empty, too long or there twice, with their lines."""
    from flowrl.cli import data as command

    path = config_file(config, "data check")
    raise typer.Exit(command.check(path, overrides or [], as_json=json))


backends = typer.Typer(
    help="List the plug-ins, or check one.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@backends.callback(invoke_without_command=True)
def backends_list(context: typer.Context, json: Json = False, debug: Debug = False) -> None:
    """List the plug-ins and whether they can be used here, or check one."""
    if context.invoked_subcommand is None:
        from flowrl.cli.doctor import run_backends

        raise typer.Exit(run_backends(json))


@backends.command("check")
def backends_check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An installed plug-in.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A model folder with weights, in place of a small random model."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda:0 or npu:0.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of logprobs; 0.001, or 0.1 in 16 bits, by default.", min=0.0
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Limit of each check's generation.", min=0.0)
    ] = 120.0,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the plug-in; may be repeated."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that an engine and a trainer keep the promises of flowrl.backend.protocols."""
    from flowrl.cli import check_backend as command

    code = command.run(
        name,
        {
            "model": model,
            "device": device,
            "dtype": dtype,
            "tolerance": tolerance,
            "timeout_s": timeout,
            "options": command.read_options(option or []),
        },
        as_json=json,
    )
    raise typer.Exit(code)


plugin = typer.Typer(
    help="List what installed packages add, or begin such a package.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@plugin.command("list")
def plugin_list(json: Json = False, debug: Debug = False) -> None:
    """List backends, workflows, rewards, environments and trackers, with their packages."""
    from flowrl.cli import plugin as command

    command.run_list(as_json=json)


@plugin.command("new")
def plugin_new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What roles.NAME.backend will say.")],
    kind: Annotated[str, typer.Option(help="generate, train or score.")] = "generate",
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The new folder; flowrl-NAME by default.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a package with a plug-in that works, for you to put your library into."""
    from flowrl.cli import plugin as command

    command.run_new(name, kind, output)
