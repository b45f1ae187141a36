"""`fl.cut`: where a response is cut, for other samples to continue it from there.

branches = actor.generate(fl.prompts_of(trunk, cut=fl.cut.share(0.5)), n=4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from flowrl.specs.base import Count, Range
from flowrl.specs.names import operation, refusing_others
from flowrl.specs.prompts import PromptsSpec

__all__ = [
    "CutAt",
    "CutLeastLikely",
    "CutShare",
    "CutSpec",
    "at",
    "least_likely",
    "share",
]

if not TYPE_CHECKING:  # a type checker should report unknown names
    __getattr__ = refusing_others(__name__, __all__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSpec(PromptsSpec):
    """The base of cuts: the prompt is the sample's own prompt with the beginning of its response.

    At least the last token of the response is cut off, so that what ended it is sampled again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAt(CutSpec):
    """Keeps the first `tokens` tokens of a response."""

    kind: ClassVar[str] = "cut_at"

    tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CutShare(CutSpec):
    """Keeps this share of a response's tokens, rounded down."""

    kind: ClassVar[str] = "cut_share"

    share: Annotated[float, Range(low=0.0, high=1.0, above=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLeastLikely(CutSpec):
    """Keeps the tokens before the least likely one."""

    kind: ClassVar[str] = "cut_least_likely"

    rank: Count = 1


@operation
def at(tokens: int) -> CutAt:
    """Cuts each response after `tokens` tokens, or before its last token where it has no more."""
    return CutAt(tokens=tokens)


@operation
def share(share: float) -> CutShare:
    """Cuts each response after a share of its tokens, rounded down."""
    return CutShare(share=share)


@operation
def least_likely(rank: int = 1) -> CutLeastLikely:
    """Cuts each response before its least likely token, by the logprobs of the engine.

    Args:
        rank: 1 for the least likely token, 2 for the next: several rollouts may continue one trunk
            from several places.
    """
    return CutLeastLikely(rank=rank)


def most_before(spec: CutSpec, num_tokens: int) -> int:
    """Returns the tokens that are before a cut at most, in a response of at most `num_tokens`."""
    most = max(0, num_tokens - 1)
    match spec:
        case CutAt():
            return min(spec.tokens, most)
        case CutShare():
            return min(math.floor(spec.share * num_tokens), most)
        case _:
            return most
