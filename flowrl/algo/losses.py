"""The arguments and results of losses, and the composition of policy losses.

Losses get response tokens only, concatenated and without padding: every tensor is `[R]`. A loss
returns per-token values, which `aggregate` reduces to the mini-batch's number with weights whose
denominators count the whole mini-batch. The sum over micro-batches of the aggregated parts is
therefore the aggregate of the whole, for any split of the mini-batch between samples.

A policy loss is a surrogate, decorated with `policy_loss`, which computes the shared parts::

    L_t = keep_t * w_t * surrogate_t - entropy coefficient * H_t

with the importance weight w_t and the masks keep_t of `flowrl.algo.corrections`, both detached.

Two choices need the whole mini-batch before its micro-batches are computed: normalised importance
weights, whose mean is taken over the mini-batch, and KL-Cov, which ranks all its tokens. `prepare`
computes both, so that micro-batches add up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from flowrl.algo.corrections import Segments, importance_weights, rejection_mask, sequence_mask
from flowrl.specs.loss import Aggregation, CrossEntropy, KLCov, LossSpec, PolicyLoss
from flowrl.specs.loss.policy import RatioLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The fields that a loss may read besides the logprobs; float `[R]`, one a response token.

    Attributes:
        advantages: The weight of each token in the policy gradient.
        behaviour_logprobs: Logprobs of the policy that sampled the tokens.
        old_logprobs: Logprobs of the trained policy at the start of the step.
        reference_logprobs: Logprobs of the reference policy.
        entropy: The entropy of each token's distribution, with gradient; for an entropy bonus.
        samples: int64 `[R]`, equal for tokens of one sample. A batch holds whole samples, in any
            order; the numbers have no other meaning.
        old_values: A critic's values before the step.
        returns: A critic's targets.
        preferred: bool `[R]`, true at tokens of the preferred sample of their pair.
        pairs: int64 `[R]`, equal for tokens of one pair. A batch holds whole pairs.
        extra: Fields by name that the program computed for this loss.
        weight_scale: `[]`, the factor of importance weights that makes their mean over the
            mini-batch 1. None if this batch is the whole mini-batch.
        penalised: bool `[R]`, true at tokens that KL-Cov penalises. None if this batch is the whole
            mini-batch. `prepare` computes both.
    """

    advantages: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    preferred: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    weight_scale: torch.Tensor | None = None
    penalised: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The result of a loss.

    Attributes:
        values: `[R]`, the loss of each token, with gradient.
        means: Metrics without gradient, `[R]` or one a sample or pair; the mean over the mini-batch
            is reported.
        maxima: Metrics `[R]` without gradient; the maximum is reported.
    """

    values: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)


def required(batch: TokenBatch, name: str, reader: str) -> torch.Tensor:
    """Returns a field of the batch that `reader` needs; a ValueError without it."""
    value: torch.Tensor | None = getattr(batch, name)
    if value is None:
        raise ValueError(f"{reader} needs {name}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStep:
    """The arguments of a surrogate; all tensors are `[R]`.

    Attributes:
        logprobs: Logprobs of the policy that is trained, with gradient.
        advantages: The advantage of each token.
        batch: All other fields.
        spec: The specification of the loss.
    """

    logprobs: torch.Tensor
    advantages: torch.Tensor
    batch: TokenBatch
    spec: PolicyLoss

    @property
    def anchor(self) -> torch.Tensor:
        """The logprobs of the policy with which the trained policy is compared."""
        return required(self.batch, f"{self.spec.anchor}_logprobs", self.spec.kind)

    @property
    def gap(self) -> torch.Tensor:
        """Log-ratio to the anchor, with gradient and not clamped."""
        return self.logprobs - self.anchor

    @property
    def segments(self) -> Segments:
        """The samples of the tokens."""
        return Segments.of(required(self.batch, "samples", self.spec.kind))

    def ratio(self, level: RatioLevel) -> torch.Tensor:
        """The ratio to the anchor, with gradient; `RatioLevel` describes the levels."""
        if level == "token":
            return self.clamped(self.gap).exp()
        mean = self.segments.means(self.gap)
        if level == "sequence-token":
            mean = mean.detach() + self.logprobs - self.logprobs.detach()
        return self.clamped(mean).exp()

    def measured(self, values: torch.Tensor, level: RatioLevel) -> torch.Tensor:
        """Returns the values of a metric: `[R]`, or `[S]` if the ratio is a sample's.

        A sample that is clipped as a whole counts once, regardless of its length.
        """
        values = values.detach().to(self.logprobs.dtype)
        return self.segments.averages(values) if level == "sequence" else values

    def clamped(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Clamps the log-ratio to the bounds of the specification; no gradient outside."""
        low, high = self.spec.min_log_ratio, self.spec.max_log_ratio
        return log_ratio if low is None and high is None else log_ratio.clamp(low, high)


