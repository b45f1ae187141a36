"""Losses of a critic by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.specs.base import option
from flowrl.specs.loss.base import Aggregation, LossSpec, Prediction

__all__ = ["ValueClip", "value_clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueClip(LossSpec):
    """Half the squared error of a value, with the value's step clipped (PPO's reference code).

    Attributes:
        clip: The value is clipped to within this of the old value; None does not clip.
        form: `square`, half the square; or `huber`, linear beyond `delta`.
        delta: Of `huber`.
    """

    kind: ClassVar[str] = "value_clip"
    predicts: ClassVar[Prediction] = "values"

    clip: float | None = 0.2
    aggregation: Aggregation = "token-mean"
    form: Literal["square", "huber"] = option("square")
    delta: float = option(10.0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Returns, and the values before the step where these clip."""
        return ("returns",) if self.clip is None else ("returns", "old_values")


def value_clip(
    clip: float | None = 0.2,
    *,
    aggregation: Aggregation = "token-mean",
    form: Literal["square", "huber"] = "square",
    delta: float = 10.0,
) -> ValueClip:
    """The critic's loss; `clip=None` is the plain squared error."""
    return ValueClip(clip=clip, aggregation=aggregation, form=form, delta=delta)
