"""Reward terms by length, ending and repetition of a response, without the answer.

    kind            value
    overlong        DAPO's length penalty of the response's tokens, at most 0
    repetition      the share of repeated n-grams of words (or characters), times a penalty
    stop_properly   the named term's value, scaled or replaced if the response was truncated
    cosine_length   a number by length, for correct and for wrong responses; a response is correct
                    if the named term's value is at least `right_from`

The formulas are those of `flowrl.algo.maps`. Lengths are in response tokens, the stop token
included. n-grams are those of the text: words are split at white space and compared without case;
`unit: characters` is for text without spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flowrl.algo.maps import cosine_length, repetition, soft_overlong, stop_properly, words
from flowrl.backend.protocols import ScoreRequest
from flowrl.errors import ConfigError
from flowrl.specs import FinishReason
from flowrl.specs.base import wrong_fields
from flowrl.specs.maps import CosineLength, Repetition, ShapingSpec, SoftOverlong, StopProperly
from flowrl_backends.verify.options import TermOptions

Penalty: TypeAlias = Callable[[ScoreRequest], float]
"""A function of a sample alone."""

Transformation: TypeAlias = Callable[[ScoreRequest, float], float]
"""A function of a sample and the value of the term that it is `of`."""


def _check(spec: ShapingSpec, options: TermOptions) -> None:
    """Raises a `ConfigError` if an option has a value that the formula does not allow."""
    for field, value, expected in wrong_fields(spec):
        raise ConfigError(
            f"a reward term cannot have this {field}",
            where=f"{options.where}.{field}",
            found=repr(value),
            expected=expected,
        )


def _overlong(options: TermOptions) -> Penalty:
    spec = SoftOverlong(
        max_tokens=options.whole("max_tokens"),
        buffer=options.whole("buffer", 0),
        factor=options.number("factor", 1.0),
        cap=options.truth("cap", True),
    )
    _check(spec, options)
    return lambda request: float(soft_overlong([request.num_tokens], spec)[0])


def _repetition(options: TermOptions) -> Penalty:
    spec = Repetition(
        ngram=options.whole("ngram", 3), max_penalty=options.number("max_penalty", -1.0)
    )
    _check(spec, options)
    unit = options.choice("unit", ("words", "characters"))
    items = words if unit == "words" else list
    return lambda request: float(repetition([items(request.response)], spec)[0])


def _stop_properly(options: TermOptions) -> Transformation:
    spec = StopProperly(coefficient=options.number("coefficient", 0.0))
    _check(spec, options)

    def transform(request: ScoreRequest, value: float) -> float:
        truncated = request.finish is FinishReason.LENGTH
        return float(stop_properly([value], [truncated], spec)[0])

    return transform


def _cosine_length(options: TermOptions) -> Transformation:
    spec = CosineLength(
        max_tokens=options.whole("max_tokens"),
        wrong_short=options.number("wrong_short", -1.0),
        wrong_long=options.number("wrong_long", -0.5),
        correct_long=options.number("correct_long", 0.5),
        correct_short=options.number("correct_short", 1.0),
    )
    _check(spec, options)
    right_from = options.number("right_from", 1.0)

    def transform(request: ScoreRequest, value: float) -> float:
        return float(cosine_length([request.num_tokens], [value >= right_from], spec)[0])

    return transform


PENALTIES: dict[str, Callable[[TermOptions], Penalty]] = {
    "overlong": _overlong,
    "repetition": _repetition,
}
TRANSFORMATIONS: dict[str, Callable[[TermOptions], Transformation]] = {
    "stop_properly": _stop_properly,
    "cosine_length": _cosine_length,
}
