"""The driver of rollouts on a virtual clock: work that its lane does, one piece after the other.

Where processes and threads share a machine (`Sharing`), a piece takes as long as they leave it;
otherwise as long as it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowrl.sim.clock import Clock
from flowrl.sim.lanes import Lane
from flowrl.sim.sharing import Beside, Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class SimDriver:
    """See the module.

    Attributes:
        sharing: What its lane, and those beside it, share a machine by; None where they do not.
    """

    clock: Clock
    lane: Lane
    sharing: Sharing | None = None

    def work(
        self,
        what: str,
        seconds: float,
        then: Callable[[], object],
        begun: Callable[[], object] | None = None,
    ) -> None:
        """Does something when everything before is done; at once where it takes no time.

        Args:
            begun: Called when its turn has come.
            then: Called when it is done.
        """
        if seconds:
            self.beside(self.lane, what, seconds, then, begun)
            return
        if begun is not None:
            begun()
        then()

    def beside(
        self,
        lane: Lane,
        what: str,
        seconds: float,
        then: Callable[[], object],
        begun: Callable[[], object] | None = None,
        *,
        beside: Beside | None = None,
    ) -> None:
        """Has any lane of the machine do something, in turn."""
        if self.sharing is not None:
            self.sharing.work(lane, what, seconds, then, begun=begun, beside=beside)
            return
        begin_s, end_s = lane.work(what, self.clock.now, seconds)
        if begun is not None:
            self.clock.at(begin_s, begun)
        self.clock.at(end_s, then)

    def wait(self, lane: Lane, what: str, seconds: float, beside: Beside | None = None) -> float:
        """Has a lane do something, and everything else happen until it is done; seconds it took."""
        began, done = self.clock.now, [False]

        def end() -> None:
            done[0] = True

        self.beside(lane, what, seconds, end, beside=beside)
        self.clock.run_until(lambda: done[0])
        return self.clock.now - began