_P = TypeVar("_P", bound=PolicyLoss)
Surrogate: TypeAlias = Callable[[PolicyStep, _P], TokenLoss]
Loss: TypeAlias = Callable[[torch.Tensor, TokenBatch, LossSpec], TokenLoss]


def policy_loss(
    surrogate: Surrogate[_P],
) -> Callable[[torch.Tensor, TokenBatch, _P], TokenLoss]:
    """Makes a loss of a surrogate: adds weights, masks, the entropy bonus, and metrics.

    Metrics of all policy losses: with an anchor, `ratio_mean`, `ratio_max`, `log_ratio` (its
    negative mean is k1 of KL(anchor || policy)) and `approx_kl` (k3 of the same: ratio - 1 - log
    ratio); with a correction, `weight_mean` and `weight_max`; with a mask, `kept_fraction`. Means
    are over tokens; those of ratios, clips and weights that a surrogate computes once a sample are
    over samples.
    """

    @wraps(surrogate)
    def loss(logprobs: torch.Tensor, batch: TokenBatch, spec: _P) -> TokenLoss:
        missing = [name for name in spec.needs if getattr(batch, name) is None]
        if missing:
            raise ValueError(f"{spec.kind} needs {' and '.join(missing)}")
        advantages = required(batch, "advantages", spec.kind)
        step = PolicyStep(logprobs=logprobs, advantages=advantages, batch=batch, spec=spec)
        terms = _corrected(step, _measured(step, surrogate(step, spec)))
        if not spec.entropy:
            return terms
        entropy = required(batch, "entropy", f"the entropy bonus of {spec.kind}")
        return replace(terms, values=terms.values - spec.entropy * entropy)

    return loss


def _measured(step: PolicyStep, terms: TokenLoss) -> TokenLoss:
    if not step.spec.reads_anchor:
        return terms
    with torch.no_grad():
        gap = step.gap
        ratio = gap.exp()
        means = {"ratio_mean": ratio, "approx_kl": torch.expm1(gap) - gap, "log_ratio": gap}
    return replace(
        terms, means={**means, **terms.means}, maxima={"ratio_max": ratio, **terms.maxima}
    )


def _corrected(step: PolicyStep, terms: TokenLoss) -> TokenLoss:
    weights = policy_weights(step.batch, step.spec)
    keep = _kept(step)
    values, means, maxima = terms.values, dict(terms.means), dict(terms.maxima)
    if weights is not None:
        values = values * weights
        means["weight_mean"] = maxima["weight_max"] = weights
    if keep is not None:
        # Not a product: 0 times an infinite loss is NaN.
        values = torch.where(keep, values, torch.zeros_like(values))
        means["kept_fraction"] = keep.to(values.dtype)
    return TokenLoss(values=values, means=means, maxima=maxima)


def policy_weights(batch: TokenBatch, spec: PolicyLoss) -> torch.Tensor | None:
    """Returns the importance weights `[R]` of a loss, normalised if required; None without any."""
    if spec.weights == "none":
        return None
    weights = importance_weights(
        required(batch, "old_logprobs", spec.kind),
        required(batch, "behaviour_logprobs", spec.kind),
        _segments(batch, spec, spec.weights != "token"),
        level=spec.weights,
        outside=spec.weights_outside,
        low=spec.weights_low,
        high=spec.weights_high,
    )
    if spec.weights_normalise:
        scale = batch.weight_scale
        weights = weights * (1 / weights.mean() if scale is None else scale)
    return weights


def _kept(step: PolicyStep) -> torch.Tensor | None:
    """Returns bool `[R]`, true at tokens that are kept; None if nothing is masked."""
    spec, keep = step.spec, None
    if spec.rejection != "none":
        keep = rejection_mask(
            required(step.batch, "old_logprobs", step.spec.kind),
            required(step.batch, "behaviour_logprobs", step.spec.kind),
            _segments(step.batch, spec, spec.rejection != "token"),
            level=spec.rejection,
            estimator=spec.rejection_estimator,
            divergence=spec.rejection_divergence,
            low=spec.rejection_low,
            high=spec.rejection_high,
        )
    if spec.sequence_mask is not None:
        near = sequence_mask(
            step.logprobs, step.anchor, step.advantages, step.segments, spec.sequence_mask
        )
        keep = near if keep is None else keep & near
    return keep


