"""What every loss has: an aggregation, the fields it reads, its attitude to stale samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import Spec, option

__all__ = ["Aggregation", "CrossEntropy", "LossSpec", "Prediction", "cross_entropy"]

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
