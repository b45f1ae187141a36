"""The base of losses, and the losses that are not policy gradients.

The latter are cross-entropy (supervised fine-tuning), a critic's loss, DPO on pairs of answers,
Bradley-Terry for reward models, and losses of models that predict the outcome of a response.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, NoReturn, Self, TypeAlias

from flowrl.specs.base import FromZero, Positive, Range, Spec, Wrong, option
from flowrl.specs.names import operation
from flowrl.specs.user_functions import names_among
from flowrl.user_lines import trace_error

Aggregation: TypeAlias = Literal[
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "constant",
    "prompt-mean-token-mean",
]
"""The reduction of per-token losses to one number for a mini-batch.

- `token-mean`: sum over response tokens / number of response tokens (DAPO).
- `sequence-mean-token-mean`: mean over samples of each sample's token mean (GRPO as published).
- `sequence-mean-token-sum`: mean over samples of each sample's token sum.
- `constant`: sum over response tokens / (number of samples x max_tokens of the rollout) (Dr.GRPO).
- `prompt-mean-token-mean`: mean over prompts of the token mean over all samples of a prompt.

Every denominator counts the whole mini-batch, so the result does not depend on micro-batches.
"""


Prediction: TypeAlias = Literal["logprobs", "values", "scores", "token_scores"]
"""The model's output that a loss reads.

- `logprobs`: the logprob of each response token.
- `values`: the output of a value head before each response token (a critic).
- `scores`: the output of a value head at the last token of each sample (a reward model).
- `token_scores`: that output at each response token (a process reward model).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(Spec):
    """The base of losses. The field `aggregation` names a loss's aggregation; default token-mean.

    `0.1 * loss` is the loss with another `scaled_by`.

    Attributes:
        count_empty: True if samples without response tokens count in the denominators of means over
            samples (and prompts without any in those of means over prompts). This is the default,
            so that the weight of a sample does not depend on other samples.
        scaled_by: The factor of the whole loss, its entropy bonus included. A KL penalty of the
            update has a coefficient of its own.
        predicts: The model's output that the loss reads: `logprobs` or `values` of each response
            token, or `scores`, one a sample.
        pairs: True if samples come in pairs, the preferred one first, which no mini-batch and no
            micro-batch separates.
    """

    family: ClassVar[str] = "loss"
    predicts: ClassVar[Prediction] = "logprobs"
    pairs: ClassVar[bool] = False
    _needs: ClassVar[tuple[str, ...]] = ()
    _extra_fields: ClassVar[tuple[str, ...]] = ()
    _corrects_behaviour: ClassVar[bool] = False

    count_empty: bool = option(True)
    scaled_by: Annotated[float, Range(low=0.0, above=True, finite=True)] = option(1.0)

    def __mul__(self, factor: object) -> Self:
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if is_number and 0 < float(factor) < math.inf:  # type: ignore[arg-type]
            return replace(self, scaled_by=self.scaled_by * float(factor))  # type: ignore[arg-type]
        hint = "weigh samples with advantages, and terms of a sum with numbers"
        if is_number and factor == 0:
            hint = "leave the update or the term out, inside `if weight:` where a setting decides"
        elif is_number:
            hint = "what is maximised has no bound; write a loss of your own that has one"
        raise trace_error(
            f"the loss {self.kind} cannot be multiplied by this",
            found=repr(factor),
            expected="a finite number above 0",
            hint=hint,
        )

    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return self * -1

    def __add__(self, other: object) -> NoReturn:
        raise trace_error(
            "losses are not added with + or with Python's sum",
            found=f"{self.kind} and {getattr(other, 'kind', repr(other))}",
            expected="a sum of terms, each with its samples and its loss",
            hint="write actor.update(fl.sum(fl.term(rollout, advantages=..., loss=...), "
            "0.1 * fl.term(rollout, loss=...)))",
        )

    __radd__ = __add__

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of the update's batch that the loss reads besides tokens and response_mask."""
        return self._needs

    @property
    def extra_fields(self) -> tuple[str, ...]:
        """The fields of own maps that the loss reads, and the score."""
        return self._extra_fields

    @property
    def corrects_behaviour(self) -> bool:
        """True if the loss corrects for samples of an older policy."""
        return self._corrects_behaviour


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(LossSpec):
    """Negative log-likelihood of the response tokens: supervised fine-tuning."""

    kind: ClassVar[str] = "cross_entropy"
    aggregation: Aggregation = "token-mean"