def _segments(batch: TokenBatch, spec: PolicyLoss, needed: bool) -> Segments:
    if needed:
        return Segments.of(required(batch, "samples", spec.kind))
    none = torch.zeros(0, dtype=torch.int64)
    return Segments(none, none)


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
) -> npt.NDArray[np.float64]:
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
    number = np.arange(len(n))
    if aggregation == "prompt-mean-token-mean":
        if groups is None:
            raise ValueError(f"{aggregation} needs the groups of the samples")
        number = np.unique(np.asarray(groups), return_inverse=True)[1]
    tokens = np.bincount(number, weights=n)  # of each sample or prompt
    count = float(len(tokens) if count_empty else (tokens > 0).sum())
    count = max(count if num_samples is None else num_samples, 1.0)
    weights = (n > 0).astype(np.float64)
    match aggregation:
        case "token-mean":
            weights /= total
        case "sequence-mean-token-mean" | "prompt-mean-token-mean":
            weights /= np.maximum(tokens, 1)[number]
            weights /= count
        case "sequence-mean-token-sum":
            weights /= count
        case "constant":
            if max_tokens <= 0:
                raise ValueError(f"constant aggregation needs max_tokens > 0, not {max_tokens}")
            weights /= count
            weights /= max_tokens
    return weights * dp_size


def aggregate(values: torch.Tensor, token_weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of per-token losses, a scalar.

    Args:
        values: `[R]`, the loss of each token.
        token_weights: `[R]`, `sample_weights` of each token's sample.
    """
    return torch.dot(values, token_weights.to(values.dtype))


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss, ready to call.

    Attributes:
        spec: The specification of the loss.
        function: `(logprobs [R], batch, spec) -> TokenLoss`.
        proportional: True if value and gradient of a token are 0 if its advantage is 0.
    """

    spec: LossSpec
    function: Loss
    proportional: bool

    @property
    def aggregation(self) -> Aggregation:
        """The loss's aggregation; `token-mean` if the loss does not name one."""
        named: Aggregation = getattr(self.spec, "aggregation", "token-mean")
        return named

    def sample_weights(
        self, response_lengths: npt.ArrayLike, groups: npt.ArrayLike, *, max_tokens: int
    ) -> npt.NDArray[np.float64]:
        """Returns `[S]`, the weight of each sample's tokens in the loss of a whole mini-batch."""
        return sample_weights(
            response_lengths,
            self.aggregation,
            max_tokens=max_tokens,
            groups=groups,
            count_empty=self.spec.count_empty,
        )

    def __call__(self, logprobs: torch.Tensor, batch: TokenBatch) -> TokenLoss:
        terms = self.function(logprobs, batch, self.spec)
        if self.spec.scaled_by == 1:
            return terms
        return replace(terms, values=self.spec.scaled_by * terms.values)


def cross_entropy(logprobs: torch.Tensor, batch: TokenBatch, spec: CrossEntropy) -> TokenLoss:
    """Computes the negative log-likelihood: L = -logprob."""
    return TokenLoss(values=-logprobs)


def prepares(spec: LossSpec) -> Literal["nothing", "batch", "logprobs"]:
    """Returns the inputs of `prepare` for a loss: nothing, the batch, or also the logprobs."""
    if isinstance(spec, KLCov):
        return "logprobs"
    return "batch" if isinstance(spec, PolicyLoss) and spec.weights_normalise else "nothing"


def prepare(logprobs: torch.Tensor | None, batch: TokenBatch, spec: LossSpec) -> TokenBatch:
    """Adds to a mini-batch the fields that its micro-batches need from the whole of it.

    With data parallelism both arguments must be those of the whole mini-batch, of all ranks.

    Args:
        logprobs: `[N]`, the policy's logprobs before the update, without gradient; read if
            `prepares(spec)` is `logprobs`.
        batch: All N response tokens of the mini-batch.
        spec: The loss.

    Returns:
        The batch with `weight_scale` and `penalised`, of which a micro-batch takes its part.
    """
    if isinstance(spec, PolicyLoss) and spec.weights_normalise:
        weights = policy_weights(batch, replace(spec, weights_normalise=False))
        assert weights is not None
        batch = replace(batch, weight_scale=1 / weights.mean())
    if isinstance(spec, KLCov):
        if logprobs is None:
            raise ValueError("kl_cov ranks all tokens of a mini-batch by their logprobs")
        chosen = most_covariant(logprobs, required(batch, "advantages", spec.kind), spec.fraction)
        batch = replace(batch, penalised=chosen)
    return batch


def most_covariant(
    logprobs: torch.Tensor, advantages: torch.Tensor, fraction: float
) -> torch.Tensor:
    """Returns bool `[N]`, true at the tokens whose logprob and advantage covary most.

    There are max(1, floor(fraction * N)) of them. The covariance of a token is
    (A - mean A) * (logprob - mean logprob), with means over all N.
    """
    with torch.no_grad():
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        if len(covariance):
            count = min(len(covariance), max(1, int(fraction * len(covariance))))
            chosen[covariance.topk(count).indices] = True
        return chosen
