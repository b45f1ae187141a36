"""Where the times of a stage come from: a profile of this machine, or assumptions about devices.

What is assumed is a roofline: a decode step reads the weights and every key and value once, and
computes `2 P` operations a row (P parameters that a token passes), and takes the longer of the two
plus a fixed part; a training pass computes `6 P` a token, a forward pass `2 P`. The speeds are
round numbers for the kind of device and those of no card in particular: they give the shape of a
schedule, not its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrl.compiler import CompiledStage
from flowrl.cost import ModelShape
from flowrl.cost.demand import phase_of
from flowrl.cost.memory import DTYPE_BYTES, Phase
from flowrl.errors import PlanError
from flowrl.graph import Op
from flowrl.plan.schema import PlacementPlan
from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.engine import PollRule
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.scorers import ScoreTimes
from flowrl.sim.sharing import Beside
from flowrl.sim.step_time import StepTime
from flowrl.sim.workload import PromptLengths

Switch = tuple[str, str, str]
"""A residency switch: role, what, action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Of one replica of a generating role.

    Attributes:
        poll: How a driver polls it where it is embedded.
        load_s: What it takes to go on with weights that changed in place.
        load_folder_s: Seconds in which it loads weights from a folder.
        apart: Its steps in a process of its own, where they take longer.
        kv_tokens: Tokens whose keys and values it can hold; None where slots are the limit.
        reserve: Tokens that each row has to find free when another is let in.
    """

    step: StepTime
    poll: PollRule | None = None
    load_s: float = 0.0
    load_folder_s: float = 0.0
    apart: StepTime | None = None
    kv_tokens: int | None = None
    reserve: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """Of one operation of a plan, on all of its devices.

    Attributes:
        cost: Of its samples.
        move_s: Seconds in which what it needs comes from the host, and goes back there.
        piece_s: Seconds that every piece but the first costs beside, where it streams.
    """

    cost: LinearCost
    move_s: float = 0.0
    piece_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """All that a stage's simulation needs to know of time. What is missing takes none.

    Attributes:
        source: Where it comes from, for people.
        engines: By role.
        ops: By role and operation, of one replica.
        nodes: By operation of the plan; they go before those of its role.
        players: Of engines, by the operation that draws; they go before those of its role.
        response_tokens: Mean tokens of a row of data behind its prompt; None takes the longest.
        scorers: By role.
        environments: By role, or by the node that plays, which goes before.
        episodes: How episodes with an environment go, likewise; where none is said, each turn
            and each observation is as long as it may be.
        beside: What operations lose to other threads of their process, by role and operation.
        switches: Seconds of residency switches.
        host: Of a driver whose engines are in its process.
        host_apart: Of one whose engines are in processes of their own; None where it costs no more.
        prompts: Lengths of prompts.
    """

    source: str
    engines: Mapping[str, EngineTimes]
    ops: Mapping[tuple[str, str], LinearCost] = field(default_factory=dict)
    nodes: Mapping[str, NodeTimes] = field(default_factory=dict)
    players: Mapping[str, EngineTimes] = field(default_factory=dict)
    response_tokens: float | None = None
    scorers: Mapping[str, ScoreTimes] = field(default_factory=dict)
    environments: Mapping[str, EnvironmentTimes] = field(default_factory=dict)
    episodes: Mapping[str, EpisodeShape] = field(default_factory=dict)
    beside: Mapping[tuple[str, str], Beside] = field(default_factory=dict)
    switches: Mapping[Switch, float] = field(default_factory=dict)
    host: HostCost = field(default_factory=HostCost)
    host_apart: HostCost | None = None
    prompts: PromptLengths = field(default_factory=lambda: PromptLengths(values=(1,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    """Of a kind of device: operations and bytes a second, and seconds of a call."""

    flops: float
    nbytes: float
    call_s: float


_SPEEDS = {
    "cpu": _Speed(flops=25e9, nbytes=8e9, call_s=0.5e-3),  # of one core
    "cuda": _Speed(flops=400e12, nbytes=2.5e12, call_s=5e-3),
    "npu": _Speed(flops=150e12, nbytes=1.2e12, call_s=8e-3),
}

_FOLDER_S, _WRITE, _READ = 2e-3, 1e9, 2e9
"""Of weights that go through a folder: seconds of each end, and bytes a second written and read."""

_PASSES = {Phase.LOGPROBS: 1, Phase.VALUES: 1, Phase.SCORES: 1, Phase.UPDATE: 3}
"""Forward passes that each kind of work is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The assumed `StepTime` of a model on a device.

    Attributes:
        params: That a token passes.
        weight_bytes: Read once a step.
        kv_bytes: Of one token of one row.
        flops: Operations a second.
        nbytes: Bytes a second.
        call_s: Of a step beside.
    """

    params: float
    weight_bytes: float
    kv_bytes: float
    flops: float
    nbytes: float
    call_s: float

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        """See `StepTime`."""
        computed = 2 * self.params * batch / self.flops
        read = (self.weight_bytes + self.kv_bytes * batch * context) / self.nbytes
        return self.call_s + max(computed, read)

    def prefill_s(self, rows: int, tokens: int) -> float:
        """See `StepTime`."""
        computed = 2 * self.params * tokens / self.flops
        return self.call_s + max(computed, self.weight_bytes / self.nbytes)

    def leave_s(self) -> float:
        """See `StepTime`."""
        return 0.0


def assumed_times(stage: CompiledStage) -> StageTimes:
    """Round numbers for a stage's models and the kinds of devices that its plan has.

    Raises:
        PlanError: a role whose model's shape the compiler does not know.
    """
    plan = stage.plan
    engines: dict[str, EngineTimes] = {}
    ops: dict[tuple[str, str], LinearCost] = {}
    for node in stage.graph.nodes:
        phase = phase_of(node)
        if phase is None or node.role is None:
            continue
        shape, speed = _shape(stage, node.role), _speed(plan, node.role)
        params = float(shape.parameters.active)
        if node.op is Op.GENERATE:
            step = _roofline(plan, node.role, shape, speed)
            stored = shape.parameters.total * DTYPE_BYTES.get(plan.placement(node.role).dtype, 2)
            engines[node.role] = EngineTimes(step=step, load_folder_s=_FOLDER_S + stored / _READ)
            ops[node.role, "export"] = LinearCost(call_s=_FOLDER_S + stored / _WRITE)
        else:
            token_s = _PASSES[phase] * 2 * params / speed.flops
            ops[node.role, str(node.op)] = LinearCost(call_s=speed.call_s, token_s=token_s)
    kinds = sorted({_kind(plan, role) for role, op in ops if op != "export"})
    return StageTimes(
        source=f"assumed, not measured ({', '.join(kinds)})",
        engines=engines,
        ops=ops,
        prompts=PromptLengths(values=(plan.sizes.max_prompt_tokens,)),
    )


def _shape(stage: CompiledStage, role: str) -> ModelShape:
    cost = stage.context.costs.get(role)
    placement = stage.plan.placement(role)
    if cost is None and placement.copy_of is not None:
        cost = stage.context.costs.get(placement.copy_of)
    if cost is None:
        raise PlanError(
            "nothing is known of this role's model, so no time can be assumed",
            where=f"roles.{role}",
            hint="measure it with `flowrl profile`",
        )
    return cost.shape


def _kind(plan: PlacementPlan, role: str) -> str:
    return plan.pool.device(plan.placement(role).devices[0]).type


def _speed(plan: PlacementPlan, role: str) -> _Speed:
    """Of one replica of the role."""
    placement = plan.placement(role)
    speed = _SPEEDS.get(_kind(plan, role), _SPEEDS["cuda"])
    layout = placement.layout
    devices = layout.tp * layout.pp * layout.cp
    return _Speed(flops=speed.flops * devices, nbytes=speed.nbytes * devices, call_s=speed.call_s)


def _roofline(plan: PlacementPlan, role: str, shape: ModelShape, speed: _Speed) -> Roofline:
    width = DTYPE_BYTES.get(plan.placement(role).dtype, 2)
    params = float(shape.parameters.active)
    return Roofline(
        params=params,
        weight_bytes=params * width,
        kv_bytes=float(shape.num_layers * shape.cache_size * width),
        flops=speed.flops,
        nbytes=speed.nbytes,
        call_s=speed.call_s,
    )
