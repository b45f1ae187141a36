"""The shared parts of policy losses: the anchor, importance weights, rejection, and options.

Up to three policies are involved: *behaviour* (the engine's, which sampled the tokens), *old* (the
trainer's at the start of the step, recomputed), and the one that is trained. A policy loss is
composed of four choices::

    log-ratio to an anchor, at a level  ->  surrogate  ->  correction and masks  ->  aggregation

The anchor is the behaviour or the old policy. With the old policy as anchor, a correction weighs
each token by old / behaviour, and a rejection removes tokens or samples where the two are too far
apart. Both are factors without gradient. `flowrl.specs.loss.surrogates` holds the surrogates; the
other choices are fields of `PolicyLoss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict

from flowrl.specs.base import Finite, FromZero, Range, Wrong, option
from flowrl.specs.loss.base import Aggregation, LossSpec
from flowrl.specs.names import operation
from flowrl.user_lines import trace_error

Anchor: TypeAlias = Literal["behaviour", "old"]
"""The policy with which the trained policy is compared. `behaviour` needs no further correction;
`old` is the proximal policy of decoupled PPO (Hilton et al., "Batch size-invariance for policy
optimization", arXiv 2110.00641; AReaL, arXiv 2505.24298)."""


RatioLevel: TypeAlias = Literal["token", "sequence", "sequence-token"]
"""The ratio of the trained policy to its anchor at a token.

- `token`: the ratio of the token's probabilities.
- `sequence`: the geometric mean over the sample, the same at each token, differentiated as such
  (GSPO; Zheng et al., arXiv 2507.18071, equation 7).
- `sequence-token`: the same value, but each token's gradient is that of its own logprob times the
  token's own advantage (GSPO-token, equation 14). Equal to `sequence` if all tokens of a sample
  have one advantage.
"""


WeightLevel: TypeAlias = Literal["none", "token", "sequence", "geometric"]
"""The ratio old / behaviour: of the token, its product over a sample, or its geometric mean."""


Outside: TypeAlias = Literal["truncate", "zero"]
"""The value of a weight outside its bounds: the bound (TIS), or 0 (IcePop, MIS)."""


RejectionLevel: TypeAlias = Literal[
    "none", "token", "sequence-mean", "sequence-sum", "sequence-max"
]
"""The unit of rejection: each token by itself, or each sample by a statistic of its tokens."""


Estimator: TypeAlias = Literal["k1", "k2", "k3"]
"""The estimator of the divergence at a token, in nats, with d = log old - log behaviour: k1 = -d,
k2 = d^2 / 2, k3 = exp(d) - 1 - d; for the reverse divergence, the same with -d in place of d."""


Divergence: TypeAlias = Literal["behaviour-old", "old-behaviour"]
"""The direction of the estimated divergence.

- `behaviour-old` (default): KL(behaviour || old), which samples of the behaviour policy estimate
  without bias (verl).
- `old-behaviour`: the formula of KL(old || behaviour) at the same samples (AReaL).

k2 is the same for both.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance weights old / behaviour, made by `truncate` and `mask_outside`.

    `PolicyLoss` has the same fields.
    """

    weights: WeightLevel
    weights_outside: Outside
    weights_low: float
    weights_high: float | None
    weights_normalise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Bounds on the gap between old and behaviour policy, made by `reject`.

    `PolicyLoss` has the same fields.
    """

    rejection: RejectionLevel
    rejection_estimator: Estimator
    rejection_divergence: Divergence
    rejection_low: float | None
    rejection_high: float | None


@operation
def truncate(
    high: float | None = 2.0,
    *,
    low: float = 0.0,
    level: WeightLevel = "token",
    normalise: bool = False,
) -> Correction:
    """Returns weights of truncated importance sampling.

    (TIS; Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025.)

    Args:
        high: The largest weight; None for no upper bound.
        low: The smallest weight.
        level: The ratio that is the weight.
        normalise: True to divide the weights by their mean over the mini-batch's response tokens.
    """
    return _weights("truncate", low, high, level, normalise)


@operation
def mask_outside(
    low: float = 0.5,
    high: float | None = 2.0,
    *,
    level: WeightLevel = "token",
    normalise: bool = False,
) -> Correction:
    """Returns importance weights that are 0 outside `[low, high]`.

    (IcePop, Ling team, 2025, for tokens.)
    """
    return _weights("zero", low, high, level, normalise)


def _weights(
    outside: Outside, low: float, high: float | None, level: WeightLevel, normalise: bool
) -> Correction:
    return Correction(
        weights=level,
        weights_outside=outside,
        weights_low=low,
        weights_high=high,
        weights_normalise=normalise,
    )


@operation
def reject(
    *,
    low: float | None = None,
    high: float | None = None,
    level: RejectionLevel = "token",
    estimator: Estimator = "k3",
    divergence: Divergence = "behaviour-old",
) -> Rejection:
    """Returns a rejection of tokens or samples whose gap is outside `[low, high]`, in nats.

    Denominators still count them. A geometric-mean ratio old / behaviour within [a, b] is
    `level="sequence-mean", estimator="k1"` with the bounds -log b and -log a, or with
    `divergence="old-behaviour"` log a and log b.
    """
    return Rejection(
        rejection=level,
        rejection_estimator=estimator,
        rejection_divergence=divergence,
        rejection_low=low,
        rejection_high=high,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(LossSpec):
    """The base of policy losses.

    Attributes:
        anchor: The policy with which the trained policy is compared.
        min_log_ratio, max_log_ratio: The bounds to which the log-ratio to the anchor is clamped
            before it is exponentiated; outside them, the gradient is 0. None, the default, clamps
            nothing, as in the papers.
        weights: The level of the importance weights old / behaviour; `none` for no weights.
        weights_outside: The value of weights outside their bounds.
        weights_low, weights_high: The bounds; None for no upper bound.
        weights_normalise: True to divide weights by their mean over the mini-batch's response
            tokens.
        rejection: The unit that is removed for the gap between old and behaviour policy.
        rejection_estimator: The estimator of the gap.
        rejection_divergence: The direction of the divergence between them.
        rejection_low, rejection_high: The bounds within which tokens are kept; None for no bound.
        sequence_mask: The bound of a sample's mean of log anchor - log policy beyond which its
            tokens of negative advantage are removed (off-policy sequence mask; DeepSeek-V3.2, 2025,
            equations 8 and 9). None removes nothing.
        entropy: The coefficient of the entropy bonus: the loss of a token is reduced by this times
            the entropy of its distribution.
    """

    anchor: Anchor = option("behaviour")
    min_log_ratio: Annotated[float, Range(at_most="max_log_ratio")] | None = option(None)
    max_log_ratio: float | None = option(None)
    weights: WeightLevel = option("none")
    weights_outside: Outside = option("truncate")
    weights_low: Annotated[float, Range(low=0.0, at_most="weights_high")] = option(0.0)
    weights_high: FromZero | None = option(None)
    weights_normalise: bool = option(False)
    rejection: RejectionLevel = option("none")
    rejection_estimator: Estimator = option("k3")
    rejection_divergence: Divergence = option("behaviour-old")
    rejection_low: Annotated[float, Range(at_most="rejection_high")] | None = option(None)
    rejection_high: float | None = option(None)
    sequence_mask: float | None = option(None)
    entropy: Finite = option(0.0)

    uses_anchor: ClassVar[bool] = True
    """True if the surrogate itself compares the policy with its anchor."""

    @property
    def reads_anchor(self) -> bool:
        """True if the surrogate or a mask compares the policy with its anchor."""
        return self.uses_anchor or self.sequence_mask is not None

    @property
    def compares_old(self) -> bool:
        """True if the old and the behaviour policy are compared."""
        return self.weights != "none" or self.rejection != "none"

    @property
    def needs(self) -> tuple[str, ...]:
        """The advantages, and the logprobs of the policies that are compared."""
        behaviour = self.compares_old or (self.reads_anchor and self.anchor == "behaviour")
        old = self.compares_old or (self.reads_anchor and self.anchor == "old")
        names = ["advantages"]
        names += ["behaviour_logprobs"] if behaviour else []
        names += ["old_logprobs"] if old else []
        return tuple(names)

    @property
    def corrects_behaviour(self) -> bool:
        """True if the ratio, or a weight, is to the policy that sampled the tokens."""
        anchored = self.uses_anchor and self.anchor == "behaviour"
        return anchored or self.weights != "none"

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a rejection without a bound."""
        if self.rejection != "none" and self.rejection_low is self.rejection_high is None:
            yield "rejection", self.rejection, "a bound, low or high, beyond which it removes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioLoss(PolicyLoss):
    """The base of policy losses whose ratio may be a token's or a sample's.

    Attributes:
        ratio: The level of the ratio.
    """

    ratio: RatioLevel = option("token")


class PolicyOptions(TypedDict, total=False):
    """The options of every policy loss besides its own numbers; `PolicyLoss` documents them.

    `correction` and `rejection` make the old policy the anchor, unless `anchor` is given.
    """

    aggregation: Aggregation
    anchor: Anchor
    correction: Correction | None
    rejection: Rejection | None
    sequence_mask: float | None
    entropy: float
    min_log_ratio: float | None
    max_log_ratio: float | None
    count_empty: bool


def policy_fields(options: PolicyOptions) -> dict[str, Any]:
    """Returns the options of a policy loss as fields of its specification.

    Raises:
        TraceError: Options contradict each other.
    """
    values: dict[str, Any] = dict(options)
    correction, rejection = values.pop("correction", None), values.pop("rejection", None)
    for name, value, kind, made_by in (
        ("correction", correction, Correction, "fl.loss.truncate() or fl.loss.mask_outside()"),
        ("rejection", rejection, Rejection, "fl.loss.reject(high=...)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise trace_error(
                f"this is not a {name} of a policy loss",
                found=repr(value),
                expected=f"the result of {made_by}, or None",
            )
    if correction is not None and values.get("anchor") == "behaviour":
        raise trace_error(
            "a ratio to the behaviour policy needs no importance weights: they would count twice",
            found="anchor='behaviour' with a correction",
            hint="omit anchor: with a correction it is the old policy",
        )
    if correction is not None or rejection is not None:
        values.setdefault("anchor", "old")
    return values | correction_fields(correction, rejection)


def correction_fields(*parts: Correction | Rejection | None) -> dict[str, Any]:
    """Returns the fields of a `PolicyLoss` that a correction and a rejection set."""
    return {name: value for part in parts if part for name, value in asdict(part).items()}
