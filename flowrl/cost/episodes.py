"""What is known of episodes and of the calls of environments, without the time that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowrl.cost.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSeconds:
    """What a call of an environment takes.

    Attributes:
        reset_s: Of the one that serves it, to begin an episode.
        step_s: Likewise, to answer a turn.
        wait_s: That each answer is late beside, while others are served.
        source: `given`, `measured`, or `unknown` where all are 0 because nobody said.
    """

    reset_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    source: str = "given"


@runtime_checkable
class EnvironmentCost(Protocol):
    """A cost that knows environments too."""

    def environment(self, role: str) -> CallSeconds | None:
        """What a call of this role's environment takes; None where nobody measured it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How episodes go.

    Attributes:
        turns: Of an episode, on average.
        most_turns: Of the longest.
        said: Tokens of an observation, on average; one comes before each turn.
        others: Tokens that other policies draw between two turns, each in the time of one of this
            policy's own; they are said to it, too.
    """

    turns: float
    most_turns: int
    said: float = 0.0
    others: float = 0.0

    def of_one(self, players: int, lengths: Lengths) -> Episodes:
        """As one of the policies that take turns in them has them."""
        others = (players - 1) * (lengths.mean / self.turns - self.said)
        return Episodes(
            turns=self.turns / players,
            most_turns=-(-self.most_turns // players),
            said=players * self.said + others,
            others=others,
        )

    def drawn_share(self, lengths: Lengths) -> float:
        """Of a sample's tokens, those that are drawn and not said."""
        return max(0.0, 1.0 - self.turns * self.said / lengths.mean)
