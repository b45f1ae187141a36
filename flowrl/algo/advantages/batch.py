"""The input and the result of advantages, and the steps of those that have one number a token.

numpy only. Arrays of tokens are padded, `[N, T]`, with a mask of that shape that may have holes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowrl.algo.kl import estimate
from flowrl.errors import RewardError
from flowrl.specs.advantage import EpsPlace, Masking
from flowrl.specs.kl import Estimator

Array = npt.NDArray[np.float64]
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
        source: `[N]`, the place of a sample's set in `fl.concat`, from 0.
        token_rewards: `[N, T]`, the environment's reward at each token; 0 off the mask. Recursions
            (`gae`, `reinforce_pp`, `remax`, `optimal_token_baseline`) take these as rewards, and
            the last token gets the difference of the score and their sum. So the rewards of a
            sample add up to its score, with or without them, and nothing counts twice.
        process_rewards: `[N, T]`, rewards of tokens in addition to the score, as a process reward
            model gives them.
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
    source: npt.NDArray[np.generic] | None = None
    token_rewards: Floats | None = None
    process_rewards: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageResult:
    """Advantages, and the targets of a critic.

    Attributes:
        advantages: float32 `[N]` or, per token, `[N, T]` with 0 off the mask.
        returns: float32 `[N, T]` if the specification has rewards-to-go; else None.
    """

    advantages: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32] | None = None

    @classmethod
    def masked(
        cls, mask: npt.ArrayLike, advantages: Array, returns: Array | None = None
    ) -> AdvantageResult:
        """Returns the result of numbers `[N, T]`, which are set to 0 off the mask."""
        live = np.asarray(mask) > 0
        return cls(
            advantages=np.where(live, advantages, 0.0).astype(np.float32),
            returns=None if returns is None else np.where(live, returns, 0.0).astype(np.float32),
        )


def field_of(batch: AdvantageBatch, name: str, kind: str) -> Array:
    """Returns an array of the batch as float64; a ValueError without it."""
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"the advantage {kind} needs {name}, which the batch does not have")
    return np.asarray(value, np.float64)


def check_scores(scores: npt.ArrayLike, groups: npt.ArrayLike) -> Array:
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


@dataclass(frozen=True, slots=True)
class Padding:
    """The positions of `[N, T]` arrays in the concatenated tokens of all samples.

    Column 0 is the first token that the policy produced, the last column of a sample the last one;
    the tokens between them are included, so that environment tokens make holes in the mask.

    >>> places = Padding.of([0, 3, 5], [False, True, True, False, True])
    >>> places.pad(np.array([9.0, 1.0, 2.0, 9.0, 3.0])).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    >>> places.flat(np.array([[1.0, 2.0], [3.0, 0.0]])).tolist()
    [0.0, 1.0, 2.0, 0.0, 3.0]

    Attributes:
        rows: int `[P]`, the sample of each of the P tokens in the padded array.
        columns: int `[P]`, their columns.
        tokens: int `[P]`, their positions in the concatenated tokens.
        shape: N and T.
        total: The number of tokens of all samples.
    """

    rows: Ints
    columns: Ints
    tokens: Ints
    shape: tuple[int, int]
    total: int

    @classmethod
    def of(cls, offsets: npt.ArrayLike, response_mask: npt.ArrayLike) -> Padding:
        """Makes the padding of `SequenceBatch.offsets` `[N + 1]` and bool `response_mask`."""
        starts, mask = np.asarray(offsets, np.int64), np.asarray(response_mask, np.bool_)
        count = len(starts) - 1
        produced = np.flatnonzero(mask)
        # The range of each sample in the produced tokens.
        begin = np.searchsorted(produced, starts[:-1])
        end = np.searchsorted(produced, starts[1:])
        filled = end > begin
        first, length = np.zeros((2, count), np.int64)
        first[filled] = produced[begin[filled]]
        length[filled] = produced[end[filled] - 1] - first[filled] + 1
        rows = np.repeat(np.arange(count), length)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(length) - length, length)
        width = int(length.max()) if count else 0
        return cls(rows, columns, first[rows] + columns, (count, width), len(mask))

    def pad(self, values: npt.ArrayLike) -> Array:
        """Returns `[N, T]` from one value a token of all samples; 0 at padding."""
        out = np.zeros(self.shape)
        out[self.rows, self.columns] = np.asarray(values, np.float64)[self.tokens]
        return out

    def flat(self, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Returns float32, one value a token of all samples; 0 at tokens outside `[N, T]`."""
        out = np.zeros(self.total, np.float32)
        out[self.tokens] = np.asarray(values)[self.rows, self.columns]
        return out


