"""What a simulated trainer does with the batches of a step: operations on their lanes.

    batches -> the operation that can begin first -> its lanes, all at once -> ... -> publications

An operation begins when those before it have ended and its lanes are free; engines that draw on one
of them give way. Operations that stream (`flowrl.sim.streams`) have begun before, or begin when the
trainer comes to their batch; here the trainer waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.errors import SchedulerError
from flowrl.sim.batch import Batch
from flowrl.sim.clock import Clock
from flowrl.sim.costs import BatchWork, batch_work
from flowrl.sim.driver import SimDriver
from flowrl.sim.engine import SimEngine
from flowrl.sim.lanes import Lane
from flowrl.sim.model import EnvironmentModel, OpModel, SimModel
from flowrl.sim.streams import SimStreams


@dataclass(slots=True, eq=False, kw_only=True)
class SimOperations:
    """The operations of a model; see the module.

    Attributes:
        lanes: By name; those that operations compute on are among them.
        engines: All of the model, which may draw on the same lanes.
        driver: Has the trainer's lane work where processes share a machine.
        trainer: Lane of what makes the batches.
        publish: Is called with a role when its engines are to serve new weights.
        streams: The operations that begin on groups, or ahead of the trainer.
    """

    model: SimModel
    clock: Clock
    lanes: Mapping[str, Lane]
    engines: Sequence[SimEngine]
    driver: SimDriver
    trainer: Lane
    publish: Callable[[str], None]
    streams: SimStreams = field(init=False)
    _said: dict[str, Callable[[int], int]] = field(init=False)  # by rollout

    def __post_init__(self) -> None:
        self._said = {
            rollout.name: _tokens_said(rollout.environment) for rollout in self.model.rollouts
        }
        self.streams = SimStreams(
            clock=self.clock,
            ops=self.model.ops,
            rollouts=self.model.rollouts,
            take=self._take_lanes,
            said=self._said,
        )

    def learn(self, number: int, batches: Mapping[str, Batch], seconds: dict[str, float]) -> None:
        """Does the operations of a step, and publishes what they end with.

        Args:
            number: Of the step, from 1.
            batches: By rollout.
            seconds: By kind of work; what operations and the rows of the batch take is added.
        """
        kept, whole = {}, {}
        for name, said in self._said.items():
            batch = batches[name]
            kept[name] = batch_work(batch.delivered, said)
            whole[name] = batch_work((*batch.delivered, *batch.filtered), said)
        if self.model.host.row_s:
            rows = sum(work.rows for work in kept.values())
            spent_s = self.driver.wait(self.trainer, "host", self.model.host.row_s * rows)
            seconds["host"] = seconds.get("host", 0.0) + spent_s
        began_s = self.clock.now
        finished: dict[str, float] = {}  # when each operation that is over ended
        published: list[tuple[float, str]] = []
        waiting = list(self.model.ops)
        while waiting:
            self.streams.come_to(number, waiting, finished, began_s)
            op = self._next_op(waiting, finished, began_s)
            waiting.remove(op)
            start = max((finished[before] for before in op.after), default=began_s)
            finished[op.name] = start
            if number % op.every:
                continue
            work = None if op.name in self.streams else _work_of(op, kept, whole)
            if work is not None and not work.rows and op.op != "sync":
                continue
            end, took = self._do(op, number, start, work)
            finished[op.name] = end
            seconds[op.op] = seconds.get(op.op, 0.0) + took
            if op.publishes and (op.rollout is None or kept[op.rollout].rows):
                published += [(end, role) for role in op.publishes]
        for at_s, role in sorted(published):
            self.clock.run_to(at_s)
            self.publish(role)
        self.clock.run_to(max([self.clock.now, *finished.values()]))

    def _next_op(
        self, waiting: Sequence[OpModel], finished: Mapping[str, float], began_s: float
    ) -> OpModel:
        """The operation that can begin first; in the plan's order where several can.

        Those that stream come last: to wait for one moves the clock.
        """
        ready = [op for op in waiting if all(before in finished for before in op.after)]

        def key(op: OpModel) -> tuple[bool, float]:
            start = max((finished[before] for before in op.after), default=began_s)
            free = max((self.lanes[lane].free_s for lane in op.lanes), default=0.0)
            return (op.name in self.streams, max(start, free))

        return min(ready, key=key)

    def _do(
        self, op: OpModel, number: int, start: float, work: BatchWork | None
    ) -> tuple[float, float]:
        """Does an operation; when it ends, and seconds of its work.

        Args:
            start: When those before it have ended.
            work: What it is given; None of one that streams.
        """
        if work is None:
            end, took = self._streamed(op, number) or (start, 0.0)
            return max(start, end), took
        spent = op.fixed_s + op.cost(work)
        begin, took = self._take_lanes(op, start, spent) if spent else (start, 0.0)
        return begin + took, took

    def _streamed(self, op: OpModel, number: int) -> tuple[float, float] | None:
        """Waits until an operation that streams is done with a batch."""
        if not self.clock.run_until(lambda: self.streams.is_over(op.name, number)):
            raise SchedulerError(
                "nothing moves any more",
                where=f"{self.model.name}, step {number}, {self.clock.now:g} s",
                found=f"{op.name} waits for groups that nobody works on",
                hint="allow more prompts at once, or fewer faults",
            )
        return self.streams.collect(op.name, number)

    def _take_lanes(self, op: OpModel, start: float, spent: float) -> tuple[float, float]:
        """All lanes of an operation at once, as soon as all are free; when, and for how long."""
        wanted = frozenset(op.lanes)
        drawing = [engine for engine in self.engines if not wanted.isdisjoint(engine.lane.names)]
        if drawing:
            self.clock.run_to(start)  # until then the lanes are theirs
        for engine in drawing:
            engine.give_way()
        begin = max([start, *(self.lanes[lane].free_s for lane in op.lanes)])
        shared = self.driver.sharing is not None
        if shared and op.lanes == (self.trainer.name,) and not op.streams:
            self.clock.run_to(begin)
            return begin, self.driver.wait(self.trainer, op.op, spent, beside=op.threads)
        for lane in op.lanes:
            self.lanes[lane].work(op.op, begin, spent)
        return begin, spent


def _tokens_said(environment: EnvironmentModel | None) -> Callable[[int], int]:
    """Tokens of an environment in an episode in which so many are drawn."""
    return (lambda drawn: 0) if environment is None else environment.shape.said


def _work_of(
    op: OpModel, kept: Mapping[str, BatchWork], whole: Mapping[str, BatchWork]
) -> BatchWork:
    """What an operation is given.

    Args:
        kept: By rollout, what its filters kept.
        whole: By rollout, all of its batch.
    """
    if op.rollout is None:
        tokens = op.rows * op.tokens_per_row
        work = BatchWork(rows=op.rows, tokens=tokens, distinct=tokens)
    else:
        work = (kept if op.kept_only else whole)[op.rollout]
    return work.scaled(op.share, calls=op.calls, micro_batch=op.micro_batch)
