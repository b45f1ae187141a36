"""The data of a stage: where each source node stands, and what a step takes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.data import PromptCursor, PromptItem
from flowrl.graph.signatures import PREFERRED
from flowrl.ids import NodeId, sample_id
from flowrl.runtime.payloads import Payload
from flowrl.runtime.sample_set import StepBatch, sample_set

__all__ = ["Responses", "Source"]

Responses: TypeAlias = Callable[[PromptItem], Sequence[Ints]]
"""The responses that come with an item, each int64 `[R]`: a solution, or the two of a pair."""


@dataclass(slots=True, kw_only=True)
class Source:
    """One source node.

    Attributes:
        node: Its id.
        cursor: Hands out its rows.
        num: Rows of a step.
        responses: What comes with each row; None for prompts, which are answered by rollouts.
        pairs: Whether two responses come with each row, the preferred one first.
        observes: Whether its cursor goes by how prompts did (a curriculum).
    """

    node: NodeId
    cursor: PromptCursor
    num: int
    responses: Responses | None = None
    pairs: bool = False
    observes: bool = False

    def take(self) -> list[PromptItem]:
        """The rows of the next step."""
        return self.cursor.take(self.num)

    def give(self, items: Sequence[PromptItem], step: StepBatch) -> None:
        """Puts rows that have responses into a step, as a set of samples."""
        if self.responses is None:
            return
        groups = [
            (
                item.group,
                [
                    (sample_id(item.group, member), Payload(item=item, tokens=tokens))
                    for member, tokens in enumerate(self.responses(item))
                ],
            )
            for item in items
        ]
        step.sets[self.node] = sample_set(self.node, groups)
        if self.pairs:
            preferred = np.tile([True, False], len(items))
            step.values[self.node, PREFERRED.name] = preferred
