"""`flowrl watch`: what a run does, shown anew until it ends."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flowrl.observe.run_status import report_of


def run(folder: Path, every_s: float) -> None:
    """Shows the status of a run until it ends or Ctrl-C; where nobody looks, only the last one.

    Args:
        every_s: Seconds between two looks.

    Raises:
        CheckpointError: The folder has no run.
    """
    report = report_of(folder)
    console = Console(highlight=False, soft_wrap=True)
    live = Live(console=console, auto_refresh=False, transient=True)
    with suppress(KeyboardInterrupt), live if console.is_terminal else nullcontext():
        while report.is_alive:
            live.update(Text(str(report)), refresh=console.is_terminal)
            time.sleep(every_s)
            report = report_of(folder)
    print(report)
