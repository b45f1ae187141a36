"""`fl.advantage`: how scores become the weights of the policy gradient."""

from __future__ import annotations

from typing import get_args

from flowrl.config.nearest import suggestion
from flowrl.graph.signatures import ADVANTAGE
from flowrl.graph.types import Op
from flowrl.program.handles import Advantages, Scores
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    is_number,
    operation,
    refuse_argument,
)
from flowrl.specs import GroupRelative
from flowrl.specs.advantage import Scale, Singleton

__all__ = ["group_relative"]


@operation
def group_relative(
    scores: Scores,
    *,
    std: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Advantages:
    """(score - mean of its group) / (std + eps): GRPO; with `std="none"`, Dr.GRPO.

    Args:
        scores: One a sample, as `reward.score` returned them.
        std: What centred scores are divided by: the standard deviation of the `group`, of the
            `batch`, or `none`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: Added to the standard deviation, outside the root.
        singleton: What a group of one gets: `zero`, or its `raw` score.
    """
    name = "fl.advantage.group_relative"
    tracer = current_tracer(name)
    read = check_handle(scores, Scores, operation=name, argument="scores").read()
    for argument, value, allowed in (
        ("std", std, get_args(Scale)),
        ("singleton", singleton, get_args(Singleton)),
        ("ddof", ddof, (0, 1)),
    ):
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            hint = suggestion(str(value), [str(choice) for choice in allowed])
            raise refuse_argument(name, argument, value, f"one of {choices}", hint)
    if not is_number(eps):
        raise refuse_argument(name, "eps", eps, "a number from 0 up")
    spec = GroupRelative(std=std, ddof=ddof, eps=float(eps), singleton=singleton)
    node = tracer.add(Op.ADVANTAGE, name="advantage", reads={"scores": read}, attrs={"spec": spec})
    return Advantages(tracer, node, (ADVANTAGE,))