def kl_penalty(
    batch: AdvantageBatch, estimator: Estimator, coefficient: float, kind: str
) -> Array | None:
    """Returns the KL estimate `[N, T]` of a penalty on rewards; None if the coefficient is 0."""
    if coefficient == 0:
        return None
    logprobs = field_of(batch, "logprobs", kind)
    return estimate(logprobs, field_of(batch, "reference_logprobs", kind), estimator)


def last_token(mask: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Returns bool `[N, T]`, true at the last token of each sample's mask, if it has any."""
    m = np.asarray(mask) > 0
    later = np.flip(np.cumsum(np.flip(m, 1), axis=1), 1)
    return np.asarray(m & (later == 1), np.bool_)


def token_rewards(
    scores: npt.ArrayLike,
    mask: npt.ArrayLike,
    kl: npt.ArrayLike | None = None,
    *,
    kl_coefficient: float = 0.0,
    given: npt.ArrayLike | None = None,
    process: npt.ArrayLike | None = None,
) -> Array:
    """Returns rewards of tokens: the score at the last token, minus a KL penalty at every token.

    The reward of RLHF (Ouyang et al., InstructGPT, 2022, equation 2, written per token)::

        r_t = [t last] score - kl_coefficient kl_t

    Rewards e_t of an environment keep their tokens, and the last token gets the rest of the score,
    so that rewards add up to the score in both cases::

        r_t = e_t + [t last] (score - sum of e) - kl_coefficient kl_t

    Process rewards p_t come in addition to the score::

        r_t = e_t + p_t + [t last] (score - sum of e) - kl_coefficient kl_t

    Tokens off the mask also get the penalty, if `kl` is not 0 there. A sample without tokens gets
    no score.

    Args:
        scores: `[N]`.
        mask: `[N, T]`.
        kl: `[N, T]`, per-token estimates of the KL divergence.
        kl_coefficient: The coefficient of the penalty.
        given: `[N, T]`, rewards of an environment; values off the mask are not read.
        process: `[N, T]`, process rewards; values off the mask are not read.
    """
    r = np.asarray(scores, np.float64)
    last = last_token(mask)
    rewards: Array = np.where(last, r[:, None], 0.0)
    if given is not None:
        environment = np.where(np.asarray(mask) > 0, np.asarray(given, np.float64), 0.0)
        rewards = environment + np.where(last, (r - environment.sum(1))[:, None], 0.0)
    if process is not None:
        rewards = rewards + np.where(np.asarray(mask) > 0, np.asarray(process, np.float64), 0.0)
    if kl is None or kl_coefficient == 0:
        return rewards
    return rewards - kl_coefficient * np.asarray(kl, np.float64)


def rewards_to_go(
    rewards: npt.ArrayLike, mask: npt.ArrayLike, gamma: float = 1.0, masking: Masking = "carry"
) -> Array:
    """Computes G_t = r_t + gamma G_{t+1}, from the last token backwards.

    At a token off the mask, by `masking`::

        carry    G_t = G_{t+1}                     the token is skipped; nothing is discounted
        zero     G_t = gamma G_{t+1}               its reward counts as 0; time passes
        none     G_t = r_t + gamma G_{t+1}         the mask is ignored
        reset    G_t = r_t + gamma G_{t+1}, and the token before sees G = 0 there

    Returns:
        `[N, T]`; off the mask, the values of the recursion.
    """
    r, m = np.asarray(rewards, np.float64), (np.asarray(mask) > 0).astype(np.float64)
    if masking == "zero":
        r = r * m
    out = np.zeros_like(r)
    running = np.zeros(len(r))
    for t in reversed(range(r.shape[1])):
        step = r[:, t] + gamma * running
        out[:, t] = np.where(m[:, t] > 0, step, running) if masking == "carry" else step
        running = out[:, t] * m[:, t] if masking == "reset" else out[:, t]
    return out


def whiten(
    values: npt.ArrayLike,
    mask: npt.ArrayLike,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    place: EpsPlace = "inside",
) -> Array:
    """Standardises values by their mean and standard deviation over the tokens of the mask.

    By `place`::

        inside     (x - mean) / sqrt(var + eps)
        outside    (x - mean) / (sqrt(var) + eps)
        floor      (x - mean) / sqrt(max(var, eps))

    Equal values give exactly 0, and so does a single token.

    Returns:
        `[N, T]`, 0 off the mask.
    """
    x, m = np.asarray(values, np.float64), np.asarray(mask) > 0
    chosen = x[m]
    if len(chosen) <= ddof or chosen.min() == chosen.max():
        return np.zeros_like(x)
    centred = x - chosen.mean()
    variance = (centred[m] ** 2).sum() / (len(chosen) - ddof)
    divisor = {
        "inside": np.sqrt(variance + eps),
        "outside": np.sqrt(variance) + eps,
        "floor": np.sqrt(max(variance, eps)),
    }[place]
    return np.where(m, centred / divisor, 0.0)
