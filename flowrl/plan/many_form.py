"""The parts of a plan that only a plan over many devices has. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowrl.wording import percent

ScheduleKind: TypeAlias = Literal["run", "temporal", "spatial", "asynchronous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """A node of the schedule, which is a tree.

    Attributes:
        kind: `run` is a leaf. The parts of `temporal` take turns on the same devices, those of
            `spatial` work at once on devices of their own, and of `asynchronous` the first is a
            later step ahead of the second.
        devices: That it stands on.
        node: Of a leaf: the operation.
        chunks: Of `spatial`: pieces in which the batch passes from the first part to the second.
        ready: Where these do not come evenly: the share of the first part's time after which each
            is there.
        parts: Two, or none of a leaf.
    """

    kind: ScheduleKind
    devices: int
    node: str | None = None
    chunks: int = 1
    ready: tuple[float, ...] = ()
    parts: tuple[ScheduleStep, ...] = ()

    def nodes(self) -> tuple[str, ...]:
        """The operations that it runs, first before second."""
        own = () if self.node is None else (self.node,)
        return own + tuple(node for part in self.parts for node in part.nodes())

    def draw(self) -> tuple[str, ...]:
        """The tree as lines of text."""
        plural = "device" if self.devices == 1 else "devices"
        if self.kind == "run":
            return (f"{self.node} on {self.devices} {plural}",)
        pieces = f", {self.chunks} chunks" if self.chunks > 1 else ""
        if self.ready:
            pieces += f", the first after {percent(self.ready[0])} of the time"
        lines = [f"{self.kind} on {self.devices} {plural}{pieces}"]
        for i, part in enumerate(self.parts):
            last = i == len(self.parts) - 1
            for j, line in enumerate(part.draw()):
                lead = ("`-- " if last else "|-- ") if j == 0 else ("    " if last else "|   ")
                lines.append(lead + line)
        return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """How an inference server is started: for one replica of an operation, or for those over which
    its experts are divided.

    Attributes:
        flags: `(option, value)` as its command line has them; an empty value of a switch.
    """

    node: str
    engine: str
    flags: tuple[tuple[str, str], ...]

    def command(self) -> str:
        """The options in one line."""
        return " ".join(f"{name} {value}".strip() for name, value in self.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedDecision:
    """A decision that somebody made; it is kept when the plan is made anew.

    Attributes:
        subject: What it is about, as it was written.
        nodes: The operations that this means.
    """

    subject: str
    field: str
    value: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentUse:
    """How an environment plays with a policy.

    Attributes:
        mode: `together` on the policy's devices (or on the cores of their hosts), or `apart`.
        at_once: Calls that it serves at once, on all that it has.
        reset_s: Seconds of a call that begins an episode.
        step_s: Seconds of a call that answers a turn.
        wait_s: Seconds that an answer is late beside.
        turns: Of an episode, on average.
        drawn: Tokens of a turn, on average.
        said: Tokens that it says before each.
        seconds: Its work in a step, if nothing waited.
        source: Of these times: `given`, `measured` or `unknown`.
    """

    mode: Literal["together", "apart"]
    at_once: float
    reset_s: float
    step_s: float
    wait_s: float
    turns: float
    drawn: float
    said: float
    seconds: float
    source: str
