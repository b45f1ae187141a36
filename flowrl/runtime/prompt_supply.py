"""Where a rollout has further prompts from, and how many of them a batch may cost.

A filter that takes out nearly every group (a policy that solves all prompts, or none) would have a
batch draw prompts without end. `PromptSupply` counts what becomes of them and stops that, with the
filter's pass rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.data import PromptItem
from flowrl.errors import DataError
from flowrl.ids import GroupId
from flowrl.wording import percent

__all__ = ["BatchNotFilled", "PromptSupply"]


class BatchNotFilled(DataError):
    """A batch cost more prompts than it may; nothing has changed since the last step boundary."""


@dataclass(slots=True, kw_only=True)
class PromptSupply:
    """The prompts of one rollout.

    Attributes:
        take: The next prompts, so many, of a source of prompts where one is named.
        limit: Prompts that one batch may cost; of a rollout that runs ahead, groups that may be
            lost between two batches.
        where: The config key of the limit, and its value.
        filters: By the reason that they give, the filters as the graph writes them.
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
        """A group was kept, or lost for a reason."""
        if reason is None:
            self.kept += 1
        else:
            self.lost.setdefault(group, reason)

    def begin(self) -> None:
        """Another batch begins."""
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
        """The error of a batch that cannot be filled."""
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