@operation
def cross_entropy(*, aggregation: Aggregation = "token-mean") -> CrossEntropy:
    """Returns the negative log-likelihood of the response tokens."""
    return CrossEntropy(aggregation=aggregation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueClip(LossSpec):
    """Half the squared error of a value, with the value's step clipped (PPO's reference code).

    Attributes:
        clip: The largest distance of the clipped value from the old value; None does not clip.
        form: `square`, half the square; or `huber`, linear beyond `delta`.
        delta: The error from which `huber` is linear.
    """

    kind: ClassVar[str] = "value_clip"
    predicts: ClassVar[Prediction] = "values"

    clip: FromZero | None = 0.2
    aggregation: Aggregation = "token-mean"
    form: Literal["square", "huber"] = option("square")
    delta: Positive = option(10.0)

    @property
    def needs(self) -> tuple[str, ...]:
        """The returns, and with a clip the values before the step."""
        return ("returns",) if self.clip is None else ("returns", "old_values")


@operation
def value_clip(
    clip: float | None = 0.2,
    *,
    aggregation: Aggregation = "token-mean",
    form: Literal["square", "huber"] = "square",
    delta: float = 10.0,
) -> ValueClip:
    """Returns the critic's loss; `clip=None` is the plain squared error."""
    return ValueClip(clip=clip, aggregation=aggregation, form=form, delta=delta)


PairForm: TypeAlias = Literal["sigmoid", "ipo"]
"""The loss as a function of DPO's reward difference.

- `sigmoid`: the negative log-likelihood of the preference (DPO).
- `ipo`: the squared distance of the log-ratio difference to 1 / (2 beta) (IPO; Azar et al., arXiv
  2310.12036, equation 17, whose tau is beta).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss(LossSpec):
    """The base of losses on pairs. The loss of a mini-batch is the mean over its pairs.

    Each token of a pair carries the pair's loss, so that the mean over samples of token means is
    the mean over pairs. Other aggregations would weigh pairs by their lengths, so there are none.
    Pairs may come from any policy, as the losses have no expectation over the policy.
    """

    pairs: ClassVar[bool] = True
    _corrects_behaviour: ClassVar[bool] = True
    aggregation: ClassVar[Aggregation] = "sequence-mean-token-mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(PairLoss):
    """Direct preference optimization (Rafailov et al., arXiv 2305.18290).

    Attributes:
        beta: The factor of the log-ratios; larger values keep the policy closer to the reference.
        label_smoothing: The probability that a preference is reversed (conservative DPO; Mitchell,
            "A note on DPO with noisy preferences", 2023).
        form: The loss as a function of the reward difference.
    """

    kind: ClassVar[str] = "dpo"
    _needs: ClassVar[tuple[str, ...]] = ("reference_logprobs", "preferred")

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Range(low=0.0, high=0.5)] = option(0.0)
    form: PairForm = option("sigmoid")

    def conflicts(self) -> Iterator[Wrong]:
        """Yields the label smoothing of IPO, which has no meaning."""
        if self.form == "ipo" and self.label_smoothing:
            yield "label_smoothing", self.label_smoothing, "0 in IPO, which is finite without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry(PairLoss):
    """The loss of a reward model on pairs (Ouyang et al., arXiv 2203.02155, equation 1).

    Attributes:
        margin: The difference by which the preferred sample's score should be larger (Touvron et
            al., Llama 2, 2023, equation 2).
        centering: The coefficient of the squared sum of a pair's scores, which keeps their mean
            near 0 (Eisenstein et al., arXiv 2312.09244, equation 2).
    """

    kind: ClassVar[str] = "bradley_terry"
    predicts: ClassVar[Prediction] = "scores"
    _needs: ClassVar[tuple[str, ...]] = ("preferred",)

    margin: float = option(0.0)
    centering: FromZero = option(0.0)


@operation
def dpo(
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    form: PairForm = "sigmoid",
) -> DPO:
    """Returns direct preference optimization on pairs of answers."""
    return DPO(beta=beta, label_smoothing=label_smoothing, form=form)


@operation
def bradley_terry(*, margin: float = 0.0, centering: float = 0.0) -> BradleyTerry:
    """Returns the loss of a reward model on pairs of answers."""
    return BradleyTerry(margin=margin, centering=centering)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeLoss(LossSpec):
    """The base of losses that learn the outcome of a response: its score, from 0 to 1.

    An update is given the score as its rewards. An outcome is that of its response, whichever
    policy wrote it.
    """

    aggregation: ClassVar[Aggregation] = "sequence-mean-token-mean"
    _needs: ClassVar[tuple[str, ...]] = ("score",)
    _extra_fields: ClassVar[tuple[str, ...]] = ("score",)
    _corrects_behaviour: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitReward(OutcomeLoss):
    """Cross-entropy of the outcome with a policy's log-ratio to a reference (Cui et al., PRIME).

    Attributes:
        beta: The factor of the log-ratio.
    """

    kind: ClassVar[str] = "implicit_reward"
    _needs: ClassVar[tuple[str, ...]] = ("reference_logprobs", "score")

    beta: Positive = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(OutcomeLoss):
    """Cross-entropy of the outcome with a reward model's number at the last token."""

    kind: ClassVar[str] = "outcome"
    predicts: ClassVar[Prediction] = "scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutcome(OutcomeLoss):
    """Cross-entropy of the outcome with a reward model's number at each token."""

    kind: ClassVar[str] = "token_outcome"
    predicts: ClassVar[Prediction] = "token_scores"


@operation
def implicit_reward(beta: float = 0.05) -> ImplicitReward:
    """Returns the loss of a policy whose log-ratio to a reference is to tell the outcome."""
    return ImplicitReward(beta=beta)


@operation
def outcome(*, per: Literal["sample", "token"] = "sample") -> OutcomeLoss:
    """Returns the loss of a reward model whose number is to predict the outcome.

    Args:
        per: `sample` has the number at the last token predict it, `token` that at every token.

    Raises:
        TraceError: `per` is neither.
    """
    names_among(per, ("sample", "token"), what="part of a response (per=)")
    return Outcome() if per == "sample" else TokenOutcome()
