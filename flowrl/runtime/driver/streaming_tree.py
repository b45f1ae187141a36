"""Rollouts of one tree whose engines go on while the trainer learns.

The rollout at the root runs ahead as its age budget allows; a sample's end admits its children at
once, as in every tree (`flowrl.runtime.driver.rollout_tree`). A batch is that of the root and, when
it is there, the children of the samples that ended with it, by name, and theirs. So a child is
consumed with its parent, at the same version. Both are of bounded age, and so is what a child's
prompt was made of.

Children of a sample that is dropped, as of one that became too old, are dropped at once.

Where several rollouts answer the data's prompts, or one answers some of them, each step has its own
rows: they are taken and offered to all when the step may begin that many versions ahead, and its
batch names them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from flowrl.backend.weights import Weights
from flowrl.data import PromptItem
from flowrl.errors import SchedulerError
from flowrl.ids import GroupId, NodeId, SampleId
from flowrl.runtime.checkpoint.unused_samples import UnusedSamples
from flowrl.runtime.driver.collected_batch import Clock, CollectedBatch
from flowrl.runtime.driver.rollout_tree import OpenRollout, RolloutTree, members_of
from flowrl.runtime.driver.rounds import POLL_S, stalled
from flowrl.runtime.driver.step_report import GeneratedRollout, sample_ages
from flowrl.runtime.driver.streaming_driver import StreamingDriver
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.workers import wait_for_any
from flowrl.wording import counted


class StreamingTree(RolloutTree):
    """See the module. It is served by a `RolloutThread`, which calls everything here.

    Args:
        rollouts: Those of the tree, each with a `StreamingDriver`.
        fleets: Their engines.
        stall_timeout_s: Seconds without progress after which a batch is given up.
    """

    def __init__(
        self,
        rollouts: Sequence[OpenRollout],
        fleets: Iterable[EngineFleet],
        *,
        stall_timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(rollouts)
        self._drivers: dict[NodeId, StreamingDriver] = {}
        for rollout in rollouts:
            assert isinstance(rollout.driver, StreamingDriver)
            self._drivers[rollout.node] = rollout.driver
        self._fleets = tuple(fleets)
        self._busy_s = self._generating_s()  # of engines, when the last batch was taken
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._asked: tuple[int, float] | None = None  # the batch that is waited for, and since when
        self._progressed = 0.0  # when something last did
        self._stopped = 0.0  # when the clock was
        self._connect()
        for rollout in rollouts:
            children = [self._drivers[child.node] for child in self.children_of(rollout)]
            if children:
                rollout.driver.on_dropped = partial(_drop_children, children)

    # What the trainer asks for

    def offer(self, rows: Mapping[NodeId, Sequence[PromptItem]]) -> None:
        """Offers the prompts of a step to the rollouts that answer them.

        Args:
            rows: Prompts by the node that gives them.
        """
        for root in self.roots:
            self._drivers[root.node].offer(rows[root.part.source])

    def ask(self, batch: int, rows: Mapping[NodeId, Sequence[PromptItem]]) -> None:
        """Requests a batch: the trainer is free.

        Args:
            rows: Its prompts by the node that gives them, where a step has its own ones.
        """
        self._asked = (batch, self._clock())
        for root in self.roots:
            driver = self._drivers[root.node]
            if root.part.by_rows:
                driver.ask_for(batch, [item.group for item in rows[root.part.source]])
            else:
                driver.ask(batch)
        self._ask_for_children()

    def _ask_for_children(self) -> None:
        """Requests the children of what was delivered."""
        if self._asked is None:
            return
        batch, _ = self._asked
        for child in self.rollouts:
            if child.part.parent is None:
                continue
            (parents,) = (r for r in self.rollouts if r.node == child.part.parent)
            delivered = self._drivers[parents.node]
            own = self._drivers[child.node]
            if own.is_delivered(batch) or not delivered.is_delivered(batch):
                continue
            ended = _as_generated(parents, delivered.delivered(batch))
            if self.waits(child):
                self._admit_of(child, ended)
            own.ask_for(batch, _children_of(own, ended))
        if self.is_delivered(batch):
            self._asked = None

    def is_delivered(self, batch: int) -> bool:
        """True if `take` can return the batch. May be called from any thread."""
        return all(driver.is_delivered(batch) for driver in self._drivers.values())

    def take(self, batch: int) -> list[GeneratedRollout]:
        """Takes a delivered batch of every rollout."""
        self._items.clear()
        taken = [_as_generated(r, self._drivers[r.node].take(batch)) for r in self.rollouts]
        busy_s = self._generating_s()
        taken[0].collected.seconds.generate = busy_s - self._busy_s
        self._busy_s = busy_s
        return taken

    def _generating_s(self) -> float:
        return sum(fleet.busy_s for fleet in self._fleets)

    def load(self, fleet: EngineFleet, weights: Weights) -> None:
        """Has the engines of a fleet serve what `EngineFleet.written` returned."""
        fleet.announce(weights)
        drivers = [rollout.driver for rollout in self.rollouts]
        served = [driver for driver in drivers if any(map(driver.serves, fleet.engines))]
        if not served[0].scheduler.settings.publication.empties:
            for engine in fleet.engines:
                fleet.load(engine)
        for driver in served:
            driver.publish(weights.version)

    # Rounds

    def round(self, wake: int) -> int:
        """Looks once after everyone, and waits a little where nothing moved.

        Raises:
            SchedulerError: a batch is waited for, and nothing moved for the stall timeout.
            FlowError: what `RolloutDriver.collect` raises.
        """
        progressed = self._look()
        now = self._clock()
        if progressed:
            self._progressed = now
        elif self._asked is not None and self._idle_s(now) > self._stall_timeout_s:
            raise stalled(self._stall_timeout_s, self.describe())
        elif not self._is_broken:
            wait_for_any([w for d in self._drivers.values() for w in d.waitable()], POLL_S, wake)
        return progressed

    def _look(self) -> int:
        progressed = self.scale() + sum(driver.look() for driver in self._drivers.values())
        self._ask_for_children()
        if progressed:
            self.root.driver.beat()
        return progressed

    @property
    def roots(self) -> list[OpenRollout]:
        """The rollouts that answer the data's prompts."""
        return [rollout for rollout in self.rollouts if rollout.part.parent is None]

    @property
    def _is_broken(self) -> bool:
        return any(driver.is_broken for driver in self._drivers.values())

    def _idle_s(self, now: float) -> float:
        assert self._asked is not None
        return now - max(self._progressed, self._asked[1])

    # Standing still

    def stop_clock(self) -> None:
        """Stops the clock while no rounds run, for messages of engines wait meanwhile."""
        self._stopped = self._clock()
        for driver in self._drivers.values():
            driver.stop_clock()

    def start_clock(self) -> None:
        """Rounds again."""
        self._progressed += self._clock() - self._stopped
        for driver in self._drivers.values():
            driver.start_clock()

    def settle_scores(self) -> None:
        """Waits until scorers have answered everything: others may use them then.

        Raises:
            SchedulerError: they do not within the stall timeout.
        """
        for driver in self._drivers.values():
            driver.settle_scores()

    def written(self) -> dict[NodeId, tuple[dict[str, object], UnusedSamples]]:
        """Returns the state of each scheduler and the samples, between two decode steps.

        Running samples are stopped with their tokens, so that these are in it, and go on.
        """
        drivers = self._drivers.values()
        for driver in drivers:
            driver.pause()
        try:
            self.root.driver.wait_for(
                lambda: not any(driver.is_generating for driver in drivers), self._wait_for_engines
            )
            return {
                node: (driver.scheduler.to_json(), driver.unused())
                for node, driver in self._drivers.items()
            }
        finally:
            for driver in drivers:
                driver.go_on()

    def _wait_for_engines(self) -> int:
        drivers = self._drivers.values()
        progressed = sum(driver.look_after_engines(driver.spent) for driver in drivers)
        if not progressed and not self._is_broken:
            wait_for_any([w for d in drivers for w in d.waitable_engines()], POLL_S)
        return progressed


