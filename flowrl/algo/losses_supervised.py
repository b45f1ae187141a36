"""The losses that are not policy gradients: a critic's, DPO's, and Bradley-Terry for reward models.

In losses on pairs, the tokens of the preferred sample w and of the other sample l are in one `[R]`
tensor, as in every loss; `batch.pairs` says which tokens belong to one pair and `batch.preferred`
which are w's. Each token carries the loss of its pair, so `sequence-mean-token-mean` is the mean
over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from flowrl.algo.corrections import Segments
from flowrl.algo.losses import TokenBatch, TokenLoss, required
from flowrl.specs.loss import DPO, BradleyTerry, LossSpec, ValueClip

__all__ = [
    "bradley_terry",
    "dpo",
    "explained_variance",
    "value_clip",
]


def value_clip(values: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Computes half the squared error of a value, with a clip that is pessimistic.

    With the return R, the value v and the value v_old before the step::

        L = max(e(v - R), e(clip(v, v_old - clip, v_old + clip) - R))

    where e(x) = x^2 / 2, or Huber's e(x) = x^2 / 2 for |x| <= delta and delta * (|x| - delta / 2)
    beyond. R and v_old carry no gradient. (From the reference code of PPO, 2017; not in the paper;
    Huang et al., "The 37 implementation details of PPO", 2022, detail 9.)

    Args:
        values: `[R]`, the critic's value at each response token, with gradient.
        batch: The returns, and with a clip the old values.
        spec: The loss.

    Metrics: `value_mean`, `return_mean`; `value_clip_fraction`, the share of tokens whose clipped
    error is larger.
    """
    assert isinstance(spec, ValueClip)
    returns = required(batch, "returns", spec.kind)
    plain = _error(values - returns, spec)
    means = {"value_mean": values.detach(), "return_mean": returns}
    if spec.clip is None:
        return TokenLoss(values=plain, means=means)
    old = required(batch, "old_values", spec.kind)
    clipped = _error(values.clamp(old - spec.clip, old + spec.clip) - returns, spec)
    removed = clipped > plain
    means["value_clip_fraction"] = removed.to(values.dtype)
    return TokenLoss(values=torch.where(removed, clipped, plain), means=means)


def _error(x: torch.Tensor, spec: ValueClip) -> torch.Tensor:
    square = 0.5 * x.square()
    if spec.form == "square":
        return square
    size = x.abs()
    return torch.where(size <= spec.delta, square, spec.delta * (size - 0.5 * spec.delta))


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """Returns the share of the returns' variance that a critic explains: 1 - Var(R - v) / Var(R).

    1 is perfect, 0 is the value of a constant, and below 0 is worse than that. A constant error
    does not change it. None if the returns do not vary.
    """
    if not len(returns) or returns.min() == returns.max():
        return None
    targets = returns.double()
    residual = (targets - values.double()).var(correction=0)
    return float(1 - residual / targets.var(correction=0))


def dpo(logprobs: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7).

    With a sample's log-ratio D = sum over its response tokens of logprob - reference logprob, and
    h = D_w - D_l::

        sigmoid   L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)     e = label_smoothing
        ipo       L = (h - 1 / (2 beta))^2

    e = 0 is the paper's; e > 0 is conservative DPO (Mitchell, 2023). IPO (Azar et al.,
    arXiv 2310.12036, equation 17) sums over tokens as in its paper; TRL takes the mean there.

    Metrics, means over pairs: `reward_chosen` and `reward_rejected`, beta D_w and beta D_l (the
    implicit rewards); `reward_margin`, their difference; `pair_accuracy`, the share above 0;
    `logprob_chosen` and `logprob_rejected`, sums over the samples.
    """
    assert isinstance(spec, DPO)
    gap = logprobs - required(batch, "reference_logprobs", spec.kind)
    pairs, sign = _pairs(batch, spec)
    h = pairs.sums(sign * gap)
    if spec.form == "ipo":
        values = (h - 0.5 / spec.beta).square()
    else:
        smoothing = spec.label_smoothing
        values = -(1 - smoothing) * logsigmoid(spec.beta * h)
        if smoothing:
            values = values - smoothing * logsigmoid(-spec.beta * h)
    means = _compared(pairs, sign, spec.beta * gap.detach(), "reward")
    sums = _compared(pairs, sign, logprobs.detach(), "logprob")
    del sums["logprob_margin"]
    return TokenLoss(values=values, means=_with_accuracy(means) | sums)


def bradley_terry(scores: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Computes the loss of a reward model (Ouyang et al., arXiv 2203.02155, equation 1).

    With a pair's scores r_w and r_l::

        L = -log sigmoid(r_w - r_l - margin) + centering (r_w + r_l)^2

    The margin is Llama 2's (Touvron et al., 2023, equation 2), the same for all pairs; centering is
    Eisenstein et al., arXiv 2312.09244, equation 2. Both are 0 by default. A mini-batch's loss is
    the mean over its pairs; where each prompt has one pair, that is the equation's factor.

    Args:
        scores: `[S]`, the model's score at each sample's last token, with gradient.
        batch: The pairs, and the mask of the preferred samples.
        spec: The loss.

    Metrics, means over pairs: `reward_chosen`, `reward_rejected`, `reward_margin` (their
    difference), `pair_accuracy` (the share of margins above 0).
    """
    assert isinstance(spec, BradleyTerry)
    pairs, sign = _pairs(batch, spec)
    values = -logsigmoid(pairs.sums(sign * scores) - spec.margin)
    if spec.centering:
        values = values + spec.centering * pairs.sums(scores).square()
    means = _compared(pairs, sign, scores.detach(), "reward")
    return TokenLoss(values=values, means=_with_accuracy(means))


def _pairs(batch: TokenBatch, spec: LossSpec) -> tuple[Segments, torch.Tensor]:
    """Returns the pairs of the tokens, and 1 at preferred tokens, -1 at the others."""
    preferred = required(batch, "preferred", spec.kind)
    return Segments.of(required(batch, "pairs", spec.kind)), torch.where(preferred, 1.0, -1.0)


def _compared(
    pairs: Segments, sign: torch.Tensor, values: torch.Tensor, name: str
) -> dict[str, torch.Tensor]:
    """Returns sums over the preferred and the other sample of each pair, and the margin, `[P]`."""
    chosen = pairs.totals(values * (sign > 0))
    rejected = pairs.totals(values * (sign < 0))
    return {
        f"{name}_chosen": chosen,
        f"{name}_rejected": rejected,
        f"{name}_margin": chosen - rejected,
    }


def _with_accuracy(means: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    margin = means["reward_margin"]
    return {**means, "pair_accuracy": (margin > 0).to(margin.dtype)}
