"""What a plan predicts, the reasons that it gives, and the plans that came close. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.cost.memory import PhaseMemory
from flowrl.plan.many_form import ScheduleStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedMemory:
    """What a device holds in a phase, of all its roles.

    Attributes:
        active: The role that works in this phase.
        num_devices: That hold the same; `device` is the first of them.
    """

    device: str
    active: str
    memory: PhaseMemory
    num_devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpan:
    """A bar of the predicted timeline, in seconds from the start of the step.

    What runs ahead may end after the step, which then is shorter than its batch takes.
    """

    node: str
    device: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSource:
    """Where the predicted time of an operation comes from.

    Attributes:
        source: `measured`, `aiconfigurator` or `analytic`; `assumed` of a plan for this machine.
        parts: `(name, seconds)`; what overlaps may add up to more.
        assumed: What it takes for granted of the device, such as `hopper's efficiencies`; else
            empty.
    """

    node: str
    seconds: float
    source: str
    parts: tuple[tuple[str, float], ...] = ()
    assumed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the plan expects; times are None where nobody estimated them.

    Attributes:
        memory: One entry for each device and phase.
        bottleneck: The operation that the step waits for most.
        idle_share: Of the time of the devices that the plan uses, 0 to 1.
        sync_s: Of `step_s`, what new weights take on their way.
        device_s: Seconds of these devices for a sample, idle or not.
        tokens_per_device_s: Tokens of prompts and responses of all samples that a step draws (of a
            step that draws none: learns from), by mean lengths, a second of each of these devices.
        confidence: Which times were measured, and which estimated.
    """

    memory: tuple[PredictedMemory, ...] = ()
    step_s: float | None = None
    timeline: tuple[PredictedSpan, ...] | None = None
    bottleneck: str | None = None
    idle_share: float | None = None
    sync_s: float | None = None
    device_s: float | None = None
    tokens_per_device_s: float | None = None
    confidence: tuple[CostSource, ...] = ()

    def peak(self, device: str) -> PredictedMemory | None:
        """The phase in which a device holds most."""
        on_device = [entry for entry in self.memory if entry.device == device]
        return max(on_device, key=lambda entry: entry.memory.total, default=None)


NO_PREDICTION = Prediction()
"""Of a plan that nobody estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A choice that was not made.

    Attributes:
        constraint: What it breaks, in words.
        found: The number that breaks it, with its unit; or empty.
        limit: The number it may not pass; or empty.
        nearest: The nearest choice that is possible; or empty.
    """

    choice: str
    constraint: str
    found: str = ""
    limit: str = ""
    nearest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something is as it is."""

    subject: str
    choice: str
    why: str
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that came close.

    Attributes:
        kind: `temporal`, `spatial`, `hybrid` or `asynchronous`.
        device_s: Seconds of the devices that it uses for a sample, idle or not.
        schedule: What runs where.
    """

    summary: str
    step_s: float | None
    why_not: str
    kind: str = ""
    device_s: float | None = None
    schedule: ScheduleStep | None = None
