"""The `flowrl` command.

Each command imports what it needs when it runs, so that none waits for what another one needs.
"""

from flowrl.cli.usage import main

__all__ = ["main"]
