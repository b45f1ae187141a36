"""The result of a user's `step`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrl.backend.environment import EnvironmentState, Outcome, Said


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to a turn of the policy.

    Attributes:
        observation: The input of the policy before its next turn: text, or an array of token ids.
        reward: The reward of this turn; an episode's score is the sum of its rewards. Of several
            policies that take turns, also a tuple with one for each, in their order.
        done: True if the episode is over; then the observation is for logs only.
        state: A name for the current state of the environment, for advantages that compare turns
            which began in the same state.
        metrics: Further numbers by name, summed over the turns of an episode.

    >>> Step("<", reward=-0.1)
    Step(observation='<', reward=-0.1, done=False, state=None, metrics={})
    """

    observation: Said = ""
    reward: float | tuple[float, ...] = 0.0
    done: bool = False
    state: EnvironmentState = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def outcome(self) -> Outcome:
        """Returns the step as an `Outcome` of the protocol."""
        return Outcome(
            observation=self.observation,
            reward=self.reward,
            done=self.done,
            state=self.state,
            metrics=self.metrics,
        )