def _drop_children(children: Sequence[StreamingDriver], sample: SampleId) -> None:
    group = GroupId(sample)
    for child in children:
        if child.was_offered(group):
            child.lose_parents([group])


def _children_of(driver: StreamingDriver, parents: GeneratedRollout) -> list[GroupId]:
    """Returns the groups that answer the samples of a batch, in the order of these."""
    members = members_of(parents.collected)
    ended = [sample for item in parents.items for sample, _ in members[item.group]]
    ended += [sample for sample, _, _ in parents.collected.dropped]
    return [group for group in map(GroupId, ended) if driver.was_offered(group)]


def _as_generated(rollout: OpenRollout, collected: CollectedBatch) -> GeneratedRollout:
    return GeneratedRollout(
        part=rollout.part,
        items=_items_of(collected),
        collected=collected,
        version=collected.version,
    )


def _items_of(collected: CollectedBatch) -> Sequence[PromptItem]:
    """Prompts that were delivered, then those that were filtered."""
    items: dict[GroupId, PromptItem] = {
        group: members[0][1].item for group, members in collected.groups
    }
    for _, payload, _ in collected.filtered:
        items.setdefault(payload.item.group, payload.item)
    return tuple(items.values())


def checked_ages(
    generated: Sequence[GeneratedRollout], limits: Mapping[NodeId, int]
) -> Counter[int]:
    """Returns the number of consumed samples for each staleness, in versions.

    Args:
        limits: The staleness that samples of each rollout may have.

    Raises:
        SchedulerError: one is older, or a sample that its prompt was made of.
    """
    ages: Counter[int] = Counter()
    of_samples = sample_ages(generated)
    for rollout in generated:
        node = rollout.part.node.id
        for _, members in rollout.collected.groups:
            for sample, payload in members:
                age = of_samples[node][sample]
                if age > limits[node]:
                    raise SchedulerError(
                        "a sample is older than the workflow allows",
                        where=f"sample {sample} of {node}",
                        found=f"it, or what its prompt was made of, is {age} publications old; "
                        f"versions {payload.versions} at version {rollout.version}",
                        expected=f"at most {counted(limits[node], 'publication')} old",
                    )
                ages[age] += 1
    return ages
