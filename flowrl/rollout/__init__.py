"""The per-sample rollout scheduler: a state machine without I/O.

`RolloutScheduler.step(event) -> list[Action]` owns each sample from admission to the one end it
has. Executors and simulators translate what happens into events and carry the actions out. Rules
that can be chosen are `flowrl.rollout.policies`, named in the settings.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flowrl.rollout.settings import SchedulerSettings

if TYPE_CHECKING:
    from flowrl.rollout.actions import (
        Abort,
        Action,
        ContinueEngine,
        Deliver,
        DeliveredGroup,
        Dispatch,
        Drop,
        Judge,
        NeedPrompts,
        PauseEngine,
        ReleaseEngine,
        Score,
        Submit,
        UpdateEngine,
        Wake,
    )
    from flowrl.rollout.events import (
        AbortAsked,
        BatchAsked,
        DeadlineReached,
        EngineCapacityChanged,
        EngineContinueAsked,
        EngineJoined,
        EngineLeaving,
        EngineLost,
        EnginePauseAsked,
        EngineUpdated,
        Event,
        GroupsJudged,
        HeartbeatLost,
        HeartbeatSeen,
        Progressed,
        PromptsOffered,
        Resumed,
        RewardFailed,
        SampleEnd,
        SampleFailed,
        SamplesFinished,
        SamplesScored,
        StopAsked,
        WeightsPublished,
    )
    from flowrl.rollout.machine import TRANSITIONS, Observer, Transition
    from flowrl.rollout.scheduler import RolloutScheduler
    from flowrl.rollout.states import LIVE, TERMINAL, ClosedReason, Counts, DropReason, State

__all__ = [
    "LIVE",
    "TERMINAL",
    "TRANSITIONS",
    "Abort",
    "AbortAsked",
    "Action",
    "BatchAsked",
    "ClosedReason",
    "ContinueEngine",
    "Counts",
    "DeadlineReached",
    "Deliver",
    "DeliveredGroup",
    "Dispatch",
    "Drop",
    "DropReason",
    "EngineCapacityChanged",
    "EngineContinueAsked",
    "EngineJoined",
    "EngineLeaving",
    "EngineLost",
    "EnginePauseAsked",
    "EngineUpdated",
    "Event",
    "GroupsJudged",
    "HeartbeatLost",
    "HeartbeatSeen",
    "Judge",
    "NeedPrompts",
    "Observer",
    "PauseEngine",
    "Progressed",
    "PromptsOffered",
    "ReleaseEngine",
    "Resumed",
    "RewardFailed",
    "RolloutScheduler",
    "SampleEnd",
    "SampleFailed",
    "SamplesFinished",
    "SamplesScored",
    "SchedulerSettings",
    "Score",
    "State",
    "StopAsked",
    "Submit",
    "Transition",
    "UpdateEngine",
    "Wake",
    "WeightsPublished",
]

_LATER = ("actions", "events", "machine", "scheduler", "states")
"""Modules whose names are imported when they are asked for: planning needs the settings alone."""


if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in _LATER:
                members = vars(import_module(f"{__name__}.{module}"))
                if name in members:
                    globals()[name] = members[name]
                    return members[name]
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
