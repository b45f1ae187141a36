"""Rewards of `eager_programs.py`, in a file as a person writes one."""

from __future__ import annotations

import signal


def digits(response: str) -> float:
    """The share of digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def told(response: str) -> float:
    """`digits`, and says that it was called; only in the test's own process."""
    from tests.runtime.eager_programs import SEEN

    SEEN.append(("reward", response))
    return digits(response)


def picky(response: str) -> float:
    """Raises for some responses."""
    if response.startswith("9"):
        raise ValueError(f"no nines: {response}")
    return digits(response)


def stopping(response: str) -> float:
    """`digits`, with a breakpoint."""
    score = digits(response)
    breakpoint()
    return score


def interrupting(response: str) -> float:
    """Presses Ctrl-C when the test says so."""
    from tests.runtime.eager_programs import TROUBLE

    if TROUBLE and isinstance(TROUBLE[0], KeyboardInterrupt):
        TROUBLE.clear()
        signal.raise_signal(signal.SIGINT)
    return digits(response)
