"""Losses on pairs of answers by name: DPO for policies, Bradley-Terry for reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.errors import TraceError
from flowrl.specs.base import option
from flowrl.specs.function import caller
from flowrl.specs.loss.base import Aggregation, LossSpec, Prediction

__all__ = ["DPO", "BradleyTerry", "PairForm", "PairLoss", "bradley_terry", "dpo"]

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
