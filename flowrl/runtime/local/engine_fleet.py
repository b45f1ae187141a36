"""The engine processes of a policy, each with its own copy of the weights.

    export (the trainer's thread) -> shared memory -> publish -> each engine loads it -> Loaded

Each engine is a `RestartableEngine`: after a restart it loads the newest weights first. Calls to
the engines come from one thread at a time, that of the driver; `written` belongs to the trainer's.

Engines may come and go:  open -> has_opened, until it is True -> ... -> remove.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowrl.backend.protocols import GenerateBackend, PolicyContext, Weights
from flowrl.errors import WorkerDied
from flowrl.ids import EngineId, engine_number
from flowrl.plan.local import MOST_ENGINES
from flowrl.runtime.channels import Channel
from flowrl.runtime.local.engine_process import EngineProcess, open_engine_worker
from flowrl.runtime.local.engine_restarts import RestartableEngine
from flowrl.runtime.local.processes import core_id
from flowrl.runtime.transfer.weight_folders import WeightFolders


class RemoteEngine(RestartableEngine):
    """An engine in another process; whichever it is, it can be waited for.

    Args:
        open_process: Starts it.
    """

    def __init__(
        self,
        name: EngineId,
        open_process: Callable[[], EngineProcess],
        *,
        folders: WeightFolders | None,
    ) -> None:
        def opened() -> EngineProcess:
            self.process = open_process()
            return self.process

        super().__init__(name, opened, folders=folders)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do."""
        return self.process.fileno()

    def seconds_to_limit(self) -> float:
        """Seconds after which `poll` must be called to enforce a time limit."""
        return self.process.seconds_to_limit()

    def silent_s(self) -> float:
        """Seconds without a message while it had requests."""
        return self.process.silent_s()


class EngineFleet:
    """See the module. Opening returns at once; engines load their model meanwhile.

        weights = fleet.written(version)     # in the trainer's thread
        fleet.announce(weights)              # in the driver's, from here on
        fleet.load(name)                     # once for each engine

    Args:
        names: Names of the engines.
        plugin: Name of the plug-in that generates.
        context: Context of the policy.
        export: Writes the trainer's weights into a folder.
        fallback: Folder for weights if the system has no shared memory.
        silence_s: Seconds that an engine with requests may be silent.
        cores: The core of each engine, counted among those that this process may use; empty leaves
            it to the operating system.
        open_channel: Starts the process of an engine.
        start_timeout_s: Seconds that it may take to be ready.
        most: Engines that there may be.
        reserve: Reserves what engines run on before they are opened, or raises BackendError.
        release: Gives back what was reserved for an engine.
        share: Moves weights to where the engines are; see `WeightFolders`.

    Attributes:
        engines: Engines by name.
        most: See the arguments.
    """

    def __init__(
        self,
        names: Sequence[EngineId],
        plugin: str,
        context: PolicyContext,
        *,
        export: Callable[[Path], None],
        fallback: Path,
        silence_s: float,
        cores: Sequence[int] = (),
        open_channel: Callable[[EngineId], Channel] = lambda name: open_engine_worker(),
        start_timeout_s: float = 120.0,
        most: int = MOST_ENGINES,
        reserve: Callable[[Sequence[EngineId]], None] = lambda names: None,
        release: Callable[[EngineId], None] = lambda name: None,
        share: Callable[[Weights], Weights] | None = None,
    ) -> None:
        self.most = len(cores) or most
        self._reserve = reserve
        self._release = release
        self._plugin = plugin
        self._context = replace(context, trainable=False)
        self._export = export
        self._silence_s = silence_s
        self._start_timeout_s = start_timeout_s
        self._open_channel = open_channel
        self._core_of = dict(zip(names, map(core_id, cores), strict=bool(cores)))
        self._folders = WeightFolders(fallback, share=share)
        self._busy_before = 0.0
        self._members: dict[EngineId, RemoteEngine] = {}
        self._opening: dict[EngineId, RemoteEngine] = {}
        self.engines: Mapping[EngineId, GenerateBackend] = self._members
        try:
            self.open(names)
        except BaseException:
            self.close()
            raise
        self._members |= self._opening
        self._opening.clear()

    def open(self, names: Sequence[EngineId]) -> None:
        """Begins to open engines; returns at once.

        Raises:
            BackendError: what they would run on is not there.
        """
        self._reserve(names)
        try:
            for name in names:
                self._opening[name] = RemoteEngine(
                    name, partial(self._open, name), folders=self._folders
                )
        except BaseException:
            for name in names:
                self._end(name, self._opening)
            raise

    def has_opened(self, name: EngineId) -> bool:
        """True once an engine that is being opened is a member, with the newest weights.

        Raises:
            FlowError: it cannot be opened, and is forgotten.
        """
        process = self._opening[name].process
        try:
            process.poll(0.0)
        except BaseException:
            self._end(name, self._opening)
            raise
        if process.is_ready:
            self._members[name] = self._opening.pop(name)
            self._members[name].load_newest()
        return process.is_ready

    def remove(self, name: EngineId) -> None:
        """Ends an engine that no driver uses any more."""
        self._end(name, self._members)

    def _end(self, name: EngineId, engines: dict[EngineId, RemoteEngine]) -> None:
        """Ends an engine, which need not have been started, and frees what it holds."""
        member = engines.pop(name, None)
        if member is not None:
            self._busy_before += member.process.busy_s
            member.process.kill()
        self._folders.forget(name)
        self._release(name)

    def _open(self, name: EngineId) -> EngineProcess:
        if name in self._members:
            self._busy_before += self._members[name].process.busy_s
        return EngineProcess(
            name,
            self._plugin,
            replace(self._context, replica=1 + engine_number(name)),
            start_timeout_s=self._start_timeout_s,
            silence_s=self._silence_s,
            core=self._core_of.get(name),
            open_channel=partial(self._open_channel, name),
        )

    def wait_ready(self) -> None:
        """Waits until every engine is open or has failed; a failure is raised by its next poll.

        Raises:
            FlowError: the plug-in's error when it opens an engine.
        """
        for member in self._members.values():
            with contextlib.suppress(WorkerDied):
                member.process.wait_ready()

    def written(self, version: int) -> Weights:
        """Has the trainer's weights written, once for all engines, for `announce`."""
        return self._folders.written(version, self._export)

    def announce(self, weights: Weights) -> None:
        """Takes what `written` returned for the newest weights; engines opened later load them."""
        self._folders.add(weights)

    def load(self, name: EngineId) -> None:
        """Has an engine load the newest weights; a failed one loads them after its restart."""
        member = self._members[name]
        if member.process.is_dead:
            member.forget()
        else:
            member.load_newest()

    def publish(self, weights: Weights) -> None:
        """Calls `announce`, and `load` for every engine."""
        self.announce(weights)
        for name in self._members:
            self.load(name)

    @property
    def busy_s(self) -> float:
        """Seconds that all engines together have spent generating."""
        return self._busy_before + sum(member.process.busy_s for member in self._members.values())

    def close(self) -> None:
        """Ends every process; idempotent."""
        with ExitStack() as stack:
            stack.callback(self._folders.close)
            for member in (*self._opening.values(), *self._members.values()):
                stack.callback(member.close)
