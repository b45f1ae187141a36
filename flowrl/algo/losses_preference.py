"""Losses on pairs of answers: DPO for policies, Bradley-Terry for reward models.

Tokens of the preferred sample w and of the other one l come in one `[R]` tensor, as in every loss;
`batch.pairs` says which belong to one pair and `batch.preferred` which are w's. A pair's loss
stands at each of its tokens, so `sequence-mean-token-mean` is the mean over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from flowrl.algo.losses import TokenBatch, TokenLoss, given
from flowrl.algo.segments import Segments
from flowrl.specs.loss import DPO, BradleyTerry, LossSpec

__all__ = ["bradley_terry", "dpo"]


def dpo(logprobs: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7).

    With a sample's log-ratio D = sum over its response tokens of logprob - reference logprob, and
    h = D_w - D_l::

        sigmoid   L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)     e = label_smoothing
        ipo       L = (h - 1 / (2 beta))^2

    e = 0 is the paper's; e > 0 is conservative DPO (Mitchell, 2023). IPO (Azar et al.,
    arXiv 2310.12036, equation 17) sums over tokens like its paper; TRL takes the mean there.

    Metrics, means over pairs: `reward_chosen` and `reward_rejected`, beta D_w and beta D_l (the
    implicit rewards); `reward_margin`, their difference; `pair_accuracy`, how often it is above 0;
    `logprob_chosen` and `logprob_rejected`, sums over the samples.
    """
    assert isinstance(spec, DPO)
    gap = logprobs - given(batch, "reference_logprobs", spec.kind)
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
    """The loss of a reward model (Ouyang et al., arXiv 2203.02155, equation 1).

    With a pair's scores r_w and r_l::

        L = -log sigmoid(r_w - r_l - margin) + centering (r_w + r_l)^2

    The margin is Llama 2's (Touvron et al., 2023, equation 2), the same for all pairs; centering is
    Eisenstein et al., arXiv 2312.09244, equation 2. Both are 0 by default. A mini-batch's loss is
    the mean over its pairs; where each prompt has one pair, that is the equation's factor.

    Args:
        scores: `[S]`, the model's number at each sample's last token, with gradient.

    Metrics, means over pairs: `reward_chosen`, `reward_rejected`, `reward_margin` (their
    difference), `pair_accuracy`, how often it is above 0.
    """
    assert isinstance(spec, BradleyTerry)
    pairs, sign = _pairs(batch, spec)
    values = -logsigmoid(pairs.sums(sign * scores) - spec.margin)
    if spec.centering:
        values = values + spec.centering * pairs.sums(scores).square()
    means = _compared(pairs, sign, scores.detach(), "reward")
    return TokenLoss(values=values, means=_with_accuracy(means))


def _pairs(batch: TokenBatch, spec: LossSpec) -> tuple[Segments, torch.Tensor]:
    """The pairs of the tokens, and 1 at the preferred sample's, -1 at the other's."""
    preferred = given(batch, "preferred", spec.kind)
    return Segments.of(given(batch, "pairs", spec.kind)), torch.where(preferred, 1.0, -1.0)


def _compared(
    pairs: Segments, sign: torch.Tensor, values: torch.Tensor, name: str
) -> dict[str, torch.Tensor]:
    """Sums over the preferred and the other sample of each pair, and their difference, `[P]`."""
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
