"""Data of a workflow: what its parameters of type `fl.Prompts`, `fl.Examples`, `fl.Pairs` are."""

from __future__ import annotations

from typing import ClassVar

from flowrl.graph.signatures import PREFERRED, PROMPT, RESPONSE_MASK, TOKENS
from flowrl.graph.types import Field
from flowrl.program.handles import Handle, Samples

__all__ = ["Examples", "Pairs", "Prompts"]


class Prompts(Handle):
    """The prompts of a step: one row of the training data each."""

    __slots__ = ()
    kind = "the prompts"
    data: ClassVar[str] = "prompts"
    produces: ClassVar[tuple[Field, ...]] = (PROMPT,)


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
    data: ClassVar[str] = "pairs"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK, PREFERRED)
