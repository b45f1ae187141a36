"""What a plug-in says of itself: `Plugin`, and the `Capabilities` that it declares.

Apart from what it opens (`flowrl.backend.protocols`, where plug-ins find these names too), because
planning asks no more of a plug-in, and what it opens works on arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from flowrl.backend.environment import Environment, EnvironmentContext
    from flowrl.backend.protocols import (
        GenerateBackend,
        PolicyContext,
        ScoreBackend,
        ScoreContext,
        TrainBackend,
    )

__all__ = ["BackendStatus", "Capabilities", "Head", "Plugin", "Service"]


class Service(StrEnum):
    """What a plug-in can open."""

    GENERATE = "generate"
    TRAIN = "train"
    SCORE = "score"
    ENVIRONMENT = "environment"


Head: TypeAlias = Literal["lm", "value"]
"""What a model ends in: logits of the next token, or one number a position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a plug-in declares, for the planner and for `flowrl backends`.

    Attributes:
        services: What it opens.
        devices: Device types it runs on: `cpu`, `cuda`, `npu`.
        dtypes: Parameter types: `float32`, `bfloat16`, `float16`.
        untrained_dtypes: Those of them that it generates and gives logprobs in, but does not train.
        layouts: Parallel dimensions it can use: of `tp pp dp cp ep fsdp`.
        abort: Whether a running request can be stopped with its tokens kept.
        resume: Whether a request can begin with response tokens it already has.
        sleep: Whether it can give its device memory back and take it again.
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
    """Whether a plug-in can be used on this machine.

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


@runtime_checkable
class Plugin(Protocol):
    """What an entry point of the group `flowrl.backends` names. Importing it is cheap."""

    @property
    def name(self) -> str:
        """As written in `roles.<name>.backend`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do at all, wherever it is installed."""
        ...

    def check(self) -> BackendStatus:
        """Whether it can be used here; imports nothing heavy and never raises."""
        ...

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """An engine; with `shared`, one that reads the trainer's parameters in place."""
        ...

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """A trainer."""
        ...

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """A scorer."""
        ...

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """An environment."""
        ...
