"""What the search is given: tasks with their options, device counts, memory. No models, no graphs.

A task is one piece of a training step (generate, score, update); an option is one way to run it,
with its layout, recomputation and offload already turned into seconds and bytes. The search joins
options to a schedule (`flowrl.plan.search.schedule`); what a schedule takes is defined by
`flowrl.plan.search.evaluate`.

    generate = Task(id="generate", options=(Option(devices=8, seconds=40.0, peak=30 << 30),))
    update = Task(id="update", after=("generate",), options=(Option(devices=8, seconds=20.0),))
    problem = Problem(tasks=(generate, update), num_devices=8, memory_bytes=80 << 30)

Invariants, checked when a Problem is made:
- ids are unique, `after` names tasks that stand earlier in `tasks`, so there is no cycle;
- seconds are finite, bytes are not negative, `peak >= resident >= weight_bytes`,
  `seconds >= steady_s >= dense_s`;
- options of equal weights, form and devices agree about `weight_bytes`, or hold none of them
  (offloaded);
- `ahead` is downward closed: what a task of it reads from is in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flowrl.errors import PlanError
from flowrl.plan.search.arrivals import Arrivals


class Kind(StrEnum):
    """A family of schedules that the search may choose from.

    `TEMPORAL`: all tasks in turn on the same devices. `SPATIAL`: every task on devices of its own.
    `HYBRID`: both, nested in any way; it contains the first two. `ASYNCHRONOUS`: a part runs ahead
    of the rest on devices of its own, and each of the two is of any kind; needs `staleness > 0`.
    A problem of one task has one schedule, which is of the first three kinds.
    """

    TEMPORAL = "temporal"
    SPATIAL = "spatial"
    HYBRID = "hybrid"
    ASYNCHRONOUS = "asynchronous"


EVERY_KIND = frozenset({Kind.HYBRID, Kind.ASYNCHRONOUS})
"""All schedules: hybrid contains temporal and spatial ones."""


class Objective(StrEnum):
    """What the best schedule has least of.

    `STEP_TIME`: seconds of a step. `DEVICE_SECONDS`: seconds of a step times the devices used (the
    block and those `beside`), so that fewer devices may win; a step has a fixed number of samples,
    so this orders schedules as device-hours per sample do.
    """

    STEP_TIME = "step_time"
    DEVICE_SECONDS = "device_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a task: a device count, and what layout, recomputation and offload make of it.

    Attributes:
        devices: Devices that it runs on, exactly.
        seconds: Time for the whole batch; an offloaded role's reload and offload are in it.
        chunk_s: Extra seconds for every further chunk that the batch is cut into.
        resident: Bytes on each device while other tasks work.
        peak: Bytes on each device while it works, `resident` included.
        weight_bytes: The part of `resident` that is the parameters of `Task.weights`.
        form: How those parameters lie on the devices (layout, precision). Tasks that hold equal
            weights in equal forms on the same devices hold them once.
        label: The caller's index of what this option is; the search never reads it.
        arrivals: When its results are there for those that read them in chunks; None = evenly.
        steady_s: Time for a batch where batches follow each other without a gap, each beginning
            while others end; at most `seconds`. None = `seconds`.
        dense_s: The part of `steady_s` that is the batch's own however many others are under way;
            in the rest all of them progress together. A batch takes longer the more overlap
            (`flowrl.plan.search.overlap`).
    """

    devices: int
    seconds: float
    chunk_s: float = 0.0
    resident: int = 0
    peak: int = 0
    weight_bytes: int = 0
    form: str = ""
    label: int = 0
    arrivals: Arrivals | None = None
    steady_s: float | None = None
    dense_s: float = 0.0

    @property
    def period_s(self) -> float:
        """Seconds from one batch to the next where they follow each other without a gap."""
        return self.seconds if self.steady_s is None else self.steady_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of the step.

    Attributes:
        id: Its name.
        after: The tasks whose results it reads.
        options: The ways to run it. None at all makes the problem infeasible.
        weights: Name of the parameters that its options hold; tasks may share a name.
        max_chunks: Pieces in which its inputs may arrive; 1 = it needs the whole batch.
        in_one: It is done in one go: others have its devices before or after, and not between its
            chunks.
        beside: Further ways, which the search does without; schedules that are measured may use
            them.
    """

    id: str
    after: tuple[str, ...] = ()
    options: tuple[Option, ...]
    weights: str | None = None
    max_chunks: int = 1
    in_one: bool = False
    beside: tuple[Option, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """New weights travel from the task `source` to the task `destination` once a step.

    Attributes:
        source: The update.
        destination: The task that uses the new weights, usually generation.
        together_s: Seconds when both run on exactly the same devices.
        apart_s: Seconds otherwise.
    """

    source: str
    destination: str
    together_s: float
    apart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tasks to place on equal devices.

    Attributes:
        tasks: In an order in which they could run one after the other.
        num_devices: Devices of the pool.
        counts: Sizes that a block of devices may have, node-aligned; empty = every size. The whole
            pool is always one. Every part of a schedule stands on a block, so options of other
            sizes are never used.
        memory_bytes: Bytes of each device that tasks may use.
        chunks: Chunk counts to choose from where one task streams into another.
        syncs: Weights that travel.
        staleness: Steps by which `ahead` may run ahead of the rest; 0 = strictly on-policy.
        ahead: Tasks that may run ahead.
        pinned: Device counts that tasks must have.
        places: Devices that tasks must have, by number. The search leaves out schedules in which
            parts that stand apart would share one; which device a block is, it does not know.
        kinds: Families of schedules to choose from.
        objective: What to minimise.
        beside: Devices that are taken besides, and count where devices do.
    """

    tasks: tuple[Task, ...]
    num_devices: int
    counts: tuple[int, ...] = ()
    memory_bytes: int
    chunks: tuple[int, ...] = (1, 2, 4, 8, 16)
    syncs: tuple[Sync, ...] = ()
    staleness: int = 0
    ahead: frozenset[str] = frozenset()
    pinned: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, frozenset[int]] = field(default_factory=dict)
    kinds: frozenset[Kind] = EVERY_KIND
    objective: Objective = Objective.STEP_TIME
    beside: int = 0

    def __post_init__(self) -> None:
        check_problem(self)

    def task(self, name: str) -> Task:
        """The task of this name; KeyError where there is none."""
        for task in self.tasks:
            if task.id == name:
                return task
        raise KeyError(name)

    def behind(self, name: str) -> frozenset[str]:
        """The task of this name and all that its results follow from."""
        found, waiting = {name}, [name]
        while waiting:
            new = set(self.task(waiting.pop()).after) - found
            found |= new
            waiting += new
        return frozenset(found)

    def in_one(self) -> frozenset[str]:
        """The tasks that are done in one go, and those that one of them follows from: they are over
        before it begins."""
        found: frozenset[str] = frozenset()
        return found.union(*(self.behind(task.id) for task in self.tasks if task.in_one))

    def unread(self) -> frozenset[str]:
        """The tasks that no other one reads, and none in one go follows from."""
        names = {task.id for task in self.tasks} - self.in_one()
        return frozenset(names.difference(*(task.after for task in self.tasks)))

    def block_sizes(self) -> tuple[int, ...]:
        """The sizes that blocks may have in this pool, ascending."""
        sizes = {size for size in self.counts if size < self.num_devices}
        if not self.counts:
            sizes.update(range(1, self.num_devices))
        return tuple(sorted(sizes | {self.num_devices}))


