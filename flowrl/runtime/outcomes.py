"""What became of a driver's samples, until a batch reports it.

    finished, kept by the filter  -> Collected.groups
    taken out by the filter       -> Collected.filtered     of the batch that names their groups
    dropped                       -> Collected.dropped      of the next batch

A batch stays here until the trainer takes it. What no batch reported is written with a checkpoint
(`unused`), so that a resumed run reports the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowrl.data import PromptItem
from flowrl.ids import GroupId, SampleId
from flowrl.rollout import Deliver
from flowrl.runtime.checkpoint.unused_samples import EndedSample, UnusedSamples
from flowrl.runtime.collecting import Collected
from flowrl.runtime.payloads import Payload, PayloadStore

__all__ = ["Outcomes"]


class Outcomes:
    """See the module.

    Args:
        store: Where payloads are; batches take theirs out of it.
        unused: What `unused` gave before; its payloads are put into the store.

    Attributes:
        batches: Delivered ones that nobody has taken, by number.
    """

    def __init__(self, store: PayloadStore, unused: UnusedSamples | None = None) -> None:
        before = UnusedSamples() if unused is None else unused
        store.restore(before.payloads)
        self._store = store
        self.batches: dict[int, Collected] = dict(before.batches)
        self._dropped: list[EndedSample] = list(before.dropped)
        self._verdicts: dict[GroupId, str] = dict(before.verdicts)
        self._judged: dict[GroupId, tuple[SampleId, ...]] = dict(before.judged)  # of those groups
        self._further: list[PromptItem] = []

    def unused(self) -> UnusedSamples:
        """Samples that no batch has used yet, and what no batch has reported."""
        return UnusedSamples(
            payloads=self._store.all(),
            verdicts=self._verdicts,
            judged=self._judged,
            dropped=self._dropped,
            batches=self.batches,
        ).copy()

    def judged(
        self,
        members: Mapping[GroupId, tuple[SampleId, ...]],
        verdicts: Iterable[tuple[GroupId, str | None]],
    ) -> None:
        """Groups that a filter has looked at, with its reason against them."""
        for group, reason in verdicts:
            if reason is not None:
                self._verdicts[group] = reason
                self._judged[group] = members[group]

    def dropped(self, sample: SampleId, payload: Payload, reason: str) -> None:
        """A sample that ended unused."""
        self._dropped.append((sample, payload, reason))

    def offered(self, items: Sequence[PromptItem]) -> None:
        """Prompts in the place of groups that were lost."""
        self._further += items

    def deliver(self, action: Deliver) -> None:
        """A batch, with all that it reports."""
        collected = Collected(dropped=self._dropped, further=self._further, version=action.version)
        self._dropped, self._further = [], []
        for delivered in action.groups:
            collected.groups.append((delivered.group, self._store.take(delivered.samples)))
        for group in action.filtered:
            reason = self._verdicts.pop(group, None)
            if reason is None:
                continue  # the group was dropped; its samples are among those already
            collected.num_filtered_groups += 1
            for sample, payload in self._store.take(self._judged.pop(group)):
                collected.filtered.append((sample, payload, reason))
        self.batches[action.batch] = collected
