"""`fl.shaping`: scores that depend on length, on how a response ends, on repetition.

    scores = fl.shaping.soft_overlong(scores, rollout, max_tokens=256, buffer=64)

Each gives scores again, sample by sample, so that a filter may follow. Formulas, with paper and
equation, are at their functions in `flowrl.algo.maps`. The same are terms of `rewards.terms`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.program.handles import Rollout, Scores
from flowrl.program.maps import add_map
from flowrl.program.operation import check_handle, is_number, operation, refuse_argument
from flowrl.specs import CosineLength, MapSpec, Repetition, SoftOverlong, StopProperly
from flowrl.specs.names import raise_missing

__all__ = ["cosine_length", "repetition", "soft_overlong", "stop_properly"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        raise_missing(__name__, name, __all__)


@operation
def soft_overlong(
    scores: Scores, rollout: Rollout, *, max_tokens: int, buffer: int, factor: float = 1.0
) -> Scores:
    """Takes off a penalty that grows over the last `buffer` tokens before `max_tokens`: DAPO.

    Args:
        scores: One a sample.
        rollout: The samples that were scored.
        max_tokens: The length at which the penalty is `factor`.
        buffer: Tokens over which it grows; 0 takes all off at once, beyond `max_tokens`.
        factor: The penalty at `max_tokens`.
    """
    name = "fl.shaping.soft_overlong"
    _tokens(name, "max_tokens", max_tokens, 1)
    _tokens(name, "buffer", buffer, 0)
    if buffer > max_tokens:
        raise refuse_argument(name, "buffer", buffer, f"at most max_tokens={max_tokens}")
    if not is_number(factor):
        raise refuse_argument(name, "factor", factor, "a number from 0 up")
    spec = SoftOverlong(max_tokens=max_tokens, buffer=buffer, factor=float(factor))
    return _shaped(name, spec, scores, rollout)


@operation
def stop_properly(scores: Scores, rollout: Rollout, *, coefficient: float = 0.0) -> Scores:
    """Multiplies the score of truncated responses; below 0, the coefficient is their score.

    Args:
        scores: One a sample.
        rollout: The samples that were scored.
        coefficient: The factor, or the score.
    """
    name = "fl.shaping.stop_properly"
    spec = StopProperly(coefficient=_real(name, "coefficient", coefficient))
    return _shaped(name, spec, scores, rollout)


@operation
def cosine_length(
    scores: Scores,
    rollout: Rollout,
    *,
    max_tokens: int,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    correct_long: float = 0.5,
    correct_short: float = 1.0,
    correct_above: float = 0.5,
) -> Scores:
    """Replaces scores by half a cosine of the length: falling from right, rising from wrong.

    Args:
        scores: One a sample.
        rollout: The samples that were scored.
        max_tokens: Length at which the cosine ends.
        wrong_short: Score of a wrong response of no tokens; the other bounds follow the same
            scheme.
        correct_above: A response is right where its score is above this.
    """
    name = "fl.shaping.cosine_length"
    _tokens(name, "max_tokens", max_tokens, 1)
    spec = CosineLength(
        max_tokens=max_tokens,
        wrong_short=_real(name, "wrong_short", wrong_short),
        wrong_long=_real(name, "wrong_long", wrong_long),
        correct_long=_real(name, "correct_long", correct_long),
        correct_short=_real(name, "correct_short", correct_short),
        correct_above=_real(name, "correct_above", correct_above),
    )
    return _shaped(name, spec, scores, rollout)


@operation
def repetition(
    scores: Scores, rollout: Rollout, *, ngram: int = 3, max_penalty: float = -1.0
) -> Scores:
    """Adds `max_penalty` times the share of token n-grams that occurred before in the response.

    Args:
        scores: One a sample.
        rollout: The samples that were scored.
        ngram: Length of an n-gram.
        max_penalty: At most 0.
    """
    name = "fl.shaping.repetition"
    _tokens(name, "ngram", ngram, 1)
    if _real(name, "max_penalty", max_penalty) > 0:
        raise refuse_argument(name, "max_penalty", max_penalty, "a number of at most 0")
    spec = Repetition(ngram=ngram, max_penalty=float(max_penalty))
    return _shaped(name, spec, scores, rollout)


def _shaped(name: str, spec: MapSpec, scores: Scores, rollout: Rollout) -> Scores:
    scored = check_handle(scores, Scores, operation=name, argument="scores")
    samples = check_handle(rollout, Rollout, operation=name, argument="rollout")
    given = add_map(name, spec, (scored, samples))
    assert isinstance(given, Scores)
    return given


def _tokens(name: str, argument: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise refuse_argument(name, argument, value, f"a whole number from {least} up")


def _real(name: str, argument: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_number(abs(value)):
        raise refuse_argument(name, argument, value, "a number")
    return float(value)
