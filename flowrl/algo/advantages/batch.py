"""The batch that advantages are computed from, the result, and the calls of own advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.algo.user_function import UserFunction, shape_of
from flowrl.errors import RewardError
from flowrl.specs.advantage import AdvantageSpec, OwnAdvantage

__all__ = [
    "AdvantageBatch",
    "AdvantageResult",
    "Turns",
    "check_scores",
    "field_of",
    "own",
]


Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Turns of all samples, end to end; turn m belongs to sample `samples[m]`.

    Attributes:
        samples: int `[M]`, in ascending order; turns of a sample are in order of time.
        rewards: float `[M]`, the environment's reward after each turn.
        states: int `[M]`; equal numbers stand for equal states of the environment before the turn.
        tokens: int `[N, T]`, the turn each token belongs to; -1 where it belongs to none.
    """

    samples: Ints
    rewards: Floats
    states: Ints
    tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch:
    """N samples of at most T response tokens, padded.

    A specification's `needs` says which optional fields it reads. Position t of all `[N, T]` arrays
    speaks of the t-th token after the prompt, which baselines of a time step rely on.

    Attributes:
        scores: `[N]`, one a sample; of several rewards, their plain sum: weights are of the
            advantage (`NormaliseThenSum.reward_weights`), or of a `weighted_sum` before it. 0 where
            the specification reads no scores (`needs_scores`).
        groups: `[N]`; samples with equal numbers answer the same prompt, adjacent or not.
        mask: `[N, T]`, 1 where the policy produced the token; it may have holes.
        rewards: `[N, K]`, the rewards by themselves; NaN where one does not apply to a sample.
        values: `[N, T]`, the critic's.
        baselines: `[N]`, the score of the greedy answer to the same prompt.
        logprobs: `[N, T]`, of the policy that produced the tokens.
        reference_logprobs: `[N, T]`.
        sum_pi_squared: `[N, T]`, the sum over the vocabulary of squared probabilities.
        turns: Of rollouts of several turns.
        token_rewards: `[N, T]`, what an environment gave at each token; 0 off the mask. Recursions
            (`gae`, `reinforce_pp`, `remax`, `optimal_token_baseline`) take these as rewards, and
            the last token gets what the score has beyond their sum. The rewards of a sample so add
            up to its score, with or without them, and nothing counts twice.
    """

    scores: Floats
    groups: Ints
    mask: npt.NDArray[np.generic] | None = None
    rewards: Floats | None = None
    values: Floats | None = None
    baselines: Floats | None = None
    logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    sum_pi_squared: Floats | None = None
    turns: Turns | None = None
    token_rewards: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageResult:
    """Advantages, and what a critic is to learn.

    Attributes:
        advantages: float32 `[N]` or, per token, `[N, T]` with 0 off the mask.
        returns: float32 `[N, T]` where the specification has rewards-to-go; else None.
    """

    advantages: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32] | None = None


def field_of(batch: AdvantageBatch, name: str, kind: str) -> npt.NDArray[np.float64]:
    """An array of the batch as float64.

    Raises:
        ValueError: the batch does not hold it.
    """
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"the advantage {kind} needs {name}, which the batch does not hold")
    return np.asarray(value, np.float64)


def check_scores(scores: npt.ArrayLike, groups: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Scores as float64 `[N]`.

    Raises:
        ValueError: scores and groups are not one-dimensional and of equal length.
        RewardError: a score is not finite.
    """
    r, g = np.asarray(scores, np.float64), np.asarray(groups)
    if r.ndim != 1 or r.shape != g.shape:
        raise ValueError(f"scores {r.shape} and groups {g.shape} must be [N] alike")
    if not np.isfinite(r).all():
        row = int(np.argmin(np.isfinite(r)))
        raise RewardError("a score is not finite", where=f"sample {row}", found=str(r[row]))
    return r


def own(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """What the user's function gives, checked.

    The function is called with a batch that holds scores, groups and what it declares; everything
    else is None. It returns an array, `[N]`, or `[N, T]` where it is one number a token, or an
    `AdvantageResult` (it must, where it declares returns). Both are 0 off the mask afterwards.

    Raises:
        ValueError: the batch lacks what it declares.
        TraceError: the function raises, or returns something else; the message names its line.
    """
    assert isinstance(spec, OwnAdvantage)
    check_scores(batch.scores, batch.groups)
    missing = [name for name in spec.needs if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the advantage {spec.function} needs {' and '.join(missing)}")
    function = UserFunction.load("advantage", spec.function, spec.options, spec.needs)
    found = function(_seen(batch, spec))
    given = found.advantages if isinstance(found, AdvantageResult) else found
    mask = None if "mask" not in spec.needs else field_of(batch, "mask", spec.kind) > 0
    live = mask if spec.per_token else None
    shape = np.shape(batch.scores) if live is None else live.shape
    advantages = _checked(function, given, shape, "advantages", live)
    if not spec.returns:
        return AdvantageResult(advantages=advantages)
    if mask is None or not isinstance(found, AdvantageResult) or found.returns is None:
        raise function.refuse(
            "gives no returns, which it declares",
            found=type(found).__name__,
            expected="AdvantageResult(advantages=..., returns=...)",
        )
    returns = _checked(function, found.returns, mask.shape, "returns", mask)
    return AdvantageResult(advantages=advantages, returns=returns)


def _seen(batch: AdvantageBatch, spec: OwnAdvantage) -> AdvantageBatch:
    """The batch with nothing but scores, groups and what is declared."""
    kept: dict[str, Any] = {name: getattr(batch, name) for name in spec.needs}
    return AdvantageBatch(scores=batch.scores, groups=batch.groups, **kept)


def _checked(
    function: UserFunction,
    found: object,
    shape: tuple[int, ...],
    what: str,
    mask: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float32]:
    """Numbers of that shape, finite, and 0 off the mask, where anything may stand before."""
    expected = f"{what} {shape_of(shape)}"
    try:
        values = np.asarray(found, np.float32)
    except (TypeError, ValueError):
        raise function.refuse(
            "returns no numbers", found=f"{type(found).__name__}", expected=expected
        ) from None
    if values.shape != shape:
        raise function.refuse(
            "returns the wrong shape", found=shape_of(values.shape), expected=expected
        )
    if mask is not None:
        values = np.where(mask, values, np.float32(0))
    if not np.isfinite(values).all():
        place = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        raise function.refuse(
            "returns something that is not finite",
            found=f"{values[tuple(place)]} at {place}",
            expected=expected,
        )
    return values
