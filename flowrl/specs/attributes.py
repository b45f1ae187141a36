"""Node attributes that are not formulas: sampling options, the optimizer, and costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, TypeAlias

from flowrl.specs.base import (
    Count,
    CountFromZero,
    FiniteFromZero,
    Range,
    Share,
    Spec,
    Wrong,
    option,
)

MIN_TEMPERATURE = 1e-3
"""The lowest temperature above 0 (0 is greedy). Below it, the rounding of logits in float32, about
1e-5, becomes a considerable difference in logprobs, and logits can overflow."""

LogprobsOf: TypeAlias = Literal["model", "sampler"]
"""The distribution of logprobs: the model's, or the one that tokens are sampled from."""


class FinishReason(StrEnum):
    """The reason for which a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Spec):
    """Sampling options of a rollout.

    They are part of a rollout's type, because a trainer must know the distribution of the tokens.
    Rollout logprobs are those of the temperature-scaled logits before top-k, top-p, min-p and
    penalties, unless `logprobs` says otherwise. `temperature=0` is greedy; its logprobs are those
    at temperature 1.

    Attributes:
        temperature: The divisor of the logits; 0, or at least `MIN_TEMPERATURE`.
        top_p: The probability that the smallest set of kept tokens must reach; 1 keeps all.
        top_k: The number of likeliest tokens that are kept; 0 keeps all.
        min_p: The least probability of a kept token, as a fraction of the likeliest token's; 0
            keeps all.
        repetition_penalty: The factor that divides positive and multiplies negative logits of
            tokens that already occur in prompt or response (Keskar et al., CTRL, 2019, section
            4.1); 1 changes nothing.
        min_tokens: The number of response tokens before which stop tokens are forbidden.
        max_tokens: The maximum number of response tokens, the stop token included.
        stop: Texts that end a response: it ends with the token that completes the first of them,
            from `min_tokens` on, and keeps the text. Given as one text or as a list, and held as
            JSON; `stops` has them.
        logprobs: `model` gives those before the options above from `top_p` to `min_tokens`;
            `sampler` those of the distribution that tokens are sampled from, after all options, and
            a trainer repeats the transformation (`flowrl.backend.batch`).
    """

    family: ClassVar[str] = "sampling"
    kind: ClassVar[str] = "sampling"

    temperature: FiniteFromZero = 1.0
    top_p: Annotated[float, Range(low=0.0, high=1.0, above=True)] = 1.0
    top_k: CountFromZero = 0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Range(low=0.0, above=True, finite=True)] = 1.0
    min_tokens: CountFromZero = 0
    max_tokens: Count = 256
    stop: str = option("")
    logprobs: LogprobsOf = option("model")

    def __post_init__(self) -> None:
        given: object = self.stop
        if given == "" or (isinstance(given, str) and _texts_held(given)):
            return
        texts = [given] if isinstance(given, str) else given
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            held = json.dumps(list(texts), ensure_ascii=False) if texts else ""
            object.__setattr__(self, "stop", held)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a response."""
        return _texts_held(self.stop)

    @property
    def cuts(self) -> bool:
        """True if top-k, top-p or min-p exclude a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def truncates(self) -> bool:
        """True if tokens are sampled from another distribution than the temperature-scaled one."""
        return self.cuts or self.repetition_penalty != 1.0 or self.min_tokens > 0

    @property
    def reports_kept(self) -> bool:
        """True if an engine reports the set of kept tokens with each sampled token."""
        return self.logprobs == "sampler" and self.cuts

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a temperature that is neither 0 nor high enough."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            expected = f"0 (greedy) or a number from {MIN_TEMPERATURE:g} up"
            yield "temperature", self.temperature, expected
        if "" in self.stops:
            yield "stop", list(self.stops), "texts of at least one character"


def _texts_held(stop: str) -> tuple[str, ...]:
    """Returns the texts of `Sampling.stop`; none of anything else."""
    if not stop.startswith("["):
        return ()
    try:
        return tuple(text for text in json.loads(stop) if isinstance(text, str))
    except ValueError:  # one text that begins so
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Spec):
    """AdamW (Loshchilov & Hutter, 2019) with warm-up, a schedule and gradient clipping.

    The learning rate counts optimizer updates (one a mini-batch), not steps. It rises linearly
    over `warmup_updates`, then stays, or falls to `final_fraction` of itself at the last update.

    Attributes:
        max_grad_norm: The global L2 norm to which gradients are clipped; 0 does not clip.
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
    """Upper bounds of a node's cost in one step, with samples of maximum length and no filtering.

    Attributes:
        flops: The model's floating-point operations in a step; 0 if the node runs no model.
        output_bytes: The size of everything that the node produces in a step.
        activation_bytes: The peak size of activations, logits included.
        kv_bytes: The size of the KV cache.
    """

    family: ClassVar[str] = "cost"
    kind: ClassVar[str] = "upper_bound"

    flops: int
    output_bytes: int
    activation_bytes: int
    kv_bytes: int
