"""In which order queued samples start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["FirstOffered", "LongestFirst", "OrderPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPolicy(Spec):
    """Base of orders. Samples that come back always go before fresh ones, in either order."""

    family: ClassVar[str] = "order"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOffered(OrderPolicy):
    """As they were offered, or came back."""

    kind: ClassVar[str] = "first_offered"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestFirst(OrderPolicy):
    """The sample with the most tokens still to go first, as far as they can be predicted.

    Longest-first list scheduling ends within 4/3 - 1/(3K) of the best makespan on K slots where
    lengths are known (Graham, 1969); any order ends within 2 - 1/K. So the gain is what the tail
    of a step costs, and a wrong prediction costs no more than a wrong order.

    Lengths are learned online. The prediction for a sample of prompt p is

        (shrinkage * prior + n * mean) / (shrinkage + n)

    with n and mean over the samples of p that finished, siblings and earlier epochs alike, and the
    prior the caller's `expected_tokens`, or else the mean of all samples. What still goes is the
    prediction less the tokens that are kept.

    Two rules keep it from starving anything. In an asynchronous run the members of a group that has
    begun, and so ages, go before those of groups that have not, older weights first. And a group is
    overtaken only by groups that were admitted in the same `window`.

    Attributes:
        shrinkage: Samples that the prior counts for.
        memory: n is at most so many, so that old lengths are forgotten as the policy changes.
        prompts: Prompts to remember; the one longest not seen is forgotten first.
        probe: Of a prompt that nothing is known about, one member goes before all that is known,
            so that its siblings are predicted from it.
        window: Groups among which lengths decide; groups are counted in the order of admission, and
            each `window` of them comes before the next.
    """

    kind: ClassVar[str] = "longest_first"

    shrinkage: float = 1.0
    memory: int = 16
    prompts: int = 100_000
    probe: bool = True
    window: int = 4096

    def __post_init__(self) -> None:
        require_at_least(self, 0.01, "shrinkage")
        require_at_least(self, 1, "memory", "prompts", "window")
