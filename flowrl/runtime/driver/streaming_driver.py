"""A rollout driver whose engines go on while the trainer learns.

How many prompts are under way is the scheduler's business: with admission by age budget it asks for
as many as later batches can still take before they are too old, and this driver takes them from the
data. What ends early waits as surplus; a batch takes what is ready, oldest first, and waits for a
sample only where going on without it would make it too old.

New weights reach each engine between decode steps. With `publication=keep` all engines load them at
once, and running samples continue with them; otherwise each loads them when the scheduler reports
it empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flowrl.ids import EngineId, GroupId
from flowrl.rollout.actions import Deliver
from flowrl.rollout.events import BatchAsked, EngineContinueAsked, EnginePauseAsked
from flowrl.runtime.driver.collected_batch import CollectedBatch, Seconds
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.sources import PromptSupply
from flowrl.runtime.local.engine_fleet import EngineFleet


class StreamingDriver(RolloutDriver):
    """See the module. A `StreamingTree` runs it, in the thread of the rollouts.

    Args:
        fleet: The engines' processes.
        supply: Prompts, without end; None where it answers prompts that are made of samples.
        batch_groups: Groups of a batch.
        arguments: The arguments of `RolloutDriver`; with a supply the scheduler admits by age
            budget, without one its batches name their groups.
    """

    def __init__(
        self,
        *,
        fleet: EngineFleet,
        supply: PromptSupply | None,
        batch_groups: int,
        **arguments: Any,
    ) -> None:
        self._fleet = fleet
        self._prompts = supply
        self._batch_groups = batch_groups
        self._awaited = False  # a batch is
        self._stopped = 0.0  # when the clock was
        super().__init__(supply=supply, **arguments)

    # What the trainer asks for

    def ask(self, batch: int) -> None:
        """Requests a batch: the trainer is free."""
        if batch in self._outcomes.batches:
            return  # delivered to a process that was stopped before it took it
        self._awaited = True
        self._emit(BatchAsked(**self._stamp(), batch=batch, groups=self._batch_groups))

    def ask_for(self, batch: int, names: Sequence[GroupId]) -> None:
        """Requests the batch of these groups; of none it is there at once."""
        if batch in self._outcomes.batches:
            return
        if names:
            stamp = self._stamp()
            self._emit(BatchAsked(**stamp, batch=batch, groups=len(names), names=tuple(names)))
        else:
            empty = CollectedBatch(version=self.scheduler.version)
            self._outcomes.batches[batch] = empty

    def is_delivered(self, batch: int) -> bool:
        """True if `take` can return the batch. May be called from any thread."""
        return batch in self._outcomes.batches

    def delivered(self, batch: int) -> CollectedBatch:
        """Returns a delivered batch, which stays to be taken."""
        return self._outcomes.batches[batch]

    def take(self, batch: int) -> CollectedBatch:
        """Takes a delivered batch."""
        return self._outcomes.batches.pop(batch)

    def _update_engine(self, engine_id: EngineId) -> None:
        self._fleet.load(engine_id)
        super()._update_engine(engine_id)  # requests sent after the weights are sampled from them

    # Rounds

    def look(self) -> int:
        """Looks once after everyone, without waiting; how much moved.

        Raises:
            FlowError: what `RolloutDriver.collect` raises.
        """
        spent, began, waited_s = self.spent, self._clock(), self.spent.generate
        progressed = self.look_after_engines(spent)
        # Episodes are polled with patience: that waits, for engine and environment, and is no work.
        waited_s = spent.generate - waited_s
        self.spent.collect += max(0.0, self._clock() - began - waited_s)
        spent, assembled_s = self.spent, self.spent.assemble
        progressed += self.poll_scoring(spent, wait=False)
        if spent is not self.spent:  # a batch was delivered in there, and the next one counted on
            self.spent.assemble += spent.assemble - assembled_s
        return progressed + self._offer_more()

    def _offer_more(self) -> int:
        """Offers what the scheduler asked for; how many groups.

        Raises:
            BatchNotFilled: the batch that is waited for costs more prompts than it may.
        """
        if not self._short:
            return 0
        assert self._prompts is not None  # only an age budget asks for prompts
        settings = self.scheduler.settings
        if settings.refill and len(self._prompts.lost) >= self._prompts.limit:
            if not self._awaited:
                return 0  # the filter takes out nearly all: the next weights may do better
            raise self._prompts.exhausted(max(0, self._batch_groups - self._prompts.kept))
        short, self._short = self._short, Counter()
        for source, number in short.items():
            self.offer(self._prompts.take(number, source))
        return short.total()

    def _capacity(self, engine_id: EngineId) -> int:
        publication = self.scheduler.settings.publication
        if publication.empties and not publication.aborts:
            # What waits inside an engine would begin with the old weights.
            return self._engines[engine_id].num_slots
        return super()._capacity(engine_id)

    def _deliver(self, action: Deliver) -> None:
        super()._deliver(action)
        collected, counts = self._outcomes.batches[action.batch], self.scheduler.counts
        collected.ready = counts.ready
        collected.under_way = counts.live - counts.ready
        collected.seconds = Seconds(
            dispatch=self._dispatch_s, collect=self.spent.collect, assemble=self.spent.assemble
        )
        self.spent, self._dispatch_s = Seconds(), 0.0
        self._awaited = False
        if self._prompts is not None:
            self._prompts.begin()

    # Standing still

    def stop_clock(self) -> None:
        """Stops the clock while no rounds run, for messages of engines wait meanwhile."""
        self._stopped = self._clock()

    def start_clock(self) -> None:
        """Rounds again."""
        stood_s = self._clock() - self._stopped
        self._began += stood_s

    def settle_scores(self) -> None:
        """Waits until scorers have answered everything: others may use them then.

        Raises:
            SchedulerError: they do not within the stall timeout.
        """
        # The trainer waits, between two steps: neither drives the batch that is being generated.
        spent = Seconds()
        self.wait_for(lambda: not self._results.due, lambda: self.poll_scoring(spent, wait=True))

    def pause(self) -> None:
        """Has the engines stop its running samples, which keep their tokens, and begin none."""
        for engine in list(self._engines):
            self._emit(EnginePauseAsked(**self._stamp(), engine=engine, running="abort"))

    def go_on(self) -> None:
        """Has the engines go on after `pause`."""
        for engine in list(self._engines):
            self._emit(EngineContinueAsked(**self._stamp(), engine=engine))
