"""The base of losses, and the losses that are not policy gradients.

The latter are cross-entropy (supervised fine-tuning), a critic's loss, DPO on pairs of answers, and
Bradley-Terry for reward models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.errors import TraceError
from flowrl.specs.base import Spec, option
from flowrl.specs.function import caller

__all__ = [
    "DPO",
    "Aggregation",
    "BradleyTerry",
    "CrossEntropy",
    "LossSpec",
    "PairForm",
    "PairLoss",
    "Prediction",
    "ValueClip",
    "bradley_terry",
    "cross_entropy",
    "dpo",
    "value_clip",
]


Aggregation: TypeAlias = Literal[
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "constant",
    "prompt-mean-token-mean",
]
"""How per-token losses become one number for a mini-batch.

- `token-mean`: sum over response tokens / number of response tokens (DAPO).
- `sequence-mean-token-mean`: mean over samples of each sample's token mean (GRPO as published).
- `sequence-mean-token-sum`: mean over samples of each sample's token sum.
- `constant`: sum over response tokens / (number of samples x max_tokens of the rollout) (Dr.GRPO).
- `prompt-mean-token-mean`: mean over prompts of the token mean over all samples of a prompt.

Every denominator counts the whole mini-batch, so the result does not depend on micro-batches.
"""


Prediction: TypeAlias = Literal["logprobs", "values", "scores"]
"""What a loss reads of the model.

- `logprobs`: of each response token.
- `values`: a value head's number before each response token (a critic).
- `scores`: a value head's number at the last token of each sample (a reward model).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(Spec):
    """Base of losses. A loss names its aggregation in a field `aggregation`; token-mean without.

    Attributes:
        count_empty: Whether samples without response tokens count in the denominators of means
            over samples (and prompts without any in those of means over prompts). They do by
            default, so that the weight of a sample does not depend on what happened to others.
        predicts: What of the model the loss reads: `logprobs` or `values` of each response token,
            or `scores`, one a sample.
        pairs: Whether samples come in pairs, the preferred one first, that no mini-batch and no
            micro-batch separates.
    """

    family: ClassVar[str] = "loss"
    predicts: ClassVar[Prediction] = "logprobs"
    pairs: ClassVar[bool] = False

    count_empty: bool = option(True)

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of the update's batch that the loss reads, beside tokens and response_mask."""
        return ()

    @property
    def extra_fields(self) -> tuple[str, ...]:
        """Fields of the user's own maps that the loss reads."""
        return ()

    @property
    def corrects_behaviour(self) -> bool:
        """Whether the loss corrects for samples of an older policy."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(LossSpec):
    """Negative log-likelihood of the response tokens: supervised fine-tuning."""

    kind: ClassVar[str] = "cross_entropy"
    aggregation: Aggregation = "token-mean"


def cross_entropy(*, aggregation: Aggregation = "token-mean") -> CrossEntropy:
    """Negative log-likelihood of the response tokens."""
    return CrossEntropy(aggregation=aggregation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueClip(LossSpec):
    """Half the squared error of a value, with the value's step clipped (PPO's reference code).

    Attributes:
        clip: The value is clipped to within this of the old value; None does not clip.
        form: `square`, half the square; or `huber`, linear beyond `delta`.
        delta: Of `huber`.
    """

    kind: ClassVar[str] = "value_clip"
    predicts: ClassVar[Prediction] = "values"

    clip: float | None = 0.2
    aggregation: Aggregation = "token-mean"
    form: Literal["square", "huber"] = option("square")
    delta: float = option(10.0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Returns, and the values before the step where these clip."""
        return ("returns",) if self.clip is None else ("returns", "old_values")


def value_clip(
    clip: float | None = 0.2,
    *,
    aggregation: Aggregation = "token-mean",
    form: Literal["square", "huber"] = "square",
    delta: float = 10.0,
) -> ValueClip:
    """The critic's loss; `clip=None` is the plain squared error."""
    return ValueClip(clip=clip, aggregation=aggregation, form=form, delta=delta)


PairForm: TypeAlias = Literal["sigmoid", "ipo"]
"""How DPO's reward difference becomes a loss.

- `sigmoid`: the negative log-likelihood of the preference (DPO).
- `ipo`: the squared distance of the log-ratio difference to 1 / (2 beta) (IPO; Azar et al., arXiv
  2310.12036, equation 17, whose tau is beta).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss(LossSpec):
    """Base of losses on pairs. The loss of a mini-batch is the mean over its pairs.

    Each token of a pair carries the pair's loss, so that the mean over samples of token means is
    the mean over pairs; other aggregations would weigh pairs by their lengths, and are not offered.
    """

    pairs: ClassVar[bool] = True
    aggregation: ClassVar[Aggregation] = "sequence-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(PairLoss):
    """Direct preference optimization (Rafailov et al., arXiv 2305.18290).

    Attributes:
        beta: Strength of the pull to the reference policy.
        label_smoothing: Probability that a preference is the wrong way round (conservative DPO;
            Mitchell, "A note on DPO with noisy preferences", 2023).
        form: How the reward difference becomes a loss.
    """

    kind: ClassVar[str] = "dpo"

    beta: float = 0.1
    label_smoothing: float = option(0.0)
    form: PairForm = option("sigmoid")

    @property
    def needs(self) -> tuple[str, ...]:
        """The reference's logprobs, and which sample of a pair is preferred."""
        return ("reference_logprobs", "preferred")

    @property
    def corrects_behaviour(self) -> bool:
        """Pairs may come from any policy: the loss takes no expectation over the trained one."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry(PairLoss):
    """The loss of a reward model on pairs (Ouyang et al., arXiv 2203.02155, equation 1).

    Attributes:
        margin: By how much the preferred sample's score should be larger (Touvron et al., Llama 2,
            2023, equation 2).
        centering: Coefficient of the squared sum of a pair's scores, which holds their mean at 0
            (Eisenstein et al., arXiv 2312.09244, equation 2).
    """

    kind: ClassVar[str] = "bradley_terry"
    predicts: ClassVar[Prediction] = "scores"

    margin: float = option(0.0)
    centering: float = option(0.0)

    @property
    def needs(self) -> tuple[str, ...]:
        """Which sample of a pair is preferred."""
        return ("preferred",)

    @property
    def corrects_behaviour(self) -> bool:
        """Pairs may come from any policy."""
        return True


def dpo(
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    form: Literal["sigmoid", "ipo"] = "sigmoid",
) -> DPO:
    """Direct preference optimization on pairs of answers."""
    if not _is_number(beta) or beta <= 0:
        raise TraceError(
            "dpo's beta is not positive", where=caller(), found=repr(beta), expected="more than 0"
        )
    if not _is_number(label_smoothing) or not 0 <= label_smoothing < 0.5:
        raise TraceError(
            "dpo's label_smoothing is no probability of a wrong preference",
            where=caller(),
            found=repr(label_smoothing),
            expected="0 to less than 0.5",
        )
    if label_smoothing and form == "ipo":
        raise TraceError(
            "label_smoothing has no meaning in IPO, whose target is finite already",
            where=caller(),
            found=f"form='ipo', label_smoothing={label_smoothing}",
            hint="leave label_smoothing out, or use form='sigmoid'",
        )
    return DPO(beta=beta, label_smoothing=label_smoothing, form=form)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bradley_terry(*, margin: float = 0.0, centering: float = 0.0) -> BradleyTerry:
    """The loss of a reward model on pairs of answers."""
    return BradleyTerry(margin=margin, centering=centering)
