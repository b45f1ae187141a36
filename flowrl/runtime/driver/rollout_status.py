"""What a rollout does now, read from its scheduler while that goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flowrl.observe.run_status import EngineStatus, RolloutStatus
from flowrl.rollout.state import SchedulerState
from flowrl.rollout.states import LIVE, Engine
from flowrl.runtime.local.engine_restarts import EngineFailures


def rollout_status(
    name: str, state: SchedulerState, waits: Sequence[str], failures: EngineFailures
) -> RolloutStatus:
    """Returns the status of a rollout.

    Args:
        waits: Who waits for whom.
        failures: Shows which engines are broken.
    """
    counts, version = state.machine.counts, state.machine.version
    # A list at once: the thread of the driver adds samples meanwhile.
    begun = [s.first_version for s in list(state.machine.samples.values())]
    ages = Counter(version - first for first in begun if first is not None)
    return RolloutStatus(
        name=name,
        samples={each.value: counts[each] for each in LIVE if counts[each]},
        staleness=dict(sorted(ages.items())),
        engines=[
            EngineStatus(
                name=engine.id,
                weights=engine.version,
                samples=len(engine.held),
                capacity=engine.capacity,
                state=_state_of(engine, failures),
            )
            for engine in list(state.placement.engines.values())
        ]
        + [
            EngineStatus(name=lost, weights=0, samples=0, capacity=0, state="given up")
            for lost in failures.given_up
        ],
        waits=waits,
    )


def _state_of(engine: Engine, failures: EngineFailures) -> str:
    if not failures.is_alive(engine.id):
        return "failed; it is restarted"
    return ", ".join(sorted(engine.closed)) or "ready"
