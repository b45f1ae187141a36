"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.errors import ConfigError

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of config keys.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def config_file(config: Path | None, command: str) -> Path:
    if config is None or ("=" in config.name and not config.exists()):
        words = ["flowrl", command, "configs/quickstart.yaml", *([str(config)] if config else [])]
        raise ConfigError(
            f"`flowrl {command}` needs a config file" + (", or --resume RUN" * (command == "run")),
            where="command line",
            hint=f"for example `{' '.join(words)}`",
        )
    return config
