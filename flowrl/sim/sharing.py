"""What the processes of one machine take from each other: its cores, and each one its interpreter.

A piece of work says how many seconds it takes alone. It is done at a speed that follows from what
else is done at the time:

- Two threads of a process share its interpreter. What one loses while the other works was measured
  (`Beside`): a trainer leaves the interpreter while it computes, but comes back every few
  microseconds, and then waits; and its caches are full of the other's things.
- Where more is done at once than there are cores, everyone gets the same share of what it could do.

So a speed holds until the next piece begins or ends, and what is left of each is counted on from
there (processor sharing). Engines are told their pace and count their own steps by it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from flowrl.sim.clock import Clock
from flowrl.sim.lanes import Lane

_NOTHING_S = 1e-12
"""Less than rounding makes of a day of virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Two threads of one interpreter: one computes, the other is busy with Python alone.

    Attributes:
        loses: Seconds that the first one loses for each second of the other's work: 1 where it
            stands still meanwhile, as it does with nothing but Python to do; less where it goes on
            computing, more where it has to find its way back.
        lets: Share of its speed that the other one keeps.
    """

    loses: float = 1.0
    lets: float = 1.0


class Paced(Protocol):
    """Something that works on its own, at a pace that it is told (an engine)."""

    def set_pace(self, pace: float) -> None:
        """From now on everything takes `pace` times as long as alone."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Piece:
    lane: Lane
    what: str
    left_s: float
    beside: Beside | None
    then: Callable[[], object]
    begun: Callable[[], object] | None
    begin_s: float = 0.0
    speed: float = 0.0

    @property
    def due_s(self) -> float:
        """Seconds until it is done at this speed."""
        if not self.left_s:
            return 0.0
        return self.left_s / self.speed if self.speed > 0 else math.inf


@dataclass(slots=True, eq=False, kw_only=True)
class Sharing:
    """See the module. A lane does one piece at a time, in the order of asking.

    Attributes:
        num_cores: Of the machine.
    """

    clock: Clock
    num_cores: int
    _queues: dict[str, deque[_Piece]] = field(default_factory=dict)  # by lane; the first is done
    _active: dict[str, _Piece] = field(default_factory=dict)  # by lane
    _paced: dict[int, Paced] = field(default_factory=dict)  # by identity, in order of entrance
    _pace: float = 1.0
    _settled_s: float = 0.0  # up to when work is counted off
    _stamp: int = 0

    def work(
        self,
        lane: Lane,
        what: str,
        seconds: float,
        then: Callable[[], object],
        *,
        beside: Beside | None = None,
        begun: Callable[[], object] | None = None,
    ) -> None:
        """Has a lane do something.

        Args:
            seconds: That it takes alone; what takes none waits for its turn all the same.
            then: Called when it is done.
            beside: Of the first of two threads of a process; None for the other one.
            begun: Called when its turn has come.
        """
        queue = self._queues.setdefault(lane.name, deque())
        queue.append(
            _Piece(lane=lane, what=what, left_s=seconds, beside=beside, then=then, begun=begun)
        )
        if len(queue) == 1:
            self._begin(queue[0])
            self._set_speeds()

    def enter(self, paced: Paced) -> None:
        """An engine begins to work; idempotent."""
        if id(paced) not in self._paced:
            self._paced[id(paced)] = paced
            paced.set_pace(self._pace)
            self._set_speeds()

    def leave(self, paced: Paced) -> None:
        """It has nothing to do any more; idempotent."""
        if self._paced.pop(id(paced), None) is not None:
            paced.set_pace(1.0)
            self._set_speeds()

    def _begin(self, piece: _Piece) -> None:
        piece.begin_s = self.clock.now
        self._settle()  # before it counts
        self._active[piece.lane.name] = piece
        if piece.begun is not None:
            piece.begun()

    def _settle(self) -> None:
        """Counts off what was done since the last change of speeds."""
        passed_s = self.clock.now - self._settled_s
        if passed_s > 0:
            for piece in self._active.values():
                piece.left_s = max(0.0, piece.left_s - passed_s * piece.speed)
        self._settled_s = self.clock.now

    def _set_speeds(self) -> None:
        self._settle()
        active = list(self._active.values())
        wanted = [self._wanted(piece, active) for piece in active]
        demand = sum(max(0.0, speed) for speed in wanted) + len(self._paced)
        share = min(1.0, self.num_cores / demand) if demand else 1.0
        for piece, speed in zip(active, wanted, strict=True):
            piece.speed = speed * share
        if self._pace != 1.0 / share:
            self._pace = 1.0 / share
            for paced in list(self._paced.values()):
                paced.set_pace(self._pace)
        self._stamp += 1
        if active:
            first_s = min(piece.due_s for piece in active)
            self.clock.at(self.clock.now + first_s, self._look, self._stamp)

    @staticmethod
    def _wanted(piece: _Piece, active: list[_Piece]) -> float:
        """Its speed where there are cores enough."""
        others = [
            one
            for one in active
            if one is not piece and one.lane.process and one.lane.process == piece.lane.process
        ]
        if not others:
            return 1.0
        if piece.beside is not None:
            # Below 0 where it loses more than the time it stands still.
            return 1.0 - piece.beside.loses * piece.beside.lets
        return next(
            (one.beside.lets for one in others if one.beside is not None), 1 / (1 + len(others))
        )

    def _look(self, stamp: int) -> None:
        """Something is done, if nothing has changed meanwhile."""
        if stamp != self._stamp:
            return
        self._settle()
        least = min(piece.due_s for piece in self._active.values())
        # What is due now is done, whatever rounding has left of it.
        done = [piece for piece in self._active.values() if piece.due_s <= least + _NOTHING_S]
        now = self.clock.now
        for piece in done:
            lane = piece.lane
            del self._active[lane.name]
            queue = self._queues[lane.name]
            queue.popleft()
            lane.free_s = now
            lane.done(piece.what, piece.begin_s, now)
            if queue:
                self._begin(queue[0])
        self._set_speeds()
        for piece in done:
            piece.then()
