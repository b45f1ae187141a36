"""The data of a stage: where each source node stands, and what a step takes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.data import Prompt, PromptCursor, PromptItem, PromptMixture, PromptSet
from flowrl.graph.signatures import PREFERRED
from flowrl.ids import GroupId, NodeId, sample_id
from flowrl.runtime.payloads import Payload
from flowrl.runtime.sample_set import StepBatch, sample_set

__all__ = ["Responses", "Source"]

Responses: TypeAlias = Callable[[PromptItem], Sequence[Ints]]
"""The responses that come with an item, each int64 `[R]`: a solution, or the two of a pair."""


@dataclass(kw_only=True)
class Source:
    """One source node.

    Attributes:
        node: Its id.
        cursor: Hands out its rows.
        num: Rows of a step.
        responses: What comes with each row; None for prompts, which are answered by rollouts.
        pairs: Whether two responses come with each row, the preferred one first.
        observes: Whether its cursor goes by how prompts did (a curriculum).
        prompts: Its rows.
    """

    node: NodeId
    cursor: PromptCursor | PromptMixture
    num: int
    responses: Responses | None = None
    pairs: bool = False
    observes: bool = False
    prompts: PromptSet

    def take(self) -> list[PromptItem]:
        """The rows of the next step."""
        return self.cursor.take(self.num)

    def take_further(self, num: int, source: str = "") -> list[PromptItem]:
        """The next rows, beside those of a step; of one source of prompts, where it is named."""
        if not source:
            return self.cursor.take(num)
        assert isinstance(self.cursor, PromptMixture)  # nobody else names sources
        return self.cursor.take_of(source, num)

    def item_of(self, group: GroupId) -> PromptItem:
        """A row that was handed out.

        Raises:
            KeyError: there is no such row.
        """
        epoch, _, index = group.partition("/")
        prompt = self._rows[int(index)]
        return PromptItem(
            epoch=int(epoch),
            index=prompt.row.index,
            group=group,
            row=prompt.row,
            prompt_ids=prompt.prompt_ids,
        )

    @cached_property
    def _rows(self) -> dict[int, Prompt]:
        return {prompt.row.index: prompt for prompt in self.prompts.prompts}

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
