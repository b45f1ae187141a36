"""Predicts how long answers get, from those that finished: by prompt, over all epochs.

The formula and its options are those of `LongestFirst`.
"""

from __future__ import annotations

from typing import Any

from flowrl.rollout.policies import LongestFirst
from flowrl.rollout.records import Group, Sample

__all__ = ["LengthPredictor"]

_TIER = 1e9
"""Ranks of one tier lie within it; no answer is as long."""

_BEGUN = -1e6 * _TIER
"""Where the tiers of groups that age begin; there are fewer windows and versions than that."""


class LengthPredictor:
    """Mean lengths of finished answers, by prompt and of all."""

    __slots__ = ("_all", "_count", "_policy", "_prompts", "ages")

    def __init__(self, policy: LongestFirst, *, ages: bool) -> None:
        self._policy = policy
        self.ages = ages  # whether groups that have begun go before others
        # prompt -> (answers, mean tokens); the prompt seen last stands last
        self._prompts: dict[str, tuple[int, float]] = {}
        self._count = 0  # answers of all prompts
        self._all = 0.0  # their mean

    def observe(self, group: Group, num_tokens: int) -> None:
        """An answer to the group's prompt finished with so many tokens."""
        self._count += 1
        self._all += (num_tokens - self._all) / self._count
        prompt = _prompt(group)
        count, mean = self._prompts.pop(prompt, (0, 0.0))
        count = min(count + 1, self._policy.memory)
        self._prompts[prompt] = (count, mean + (num_tokens - mean) / count)
        if len(self._prompts) > self._policy.prompts:
            del self._prompts[next(iter(self._prompts))]

    def predict(self, group: Group) -> float:
        """Tokens of an answer to the group's prompt."""
        prior = self._all if group.expected_tokens is None else group.expected_tokens
        count, mean = self._prompts.get(_prompt(group), (0, 0.0))
        shrinkage = self._policy.shrinkage
        return (shrinkage * prior + count * mean) / (shrinkage + count)

    def rank(self, sample: Sample) -> float:
        """The sample's place in a line, least first: minus the tokens that it still has to go.

        That is within its tier: of groups that have begun, by first version; of others, by window.
        A probe, the first member of a group about whose prompt nothing is known, leads its tier.
        """
        group = sample.group
        if self.ages and group.first_version is not None:
            tier = _BEGUN + group.first_version * _TIER
        else:
            tier = group.seq // self._policy.window * _TIER
        if (
            self._policy.probe
            and sample.member == 0
            and sample.attempt < 0
            and group.expected_tokens is None
            and _prompt(group) not in self._prompts
        ):
            return tier - _TIER / 2
        return tier + sample.kept_tokens - self.predict(group)

    def to_json(self) -> dict[str, Any]:
        """Everything that was learned."""
        return {
            "count": self._count,
            "mean": self._all,
            "prompts": [[prompt, *seen] for prompt, seen in self._prompts.items()],
        }

    def read(self, obj: dict[str, Any]) -> None:
        """Takes what `to_json` wrote."""
        self._count, self._all = obj["count"], obj["mean"]
        self._prompts = {prompt: (count, mean) for prompt, count, mean in obj["prompts"]}


def _prompt(group: Group) -> str:
    return group.id.partition("/")[2]
