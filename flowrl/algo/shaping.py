"""Reward shaping: scores that depend on length, on how a response ends, on repetition. numpy only.

A penalty is at most 0 and is added to a score; `stop_properly` and `cosine_length` give the score.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from flowrl.specs.shaping import CosineLength, Repetition, ShapingSpec, SoftOverlong, StopProperly

__all__ = ["cosine_length", "repetition", "soft_overlong", "stop_properly", "words"]

Array = npt.NDArray[np.float64]


def soft_overlong(lengths: npt.ArrayLike, spec: ShapingSpec) -> Array:
    """The length penalty of DAPO (Yu et al., 2025, equation 13), times `factor`::

        0                                   L <= max - buffer
        factor (max - buffer - L) / buffer  L <= max
        -factor                             beyond; with `cap=False` the second line goes on

    With `buffer=0`, -factor for L > max and else 0.

    Args:
        lengths: int `[N]`, response tokens.

    Returns:
        float64 `[N]`, to be added to the scores.

    Raises:
        ValueError: a buffer below 0.
    """
    assert isinstance(spec, SoftOverlong)
    length = np.asarray(lengths, np.float64)
    if spec.buffer < 0:
        raise ValueError(f"buffer must be at least 0, not {spec.buffer}")
    if spec.buffer == 0:
        return np.where(length > spec.max_tokens, -spec.factor, 0.0)
    over = np.maximum(length - (spec.max_tokens - spec.buffer), 0.0) / spec.buffer
    if spec.cap:
        over = np.minimum(over, 1.0)
    # No -0 for responses within bounds.
    return np.where(over > 0, -spec.factor * over, 0.0)


def stop_properly(scores: npt.ArrayLike, truncated: npt.ArrayLike, spec: ShapingSpec) -> Array:
    """Scores of truncated responses times the coefficient; below 0, the coefficient replaces them.

    A negative factor would turn a wrong answer's penalty into a reward, so a negative coefficient
    is not one (as in OpenRLHF).

    Args:
        scores: `[N]`.
        truncated: bool `[N]`, whether the response ended at `max_tokens`.

    Returns:
        float64 `[N]`.
    """
    assert isinstance(spec, StopProperly)
    r, cut = np.asarray(scores, np.float64), np.asarray(truncated, np.bool_)
    return np.where(cut, r * spec.coefficient if spec.coefficient >= 0 else spec.coefficient, r)


def cosine_length(lengths: npt.ArrayLike, correct: npt.ArrayLike, spec: ShapingSpec) -> Array:
    """The cosine reward (Yeo et al., "Demystifying Long Chain-of-Thought Reasoning", 2025)::

        p     = min(L / max_tokens, 1)
        score = long + (short - long) (1 + cos(pi p)) / 2

    with short and long of correct or of wrong responses: right answers are worth most when short,
    wrong ones cost least when long.

    Args:
        lengths: int `[N]`, response tokens.
        correct: bool `[N]`.

    Returns:
        float64 `[N]`.
    """
    assert isinstance(spec, CosineLength)
    right = np.asarray(correct, np.bool_)
    progress = np.minimum(np.asarray(lengths, np.float64) / spec.max_tokens, 1.0)
    short = np.where(right, spec.correct_short, spec.wrong_short)
    long = np.where(right, spec.correct_long, spec.wrong_long)
    return np.asarray(long + 0.5 * (short - long) * (1.0 + np.cos(np.pi * progress)), np.float64)


def repetition(sequences: Iterable[Sequence[Hashable]], spec: ShapingSpec) -> Array:
    """(1 - different n-grams / n-grams) * max_penalty; 0 for fewer than n items (Yeo et al., 2025).

    Args:
        sequences: N responses, as token ids or as `words`.

    Returns:
        float64 `[N]`, to be added to the scores.
    """
    assert isinstance(spec, Repetition)
    return np.array([_share_repeated(s, spec.ngram) * spec.max_penalty for s in sequences]) + 0.0


def _share_repeated(sequence: Sequence[Hashable], n: int) -> float:
    count = len(sequence) - n + 1
    if count <= 0:
        return 0.0
    return 1.0 - len({tuple(sequence[i : i + n]) for i in range(count)}) / count


def words(text: str) -> list[str]:
    """Words of a text for `repetition`: split at white space, in lower case."""
    return text.lower().split()
