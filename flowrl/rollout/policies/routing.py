"""Which engine with room gets the next sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["LeastLoaded", "PromptAffinity", "RoutingPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy(Spec):
    """Base of routing policies. A sample that failed on an engine prefers any other, once."""

    family: ClassVar[str] = "routing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAffinity(RoutingPolicy):
    """The engine of the group's member before, while it has room: it holds the prompt's KV cache.

    Otherwise the least loaded one.
    """

    kind: ClassVar[str] = "prompt_affinity"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded(RoutingPolicy):
    """The engine with the least held / capacity; of several, the one that joined first."""

    kind: ClassVar[str] = "least_loaded"
