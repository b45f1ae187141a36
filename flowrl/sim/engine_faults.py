"""Breaks simulated engines as the faults say, and brings them back.

Losses at random are drawn from the seed and the engine's number; see `flowrl.sim.faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowrl.sim.clock import Clock
from flowrl.sim.engine import SimEngine
from flowrl.sim.faults import Faults
from flowrl.sim.rollout import SimRollout
from flowrl.sim.trace import Trace


@dataclass(slots=True, eq=False, kw_only=True)
class EngineBreaker:
    """Puts the faults of engines on the clock.

    Attributes:
        engines: In the order in which scripts count them.
        rollouts: All of the model; an engine is lost to each that it has joined.
        version: Of the weights that an engine has to serve.
        num_lost: Losses so far.
    """

    clock: Clock
    faults: Faults
    seed: int
    engines: Sequence[SimEngine]
    rollouts: Sequence[SimRollout]
    version: Callable[[SimEngine], int]
    trace: Trace | None = None
    num_lost: int = field(default=0, init=False)

    def begin(self) -> None:
        """Schedules every scripted fault, and each engine's first loss at random."""
        for fault in self.faults.script:
            engine = self.engines[fault.engine]
            if fault.kind == "slow":
                self.clock.at(fault.at_s, engine.slow_down, fault.factor)
                if fault.for_s is not None:
                    self.clock.at(fault.at_s + fault.for_s, engine.slow_down, 1.0)
            elif fault.kind == "silent":
                self.clock.at(fault.at_s, self._silence, engine, fault.for_s)
            else:
                self.clock.at(fault.at_s, self._lose, engine, fault.for_s, None)
        if self.faults.engines.mean_time_between_s:
            for number, engine in enumerate(self.engines):
                self._lose_later(engine, np.random.default_rng([self.seed, number]))

    def _lose_later(self, engine: SimEngine, rng: np.random.Generator) -> None:
        rates = self.faults.engines
        at_s = self.clock.now + float(rng.exponential(rates.mean_time_between_s))
        self.clock.at(at_s, self._lose, engine, rates.repair_s, rng)

    def _lose(
        self, engine: SimEngine, back_after_s: float | None, rng: np.random.Generator | None
    ) -> None:
        """Takes an engine away.

        Args:
            back_after_s: Seconds until it joins again; None is never.
            rng: Of its next loss; None of a scripted one.
        """
        own = [rollout for rollout in self.rollouts if engine.id in rollout.engines]
        if not own:
            return  # it is gone already
        self.num_lost += 1
        if self.trace is not None:
            self.trace.moment(engine.lane, f"{engine.id} lost", self.clock.now)
        for rollout in own:
            rollout.lose(engine, "simulated")
        if back_after_s is not None:
            self.clock.at(self.clock.now + back_after_s, self._join, engine, own, rng)

    def _silence(self, engine: SimEngine, for_s: float | None) -> None:
        own = [rollout for rollout in self.rollouts if engine.id in rollout.engines]
        for rollout in own:
            rollout.silence(engine)
            if for_s is not None:
                self.clock.at(self.clock.now + for_s, rollout.speak, engine)

    def _join(
        self, engine: SimEngine, rollouts: Sequence[SimRollout], rng: np.random.Generator | None
    ) -> None:
        engine.slow = 1.0
        engine.publish(self.version(engine))
        for rollout in rollouts:
            rollout.join(engine)
        if rng is not None:
            self._lose_later(engine, rng)
