"""The reduction of per-token losses to one number, for any split into micro-batches and ranks.

The loss of a mini-batch is a weighted sum over its response tokens. The weights depend only on
counts of the *whole* mini-batch, so parts of it, computed in any order and place, add up to the
whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.specs.loss import Aggregation

__all__ = ["sample_weights"]

Weights = npt.NDArray[np.float64]


def sample_weights(
    response_lengths: npt.ArrayLike,
    aggregation: Aggregation,
    *,
    max_tokens: float = 0,
    groups: npt.ArrayLike | None = None,
    count_empty: bool = True,
    num_tokens: float | None = None,
    num_samples: float | None = None,
    dp_size: int = 1,
) -> Weights:
    """Returns the weight of each sample's tokens in the mini-batch's loss.

    Over S samples of n_i response tokens each, N in all, and P prompts of N_p tokens each::

        token-mean                  1 / N                  DAPO, 2025, equation 12
        sequence-mean-token-mean    1 / (S * n_i)          GRPO, DeepSeekMath, 2024, equation 3
        sequence-mean-token-sum     1 / S
        constant                    1 / (S * max_tokens)   Dr.GRPO, 2025, section 3.2
        prompt-mean-token-mean      1 / (P * N_p)

    By default S counts every sample and P every prompt, also those without response tokens (as in
    TRL, SkyRL and ROLL); `count_empty=False` excludes these (as in verl and OpenRLHF).

    A rank of data parallelism that holds a part of the mini-batch passes the counts of the whole as
    `num_tokens` and `num_samples` (each prompt must then be on one rank, and `num_samples` is the
    number of prompts). If gradients are averaged over ranks instead of added, `dp_size` compensates
    for it.

    Args:
        response_lengths: int `[S]`, the number of response tokens of each sample.
        aggregation: The reduction.
        max_tokens: The rollout's `max_tokens`; read by `constant`.
        groups: int `[S]`, equal for samples of the same prompt; read by `prompt-mean-token-mean`.
        count_empty: True if samples without response tokens count in S, and such prompts in P.
        num_tokens: N, in place of the sum of `response_lengths`.
        num_samples: S (P for `prompt-mean-token-mean`), in place of the number of samples here.
            `constant` with `num_samples=1` is the sum over `max_tokens` alone (verl).
        dp_size: The factor of all weights.

    Returns:
        float64 `[S]`; 0 for a sample without response tokens.

    Raises:
        ValueError: The mini-batch has no response token, `constant` has no positive max_tokens, or
            `prompt-mean-token-mean` has no groups.
    """
    n = np.asarray(response_lengths, np.float64)
    total = n.sum() if num_tokens is None else num_tokens
    if total <= 0:
        raise ValueError("a mini-batch without response tokens has no loss")
    present = (n > 0).astype(np.float64)
    members = np.ones_like(n) if count_empty else present
    samples = members.sum() if num_samples is None else num_samples
    if aggregation == "token-mean":
        weights = present / total
    elif aggregation == "sequence-mean-token-mean":
        weights = present / np.maximum(n, 1) / max(samples, 1)
    elif aggregation == "sequence-mean-token-sum":
        weights = present / max(samples, 1)
    elif aggregation == "constant":
        if max_tokens <= 0:
            raise ValueError(f"constant aggregation needs max_tokens > 0, not {max_tokens}")
        weights = present / max(samples, 1) / max_tokens
    else:
        if groups is None:
            raise ValueError(f"{aggregation} needs the groups of the samples")
        weights = _prompt_weights(n, np.asarray(groups), count_empty, num_samples)
    return np.asarray(weights * dp_size, np.float64)


def _prompt_weights(
    n: Weights, groups: npt.NDArray[np.int64], count_empty: bool, num_prompts: float | None
) -> Weights:
    _, number = np.unique(groups, return_inverse=True)
    tokens = np.bincount(number, weights=n)
    prompts = float(len(tokens) if count_empty else (tokens > 0).sum())
    if num_prompts is not None:
        prompts = num_prompts
    weights: Weights = (n > 0) / np.maximum(tokens, 1)[number] / max(prompts, 1)
    return weights
