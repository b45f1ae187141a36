"""Losses without a surrogate: of critics, pairs, reward models, outcomes, and one's own functions.

In losses on pairs, the tokens of the preferred sample w and of the other sample l are in one `[R]`
tensor, as in every loss; `batch.pairs` says which tokens belong to one pair and `batch.preferred`
which are w's. Each token carries the loss of its pair, so `sequence-mean-token-mean` is the mean
over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from flowrl.algo.corrections import Segments
from flowrl.algo.losses import Loss, TokenBatch, TokenLoss, required
from flowrl.algo.user_functions import UserFunction, shape_of
from flowrl.specs.loss import DPO, BradleyTerry, ImplicitReward, LossSpec, OwnLoss, ValueClip
from flowrl.specs.loss.own import FIELDS


def value_clip(values: torch.Tensor, batch: TokenBatch, spec: ValueClip) -> TokenLoss:
    """Computes half the squared error of a value, with a clip that is pessimistic.

    With the return R, the value v and the value v_old before the step::

        L = max(e(v - R), e(clip(v, v_old - clip, v_old + clip) - R))

    where e(x) = x^2 / 2, or Huber's e(x) = x^2 / 2 for |x| <= delta and delta * (|x| - delta / 2)
    beyond. R and v_old carry no gradient. (From the reference code of PPO, 2017; not in the paper;
    Huang et al., "The 37 implementation details of PPO", 2022, detail 9.)

    Metrics: `value_mean`, `return_mean`; `value_clip_fraction`, the share of tokens whose clipped
    error is larger.
    """
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


def dpo(logprobs: torch.Tensor, batch: TokenBatch, spec: DPO) -> TokenLoss:
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


def bradley_terry(scores: torch.Tensor, batch: TokenBatch, spec: BradleyTerry) -> TokenLoss:
    """Computes the loss of a reward model (Ouyang et al., arXiv 2203.02155, equation 1).

    With a pair's scores r_w and r_l::

        L = -log sigmoid(r_w - r_l - margin) + centering (r_w + r_l)^2

    The margin is Llama 2's (Touvron et al., 2023, equation 2), the same for all pairs; centering is
    Eisenstein et al., arXiv 2312.09244, equation 2. Both are 0 by default. A mini-batch's loss is
    the mean over its pairs; where each prompt has one pair, that is the equation's factor.

    The scores are `[S]`, the model's at each sample's last token.

    Metrics, means over pairs: `reward_chosen`, `reward_rejected`, `reward_margin` (their
    difference), `pair_accuracy` (the share of margins above 0).
    """
    pairs, sign = _pairs(batch, spec)
    values = -logsigmoid(pairs.sums(sign * scores) - spec.margin)
    if spec.centering:
        values = values + spec.centering * pairs.sums(scores).square()
    means = _compared(pairs, sign, scores.detach(), "reward")
    return TokenLoss(values=values, means=_with_accuracy(means))


def implicit_reward(logprobs: torch.Tensor, batch: TokenBatch, spec: ImplicitReward) -> TokenLoss:
    """Computes the loss of an implicit process reward model (Cui et al., arXiv 2502.01456).

    With a sample's log-ratio D = sum over its response tokens of logprob - reference logprob, and
    its score o (equation 4)::

        L = -o log sigmoid(beta D) - (1 - o) log sigmoid(-beta D)

    Each token carries the loss of its sample, so that the mean over samples of means over tokens is
    the mean over samples. The reward of a token is then beta (logprob - reference logprob)
    (equation 3; Yuan et al., arXiv 2412.01981).

    Metrics, means over samples: `outcome_reward`, beta D; `outcome_accuracy`, the share of samples
    for which sigmoid(beta D) and the score are on the same side of 1/2.
    """
    gap = logprobs - required(batch, "reference_logprobs", spec.kind)
    samples = Segments.of(required(batch, "samples", spec.kind))
    return _outcome_loss(spec.beta * samples.sums(gap), batch, spec)


def outcome(numbers: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Computes the cross-entropy of outcomes with the numbers of a reward model.

    With a number s and the score o of the response::

        L = -o log sigmoid(s) - (1 - o) log sigmoid(-s)

    The number is that at the last token (`outcome`), or that at each token (`token_outcome`: the
    verifier that judges every prefix of Cobbe et al., arXiv 2110.14168, section 4.3).

    Metrics, means over samples: `outcome_reward`, s; `outcome_accuracy`, the share of numbers on
    the right side of 0.
    """
    return _outcome_loss(numbers, batch, spec)


