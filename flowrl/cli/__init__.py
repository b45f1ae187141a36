"""The `flowrl` command."""

from flowrl.cli.app import main

__all__ = ["main"]
