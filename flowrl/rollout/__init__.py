"""The per-sample rollout scheduler: a state machine without I/O.

`RolloutScheduler.step(event) -> list[Action]` owns each sample from admission to the one end it
has. Executors and simulators translate what happens into events and carry the actions out.
"""

from flowrl.rollout.actions import (
    Abort,
    Action,
    Deliver,
    DeliveredGroup,
    Dispatch,
    Drop,
    Judge,
    NeedPrompts,
    Score,
    Submit,
)
from flowrl.rollout.events import (
    AbortAsked,
    BatchAsked,
    EngineCapacityChanged,
    EngineJoined,
    EngineLost,
    Event,
    GroupsJudged,
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
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import LIVE, TERMINAL, Counts, DropReason, State

__all__ = [
    "LIVE",
    "TERMINAL",
    "TRANSITIONS",
    "Abort",
    "AbortAsked",
    "Action",
    "BatchAsked",
    "Counts",
    "Deliver",
    "DeliveredGroup",
    "Dispatch",
    "Drop",
    "DropReason",
    "EngineCapacityChanged",
    "EngineJoined",
    "EngineLost",
    "Event",
    "GroupsJudged",
    "Judge",
    "NeedPrompts",
    "Observer",
    "Progressed",
    "PromptsOffered",
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
    "WeightsPublished",
]