def _outcome_loss(numbers: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    if "score" not in batch.extra:
        raise ValueError(f"{spec.kind} needs score")
    score = batch.extra["score"]
    values = binary_cross_entropy_with_logits(numbers, score, reduction="none")
    samples = Segments.of(required(batch, "samples", spec.kind))
    right = ((numbers.detach() > 0) == (score > 0.5)).to(values.dtype)
    means = {
        "outcome_reward": samples.averages(numbers.detach()),
        "outcome_accuracy": samples.averages(right),
    }
    return TokenLoss(values=values, means=means)


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


def own_loss(spec: OwnLoss) -> Loss:
    """Returns the function of an own loss, with checks of each result.

    The user's function gets the logprobs `[R]` (or a critic's values) and a batch with the fields
    that it declares, `samples`, `pairs` and `entropy`; all other fields are None. It returns `[R]`,
    or a `TokenLoss`.

    Raises:
        TraceError: The function does not exist. When called: the function raises an error, or does
            not return a loss of each token; the message names its line.
        ValueError: When called: the batch does not have a declared field.
    """
    function = UserFunction.load("loss", spec.function, spec.options, spec.needs)
    hidden = {name: None for name in FIELDS if name not in spec.needs}

    def loss(logprobs: torch.Tensor, batch: TokenBatch, _: LossSpec) -> TokenLoss:
        missing = [name for name in spec.needs if _lacks(batch, name, spec)]
        if missing:
            raise ValueError(f"loss {spec.function} needs {' and '.join(missing)}")
        extra = {name: batch.extra[name] for name in spec.extra_fields}
        seen = replace(batch, extra=extra, weight_scale=None, penalised=None, **hidden)
        return _checked(function, function(logprobs, seen), logprobs)

    return loss


def _lacks(batch: TokenBatch, name: str, spec: OwnLoss) -> bool:
    return name not in batch.extra if name in spec.extra_fields else getattr(batch, name) is None


def _checked(function: UserFunction, result: object, logprobs: torch.Tensor) -> TokenLoss:
    terms = TokenLoss(values=result) if isinstance(result, torch.Tensor) else result
    expected = f"a tensor {shape_of(logprobs.shape)}, the loss of each response token"
    if not isinstance(terms, TokenLoss):
        raise function.refuse(
            "does not return a tensor",
            found=type(result).__name__,
            expected=f"{expected}, or a TokenLoss",
        )
    values = terms.values
    if values.shape != logprobs.shape:
        summed = "return a number a token; flowrl aggregates" if values.ndim == 0 else None
        raise function.refuse(
            "returns the wrong shape",
            found=shape_of(values.shape),
            expected=expected,
            hint=summed,
        )
    if not values.is_floating_point():
        raise function.refuse("does not return floats", found=str(values.dtype), expected=expected)
    if values.numel() and logprobs.requires_grad and not values.requires_grad:
        raise function.refuse(
            "has no gradient",
            found="values that do not depend on the logprobs",
            expected=expected,
            hint="compute with the logprobs as they are, without detach, .data or numpy",
        )
    wrong = torch.isnan(values.detach())
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise function.refuse(
            "returns NaN",
            found=f"at {int(wrong.sum())} of {len(values)} tokens, first token {place}, where the "
            f"logprob is {float(logprobs.detach()[place]):.6g}",
            expected="numbers",
        )
    return TokenLoss(
        values=values,
        means={name: _metric(function, name, each, values) for name, each in terms.means.items()},
        maxima={name: _metric(function, name, each, values) for name, each in terms.maxima.items()},
    )


def _metric(
    function: UserFunction, name: str, metric: object, values: torch.Tensor
) -> torch.Tensor:
    """Returns a metric without its gradient, which would keep the whole pass in memory."""
    if not isinstance(metric, torch.Tensor):
        kind, hint = type(metric).__name__, None
    elif metric.ndim != 1:
        kind, hint = shape_of(metric.shape), "do not reduce it; flowrl does, over the mini-batch"
    else:
        return metric.detach().to(values.dtype)
    raise function.refuse(
        f"gives a metric '{name}' of the wrong shape",
        found=kind,
        expected="a tensor of one dimension: a number a token, sample or pair",
        hint=hint,
    )
