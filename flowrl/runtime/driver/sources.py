"""The data of a stage: the cursor of each source node, and the prompts that refill a batch.

A filter that takes out nearly every group (a policy that solves all prompts, or none) would have a
batch take prompts without end. `PromptSupply` counts the kept and the lost groups and stops at a
limit, with an error that names the filter's pass rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.data import Prompt, PromptCursor, PromptItem, PromptMixture, PromptSet
from flowrl.errors import DataError
from flowrl.graph import Graph, Op
from flowrl.graph.signatures import PREFERRED
from flowrl.ids import GroupId, NodeId, sample_id
from flowrl.runtime.driver.payloads import Payload, StepBatch, sample_set
from flowrl.runtime.driver.texts import row_value
from flowrl.specs import RowCondition
from flowrl.wording import percent

Responses: TypeAlias = Callable[[PromptItem], Sequence[Ints]]
"""The responses that come with an item, each int64 `[R]`: a solution, or the two of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSamples:
    """A source node of samples that come with data rows.

    Attributes:
        node: Its id.
        responses: The responses of each row.
        pairs: True if two responses come with each row, the preferred one first.
        prompts: The node of prompts whose rows they come with; the node itself where it takes rows
            of its own.
    """

    node: NodeId
    responses: Responses
    pairs: bool
    prompts: NodeId

    def give(self, items: Sequence[PromptItem], step: StepBatch) -> None:
        """Puts the responses of rows into a step, as a set of samples."""
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


@dataclass(kw_only=True)
class Source:
    """A source node with a cursor.

    Attributes:
        node: Its id.
        cursor: Hands out its rows.
        num: Rows of a step.
        observes: True if its cursor uses the scores of prompts (a curriculum).
        prompts: Its rows.
    """

    node: NodeId
    cursor: PromptCursor | PromptMixture
    num: int
    observes: bool = False
    prompts: PromptSet

    def take(self) -> list[PromptItem]:
        """Takes the rows of the next step."""
        return self.cursor.take(self.num)

    def take_further(self, num: int, source: str = "") -> list[PromptItem]:
        """Takes rows in addition to those of a step; of one source of prompts, if named."""
        if not source:
            return self.cursor.take(num)
        assert isinstance(self.cursor, PromptMixture)  # only a mixture names sources
        return self.cursor.take_of(source, num)

    def item_of(self, group: GroupId) -> PromptItem:
        """Returns a row that was handed out; of a group that answers a sample, that of the sample.

        Raises:
            KeyError: there is no such row.
        """
        epoch, index, *_ = group.split("/")
        prompt = self._rows[int(index)]
        return PromptItem(
            epoch=int(epoch),
            index=prompt.index,
            group=group,
            row=prompt.row,
            prompt_ids=prompt.prompt_ids,
        )

    @cached_property
    def _rows(self) -> dict[int, Prompt]:
        return {prompt.index: prompt for prompt in self.prompts.prompts}


def split_rows(
    graph: Graph, rows: Mapping[NodeId, Sequence[PromptItem]]
) -> dict[NodeId, Sequence[PromptItem]]:
    """Returns the prompts of a step by the node that gives them: of sources, and of `where`.

    Args:
        rows: The prompts of sources.

    Raises:
        DataError: a row does not have the field by which prompts are split.
    """
    found = dict(rows)
    for node in graph.of_op(Op.WHERE):
        edge, spec = graph.feeding(node.id, "prompts"), node.attr("spec")
        if edge is None or edge.src not in found:
            continue
        assert isinstance(spec, RowCondition)
        key = str(node.source or node.id)
        found[node.id] = [
            item
            for item in found[edge.src]
            if spec.accepts(row_value(item.row, spec.field, reader=key))
        ]
    return found


class BatchNotFilled(DataError):
    """A batch cost more prompts than it may; nothing has changed since the last step boundary."""


@dataclass(slots=True, kw_only=True)
class PromptSupply:
    """The prompts of one rollout.

    Attributes:
        take: Takes a number of further prompts, of a source of prompts if one is named.
        limit: Prompts that one batch may cost; for a streaming rollout, groups that may be lost
            between two batches.
        where: The config key of the limit, and its value.
        filters: Text of the filters in the graph, by the reason that they give.
        kept: Groups that the filter kept since the last batch.
        lost: Groups that it took out since then, and those dropped, with the first reason.
        taken: Prompts that were taken since then.
    """

    take: Callable[[int, str], Sequence[PromptItem]]
    limit: int
    where: str = "train.refill_limit"
    filters: Mapping[str, str] = field(default_factory=dict)
    kept: int = 0
    lost: dict[GroupId, str] = field(default_factory=dict)
    taken: int = 0

    def note(self, group: GroupId, reason: str | None) -> None:
        """Counts a group as kept, or as lost for a reason."""
        if reason is None:
            self.kept += 1
        else:
            self.lost.setdefault(group, reason)

    def begin(self) -> None:
        """Begins another batch."""
        self.kept = self.taken = 0
        self.lost.clear()

    def further(self, groups: int, source: str = "") -> list[PromptItem]:
        """Prompts for so many groups, or as many as the limit allows; at least one.

        Raises:
            BatchNotFilled: the limit is reached.
        """
        allowed = min(groups, self.limit - self.taken)
        if allowed < 1:
            raise self.exhausted(groups)
        self.taken += allowed
        return list(self.take(allowed, source))

    def exhausted(self, missing: int) -> BatchNotFilled:
        """Makes the error of a batch that cannot be filled."""
        ended = self.kept + len(self.lost)
        counted = Counter(self.lost.values()).most_common()
        reasons = ", ".join(
            f"{number} {self.filters.get(reason, reason)}" for reason, number in counted
        )
        rate = f" ({percent(self.kept / ended, 1)})" if ended else ""
        key = self.where.partition("=")[0]
        return BatchNotFilled(
            "too few groups pass the filter to fill a batch",
            where=self.where,
            found=f"{self.kept} of {ended} groups passed{rate}; {reasons or 'none was lost'}; "
            f"{missing} are missing",
            expected=f"a full batch from at most {self.limit} prompts",
            hint=f"raise the limit: the resumed run takes a greater {key} too; or begin a new run, "
            "with prompts that the policy solves now and then, or with "
            f"{key.removesuffix('_limit')}=false to train on what passes",
        )
