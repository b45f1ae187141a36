"""Which cases of a large test `make test` runs; `make test-slow` runs the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["every", "small_or_large"]


def every(step: int, cases: Sequence[Any]) -> list[Any]:
    """Parameters of which one in `step`, the first of them among these, is not marked as slow."""
    return [_case(case, slow=bool(number % step)) for number, case in enumerate(cases)]


def small_or_large(small: object, large: object) -> list[Any]:
    """Parameters of a test that runs with `small`, and with `large` as a slow test."""
    return [_case(small, slow=False), _case(large, slow=True)]


def _case(case: Any, *, slow: bool) -> Any:
    marks = (pytest.mark.slow,) if slow else ()
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=marks)
