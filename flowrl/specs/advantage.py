"""Advantages by name: how scores become the weights of the policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import Spec

__all__ = ["AdvantageSpec", "GroupRelative", "Scale", "Singleton"]

Scale: TypeAlias = Literal["group", "batch", "none"]
"""What group-centred scores are divided by: a group's standard deviation, the batch's, nothing."""

Singleton: TypeAlias = Literal["zero", "raw"]
"""What a group of one gets: advantage 0, or its score as it is (verl keeps the score)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(Spec):
    """Base of advantages; one number a sample unless a subclass says per token."""

    family: ClassVar[str] = "advantage"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative(AdvantageSpec):
    """(score - mean of its group) / (std + eps): GRPO; with `std="none"`, Dr.GRPO.

    Attributes:
        std: What the centred scores are divided by.
        ddof: 1 for the sample standard deviation (what the field's libraries use), 0 for the
            population's.
        eps: Added to the standard deviation (outside the root).
        singleton: What a group of one gets.
    """

    kind: ClassVar[str] = "group_relative"

    std: Scale = "group"
    ddof: int = 1
    eps: float = 1e-6
    singleton: Singleton = "zero"
