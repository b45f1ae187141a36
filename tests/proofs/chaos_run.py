"""A run, in a process of its own, in which one of its processes is killed at a chosen moment.

A moment is a place in the run's own progress: the third time that samples are scored, or that a
checkpoint is being written. The run's thread that comes to it sends SIGKILL to the victim, which is
then in the middle of whatever it does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl import api
from flowrl.errors import FlowError
from flowrl.files import write_json_atomic
from flowrl.observe.display import SilentDisplay
from flowrl.rollout.events import (
    EngineJoined,
    Event,
    Progressed,
    SamplesFinished,
    SamplesScored,
)
from flowrl.runtime.checkpoint import store
from flowrl.runtime.checkpoint.journal import RolloutJournal
from flowrl.runtime.local import engine_fleet, process_channel
from flowrl.runtime.ray.clients import ActorScorers
from flowrl.runtime.scoring import pool
from flowrl.runtime.trainers import Trainer
from flowrl.runtime.workers import PolicyWorker
from tests.warm_processes import WarmProcesses

__all__ = ["MOMENTS", "Order", "Report", "main"]

MOMENTS = ("generation", "scoring", "update", "weight sync", "checkpoint")
_OF_EVENTS: dict[type[Event], str] = {
    EngineJoined: "generation",
    Progressed: "generation",
    SamplesFinished: "generation",
    SamplesScored: "scoring",
}
_RESTARTS = ("is restarted", "is replaced", "is opened again", "died under")
_ASK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is to run, and whom it kills; see `Report` for what it leaves.

    Attributes:
        config: Configuration of a new run; None resumes `folder`.
        victim: Kind of the process that is killed; "" kills none.
        moment: One of `MOMENTS`.
        number: The how-maniest of these moments, from 1.
        choice: Chooses among several such processes.
    """

    folder: str
    report: str
    config: dict[str, Any] | None = None
    victim: str = ""
    moment: str = ""
    number: int = 0
    choice: int = 0


@dataclass(slots=True, kw_only=True)
class Report:
    """What a process has done; written at each change, so that a killed one leaves it too."""

    moments: dict[str, int] = field(default_factory=dict)
    killed: str = ""
    warnings: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def restarts(self) -> int:
        return sum(any(words in text for words in _RESTARTS) for text in self.warnings)


class _Chaos(logging.Handler):
    def __init__(self, order: Order) -> None:
        super().__init__(logging.WARNING)
        self._order = order
        self._report = Report()
        self._counts: Counter[str] = Counter()
        self._entrance = threading.RLock()
        self.processes: list[tuple[str, int]] = []  # local workers: module and process

    def emit(self, record: logging.LogRecord) -> None:
        self._report.warnings.append(record.getMessage())
        self._write()

    def passed(self, moment: str) -> None:
        """Counts a moment of the run, and kills the victim at the one that was ordered."""
        with self._entrance:
            self._counts[moment] += 1
            order = self._order
            if self._report.killed or not order.victim:
                return
            if moment == order.moment and self._counts[moment] >= order.number:
                self._kill()

    def _kill(self) -> None:
        found = sorted(_VICTIMS[self._order.victim](self))
        if not found:
            return  # not yet, or between two: the next of these moments
        name, pid = found[self._order.choice % len(found)]
        self._report.killed = name
        self._write()
        os.kill(pid, signal.SIGKILL)

    def _write(self) -> None:
        self._report.moments = dict(self._counts)
        write_json_atomic(Path(self._order.report), asdict(self._report))

    def end(self, error: BaseException | None) -> None:
        self._report.error = "" if error is None else f"{type(error).__name__}: {error}"
        self._write()


# The processes of a run, by name and number


def _local(chaos: _Chaos, module: str) -> list[tuple[str, int]]:
    return [
        (f"{name.rpartition('.')[2]} {number}", pid)
        for number, (name, pid) in enumerate(chaos.processes)
        if name.startswith(module) and _is_alive(pid)
    ]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _actors(part: str) -> list[tuple[str, int]]:
    import ray

    found = []
    for name in ray.util.list_named_actors():
        if part in name:
            try:
                ask = ray.get_actor(name).__ray_call__.remote(lambda actor: os.getpid())
                found.append((name, int(ray.get(ask, timeout=_ASK_S))))
            except (ValueError, ray.exceptions.RayError):
                continue  # it died before
    return found


def _children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in text for child in path.read_text().split()]


def _raylet(chaos: _Chaos) -> list[tuple[str, int]]:
    from ray._private.worker import _global_node

    processes = _global_node.all_processes["raylet"]
    return [("raylet", one.process.pid) for one in processes]


_VICTIMS: dict[str, Callable[[_Chaos], list[tuple[str, int]]]] = {
    "driver": lambda chaos: [("driver", os.getpid())],
    "engine": lambda chaos: _local(chaos, "flowrl.runtime.local.engine"),
    "scorer": lambda chaos: _local(chaos, "flowrl.runtime.scoring"),
    "rank": lambda chaos: _local(chaos, "flowrl.runtime.local.rank_worker"),
    "trainer actor": lambda chaos: _actors(".train"),
    "engine actor": lambda chaos: _actors(".generate["),
    "scorer actor": lambda chaos: _actors(".score"),
    "scorer of an actor": lambda chaos: [
        (f"process of {name}", child)
        for name, pid in _actors(".score")
        for child in _children_of(pid)
    ],
    "environment actor": lambda chaos: _actors("game"),
    "raylet": _raylet,
}


# The moments


def _watch(chaos: _Chaos, warm: WarmProcesses) -> None:
    """Has the run's own code say where it is."""

    def between(owner: Any, name: str, moment: str) -> None:
        """Both before and after a function."""
        act = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            chaos.passed(moment)
            result = act(*arguments, **options)
            chaos.passed(moment)
            return result

        setattr(owner, name, watched)

    def start_module(module: str, descriptors: Sequence[int], output: Any) -> Any:
        process = warm.start_module(module, descriptors, output)
        chaos.processes.append((module, process.pid))
        return process

    process_channel.start_module = start_module  # type: ignore[attr-defined]
    note = RolloutJournal.note

    def noted(journal: RolloutJournal, event: Event) -> None:
        note(journal, event)
        if type(event) in _OF_EVENTS:
            chaos.passed(_OF_EVENTS[type(event)])

    RolloutJournal.note = noted  # type: ignore[assignment, method-assign]
    between(pool.ScoringPool, "submit", "scoring")
    between(ActorScorers, "submit", "scoring")
    between(Trainer, "update", "update")
    between(Trainer, "update_sum", "update")
    between(PolicyWorker, "publish", "weight sync")
    between(engine_fleet.EngineFleet, "written", "weight sync")
    between(engine_fleet.EngineFleet, "load", "weight sync")
    for name in ("_describe_files", "sync_tree", "write_json_atomic"):
        between(store, name, "checkpoint")


def main(arguments: Sequence[str]) -> None:
    """Runs until it ends or is killed: ORDER."""
    order = Order(**json.loads(arguments[0]))
    with closing(WarmProcesses()) as warm:
        chaos = _Chaos(order)
        logging.getLogger("flowrl").addHandler(chaos)
        _watch(chaos, warm)
        try:
            if order.config is not None:
                api.run(None, order.config, display=SilentDisplay())
            else:
                folder = Path(order.folder)
                api.resume(
                    api.compile(None, folder / "config.yaml"), folder, display=SilentDisplay()
                )
        except FlowError as error:
            chaos.end(error)
            print(error, file=sys.stderr)
            raise SystemExit(1) from None
        except BaseException as error:
            chaos.end(error)
            raise
        chaos.end(None)
