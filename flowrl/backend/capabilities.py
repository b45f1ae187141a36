"""The capabilities that a plug-in declares.

Planning needs no more than these; what a plug-in opens (`flowrl.backend.protocols`) works on
arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

__all__ = [
    "GIVEN_PER_SLOT",
    "BackendStatus",
    "Capabilities",
    "Head",
    "Service",
]


class Service(StrEnum):
    """A kind of worker that a plug-in opens."""

    GENERATE = "generate"
    TRAIN = "train"
    SCORE = "score"
    ENVIRONMENT = "environment"


Head: TypeAlias = Literal["lm", "value"]
"""The output of a model: logits of the next token, or one number per position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities that a plug-in declares, for the planner and for `flowrl backends`.

    Attributes:
        services: What it opens.
        devices: Device types it runs on: `cpu`, `cuda`, `npu`.
        dtypes: Parameter types: `float32`, `bfloat16`, `float16`.
        untrained_dtypes: Those of them that it generates and gives logprobs in, but does not train.
        layouts: Parallel dimensions it can use: of `tp pp dp cp ep fsdp`.
        abort: Whether a running request can be stopped with its tokens kept.
        resume: Whether a request can begin with response tokens it already has.
        sleep: Whether it can offload its device memory and reload it.
        shares_weights: Whether generation and training can use one copy of the weights in place.
        heads: What a trained model may end in; a critic and a reward model need `value`.
        grammars: What can constrain generated text: of `regex json_schema`.
        repeats_truncation: Sampling options of a rollout that engine and trainer can include in
            logprobs (`Sampling.logprobs`): of `top_p top_k min_p repetition_penalty min_tokens`.
        recompute: Activations that a trainer can compute again in the backward pass: of
            `selective` (what is cheap) and `full` (all but the input of each layer).
    """

    services: frozenset[Service]
    devices: frozenset[str]
    dtypes: frozenset[str] = frozenset({"float32"})
    untrained_dtypes: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    abort: bool = False
    resume: bool = False
    sleep: bool = False
    shares_weights: bool = False
    heads: frozenset[Head] = frozenset({"lm"})
    grammars: frozenset[str] = frozenset()
    repeats_truncation: frozenset[str] = frozenset()
    recompute: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """The result of `Plugin.check`: whether a plug-in can be used on this machine.

    Attributes:
        usable: Everything that it needs is here.
        version: Of the library behind it, where there is one.
        problem: What is missing, in one sentence; empty when usable.
        hint: What to do about it; empty when usable.
    """

    usable: bool
    version: str = ""
    problem: str = ""
    hint: str = ""


GIVEN_PER_SLOT = 2
"""Samples that the driver gives an engine for each of its slots, so that a freed slot is filled at
once. As many episodes are in flight: one generates while the other waits for its environment.
Plans, predictions and simulations assume what the driver does."""