def check_problem(problem: Problem) -> None:
    """Raises PlanError where a problem contradicts itself."""
    if not problem.tasks:
        raise PlanError("A search needs at least one task")
    if problem.num_devices < 1:
        raise _wrong("num_devices must be positive", problem.num_devices)
    if problem.memory_bytes < 0:
        raise _wrong("memory_bytes must not be negative", problem.memory_bytes)
    if any(count < 1 for count in problem.counts):
        raise _wrong("counts must be positive", problem.counts)
    if not problem.chunks or any(count < 1 for count in problem.chunks):
        raise _wrong("chunks must be one or more positive numbers", problem.chunks)
    if problem.staleness < 0:
        raise _wrong("staleness must not be negative", problem.staleness)
    if problem.beside < 0:
        raise _wrong("beside must not be negative", problem.beside)
    if not problem.kinds:
        raise PlanError("kinds must name at least one kind of schedule")
    if not any(problem.tasks is tasks for tasks in _RIGHT):
        _check_tasks(problem.tasks)
        _RIGHT.append(problem.tasks)
    _check_names(problem)


_RIGHT: deque[tuple[Task, ...]] = deque(maxlen=4)
"""Tasks that were found right last: a search makes many problems of the same ones."""


def _check_tasks(tasks: tuple[Task, ...]) -> None:
    seen: set[str] = set()
    held: dict[tuple[str, str, int], int] = {}
    for task in tasks:
        if task.id in seen:
            raise PlanError("Two tasks have one name", where=task.id)
        for read in task.after:
            if read not in seen:
                raise PlanError(
                    f"'after' names {read!r}, which is no earlier task",
                    where=task.id,
                    expected=f"one of {sorted(seen)}" if seen else "nothing: it is the first",
                )
        if task.max_chunks < 1:
            raise _wrong("max_chunks must be positive", task.max_chunks, where=task.id)
        seen.add(task.id)
        for option in task.options:
            _check_option(task, option)
            if task.weights is None or not option.weight_bytes:
                continue
            key = (task.weights, option.form, option.devices)
            if held.setdefault(key, option.weight_bytes) != option.weight_bytes:
                raise _wrong(
                    f"weights {task.weights!r} in form {option.form!r} on {option.devices} devices "
                    f"have {held[key]} bytes in one option and others in another",
                    option.weight_bytes,
                    where=task.id,
                )


