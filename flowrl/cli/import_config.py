"""`flowrl import-config`: turns a configuration of another framework into flowrl's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flowrl.cli.files import require_output, write_output


def run(path: Path, framework: str | None, output: Path | None, *, as_json: bool = False) -> None:
    """Prints or writes the config, and lists what became of each key on standard error.

    Raises:
        ConfigError: The file is of no framework, its values make no config, or the output cannot
            be written.
    """
    from flowrl.foreign_configs import config_text, import_config, report, to_json

    if output is not None:
        require_output(output)
    imported = import_config(path, framework)
    text = config_text(imported, path)
    if output is not None:
        write_output(output, text)
    if as_json:
        print(json.dumps(to_json(imported), indent=2))
        return
    print("\n".join(report(imported, path)), file=sys.stderr)
    if output is None:
        print(text, end="")
