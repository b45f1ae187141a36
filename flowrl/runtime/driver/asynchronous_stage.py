"""A stage that trains on one batch while later ones are generated.

    trainer's thread    | batch k: forward, update, publish k | batch k+1 ...
    rollout thread      | scheduler, scorers, filters: all the time
    engine processes    | generate all the time, with their own copy of the weights

A step takes the batch that the scheduler delivers, as soon as it is ready, and learns from it like
any other stage. Every sample that it learns from is at most `max_staleness` versions old, which
is checked once more here, from the versions that the engines have noted with each token.

The samples of a batch depend on which ones were ready first, so two runs with one seed differ. Two
guarantees hold, also over a stop and a resumption: every prompt is offered once, and every sample
has one end. A checkpoint holds the samples that were generated and not used yet.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from flowrl.data import PromptItem
from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId
from flowrl.runtime.driver.batch_program import BatchProgram
from flowrl.runtime.driver.collected_batch import CollectedBatch, FailureBudget
from flowrl.runtime.driver.graph_parts import RolloutPart
from flowrl.runtime.driver.payloads import StepBatch, receive_rollout
from flowrl.runtime.driver.rollout_tree import OpenRollout
from flowrl.runtime.driver.sources import RowSamples, Source
from flowrl.runtime.driver.stage import Stage, delivered_groups
from flowrl.runtime.driver.step_report import GeneratedRollout, StepReport, StepResult
from flowrl.runtime.driver.streaming_driver import StreamingDriver
from flowrl.runtime.driver.threads import RolloutThread
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.wording import counted

__all__ = ["AsynchronousStage", "checked_ages"]


_CLOSE_S = 10.0
"""Seconds that a thread which may hang has to let go of a stage."""


class AsynchronousStage(Stage):
    """See the module; the driver runs in the thread from the beginning until `close`.

    Args:
        rollout: The only one of the stage, with a fleet of engines.
        thread: Runs its driver; of the whole run.
        publish: Publishes the weights with which the stage's engines generate.
        stop: A true value gives up waiting for a batch.
        timeout_s: Seconds that the thread may take to come to a call.
    """

    def __init__(
        self,
        *,
        program: BatchProgram,
        sources: Sequence[Source],
        row_samples: Sequence[RowSamples],
        rollout: OpenRollout,
        failures: FailureBudget,
        report: StepReport,
        thread: RolloutThread,
        publish: Callable[[], None],
        stop: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        assert isinstance(rollout.driver, StreamingDriver)
        assert rollout.fleet is not None
        self._driver: StreamingDriver = rollout.driver
        self._fleet: EngineFleet = rollout.fleet
        self._part: RolloutPart = rollout.part
        self._thread = thread
        self._publish = publish
        self._has_published = False  # in this step
        self._is_ready = False  # every engine was, once
        self._stop = stop
        self._timeout_s = timeout_s
        super().__init__(
            program=program,
            sources=sources,
            row_samples=row_samples,
            rollouts=[rollout],
            failures=failures,
            report=report,
        )
        self._call(lambda: thread.serve(self._driver))

    def _call(self, act: Callable[[], None]) -> None:
        """Does something in the rollout's thread."""
        self._thread.call(act, self._timeout_s)

    # A step

    def step(self, number: int) -> StepResult:
        """Makes step `number`. Interrupted before its update, it has changed no weights."""
        if not self._is_ready:
            # Later, an engine that is restarted must not keep the others waiting.
            self._call(self._fleet.wait_ready)
            self._is_ready = True
        started = time.monotonic()
        others = [node for node in self._sources if node != self._part.source]
        step, items = StepBatch(number=number), self._take(others)
        collected = self._collect(number)
        waited_s = time.monotonic() - started
        generated = GeneratedRollout(
            part=self._part,
            items=_items_of(collected),
            collected=collected,
            version=collected.version,
        )
        ages = checked_ages(collected, self._driver.scheduler.settings.max_staleness)
        receive_rollout(self._program.parts, self._part, step, delivered_groups(generated))
        self._give_rows(step, items, [generated])
        self._has_published = False
        self._program.run(step)
        if not self._has_published:
            # Nothing was learned, but the budget of ages counts a publication for each batch.
            self._publish()
        return self._with_ages(self._end(step, [generated], started), ages, collected, waited_s)

    def _collect(self, number: int) -> CollectedBatch:
        driver = self._driver
        self._call(lambda: driver.ask(number))
        self._collecting = driver
        try:
            if not self._thread.wait_until(lambda: driver.is_delivered(number), self._stop):
                # From now on nothing more is delivered, so that what is written down then is what
                # the trainer knows of.
                self._call(self._thread.pause)
                if not driver.is_delivered(number):
                    raise KeyboardInterrupt
        finally:
            self._collecting = None
        try:
            return self._thread.call(lambda: driver.take(number), self._timeout_s)
        finally:
            self._call(self._thread.resume)

    def _with_ages(
        self, result: StepResult, ages: Counter[int], collected: CollectedBatch, waited_s: float
    ) -> StepResult:
        """Adds the metrics that only an asynchronous step has to its rows."""
        extra = dict(result.metrics.extra)
        extra |= {f"age/{age}": float(ages[age]) for age in sorted(ages)}
        extra["surplus"] = float(collected.ready)
        extra["under_way"] = float(collected.under_way)
        seconds = {"wait": waited_s, **result.metrics.seconds}
        return replace(result, metrics=replace(result.metrics, extra=extra, seconds=seconds))

    def _observe(self, generated: Sequence[GeneratedRollout]) -> None:
        # The cursor is the other thread's, which takes prompts from it.
        observe = super()._observe
        self._call(lambda: observe(generated))

    def _flush_journals(self) -> None:
        self._call(super()._flush_journals)

    # Weights

    def publish(self, engine: EngineId, version: int) -> None:
        """Sends new weights to the engines and reports the version to the scheduler."""
        if self._driver.serves(engine):
            folder = self._fleet.written(version)
            self._thread.post(lambda: self._driver.load(version, folder))
            self._has_published = True

    # Standing still

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Keeps the scorers unused while the block runs; engines continue with their samples.

        Raises:
            BaseException: the error that ended the rounds, if no call has raised it yet.
        """

        def settle() -> None:
            if self._thread.failure is not None:
                raise self._thread.failure
            self._driver.settle_scores()
            self._driver.stop_clock()
            self._thread.pause()

        def resume() -> None:
            self._driver.start_clock()
            self._thread.resume()

        self._call(settle)
        try:
            yield
        finally:
            self._call(resume)

    def state(self) -> dict[str, object]:
        """Returns JSON of the stage now; `save` writes the samples that belong to it."""
        node = self._part.node.id

        def write() -> dict[str, object]:
            scheduler, self._unused[node] = self._driver.written()
            # A resumed run's journal goes on from this state: it must not lack what led to it.
            super(AsynchronousStage, self)._flush_journals()
            return {**self._written_sources(), "schedulers": {node: scheduler}}

        return self._thread.call(write, self._timeout_s)

    def _written(self) -> dict[str, object]:
        return {}  # there are no boundaries: something is always under way

    def close(self) -> None:
        """Ends rounds and engines; idempotent."""
        try:
            self._thread.call(lambda: self._thread.serve(None), _CLOSE_S)
        finally:
            super().close()


def checked_ages(collected: CollectedBatch, max_staleness: int) -> Counter[int]:
    """Returns the number of consumed samples for each staleness, in versions.

    Raises:
        SchedulerError: one is older than `max_staleness`.
    """
    ages: Counter[int] = Counter()
    for _, members in collected.groups:
        for sample, payload in members:
            first = min((version for version, _ in payload.versions), default=None)
            age = 0 if first is None else collected.version - first
            if age > max_staleness:
                raise SchedulerError(
                    "a sample is older than the workflow allows",
                    where=f"sample {sample}",
                    found=f"versions {payload.versions} at version {collected.version}",
                    expected=f"at most {counted(max_staleness, 'publication')} old",
                )
            ages[age] += 1
    return ages


def _items_of(collected: CollectedBatch) -> Sequence[PromptItem]:
    """Prompts that were delivered, then those that were filtered."""
    items: dict[GroupId, PromptItem] = {
        group: members[0][1].item for group, members in collected.groups
    }
    for _, payload, _ in collected.filtered:
        items.setdefault(payload.item.group, payload.item)
    return tuple(items.values())
