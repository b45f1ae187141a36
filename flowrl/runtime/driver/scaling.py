"""Engines that join and leave a stage while it runs, because somebody asked for it.

    request -> fleet.open -> ... it is ready -> every driver joins it            -> answer
    request -> every driver lets it leave -> ... it is empty -> fleet.remove     -> answer

Looked at between two looks of the drivers, in their thread: nothing here waits. An engine that
joins has the newest weights. One that leaves gets no more samples; those that it has are stopped,
keep their tokens and go on with other engines. The first engine always stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.errors import ConfigError, FlowError
from flowrl.ids import EngineId, RoleName, engine_id
from flowrl.observe.scale_requests import RequestBox, ScaleAnswer, ScaleRequest
from flowrl.runtime.driver.graph_parts import role_of
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.rollout_tree import OpenRollout
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.wording import counted, listing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A request that was begun.

    Attributes:
        name: Its id.
        drivers: All that use the fleet.
        joining: Engines that are being opened.
        leaving: Engines that have samples still.
        events: What has happened so far.
        failed: Engines that could not be opened.
    """

    name: str
    fleet: EngineFleet
    drivers: Sequence[RolloutDriver]
    joining: list[EngineId] = field(default_factory=list)
    leaving: list[EngineId] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    failed: list[EngineId] = field(default_factory=list)


class Scaling:
    """See the module; one request after the other.

    Args:
        box: The requests of the run.
        rollouts: The open rollouts of the stage.
        fleets: The engines of policies that have theirs in processes of their own.
    """

    def __init__(
        self,
        box: RequestBox,
        rollouts: Sequence[OpenRollout],
        fleets: Mapping[RoleName, EngineFleet],
    ) -> None:
        self._box = box
        self._rollouts = tuple(rollouts)
        self._fleets = fleets
        self._change: _Change | None = None

    def look(self) -> int:
        """Goes on with what was begun, or begins the next request; returns 1 if something moved."""
        if self._change is not None:
            return self._go_on(self._change)
        taken = self._box.take()
        if taken is None:
            return 0
        name, request = taken
        try:
            self._change = self._begin(name, request)
        except FlowError as refusal:
            self._box.answer(name, ScaleAnswer(done=False, text=str(refusal)))
        return 1

    def close(self) -> None:
        """Answers what was begun: the engines end with the stage. Idempotent."""
        change, self._change = self._change, None
        if change is not None:
            text = "the stage ended before its engines had joined or left"
            self._box.answer(change.name, ScaleAnswer(done=False, text=text))

    def _begin(self, name: str, request: ScaleRequest) -> _Change:
        fleet, drivers = self._users(request)
        given_up = {engine for driver in drivers for engine in driver.engine_failures.given_up}
        present = [engine for engine in fleet.engines if engine not in given_up]
        change, wanted = (
            _Change(name=name, fleet=fleet, drivers=drivers),
            request.target(len(present)),
        )
        if not 1 <= wanted <= fleet.most:
            raise ConfigError(
                f"{request.role} cannot generate with {counted(wanted, 'engine')}",
                where=f"{request.role}.generate",
                found=f"{counted(len(present), 'engine')} now",
                expected=f"1 to {fleet.most}",
            )
        if wanted > len(present):
            numbers = (engine_id(request.role, n) for n in range(len(fleet.engines) + wanted))
            free = [engine for engine in numbers if engine not in fleet.engines]
            change.joining.extend(free[: wanted - len(present)])
            fleet.open(change.joining)
        for engine in present[wanted:]:
            change.leaving.append(engine)
            for driver in drivers:
                driver.leave(engine)
        return change

    def _users(self, request: ScaleRequest) -> tuple[EngineFleet, list[RolloutDriver]]:
        """Returns the engines of a role and the drivers that use them.

        Raises:
            ConfigError: there are none, or not in processes of their own.
        """
        role, where = RoleName(request.role), f"{request.role}.generate"
        users = [(r.driver, [role_of(node) for node in r.part.turn_nodes]) for r in self._rollouts]
        own = [(driver, roles) for driver, roles in users if role in roles]
        if not own:
            generating = sorted({each for _, roles in users for each in roles})
            raise ConfigError(
                f"no engine generates for role {role!r} in this stage",
                where=where,
                expected=listing(generating) or "a stage that generates",
            )
        if any(len(roles) > 1 for _, roles in own):
            raise ConfigError(
                "policies that take turns have their engines put together for the whole stage",
                where=where,
                hint=f"set roles.{role}.num_engines before the run begins",
            )
        if role not in self._fleets:
            raise ConfigError(
                f"the engine of {role} is in the process of its trainer, with one copy of the "
                "weights, so no other one can join",
                where=where,
                hint=f"start the run with roles.{role}.num_engines=2, or with executor=ray",
            )
        return self._fleets[role], [driver for driver, _ in own]

    def _go_on(self, change: _Change) -> int:
        done = [self._joined(change, engine) for engine in list(change.joining)]
        done += [self._left(change, engine) for engine in list(change.leaving)]
        if not change.joining and not change.leaving:
            self._change = None
            answer = ScaleAnswer(
                done=not change.failed,
                text="; ".join(change.events) or "nothing changes",
                engines=tuple(change.fleet.engines),
            )
            self._box.answer(change.name, answer)
            return 1
        return sum(done)

    def _joined(self, change: _Change, engine: EngineId) -> bool:
        joined: list[RolloutDriver] = []
        try:
            if not change.fleet.has_opened(engine):
                return False
            for driver in change.drivers:
                driver.join(engine, change.fleet.engines[engine])  # may open an environment
                joined.append(driver)
        except FlowError as error:
            change.failed.append(engine)
            change.events.append(f"{engine} cannot be opened: {error}")
            for driver in joined:
                driver.leave(engine)
            if joined:
                change.leaving.append(engine)
            elif engine in change.fleet.engines:
                change.fleet.remove(engine)
        else:
            change.events.append(f"{engine} joined")
        change.joining.remove(engine)
        return True

    def _left(self, change: _Change, engine: EngineId) -> bool:
        if any(driver.serves(engine) for driver in change.drivers):
            return False
        change.fleet.remove(engine)
        change.events.append(f"{engine} left")
        change.leaving.remove(engine)
        return True
