"""Reward shaping by name: scores that depend on length, on how a response ends, on repetition.

Each is a map from scores to scores: penalties are added to the score, the others replace it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import option
from flowrl.specs.maps import MapSpec

__all__ = ["CosineLength", "Repetition", "ShapingSpec", "SoftOverlong", "StopProperly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingSpec(MapSpec):
    """Base of reward shaping: reads scores and the lengths of responses, gives scores."""

    _reads: ClassVar[tuple[str, ...]] = ("score", "response_mask")
    _per_sample: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong(ShapingSpec):
    """A penalty that grows over the last `buffer` tokens before `max_tokens`: DAPO.

    With `buffer=0` it is the hard one: `factor` off for every response longer than `max_tokens`.

    Attributes:
        max_tokens: The length at which the penalty is `factor`.
        buffer: Tokens over which it grows.
        factor: The penalty at `max_tokens`.
        cap: Whether it stays at `factor` beyond `max_tokens`, as in the paper, or keeps growing.
    """

    kind: ClassVar[str] = "soft_overlong"

    max_tokens: int
    buffer: int
    factor: float = 1.0
    cap: bool = option(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProperly(ShapingSpec):
    """Truncated responses get score x coefficient; below 0, the coefficient itself is the score."""

    kind: ClassVar[str] = "stop_properly"
    _reads_truncated: ClassVar[bool] = True

    coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineLength(ShapingSpec):
    """A score that falls from right and rises from wrong along half a cosine of the length.

    Attributes:
        max_tokens: Length at which the cosine ends.
        wrong_short: Score of a wrong response of no tokens.
        wrong_long: Of a wrong response of `max_tokens` or more.
        correct_long: Of a correct response of `max_tokens` or more.
        correct_short: Of a correct response of no tokens.
        correct_above: As a map, a response is correct where its score is above this.
    """

    kind: ClassVar[str] = "cosine_length"

    max_tokens: int
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    correct_long: float = 0.5
    correct_short: float = 1.0
    correct_above: float = option(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition(ShapingSpec):
    """`max_penalty` times the share of n-grams that occurred before in the response.

    As a map it reads token ids, added to the score.

    Attributes:
        ngram: Length of an n-gram.
        max_penalty: At most 0.
    """

    kind: ClassVar[str] = "repetition"
    _reads: ClassVar[tuple[str, ...]] = ("score", "tokens", "response_mask")

    ngram: int = 3
    max_penalty: float = -1.0
