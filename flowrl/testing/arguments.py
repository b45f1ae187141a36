"""Numbers on the command lines of checks."""

from __future__ import annotations

import argparse

__all__ = ["at_least_one"]


def at_least_one(text: str) -> int:
    """How many of something are looked at: of none nothing would be checked, and all be right.

    Raises:
        ArgumentTypeError, ValueError: it is less, or no whole number.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1, so nothing would be checked")
    return number


at_least_one.__name__ = "whole number"  # what argparse calls it in messages
