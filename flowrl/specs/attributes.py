"""Node attributes that are not formulas: sampling options, the optimizer, and costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, TypeAlias

from flowrl.specs.base import Spec, option

__all__ = [
    "MIN_TEMPERATURE",
    "AdamW",
    "FinishReason",
    "LogprobsOf",
    "NodeCost",
    "Sampling",
]


MIN_TEMPERATURE = 1e-3
"""Below it (and above 0, which is greedy) the rounding of logits in float32, about 1e-5, becomes a
difference in logprobs that counts, and at last logits overflow."""

LogprobsOf: TypeAlias = Literal["model", "sampler"]
"""Whose distribution logprobs are of: the model's, or that which tokens are really drawn from."""


class FinishReason(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Spec):
    """Sampling options of a rollout.

    Rollout logprobs are those of the temperature-scaled logits before top-k, top-p, min-p and
    penalties, unless `logprobs` says otherwise. `temperature=0` is greedy; its logprobs are those
    at temperature 1.

    Attributes:
        temperature: Divides the logits; 0, or at least `MIN_TEMPERATURE`.
        top_p: Keeps the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: Keeps the k likeliest tokens; 0 keeps all.
        min_p: Keeps tokens at least this fraction as likely as the likeliest; 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already seen
            in prompt or response (Keskar et al., CTRL, 2019, section 4.1); 1 changes nothing.
        min_tokens: Stop tokens are forbidden before this many response tokens.
        max_tokens: Response tokens at most, the stop token included.
        logprobs: `model` gives those before the options above from `top_p` to `min_tokens`;
            `sampler` those of the distribution that tokens are drawn from, behind all of them, and
            a trainer repeats the transformation (`flowrl.backend.batch`).
    """

    family: ClassVar[str] = "sampling"
    kind: ClassVar[str] = "sampling"

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 256
    logprobs: LogprobsOf = option("model")

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p or min-p leave less than the vocabulary to draw from."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from another distribution than the temperature-scaled one."""
        return self.cuts or self.repetition_penalty != 1.0 or self.min_tokens > 0

    @property
    def reports_kept(self) -> bool:
        """Whether an engine reports the set of tokens that it left at each one drawn."""
        return self.logprobs == "sampler" and self.cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Spec):
    """AdamW (Loshchilov & Hutter, 2019) with warm-up, a schedule and gradient clipping.

    The learning rate counts optimizer updates (one a mini-batch), not steps. It rises linearly
    over `warmup_updates`, then stays, or falls to `final_fraction` of itself at the last update.

    Attributes:
        max_grad_norm: Global L2 norm that gradients are clipped to; 0 does not clip.
    """

    family: ClassVar[str] = "optimizer"
    kind: ClassVar[str] = "adamw"

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_updates: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost(Spec):
    """Upper bounds: every sample is as long as it may be, and no filter drops any.

    Attributes:
        flops: Operations of the model in a step; 0 where no model runs.
        output_bytes: Of all that the node produces in a step.
        activation_bytes: At once, with logits.
        kv_bytes: Of the KV cache.
    """

    family: ClassVar[str] = "cost"
    kind: ClassVar[str] = "upper_bound"

    flops: int
    output_bytes: int
    activation_bytes: int
    kv_bytes: int
