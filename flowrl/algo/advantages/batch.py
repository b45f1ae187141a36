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
    """The turns of all samples, concatenated; turn m belongs to sample `samples[m]`.

    Attributes:
        samples: int `[M]`, in ascending order; turns of a sample are in order of time.
        rewards: float `[M]`, the environment's reward after each turn.
        states: int `[M]`; equal numbers denote equal states of the environment before the turn.
        tokens: int `[N, T]`, the turn of each token; -1 for a token of no turn.
    """

    samples: Ints
    rewards: Floats
    states: Ints
    tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch:
    """N samples of at most T response tokens, padded.

    A specification's `needs` names the optional fields that it reads. Column t of all `[N, T]`
    arrays is the t-th token after the prompt; baselines of a time step rely on it.

    Attributes:
        scores: `[N]`, one a sample; with several rewards, their plain sum. Weights of rewards are
            the advantage's (`NormaliseThenSum.reward_weights`), or those of a `weighted_sum` before
            it. 0 if the specification reads no scores (`needs_scores`).
        groups: `[N]`; samples with equal numbers answer the same prompt, adjacent or not.
        mask: `[N, T]`, 1 at tokens that the policy produced; it may have holes.
        rewards: `[N, K]`, the separate rewards; NaN if one does not apply to a sample.
        values: `[N, T]`, the critic's values.
        baselines: `[N]`, the score of the greedy answer to the same prompt.
        logprobs: `[N, T]`, logprobs of the policy that produced the tokens.
        reference_logprobs: `[N, T]`, logprobs of the reference policy.
        sum_pi_squared: `[N, T]`, the sum over the vocabulary of squared probabilities.
        turns: The turns, in rollouts of several turns.
        token_rewards: `[N, T]`, the environment's reward at each token; 0 off the mask. Recursions
            (`gae`, `reinforce_pp`, `remax`, `optimal_token_baseline`) take these as rewards, and
            the last token gets the difference of the score and their sum. So the rewards of a
            sample add up to its score, with or without them, and nothing counts twice.
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
    """Advantages, and the targets of a critic.

    Attributes:
        advantages: float32 `[N]` or, per token, `[N, T]` with 0 off the mask.
        returns: float32 `[N, T]` if the specification has rewards-to-go; else None.
    """

    advantages: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32] | None = None


def field_of(batch: AdvantageBatch, name: str, kind: str) -> npt.NDArray[np.float64]:
    """Returns an array of the batch as float64.

    Raises:
        ValueError: The batch does not have the field.
    """
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"the advantage {kind} needs {name}, which the batch does not have")
    return np.asarray(value, np.float64)


def check_scores(scores: npt.ArrayLike, groups: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns scores as float64 `[N]`.

    Raises:
        ValueError: Scores and groups are not one-dimensional and of equal length.
        RewardError: A score is not finite.
    """
    r, g = np.asarray(scores, np.float64), np.asarray(groups)
    if r.ndim != 1 or r.shape != g.shape:
        raise ValueError(f"scores {r.shape} and groups {g.shape} must both be [N]")
    if not np.isfinite(r).all():
        row = int(np.argmin(np.isfinite(r)))
        raise RewardError("a score is not finite", where=f"sample {row}", found=str(r[row]))
    return r


def own(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """Calls the user's function and checks its result.

    The function gets a batch with scores, groups and the fields that it declares; all other fields
    are None. It returns an array, `[N]`, or `[N, T]` for one number a token, or an
    `AdvantageResult` (required if it declares returns). Both are then set to 0 off the mask.

    Raises:
        ValueError: The batch does not have a declared field.
        TraceError: The function raises an error or returns something else; the message names its
            line.
    """
    assert isinstance(spec, OwnAdvantage)
    check_scores(batch.scores, batch.groups)
    missing = [name for name in spec.needs if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the advantage {spec.function} needs {' and '.join(missing)}")
    function = UserFunction.load("advantage", spec.function, spec.options, spec.needs)
    result = function(_declared_part(batch, spec))
    given = result.advantages if isinstance(result, AdvantageResult) else result
    mask = None if "mask" not in spec.needs else field_of(batch, "mask", spec.kind) > 0
    token_mask = mask if spec.per_token else None
    shape = np.shape(batch.scores) if token_mask is None else token_mask.shape
    advantages = _checked(function, given, shape, "advantages", token_mask)
    if not spec.returns:
        return AdvantageResult(advantages=advantages)
    if mask is None or not isinstance(result, AdvantageResult) or result.returns is None:
        raise function.refuse(
            "gives no returns, which it declares",
            found=type(result).__name__,
            expected="AdvantageResult(advantages=..., returns=...)",
        )
    returns = _checked(function, result.returns, mask.shape, "returns", mask)
    return AdvantageResult(advantages=advantages, returns=returns)


def _declared_part(batch: AdvantageBatch, spec: OwnAdvantage) -> AdvantageBatch:
    """Returns the batch with scores, groups and declared fields only."""
    kept: dict[str, Any] = {name: getattr(batch, name) for name in spec.needs}
    return AdvantageBatch(scores=batch.scores, groups=batch.groups, **kept)


def _checked(
    function: UserFunction,
    result: object,
    shape: tuple[int, ...],
    what: str,
    mask: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float32]:
    """Returns the result as finite numbers of that shape, with arbitrary values off the mask 0."""
    expected = f"{what} {shape_of(shape)}"
    try:
        values = np.asarray(result, np.float32)
    except (TypeError, ValueError):
        raise function.refuse(
            "does not return numbers", found=f"{type(result).__name__}", expected=expected
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
            "returns a number that is not finite",
            found=f"{values[tuple(place)]} at {place}",
            expected=expected,
        )
    return values