def _check_option(task: Task, option: Option) -> None:
    if option.devices < 1:
        raise _wrong("an option needs a positive device count", option.devices, where=task.id)
    for seconds in (option.seconds, option.chunk_s):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise _wrong("seconds must be finite and not negative", seconds, where=task.id)
    if not 0 <= option.period_s <= option.seconds:
        raise _wrong(
            "steady_s must be from 0 to the option's seconds", option.steady_s, where=task.id
        )
    if not 0 <= option.dense_s <= option.period_s:
        raise _wrong("dense_s must be from 0 to steady_s", option.dense_s, where=task.id)
    if not 0 <= option.weight_bytes <= option.resident <= option.peak:
        raise _wrong(
            "bytes must satisfy 0 <= weight_bytes <= resident <= peak",
            (option.weight_bytes, option.resident, option.peak),
            where=task.id,
        )


def _check_names(problem: Problem) -> None:
    ids = {task.id for task in problem.tasks}
    named = [(sync.source, "syncs") for sync in problem.syncs]
    named += [(sync.destination, "syncs") for sync in problem.syncs]
    named += [(name, "ahead") for name in sorted(problem.ahead)]
    named += [(name, "pinned") for name in problem.pinned]
    named += [(name, "places") for name in problem.places]
    for name, place in named:
        if name not in ids:
            raise _wrong(f"'{place}' names a task that there is not", name)
    for task in problem.tasks:
        missing = sorted(set(task.after) - problem.ahead)
        if task.id in problem.ahead and missing:
            raise PlanError(
                f"'ahead' holds {task.id!r} but not {missing[0]!r}, which it reads from",
                expected="a set that holds everything its tasks read from",
            )
    for sync in problem.syncs:
        if sync.source == sync.destination:
            raise _wrong("a sync needs two tasks", sync.source)
        for seconds in (sync.together_s, sync.apart_s):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise _wrong("seconds of a sync must be finite and not negative", seconds)


def _wrong(what: str, found: object, *, where: str | None = None) -> PlanError:
    return PlanError(what, where=where, found=repr(found))
