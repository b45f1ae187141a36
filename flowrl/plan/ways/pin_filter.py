"""What pins leave of the ways to run one task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.cost.layout import Layout
from flowrl.cost.source import Recompute
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.regions import Split

OWN = "devices of its environment"
"""How a task's pins keep those of an environment apart from its own `devices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What pins leave of a task's candidates; None or empty where they say nothing.

    Attributes:
        layout: Sizes by dimension.
        devices: How many, or None; of a task of episodes, those of its environment included.
        environment: Where the environment of one is: `together` or `apart`.
        own: How many devices such an environment has.
    """

    layout: tuple[tuple[str, int], ...] = ()
    devices: int | None = None
    recompute: Recompute | None = None
    offload: str | None = None
    micro_tokens: int | None = None
    environment: str | None = None
    own: int | None = None

    def takes_split(self, split: Split) -> bool:
        """Whether an environment is where it is asked for."""
        has = split.own or split.elsewhere or (split.policy if split.takes_turns else 0)
        return self.environment in (None, split.mode) and self.own in (None, has)

    def takes(self, layout: Layout) -> bool:
        """Whether a layout has the sizes that are asked for."""
        return all(getattr(layout, name) == size for name, size in self.layout)

    def keeps(self, candidate: Candidate) -> bool:
        """Whether a way to run a task has the values that are asked for."""
        return (
            self.recompute in (None, candidate.recompute)
            and self.offload in (None, "+".join(candidate.offload) or "none")
            and self.micro_tokens in (None, candidate.micro_tokens)
        )

    def without(self, field: str) -> Filter:
        """What the other pins leave.

        Args:
            field: As pins name it, or `OWN`.
        """
        match field:
            case "devices":
                return replace(self, devices=None)
            case "recompute":
                return replace(self, recompute=None)
            case "offload":
                return replace(self, offload=None)
            case "micro_tokens":
                return replace(self, micro_tokens=None)
            case "environment":
                return replace(self, environment=None)
            case _ if field == OWN:
                return replace(self, own=None)
            case _:
                layout = tuple(one for one in self.layout if one[0] != field)
                return replace(self, layout=layout)
