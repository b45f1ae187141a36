"""A rollout driver whose engines go on while the trainer learns.

Prompts are offered ahead of the trainer, as many as the age of samples allows. With n groups a
batch and samples that may be `a` publications old, a group that begins now at version v can be in
the batches of versions v to v + a. The next batch is of version v while the trainer waits for it or
has published, and of v + 1 while it still learns from the batch before. So at most (a + 1) n groups
are under way in the first case and a n in the second: then batches in the order of age consume all
of them in time, and nothing is drawn in vain. (Fu et al., 2025, arXiv:2505.24298, equation 3, in
groups.)

What ends early waits as surplus; a batch takes what is ready, oldest first, and waits for a sample
only where going on without it would make it too old.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId
from flowrl.rollout import (
    AbortAsked,
    BatchAsked,
    Deliver,
    EngineCapacityChanged,
    Resumed,
)
from flowrl.runtime.collecting import Collected, Seconds
from flowrl.runtime.engine_fleet import EngineFleet
from flowrl.runtime.prompt_supply import PromptSupply
from flowrl.runtime.readiness import wait_for_any
from flowrl.runtime.rollouts import POLL_S, RolloutDriver
from flowrl.runtime.unused_samples import UnusedSamples

__all__ = ["Publication", "StreamingDriver"]


class Publication(StrEnum):
    """What becomes of running samples when new weights are published.

    - `keep`: they go on, with the new weights from the next token on.
    - `abort`: they are stopped and go on from their tokens, whose keys and values are made anew.
    - `finish`: each engine ends them with the old weights before it loads the new ones.
    """

    KEEP = "keep"
    ABORT = "abort"
    FINISH = "finish"


class StreamingDriver(RolloutDriver):
    """See the module. It is run by a `RolloutThread`, which calls everything here.

    Args:
        fleet: The engines' processes.
        supply: Prompts, without end.
        batch_groups: Groups of a batch.
        publication: What becomes of running samples when new weights are published.
        unused: Samples of a checkpoint; the scheduler is the one that was written with them.
        arguments: Of `RolloutDriver`.
    """

    def __init__(
        self,
        *,
        fleet: EngineFleet,
        supply: PromptSupply,
        batch_groups: int,
        publication: Publication = Publication.KEEP,
        unused: UnusedSamples | None = None,
        **arguments: Any,
    ) -> None:
        self._fleet = fleet
        self._prompts = supply
        self._batch_groups = batch_groups
        self._publication = publication
        self._unused = unused
        self._learning = False  # a batch was delivered, and its publication is still to come
        self._asked: tuple[int, float] | None = None  # the batch that is waited for, and since when
        self._moved = 0.0  # when something last did
        self._held = False  # engines are given nothing
        self._draining: set[EngineId] = set()  # end their samples before they load new weights
        self._spent = Seconds()
        self._busy_s = fleet.busy_s  # of engines, when the last batch was delivered
        super().__init__(supply=supply, **arguments)

    def _begin(self) -> None:
        if self._unused is not None:
            self.store.restore(self._unused.payloads)
            self._verdicts = dict(self._unused.verdicts)
            self._dropped = list(self._unused.dropped)
            self._unused = None
            self._emit(Resumed(id=self._next()))
        super()._begin()

    # -- what the trainer asks for -----------------------------------------------------------

    def ask(self, batch: int) -> None:
        """The trainer is free, and waits for a batch."""
        self._learning = False
        self._asked = (batch, self._clock())
        self._emit(BatchAsked(id=self._next(), batch=batch, groups=self._batch_groups))

    def is_delivered(self, batch: int) -> bool:
        """Whether `take` gives it. May be asked in any thread."""
        return batch in self._batches

    def take(self, batch: int) -> Collected:
        """A delivered batch."""
        return self._batches.pop(batch)

    def load(self, version: int, folder: Path) -> None:
        """Has the engines serve new weights.

        Args:
            folder: What `EngineFleet.written` wrote.
        """
        self._fleet.announce(version, folder)
        busy = [engine for engine, samples in self._running.items() if samples]
        if self._publication is Publication.FINISH:
            self._draining.update(busy)
            for engine in busy:
                self._resize(engine)
        elif self._publication is Publication.ABORT:
            self._abort_running()
        for engine in self._engines:
            if engine not in self._draining:
                self._fleet.load(engine)
        self.publish(version)
        self._learning = False

    # -- rounds ------------------------------------------------------------------------------

    def round(self, wake: int) -> int:
        """Looks once after everyone, and waits a little where nothing moved.

        Raises:
            SchedulerError: a batch is waited for, and nothing moved for the stall timeout.
            FlowError: what `RolloutDriver.collect` raises.
        """
        moved = self._mend_engines() + self._poll_engines(self._spent)
        moved += self._poll_scoring(self._spent, wait=False)
        moved += self._load_drained() + self._top_up()
        now = self._clock()
        if moved:
            self._moved = now
            self._beat()
        elif self._asked is not None and self._idle_s(now) > self._stall_timeout_s:
            raise SchedulerError(
                f"nothing moved for {self._stall_timeout_s:g} s",
                found=self.describe(),
                hint="raise runtime.stall_timeout_s if the worker that is waited for is slow",
            )
        elif not self._deaths.broken:
            self._wait(wake)
        return moved

    def _idle_s(self, now: float) -> float:
        assert self._asked is not None
        return now - max(self._moved, self._asked[1])

    def _top_up(self) -> int:
        """Offers as many prompts as the age of samples allows; how many."""
        staleness = self.scheduler.settings.max_staleness
        allowed = (staleness + (not self._learning)) * self._batch_groups
        missing = allowed - self._under_way()
        if missing <= 0:
            return 0
        if self.scheduler.settings.refill and self._prompts.ended >= self._prompts.limit:
            if self._asked is None:
                return 0  # the filter takes out nearly all: the next weights may do better
            raise self._prompts.exhausted(max(0, self._batch_groups - self._prompts.kept))
        self.offer(self._prompts.take(missing))
        return missing

    def _under_way(self) -> int:
        """Groups that later batches will be made of, or will answer."""
        state = self.scheduler.state
        # With refill, groups that were filtered or dropped fill no batch.
        return len(state.groups) if state.settings.refill else sum(1 for _ in state.pool.groups())

    def _refill(self) -> int:
        self._short = 0  # `_top_up` offers more than the batch is short of
        return 0

    def _deliver(self, action: Deliver) -> None:
        super()._deliver(action)
        collected, counts = self._batches[action.batch], self.scheduler.counts
        collected.version = self.scheduler.version
        collected.ready = counts.ready
        collected.under_way = counts.live - counts.ready
        busy_s = self._fleet.busy_s
        collected.seconds = Seconds(
            generate=busy_s - self._busy_s, score_wait=self._spent.score_wait
        )
        self._busy_s, self._spent = busy_s, Seconds()
        self._learning, self._asked = True, None
        self._prompts.begin()

    # -- engines -----------------------------------------------------------------------------

    def _capacity(self, engine_id: EngineId) -> int:
        if self._held or engine_id in self._draining:
            return 0
        if self._publication is Publication.FINISH:
            # What waits inside an engine would begin with the old weights.
            return self._engines[engine_id].num_slots
        return super()._capacity(engine_id)

    def _resize(self, engine_id: EngineId) -> None:
        capacity = self._capacity(engine_id)
        self._emit(EngineCapacityChanged(id=self._next(), engine=engine_id, capacity=capacity))

    def _join(self, engine_id: EngineId) -> None:
        self._draining.discard(engine_id)  # one that is opened loads the newest weights
        super()._join(engine_id)

    def _load_drained(self) -> int:
        """Has engines load new weights that have ended all they had; how many."""
        empty = [engine for engine in self._draining if not self._running[engine]]
        for engine in empty:
            self._fleet.load(engine)
            self._draining.discard(engine)
            self._resize(engine)
        return len(empty)

    def _abort_running(self) -> None:
        running = tuple(sample for samples in self._running.values() for sample in samples)
        if running:
            self._emit(AbortAsked(id=self._next(), samples=running))

    # -- standing still ----------------------------------------------------------------------

    def settle_scores(self) -> None:
        """Waits until scorers have answered everything: others may use them then.

        Raises:
            SchedulerError: they do not within the stall timeout.
        """
        self._wait_for(
            lambda: not self._answers_due, lambda: self._poll_scoring(self._spent, wait=True)
        )

    def written(self) -> tuple[dict[str, object], UnusedSamples]:
        """The scheduler's state and the samples, between two decode steps.

        Running samples are stopped with their tokens, so that these are in it, and go on.
        """
        self._held = True
        try:
            for engine in self._engines:
                self._resize(engine)
            self._abort_running()
            self._wait_for(lambda: not any(self._running.values()), self._look_after_engines)
            unused = UnusedSamples(
                payloads=self.store.all(), verdicts=self._verdicts, dropped=self._dropped
            )
            return self.scheduler.to_json(), unused.copy()
        finally:
            self._held = False
            for engine in self._engines:
                self._resize(engine)

    def _look_after_engines(self) -> int:
        moved = self._mend_engines() + self._poll_engines(self._spent)
        if not moved and not self._deaths.broken:
            wait_for_any(self._waitable_engines(), POLL_S)
        return moved

    def _wait_for(self, done: Callable[[], bool], look: Callable[[], int]) -> None:
        last = self._clock()
        while not done():
            if look():
                last = self._clock()
                self._beat()
            elif self._clock() - last > self._stall_timeout_s:
                raise SchedulerError(
                    f"nothing moved for {self._stall_timeout_s:g} s", found=self.describe()
                )
