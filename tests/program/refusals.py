"""What tests of refused programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import FlowError

__all__ = ["line_with", "program", "refusal_in", "refused"]


def refused(flow: fl.Workflow, **args: object) -> FlowError:
    """Why a program is refused."""
    with pytest.raises(FlowError) as caught:
        flow.trace(args)
    return caught.value


def line_with(file: str, mark: str) -> int:
    """The line of a file that ends in the comment `# MARK`."""
    with open(file, encoding="utf-8") as lines:  # noqa: PTH123
        found = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}")]
    assert len(found) == 1
    return found[0]


def program(body: Callable[..., Any]) -> fl.Workflow:
    """A program that calls `body(rollout, scores, actor, other, judge)` before its update."""

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, other: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        body(rollout, scores, actor, other, judge)
        actor.update(rollout, scores)

    return mine


def refusal_in(file: str, made: fl.Workflow | Callable[..., Any]) -> FlowError:
    """Why a program, or a body of one, is refused at a line of a file."""
    with pytest.raises(FlowError) as caught:
        (made if isinstance(made, fl.Workflow) else program(made)).trace()
    assert file in caught.value.where
    return caught.value
