"""Data of a workflow: what its parameters of type `fl.Prompts`, `fl.Examples`, `fl.Pairs` are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from flowrl.graph.signatures import PREFERRED, PROMPT, RESPONSE_MASK, TOKENS
from flowrl.graph.types import Field
from flowrl.program.handles import Handle, Samples

if TYPE_CHECKING:
    from flowrl.data import PromptItem

__all__ = ["Examples", "Pairs", "Prompts"]


class Prompts(Handle):
    """The prompts of a step: one row of the training data each."""

    __slots__ = ()
    kind = "the prompts"
    _shown = "print(prompts.value[0])"
    data: ClassVar[str] = "prompts"
    produces: ClassVar[tuple[Field, ...]] = (PROMPT,)

    @property
    def value(self) -> tuple[PromptItem, ...]:
        """The step's prompts, with their data rows; see `Handle.value`."""
        return cast("tuple[PromptItem, ...]", self._tracer.value_of(self.node, self.fields))


class Examples(Samples):
    """Prompts with solutions, as samples whose response is the solution: supervised stages."""

    __slots__ = ()
    kind = "the examples"
    data: ClassVar[str] = "examples"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK)


class Pairs(Samples):
    """Two answers to each prompt, the preferred one first: preference learning, reward models."""

    __slots__ = ()
    kind = "the pairs"
    _one_thing = (
        "write pairs = ...; the preferred sample of each pair and the other one stay together: "
        "reference.logprobs(pairs), actor.update(pairs, reference=..., loss=fl.loss.dpo(0.1))"
    )
    data: ClassVar[str] = "pairs"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK, PREFERRED)
