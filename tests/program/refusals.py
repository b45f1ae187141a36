"""What tests of refused programs share."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import TraceError

__all__ = ["line_with", "refused"]


def refused(flow: fl.Workflow, **args: object) -> TraceError:
    """Why a program is refused."""
    with pytest.raises(TraceError) as caught:
        flow.trace(args)
    return caught.value


def line_with(file: str, mark: str) -> int:
    """The line of a file that ends in the comment `# MARK`."""
    with open(file, encoding="utf-8") as lines:  # noqa: PTH123
        found = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}")]
    assert len(found) == 1
    return found[0]
