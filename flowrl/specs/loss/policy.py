"""Policy losses by name. Each is a *surrogate*, and shares with the others everything else.

A policy loss is composed of four choices::

    log-ratio to an anchor, at a level  ->  surrogate  ->  correction and masks  ->  aggregation

The surrogates are the classes below; the rest are fields of `PolicyLoss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import option
from flowrl.specs.loss.base import Aggregation, LossSpec
from flowrl.specs.loss.correction import (
    Anchor,
    Correction,
    Divergence,
    Estimator,
    Outside,
    Rejection,
    RejectionLevel,
    WeightLevel,
)

__all__ = [
    "CISPO",
    "DPPO",
    "GMPO",
    "SAPO",
    "TOPR",
    "VESPO",
    "KLCov",
    "Kimi",
    "PolicyClip",
    "PolicyLoss",
    "RatioLevel",
    "RatioLoss",
    "Reinforce",
]

RatioLevel: TypeAlias = Literal["token", "sequence", "sequence-token"]
"""The ratio of the trained policy to its anchor at a token.

- `token`: of the token's probabilities.
- `sequence`: the geometric mean over the sample, the same at each token, differentiated as such
  (GSPO; Zheng et al., arXiv 2507.18071, equation 7).
- `sequence-token`: of the same value, with each token's gradient that of its own logprob times
  the token's own advantage (GSPO-token, equation 14). Equal to `sequence` where all tokens of a
  sample have one advantage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(LossSpec):
    """Base of policy losses.

    Attributes:
        anchor: The policy that the trained one is compared with.
        min_log_ratio, max_log_ratio: Clamp of the log-ratio to the anchor before it is
            exponentiated; no gradient flows outside. None, the default, clamps nothing, as in the
            papers: extreme ratios are the surrogate's business.
        weights: Level of the importance weights old / behaviour; `none` has none.
        weights_outside: What becomes of weights outside their bounds.
        weights_low, weights_high: The bounds; None has no upper one.
        weights_normalise: Divide weights by their mean over the mini-batch's response tokens.
        rejection: What is removed for the gap between old and behaviour policy.
        rejection_estimator: How the gap is measured.
        rejection_divergence: Of which of the two divergences between them.
        rejection_low, rejection_high: The bounds within which it is kept; None has none.
        sequence_mask: Tokens of negative advantage are removed in samples whose mean of
            log anchor - log policy exceeds this (off-policy sequence mask; DeepSeek-V3.2, 2025,
            equations 8 and 9). None removes nothing.
        entropy: Coefficient of the entropy bonus: minus this times the entropy of each token's
            distribution is added.
    """

    anchor: Anchor = option("behaviour")
    min_log_ratio: float | None = option(None)
    max_log_ratio: float | None = option(None)
    weights: WeightLevel = option("none")
    weights_outside: Outside = option("truncate")
    weights_low: float = option(0.0)
    weights_high: float | None = option(None)
    weights_normalise: bool = option(False)
    rejection: RejectionLevel = option("none")
    rejection_estimator: Estimator = option("k3")
    rejection_divergence: Divergence = option("behaviour-old")
    rejection_low: float | None = option(None)
    rejection_high: float | None = option(None)
    sequence_mask: float | None = option(None)
    entropy: float = option(0.0)

    uses_anchor: ClassVar[bool] = True
    """Whether the surrogate itself compares the policy with its anchor."""

    @property
    def reads_anchor(self) -> bool:
        """Whether anything compares the policy with its anchor."""
        return self.uses_anchor or self.sequence_mask is not None

    @property
    def compares_old(self) -> bool:
        """Whether old and behaviour policy are compared."""
        return self.weights != "none" or self.rejection != "none"

    @property
    def needs(self) -> tuple[str, ...]:
        """Advantages, and the logprobs of the policies that are compared."""
        behaviour = self.compares_old or (self.reads_anchor and self.anchor == "behaviour")
        old = self.compares_old or (self.reads_anchor and self.anchor == "old")
        found = ["advantages"]
        found += ["behaviour_logprobs"] if behaviour else []
        found += ["old_logprobs"] if old else []
        return tuple(found)

    @property
    def corrects_behaviour(self) -> bool:
        """Whether the ratio, or a weight, is to the policy that drew the tokens."""
        anchored = self.uses_anchor and self.anchor == "behaviour"
        return anchored or self.weights != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioLoss(PolicyLoss):
    """Base of policy losses whose ratio may be a token's or a sample's.

    Attributes:
        ratio: The level of the ratio.
    """

    ratio: RatioLevel = option("token")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyClip(RatioLoss):
    """The clipped policy-gradient objective of PPO with separate bounds (DAPO's clip-higher).

    Attributes:
        clip_low, clip_high: The ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: Largest loss at negative advantage, in units of -advantage (dual-clip PPO; Ye et
            al., arXiv 1912.09729); more than 1. None has none.
        ratio_cap: Bound of the unclipped ratio (two-sided GRPO; INTELLECT-2, arXiv 2505.07291).
            At least 1 + clip_high it equals `dual_clip`. None has none.
        average_advantages: Replace the advantages of a sample by their mean over its tokens.
    """

    kind: ClassVar[str] = "policy_clip"

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token-mean"
    dual_clip: float | None = option(None)
    ratio_cap: float | None = option(None)
    average_advantages: bool = option(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(PolicyLoss):
    """The plain policy gradient, -A log pi: no ratio (Williams, 1992; GPG, arXiv 2504.02546)."""

    kind: ClassVar[str] = "reinforce"
    uses_anchor: ClassVar[bool] = False

    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(RatioLoss):
    """The policy gradient weighted by the detached, bounded ratio (MiniMax-M1, arXiv 2506.13585).

    Attributes:
        ratio_low, ratio_high: Bounds of the ratio itself, not offsets from 1; None has no upper.
        outside: `truncate` takes the bound (CISPO); `zero` drops the token.
    """

    kind: ClassVar[str] = "cispo"

    ratio_low: float = 0.0
    ratio_high: float | None = 1.2
    aggregation: Aggregation = "token-mean"
    outside: Outside = option("truncate")


@dataclass(frozen=True, slots=True, kw_only=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE: ratios weigh negative samples only (arXiv 2503.14286).

    Attributes:
        positive_low, positive_high: Bounds of the detached ratio at advantages of 0 and more; the
            paper's are 1 and 1.
        negative_low, negative_high: The same below 0; the paper's are 0 and 1.
        level: The ratio's: of the whole sample (the paper's) or of each token.
    """

    kind: ClassVar[str] = "topr"

    positive_low: float = 1.0
    positive_high: float = 1.0
    negative_low: float = 0.0
    negative_high: float = 1.0
    aggregation: Aggregation = "sequence-mean-token-sum"
    level: Literal["sequence", "token"] = option("sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class VESPO(PolicyLoss):
    """The policy gradient weighted by a gamma-shaped function of the sample's ratio.

    Variational sequence-level soft policy optimization (Shen et al., arXiv 2602.10693).

    Attributes:
        k_positive, lambda_positive: Shape and rate at advantages of 0 and more.
        k_negative, lambda_negative: The same below 0.
    """

    kind: ClassVar[str] = "vespo"

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO(PolicyLoss):
    """The geometric mean of clipped token ratios (Zhao et al., arXiv 2507.20673).

    Attributes:
        clip_low, clip_high: The log-ratio of a token is clipped to [-clip_low, clip_high]; the
            paper's are 0.4 and 0.4.
    """

    kind: ClassVar[str] = "gmpo"

    clip_low: float = 0.4
    clip_high: float = 0.4
    aggregation: Aggregation = "sequence-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO(RatioLoss):
    """A sigmoid gate in place of the clip: soft adaptive policy optimization (arXiv 2511.20347).

    Attributes:
        tau_positive, tau_negative: Temperatures of the gate at positive advantages, and at others.
    """

    kind: ClassVar[str] = "sapo"

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    aggregation: Aggregation = "sequence-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCov(PolicyLoss):
    """A penalty on the tokens whose logprob and advantage covary most (arXiv 2505.22617).

    Attributes:
        fraction: Of the mini-batch's response tokens that are penalised; at least one token is.
        coefficient: Of the penalty |log policy - log anchor|.
    """

    kind: ClassVar[str] = "kl_cov"

    fraction: float = 0.0002
    coefficient: float = 1.0
    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO(PolicyLoss):
    """Masks tokens whose probability moved too far, by total variation and not by ratio.

    Divergence proximal policy optimization, its binary form (Qi et al., arXiv 2602.04879).

    Attributes:
        limit: Largest |policy - behaviour| probability in the direction of the advantage.
    """

    kind: ClassVar[str] = "dppo"

    limit: float = 0.1
    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kimi(PolicyLoss):
    """The policy gradient with a squared log-ratio of the sample (Kimi k1.5, arXiv 2501.12599).

    Attributes:
        tau: Weight of half the squared log-ratio to the anchor.
        level: The log-ratio's: of the whole sample (the paper's) or of each token.
    """

    kind: ClassVar[str] = "kimi"

    tau: float = 0.1
    aggregation: Aggregation = "sequence-mean-token-sum"
    level: Literal["sequence", "token"] = option("sequence")


def correction_fields(
    correction: Correction | None, rejection: Rejection | None
) -> dict[str, str | float | bool | None]:
    """The fields of a `PolicyLoss` that a correction and a rejection set."""
    found: dict[str, str | float | bool | None] = {}
    if correction is not None:
        found |= {
            "weights": correction.level,
            "weights_outside": correction.outside,
            "weights_low": correction.low,
            "weights_high": correction.high,
            "weights_normalise": correction.normalise,
        }
    if rejection is not None:
        found |= {
            "rejection": rejection.level,
            "rejection_estimator": rejection.estimator,
            "rejection_divergence": rejection.divergence,
            "rejection_low": rejection.low,
            "rejection_high": rejection.high,
        }
    return found
