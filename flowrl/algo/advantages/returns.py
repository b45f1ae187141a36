"""Steps that per-token advantages are made of: rewards, rewards-to-go, whitening. numpy only.

All arrays are float64 `[N, T]`, padded, with a mask of the same shape that may have holes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, field_of
from flowrl.specs.kl import Estimator
from flowrl.specs.token_advantage import EpsPlace, Masking

__all__ = ["kl_penalty", "last_token", "penalty_of", "rewards_to_go", "token_rewards", "whiten"]

Array = npt.NDArray[np.float64]


def kl_penalty(
    logprobs: npt.ArrayLike,
    reference_logprobs: npt.ArrayLike,
    estimator: Estimator,
    *,
    clamp_input: float | None = None,
    clamp_output: float | None = None,
) -> Array:
    """Returns a per-token estimate of KL(policy || reference) for use in a reward.

    It uses the formulas of `flowrl.algo.kl.estimate` on numpy arrays: a reward has no gradient.
    """
    d = np.asarray(logprobs, np.float64) - np.asarray(reference_logprobs, np.float64)
    if clamp_input is not None:
        d = np.clip(d, -clamp_input, clamp_input)
    match estimator:
        case "k1":
            kl = d
        case "abs":
            kl = np.abs(d)
        case "k2":
            kl = 0.5 * d**2
        case "k3":
            kl = np.expm1(-d) + d
    return kl if clamp_output is None else np.clip(kl, -clamp_output, clamp_output)


def penalty_of(
    batch: AdvantageBatch, estimator: Estimator, coefficient: float, kind: str
) -> Array | None:
    """Returns the KL estimate `[N, T]` of a penalty on rewards; None if the coefficient is 0.

    Raises:
        ValueError: The batch does not have logprobs or reference_logprobs.
    """
    if coefficient == 0:
        return None
    return kl_penalty(
        field_of(batch, "logprobs", kind), field_of(batch, "reference_logprobs", kind), estimator
    )


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
    clip: tuple[float, float] | None = None,
    given: npt.ArrayLike | None = None,
) -> Array:
    """Returns rewards of tokens: the score at the last token, minus a KL penalty at every token.

    The reward of RLHF (Ouyang et al., InstructGPT, 2022, equation 2, written per token)::

        r_t = [t last] clip(score) - kl_coefficient kl_t

    Rewards e_t of an environment keep their tokens, and the last token gets the rest of the score,
    so that rewards add up to the score in both cases::

        r_t = e_t + [t last] (clip(score) - sum of e) - kl_coefficient kl_t

    Tokens off the mask also get the penalty, if `kl` is not 0 there. A sample without tokens gets
    no score.

    Args:
        scores: `[N]`.
        mask: `[N, T]`.
        kl: `[N, T]`, per-token estimates of the KL divergence.
        kl_coefficient: The coefficient of the penalty.
        clip: The bounds of the score.
        given: `[N, T]`, rewards of an environment; values off the mask are not read.
    """
    r = np.asarray(scores, np.float64)
    if clip is not None:
        r = np.clip(r, *clip)
    last = last_token(mask)
    rewards: Array = np.where(last, r[:, None], 0.0)
    if given is not None:
        environment = np.where(np.asarray(mask) > 0, np.asarray(given, np.float64), 0.0)
        rewards = environment + np.where(last, (r - environment.sum(1))[:, None], 0.0)
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
