"""Where `breakpoint()` is not meant: lines that are run, but not the ones a person waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["breakpoints_left_out"]


@contextmanager
def breakpoints_left_out() -> Iterator[None]:
    """`breakpoint()` does nothing while the block runs; `pdb.set_trace()` does."""
    before = sys.breakpointhook

    def go_on(*args: object, **kwargs: object) -> None:
        return None

    sys.breakpointhook = go_on
    try:
        yield
    finally:
        sys.breakpointhook = before
