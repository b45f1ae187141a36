"""The object that an entry point of the group `flowrl.backends` names, and its capabilities.

Planning needs no more than these. The module imports no arrays, so that finding plug-ins and
reading their capabilities stays cheap; what a plug-in opens (`flowrl.backend.protocols`) works on
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from flowrl.errors import BackendError

__all__ = [
    "GIVEN_PER_SLOT",
    "NO_OPTIONS",
    "PROTOCOL",
    "BackendStatus",
    "BasePlugin",
    "Capabilities",
    "Head",
    "Plugin",
    "Service",
    "not_offered",
    "options_of",
    "status_of",
]


if TYPE_CHECKING:
    from pydantic import BaseModel

    from flowrl.backend.environment import Environment, EnvironmentContext
    from flowrl.backend.protocols import (
        GenerateBackend,
        PolicyContext,
        ScoreBackend,
        ScoreContext,
        TrainBackend,
    )


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
        services: The kinds of workers that it opens.
        devices: The device types that it runs on: `cpu`, `cuda`, `npu`.
        dtypes: The parameter types: `float32`, `bfloat16`, `float16`.
        untrained_dtypes: Those of them in which it generates and computes logprobs, but does not
            train.
        layouts: The parallel dimensions that it can use: some of `tp pp dp cp ep fsdp`.
        abort: True if a running request can be stopped with its tokens kept.
        resume: True if a request can begin with response tokens that it already has.
        sleep: True if it can offload its device memory and reload it.
        shares_weights: True if generation and training can use one copy of the weights in place.
        heads: The heads of models that it trains; a critic and a reward model need `value`.
        grammars: The grammars that can constrain responses: some of `regex json_schema`.
        repeats_truncation: The sampling options of a rollout that engine and trainer can include in
            logprobs (`Sampling.logprobs`): some of `top_p top_k min_p repetition_penalty
            min_tokens`.
        recompute: The activations that a trainer can compute again in the backward pass:
            `selective` (the cheap ones), `full` (all but the input of each layer), or both.
        ranks: True if several processes can train a model together on CPUs, each with its share of
            a batch (`PolicyContext.rank`).
        updates: The optional abilities of a trainer: `average` (`TrainBackend.load` with a decay),
            `reset` (`TrainBackend.reset_optimizer`) and `sum` (`TrainBackend.update_sum`).
        user_environment: True if its environment is the class that `roles.NAME.environment` names.
        seeds: True if sampling response token t depends on `GenerateRequest.seed` and t alone. If
            it does not, a repeated request gives another sample of the same distribution.
        sampling: The options of `flowrl.specs.Sampling` that its engine follows: those that change
            the distribution, and `stop`. A workflow that asks for another one is refused.
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
    ranks: bool = False
    updates: frozenset[str] = frozenset()
    user_environment: bool = False
    seeds: bool = True
    sampling: frozenset[str] = frozenset(
        {"top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """The result of `Plugin.check`.

    Attributes:
        usable: True if the plug-in can be used on this machine.
        version: The version of the library behind it, if there is one.
        problem: The missing parts, in one sentence; empty if it is usable.
        hint: The way to get them; empty if it is usable.
    """

    usable: bool
    version: str = ""
    problem: str = ""
    hint: str = ""


GIVEN_PER_SLOT = 2
"""The number of samples that the driver gives an engine for each of its slots, so that a freed slot
is filled at once. The same number of episodes is in flight: one generates while the other waits for
its environment. Plans, predictions and simulations assume it too."""


PROTOCOL = 1
"""The version of the plug-in protocols. A plug-in that needs a later one says so with the attribute
`protocol`; one without it is of version 1. What a later version adds has defaults, so that older
plug-ins go on."""


NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
"""The options of a plug-in that no configuration names."""


def options_of(plugin: Plugin) -> type[BaseModel] | None:
    """Returns the model of a plug-in's options; None where it has none."""
    options: type[BaseModel] | None = getattr(plugin, "options", None)
    return options


@runtime_checkable
class Plugin(Protocol):
    """The object that an entry point of `flowrl.backends` names.

    Its module imports nothing heavy: the `open_*` methods import the library and open workers.

    Two attributes are optional: `protocol` (see `PROTOCOL`), and `options`, a pydantic model with
    `extra="forbid"` against which `roles.<name>.options` is checked before anything is opened, or
    `roles.<name>.engine_options` for an engine beside the trainer of another plug-in. Contexts
    bring the values as they were written, for the plug-in to validate into its model.
    """

    @property
    def name(self) -> str:
        """The name that `roles.<name>.backend` gives."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the plug-in, on whatever machine it is installed."""
        ...

    def check(self, options: Mapping[str, object] = NO_OPTIONS) -> BackendStatus:
        """Returns whether it can be used here; imports nothing heavy and never raises.

        Args:
            options: Those of the role that is to use it, such as the environment of its library;
                none where no role asks, as in `flowrl backends`. They are not checked before.
        """
        ...

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Opens an engine; with `shared`, one that reads the trainer's parameters in place."""
        ...

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """Opens a trainer."""
        ...

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """Opens a scorer."""
        ...

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """Opens an environment."""
        ...


class BasePlugin:
    """The defaults of a plug-in, which writes its name, its capabilities and what it opens.

    class Mine(BasePlugin):
        name = "mine"
        capabilities = Capabilities(services=frozenset({Service.SCORE}), ...)

        def open_score(self, context: ScoreContext) -> ScoreBackend:
            from mine.scorer import Scorer

            return Scorer(context)
    """

    name: str
    capabilities: Capabilities
    options: ClassVar[type[BaseModel] | None] = None

    def check(self, options: Mapping[str, object] = NO_OPTIONS) -> BackendStatus:
        """See `Plugin`; a plug-in that needs nothing can be used everywhere."""
        return BackendStatus(usable=True)

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Raises an error: the plug-in has no engine."""
        raise not_offered(self, Service.GENERATE, f"roles.{context.role}.backend")

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """Raises an error: the plug-in has no trainer."""
        raise not_offered(self, Service.TRAIN, f"roles.{context.role}.backend")

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """Raises an error: the plug-in has no scorer."""
        raise not_offered(self, Service.SCORE, f"roles.{context.role}.backend")

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """Raises an error: the plug-in has no environment."""
        raise not_offered(self, Service.ENVIRONMENT, f"roles.{context.role}.backend")


def status_of(plugin: Plugin, options: Mapping[str, object]) -> BackendStatus:
    """Returns what `Plugin.check` finds, also of a plug-in whose check knows no options."""
    return plugin.check(options) if signature(plugin.check).parameters else plugin.check()


def not_offered(
    plugin: Plugin, service: Service, where: str | None, expected: str | None = None
) -> BackendError:
    """Returns the error for a service that a plug-in does not offer.

    Args:
        where: The config key that names the plug-in.
        expected: What is to stand there.
    """
    return BackendError(
        f"backend {plugin.name!r} cannot {_VERBS[service]}",
        where=where,
        found=f"it offers {', '.join(sorted(plugin.capabilities.services)) or 'nothing'}",
        expected=expected,
        hint="`flowrl backends` lists what each one offers",
    )


_VERBS = {service: service.value for service in Service} | {
    Service.ENVIRONMENT: "be an environment"
}
