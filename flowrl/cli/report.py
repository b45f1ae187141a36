"""`flowrl report`: a run as one page."""

from __future__ import annotations

from pathlib import Path

from flowrl.cli.files import format_of, require_output, write_output
from flowrl.viz.report import render_report


def run(folder: Path, output: Path | None) -> None:
    """Writes the page of a run, into its folder by default.

    Raises:
        CheckpointError: The folder has no run, or a file of it is damaged.
        ConfigError: The file cannot be written, or is named as of another format.
    """
    if output is not None:
        format_of(output, {".html": "html"})
        require_output(output)
    page = render_report(folder)
    write_output(output or folder / "report.html", page, "report; open it in a browser")
