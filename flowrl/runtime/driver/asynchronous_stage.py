"""A stage that trains on one batch while later ones are generated.

    trainer's thread    | batch k: forward, update, publish k | batch k+1 ...
    rollout thread      | scheduler, scorers, filters: all the time
    engine processes    | generate all the time, with their own copy of the weights

A step takes the batch that the scheduler delivers, as soon as it is ready, and learns from it like
any other stage. Every sample that it learns from is at most `max_staleness` versions old, and so is
what its prompt was made of; this is checked once more here, from the versions that the engines have
noted with each token.

The samples of a batch depend on which ones were ready first, so two runs with one seed differ. Its
prompts do not where each step has its own rows (`flowrl.runtime.driver.streaming_tree`). Two
guarantees hold, also over a stop and a resumption: every prompt is offered once, and every sample
has one end. A checkpoint holds the samples that were generated and not used yet.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from flowrl.data import PromptItem
from flowrl.ids import EngineId, NodeId, RoleName
from flowrl.runtime.driver.payloads import StepBatch, receive_rollout
from flowrl.runtime.driver.rollout_tree import drop_incomplete
from flowrl.runtime.driver.stage import Stage, StageResources, delivered_groups
from flowrl.runtime.driver.step_report import GeneratedRollout, StepResult
from flowrl.runtime.driver.streaming_tree import StreamingTree, checked_ages
from flowrl.runtime.driver.threads import RolloutThread
from flowrl.runtime.spans import DRIVER, SPANS

_CLOSE_S = 10.0
"""Seconds that a thread which may hang has to let go of a stage."""


class AsynchronousStage(Stage):
    """See the module; the drivers run in the thread from the beginning until `close`.

    Args:
        resources: Its rollouts have their engines in `fleets`.
        thread: Runs the drivers; of the whole run.
        publish: Publishes the weights of a role whose engines generate.
        stop: A true value gives up waiting for a batch.
        timeout_s: Seconds that the thread may take to come to a call.
        ahead: Rows that a checkpoint's run had taken for later steps, by step and source.
    """

    def __init__(
        self,
        resources: StageResources,
        *,
        thread: RolloutThread,
        publish: Callable[[RoleName], None],
        stop: Callable[[], bool],
        timeout_s: float,
        ahead: Mapping[int, Mapping[NodeId, Sequence[PromptItem]]],
    ) -> None:
        rollouts, fleets = resources.rollouts, resources.fleets
        self._tree = StreamingTree(rollouts, fleets.values(), stall_timeout_s=timeout_s)
        roots = [root.part for root in self._tree.roots]
        # Of rows that the scheduler takes as it needs them, and of those that each step has.
        self._data = {resources.program.parts.data_of(part.source) for part in roots}
        self._by_rows = any(part.by_rows for part in roots)
        self._rows = {number: dict(rows) for number, rows in ahead.items()}
        # No sample is older in publications of its own policy, nor what its prompt was made of.
        self._limits = {r.node: r.driver.scheduler.settings.max_staleness for r in rollouts}
        self._thread = thread
        self._publish = publish
        self._published = set(fleets)  # in this step
        self._loads: list[Callable[[], None]] = []  # of roles in `_published`, until all are there
        self._is_ready = False  # every engine was, once
        self._stop = stop
        self._timeout_s = timeout_s
        super().__init__(resources)
        self._trees = (self._tree,)
        resources.program.quiet = self.quiet
        self._call(lambda: thread.serve(self._tree))

    def _call(self, act: Callable[[], None]) -> None:
        """Does something in the rollout's thread."""
        self._thread.call(act, self._timeout_s)

    # A step

    def step(self, number: int) -> StepResult:
        """Makes step `number`. Interrupted before its update, it has changed no weights."""
        if not self._is_ready:
            # Later, an engine that is restarted must not keep the others waiting.
            self._waits_for = "engines are being opened"
            for fleet in self._fleets.values():
                self._call(fleet.wait_ready)
            self._waits_for = ""
            self._is_ready = True
        started = time.monotonic()
        self._offer_ahead(number)
        others = [node for node in self._sources if node not in self._data]
        step = StepBatch(number=number)
        items = {**self._take(others), **self._rows.get(number, {})}
        generated = self._collect(number)
        waited_s = time.monotonic() - started
        drop_incomplete(generated, self._joined)
        ages = checked_ages(generated, self._limits)
        for rollout in generated:
            receive_rollout(self._program.parts, rollout.part, step, delivered_groups(rollout))
        self._give_rows(step, items, generated)
        self._published.clear()
        self._program.run(step)
        for role in self._fleets.keys() - self._published:
            # It learned nothing, but the budget of ages counts a publication for each batch.
            self._publish(role)
        self._rows.pop(number, None)
        return self._with_ages(self._end(step, generated, started), ages, generated, waited_s)

    def _offer_ahead(self, number: int) -> None:
        """Offers the rows of the steps that are not too far ahead of the weights of this one."""
        if not self._by_rows:
            return
        for step in range(number, number + max(self._limits.values()) + 1):
            if step not in self._rows:
                self._rows[step] = {node: self._sources[node].take() for node in self._data}
                rows = self._split(self._rows[step])
                self._call(partial(self._tree.offer, rows))

    def _collect(self, number: int) -> list[GeneratedRollout]:
        tree, rows = self._tree, self._split(self._rows.get(number, {}))
        self._call(lambda: tree.ask(number, rows))
        self._collecting = tree
        try:
            with SPANS.waiting(DRIVER, "a batch"):
                is_there = self._thread.wait_until(lambda: tree.is_delivered(number), self._stop)
            if not is_there:
                # From now on nothing more is delivered, so that what is written down then is what
                # the trainer knows of.
                self._call(self._thread.pause)
                if not tree.is_delivered(number):
                    raise KeyboardInterrupt
        finally:
            self._collecting = None
        try:
            return self._thread.call(lambda: tree.take(number), self._timeout_s)
        finally:
            self._call(self._thread.resume)

    def _with_ages(
        self,
        result: StepResult,
        ages: Counter[int],
        generated: Sequence[GeneratedRollout],
        waited_s: float,
    ) -> StepResult:
        """Adds the metrics that only an asynchronous step has to its rows."""
        extra = dict(result.metrics.extra)
        extra |= {f"age/{age}": float(ages[age]) for age in sorted(ages)}
        extra["surplus"] = float(sum(rollout.collected.ready for rollout in generated))
        extra["under_way"] = float(sum(rollout.collected.under_way for rollout in generated))
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
        """Sends new weights to the engines and reports the version to the scheduler.

        Those of several policies go together, once the last one's are there: a child that answers
        a parent of the newest weights may begin with no older ones of its own policy.
        """
        for role, fleet in self._fleets.items():
            if engine in fleet.engines:
                self._loads.append(partial(self._tree.load, fleet, fleet.written(version)))
                self._published.add(role)
        if self._published == self._fleets.keys():
            self._thread.post(partial(_do_all, self._loads))
            self._loads = []

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
            self._tree.settle_scores()
            self._tree.stop_clock()
            self._thread.pause()

        def resume() -> None:
            self._tree.start_clock()
            self._thread.resume()

        self._call(settle)
        try:
            yield
        finally:
            self._call(resume)

    def state(self) -> dict[str, object]:
        """Returns JSON of the stage now; `save` writes the samples that belong to it."""

        def write() -> dict[str, object]:
            written = self._tree.written()
            self._unused = {node: unused for node, (_, unused) in written.items()}
            # A resumed run's journal goes on from this state: it must not lack what led to it.
            super(AsynchronousStage, self)._flush_journals()
            schedulers = {node: scheduler for node, (scheduler, _) in written.items()}
            ahead = {
                str(number): {node: [item.group for item in items] for node, items in rows.items()}
                for number, rows in self._rows.items()
            }
            return {**self._written_sources(), "schedulers": schedulers, "rows_ahead": ahead}

        return self._thread.call(write, self._timeout_s)

    def _written(self) -> dict[str, object]:
        return {}  # there are no boundaries: something is always under way

    def close(self) -> None:
        """Ends rounds and engines; idempotent."""
        try:
            self._thread.call(lambda: self._thread.serve(None), _CLOSE_S)
        finally:
            super().close()


def _do_all(acts: Sequence[Callable[[], None]]) -> None:
    for act in acts:
        act()
