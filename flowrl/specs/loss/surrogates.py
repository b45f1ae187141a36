"""Policy losses by name: each surrogate, and the function by which a program spells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Unpack

from flowrl.specs.base import FromZero, Positive, Range, option
from flowrl.specs.loss.base import Aggregation
from flowrl.specs.loss.policy import (
    Outside,
    PolicyLoss,
    PolicyOptions,
    RatioLevel,
    RatioLoss,
    policy_fields,
)
from flowrl.specs.names import operation


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyClip(RatioLoss):
    """The clipped policy-gradient objective of PPO with separate bounds (DAPO's clip-higher).

    Attributes:
        clip_low, clip_high: The ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: The largest loss at negative advantage, in units of -advantage (dual-clip PPO;
            Ye et al., arXiv 1912.09729); more than 1. None for no bound.
        ratio_cap: The bound of the unclipped ratio (two-sided GRPO; INTELLECT-2, arXiv 2505.07291).
            If it is at least 1 + clip_high, it equals `dual_clip`. None for no bound.
        average_advantages: True to replace a sample's advantages by their mean over its tokens.
    """

    kind: ClassVar[str] = "policy_clip"

    clip_low: FromZero = 0.2
    clip_high: FromZero = 0.2
    aggregation: Aggregation = "token-mean"
    dual_clip: Annotated[float, Range(low=1.0, above=True)] | None = option(None)
    ratio_cap: Positive | None = option(None)
    average_advantages: bool = option(False)


@operation
def policy_clip(
    clip_low: float = 0.2,
    clip_high: float | None = None,
    *,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    ratio: RatioLevel = "token",
    average_advantages: bool = False,
    **options: Unpack[PolicyOptions],
) -> PolicyClip:
    """Returns the clipped objective of PPO; `clip_high` defaults to `clip_low`."""
    return PolicyClip(
        clip_low=clip_low,
        clip_high=clip_low if clip_high is None else clip_high,
        dual_clip=dual_clip,
        ratio_cap=ratio_cap,
        ratio=ratio,
        average_advantages=average_advantages,
        **policy_fields(options),
    )


def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    *,
    ratio: RatioLevel = "sequence",
    **options: Unpack[PolicyOptions],
) -> PolicyClip:
    """Returns group sequence policy optimization: the clipped objective of a sample's ratio.

    The bounds are those of the paper's experiments (Zheng et al., 2025, section 5.1).
    """
    options.setdefault("aggregation", "sequence-mean-token-mean")
    return policy_clip(clip_low, clip_high, ratio=ratio, **options)


def luspo(
    clip_low: float = 3e-4, clip_high: float = 4e-4, **options: Unpack[PolicyOptions]
) -> PolicyClip:
    """Returns length-unbiased GSPO: a sample's objective times its length (arXiv 2602.05261)."""
    options.setdefault("aggregation", "sequence-mean-token-sum")
    return policy_clip(clip_low, clip_high, ratio="sequence", **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(PolicyLoss):
    """The plain policy gradient, -A log pi: no ratio (Williams, 1992; GPG, arXiv 2504.02546)."""

    kind: ClassVar[str] = "reinforce"
    uses_anchor: ClassVar[bool] = False

    aggregation: Aggregation = "token-mean"


@operation
def reinforce(**options: Unpack[PolicyOptions]) -> Reinforce:
    """Returns the plain policy gradient of REINFORCE and GPG, without an off-policy correction."""
    return Reinforce(**policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(RatioLoss):
    """The policy gradient weighted by the detached, bounded ratio (MiniMax-M1, arXiv 2506.13585).

    Attributes:
        ratio_low, ratio_high: The bounds of the ratio itself, not offsets from 1; None for no upper
            bound.
        outside: `truncate` takes the bound (CISPO); `zero` drops the token.
    """

    kind: ClassVar[str] = "cispo"

    ratio_low: Annotated[float, Range(low=0.0, at_most="ratio_high")] = 0.0
    ratio_high: FromZero | None = 1.2
    aggregation: Aggregation = "token-mean"
    outside: Outside = option("truncate")


@operation
def cispo(
    eps_low: float = 1.0,
    eps_high: float = 0.2,
    *,
    cap: float | None = None,
    outside: Outside = "truncate",
    **options: Unpack[PolicyOptions],
) -> CISPO:
    """Returns clipped importance-sampling weights, detached: 1 - eps_low <= r <= 1 + eps_high.

    Args:
        eps_low: The offset of the lower bound.
        eps_high: The offset of the upper bound.
        cap: The upper bound itself, in place of 1 + eps_high.
        outside: `truncate` takes the bound (CISPO); `zero` drops the token.
        options: The options of every policy loss.
    """
    return CISPO(
        ratio_low=max(0.0, 1 - eps_low),
        ratio_high=1 + eps_high if cap is None else cap,
        outside=outside,
        **policy_fields(options),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE: ratios weigh negative samples only (arXiv 2503.14286).

    Attributes:
        positive_low, positive_high: The bounds of the detached ratio at advantages of 0 and more;
            1 and 1 in the paper.
        negative_low, negative_high: The same below 0; 0 and 1 in the paper.
        level: The level of the ratio: the whole sample (as in the paper) or each token.
    """

    kind: ClassVar[str] = "topr"

    positive_low: Annotated[float, Range(low=0.0, at_most="positive_high")] = 1.0
    positive_high: FromZero = 1.0
    negative_low: Annotated[float, Range(low=0.0, at_most="negative_high")] = 0.0
    negative_high: FromZero = 1.0
    aggregation: Aggregation = "sequence-mean-token-sum"
    level: Literal["sequence", "token"] = option("sequence")


@operation
def topr(**options: Unpack[PolicyOptions]) -> TOPR:
    """Returns tapered off-policy REINFORCE with the paper's bounds; `TOPR` takes others."""
    return TOPR(**policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class VESPO(PolicyLoss):
    """The policy gradient weighted by a gamma-shaped function of the sample's ratio.

    Variational sequence-level soft policy optimization (Shen et al., arXiv 2602.10693).

    Attributes:
        k_positive, lambda_positive: The shape and rate at advantages of 0 and more.
        k_negative, lambda_negative: The same below 0.
    """

    kind: ClassVar[str] = "vespo"

    k_positive: Positive = 2.0
    lambda_positive: Positive = 3.0
    k_negative: Positive = 3.0
    lambda_negative: Positive = 2.0
    aggregation: Aggregation = "token-mean"


@operation
def vespo(**options: Unpack[PolicyOptions]) -> VESPO:
    """Returns variational sequence-level soft policy optimization; `VESPO` takes other shapes."""
    return VESPO(**policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO(PolicyLoss):
    """The geometric mean of clipped token ratios (Zhao et al., arXiv 2507.20673).

    Attributes:
        clip_low, clip_high: The log-ratio of a token is clipped to [-clip_low, clip_high]; both are
            0.4 in the paper.
    """

    kind: ClassVar[str] = "gmpo"

    clip_low: FromZero = 0.4
    clip_high: FromZero = 0.4
    aggregation: Aggregation = "sequence-mean-token-mean"


@operation
def gmpo(
    clip_low: float = 0.4, clip_high: float | None = None, **options: Unpack[PolicyOptions]
) -> GMPO:
    """Returns geometric-mean policy optimization; `clip_high` defaults to `clip_low`."""
    high = clip_low if clip_high is None else clip_high
    return GMPO(clip_low=clip_low, clip_high=high, **policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO(RatioLoss):
    """A sigmoid gate in place of the clip: soft adaptive policy optimization (arXiv 2511.20347).

    Attributes:
        tau_positive, tau_negative: The temperatures of the gate at positive advantages, and else.
    """

    kind: ClassVar[str] = "sapo"

    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    aggregation: Aggregation = "sequence-mean-token-mean"


@operation
def sapo(
    tau_positive: float = 1.0, tau_negative: float = 1.05, **options: Unpack[PolicyOptions]
) -> SAPO:
    """Returns soft adaptive policy optimization."""
    return SAPO(tau_positive=tau_positive, tau_negative=tau_negative, **policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCov(PolicyLoss):
    """A penalty on the tokens whose logprob and advantage covary most (arXiv 2505.22617).

    Attributes:
        fraction: The fraction of the mini-batch's response tokens that are penalised; at least one
            token is.
        coefficient: The coefficient of the penalty |log policy - log anchor|.
    """

    kind: ClassVar[str] = "kl_cov"

    fraction: Annotated[float, Range(low=0.0, high=1.0, above=True)] = 0.0002
    coefficient: FromZero = 1.0
    aggregation: Aggregation = "token-mean"


@operation
def kl_cov(
    fraction: float = 0.0002, coefficient: float = 1.0, **options: Unpack[PolicyOptions]
) -> KLCov:
    """Returns the policy gradient with a penalty on the tokens of largest covariance."""
    return KLCov(fraction=fraction, coefficient=coefficient, **policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO(PolicyLoss):
    """Masks tokens whose probability moved too far, by total variation and not by ratio.

    Divergence proximal policy optimization, its binary form (Qi et al., arXiv 2602.04879).

    Attributes:
        limit: The largest difference of probabilities, policy - behaviour, in the direction of the
            advantage.
    """

    kind: ClassVar[str] = "dppo"

    limit: FromZero = 0.1
    aggregation: Aggregation = "token-mean"


@operation
def dppo(limit: float = 0.1, **options: Unpack[PolicyOptions]) -> DPPO:
    """Returns the policy gradient within a trust region of total variation."""
    return DPPO(limit=limit, **policy_fields(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kimi(PolicyLoss):
    """The policy gradient with a squared log-ratio of the sample (Kimi k1.5, arXiv 2501.12599).

    Attributes:
        tau: The weight of half the squared log-ratio to the anchor.
        level: The level of the log-ratio: the whole sample (as in the paper) or each token.
    """

    kind: ClassVar[str] = "kimi"

    tau: FromZero = 0.1
    aggregation: Aggregation = "sequence-mean-token-sum"
    level: Literal["sequence", "token"] = option("sequence")


@operation
def kimi(tau: float = 0.1, **options: Unpack[PolicyOptions]) -> Kimi:
    """Returns the policy gradient with a squared log-ratio, as in Kimi k1.5."""
    return Kimi(tau=tau, **policy_fields(options))
