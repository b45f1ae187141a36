"""The plan: how a graph runs on a pool, as pure data.

A plan holds decisions, predictions and reasons, and no behaviour: it can be written to JSON or
YAML, read, edited by hand, compared, and executed on another day. `version` counts the format.

Invariants (`flowrl.plan.check.whole` proves them after a file is read):
- every role has one placement, and every device of a placement is one of the pool's;
- an operation's role and devices are its placement's, and as many as its layout has where it has
  one; what it starts after are operations;
- pinned decisions hold;
- channels, routes and switches name operations and roles of the plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from flowrl.cluster.hardware import DeviceSpec
from flowrl.cost.layout import ONE_DEVICE, Layout
from flowrl.errors import ConfigError, PlanError
from flowrl.files import decode_json
from flowrl.plan.check.file_lines import form_error
from flowrl.plan.check.numbers import check_numbers
from flowrl.plan.check.whole import check_plan
from flowrl.plan.many_form import EngineFlags, EnvironmentUse, PinnedDecision, ScheduleStep
from flowrl.plan.prediction import (
    NO_PREDICTION,
    Alternative,
    PredictedMemory,
    PredictedSpan,
    Prediction,
    Reason,
    Rejection,
)

__all__ = [
    "PLAN_VERSION",
    "Alternative",
    "Channel",
    "DeviceSummary",
    "Layout",
    "MachineSummary",
    "Operation",
    "Placement",
    "PlacementPlan",
    "PlanSizes",
    "PoolSummary",
    "PredictedMemory",
    "PredictedSpan",
    "Prediction",
    "Reason",
    "Rejection",
    "ResidencySwitch",
    "StartUnit",
    "Transport",
    "WeightRoute",
    "check_plan",
]

PLAN_VERSION = 3


class StartUnit(StrEnum):
    """What must be there before an operation begins on it.

    `STEP`: the step begins. `SAMPLE`: one sample of its inputs, whatever the others do. `GROUP`:
    all samples of a prompt. `BATCH`: the whole batch.
    """

    STEP = "step"
    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


class Transport(StrEnum):
    """How payloads or weights travel.

    `MEMORY`: by reference within a process. `PIPE`: between two processes of a machine.
    `NETWORK`: between machines. `IN_PLACE`: the engine reads the trainer's own parameters.
    `FOLDER`: a folder of safetensors. `COLLECTIVE`: slices from device to device, in buckets.
    """

    MEMORY = "memory"
    PIPE = "pipe"
    NETWORK = "network"
    IN_PLACE = "in_place"
    FOLDER = "folder"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """A device of the pool as the plan saw it; `address` is its name in the plan.

    Attributes:
        machine: Of a plan over many devices, the number of its figures in the pool's `machines`;
            None of a device that no model may be on.
    """

    address: str
    node: str
    type: str
    name: str
    memory_bytes: int
    budget_bytes: int
    num_cores: int
    machine: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSummary:
    """What times of a kind of devices followed from.

    Attributes:
        node_size: Devices of a node that may be used: the others idle.
        spec: Figures of a device, with the links of its node.
    """

    node_size: int
    spec: DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSummary:
    """The pool that the plan was made for."""

    devices: tuple[DeviceSummary, ...]
    warnings: tuple[str, ...] = ()
    machines: tuple[MachineSummary, ...] = ()

    def device(self, address: str) -> DeviceSummary:
        """The device at `address`; KeyError where there is none."""
        for device in self.devices:
            if device.address == address:
                return device
        raise KeyError(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSizes:
    """The sizes that the plan was made for; a run with others needs another plan.

    Attributes:
        prompts_per_step: Prompts of a step.
        group_size: Samples for each prompt.
        mini_batches: Optimizer updates a step.
        micro_batch: Rows of one forward and backward pass.
        max_prompt_tokens: Of the longest prompt.
        max_response_tokens: Of the longest response.
        max_length: Of the longest sample, prompt and response.
    """

    prompts_per_step: int
    group_size: int
    mini_batches: int
    micro_batch: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a role lives.

    Attributes:
        devices: Addresses; a scorer runs on CPUs.
        replicas: Independent copies; of a scorer, its processes.
        process: Roles with equal names share a process and take turns on its devices. `main` is the
            executor's own. With several replicas the processes are `process[0]`, `process[1]`, ...
        num_slots: Samples decoded at once by each replica; 0 for a role that does not generate.
        trainable: It has an optimizer.
        copy_of: It begins as a copy of this role's weights; untrained, it keeps them.
        shares_weights_with: It reads this role's parameters and has none of its own.
        head: What its model ends in: `lm`, `value`; `none` for a role without a model.
    """

    role: str
    backend: str
    devices: tuple[str, ...]
    process: str
    dtype: str
    layout: Layout = ONE_DEVICE
    replicas: int = 1
    num_slots: int = 0
    trainable: bool = False
    copy_of: str | None = None
    shares_weights_with: str | None = None
    head: str = "lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A node of the graph, placed.

    Attributes:
        node: Id of the node.
        op: Its operation: `generate`, `score`, `update`, ...
        role: Who does it; None for operations of the driver.
        devices: Where; empty for operations of the driver.
        start: What must have arrived before it begins on it.
        after: Ids of the nodes that it reads, directly.
        chunk: Units of `start` that it takes at once; 0 takes all that are there.
        micro_batch: Rows of one forward and backward pass; 0 where nothing is trained.
        num_samples: Samples of a step that it makes or reads at most; 0 where it handles none.
        max_tokens: Of the longest response that it draws; 0 where it draws none.
        max_turns: Of an episode; 0 where there are no episodes.
        every: Steps between two times that it is done.
        region: Operations of one region exchange data in a cycle, sample by sample.
        layout: How its model is divided over `devices`.
        library: What runs it where the plan assumes more than the role's backend declares.
        shard: What replicas divide among them: `none`, `optimizer` or `full`.
        recompute: Activations that a backward pass computes again: `none`, `selective`, `full`.
        offload: What is on the host: the `optimizer` always, or `all` between its turns.
        micro_tokens: Tokens of a packed micro-batch on one replica; 0 where rows are padded.
        kv_tokens: Tokens that the KV cache of one replica holds; 0 where slots are the limit.
        slots: Samples that one replica decodes at once; 0 where the placement says it.
        seconds: Predicted, of a step; None where nobody estimated it.
        steady_s: Of what runs ahead of the trainer, where a batch takes less than `seconds` because
            others are under way meanwhile: the least from one batch to the next.
        move_s: Of them, the way from the host and back of what it needs; once more with every
            further chunk.
        process: Whose it is where that is not its role's: each replica is a process of its own.
        cores: The core of each replica, counted among those that a run may use; empty leaves it to
            the operating system.
        environment: Of an operation that plays episodes, with a policy over many devices.
    """

    node: str
    op: str
    role: str | None
    devices: tuple[str, ...]
    start: StartUnit
    after: tuple[str, ...] = ()
    replicas: int = 1
    chunk: int = 0
    micro_batch: int = 0
    num_samples: int = 0
    max_tokens: int = 0
    max_turns: int = 0
    every: int = 1
    region: str | None = None
    layout: Layout = ONE_DEVICE
    library: str = ""
    shard: str = "none"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    micro_tokens: int = 0
    kv_tokens: int = 0
    slots: int = 0
    seconds: float | None = None
    steady_s: float | None = None
    move_s: float = 0.0
    process: str = ""
    cores: tuple[int, ...] = ()
    environment: EnvironmentUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySwitch:
    """Memory that changes hands before an operation.

    Attributes:
        what: `kv cache`, `parameters` or `optimizer`.
        action: `release` gives device memory back, `take` takes it again.
        before: The operation that it happens before.
    """

    role: str
    device: str
    what: str
    action: str
    before: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """How new weights get from where they are trained to where they are used.

    A rule, not a list of slices: it says from which layout to which, for these parameter classes.

    Attributes:
        source: The role that is trained.
        destination: The role that uses the weights; often the same.
        after: The operation whose end publishes a version.
        parameter_classes: Of `embedding attention mlp norm head`.
        every: Steps between two times that they travel.
        node: The operation that uses them; None for all of the destination's.
        seconds: Predicted; None where nobody estimated it.
    """

    source: str
    destination: str
    after: str
    transport: Transport
    source_layout: Layout = ONE_DEVICE
    destination_layout: Layout = ONE_DEVICE
    parameter_classes: tuple[str, ...] = ("embedding", "attention", "mlp", "norm", "head")
    every: int = 1
    node: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The way of an edge's payload.

    Attributes:
        capacity: Samples that may wait in it; 0 is one step's batch.
    """

    source: str
    destination: str
    fields: tuple[str, ...]
    transport: Transport
    capacity: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """How a graph runs on a pool.

    Attributes:
        schedule: Of a plan over many devices; None where models take turns on one.
        kind: Of the schedule: `temporal`, `spatial`, `hybrid` or `asynchronous`. Of a plan for one
            device see `flowrl.plan.local`.
        engine_flags: How inference servers are started.
        pins: Decisions that were not the planner's.
        notes: What it takes for granted, and what cannot run here; for people.

    >>> from pathlib import Path
    >>> from flowrl.plan import load_plan
    >>> plan = load_plan(Path("run/plan.json"))  # doctest: +SKIP
    >>> plan.placement("actor").devices  # doctest: +SKIP
    ('cpu:0',)
    """

    version: int
    graph: str
    pool: PoolSummary
    sizes: PlanSizes
    placements: tuple[Placement, ...]
    operations: tuple[Operation, ...]
    residency: tuple[ResidencySwitch, ...] = ()
    weight_routes: tuple[WeightRoute, ...] = ()
    channels: tuple[Channel, ...] = ()
    prediction: Prediction = NO_PREDICTION
    alternatives: tuple[Alternative, ...] = ()
    reasons: tuple[Reason, ...] = ()
    schedule: ScheduleStep | None = None
    kind: str = ""
    engine_flags: tuple[EngineFlags, ...] = ()
    pins: tuple[PinnedDecision, ...] = ()
    notes: tuple[str, ...] = ()

    def placement(self, role: str) -> Placement:
        """The placement of a role; KeyError where it has none."""
        for placement in self.placements:
            if placement.role == role:
                return placement
        raise KeyError(role)

    def operation(self, node: str) -> Operation:
        """The operation of a node; KeyError where it has none."""
        for operation in self.operations:
            if operation.node == node:
                return operation
        raise KeyError(node)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def to_json(self) -> str:
        """Indented JSON that `from_json` reads back equal."""
        return to_json(self, indent=2).decode() + "\n"

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back equal."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=100)

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> PlacementPlan:
        """The plan that `to_json` wrote, checked.

        Args:
            where: Names the text in messages, for example its path.

        Raises:
            ConfigError: no JSON, an unknown key, a wrong type.
            PlanError: the parts of the plan contradict each other.
        """
        try:
            raw = decode_json(text)
        except ValueError as error:
            raise ConfigError(
                f"not JSON: {error}",
                where=where,
                hint="name a plan that `flowrl plan CONFIG -o FILE.json` wrote",
            ) from error
        return _from_raw(raw, where)

    @staticmethod
    def from_yaml(text: str, *, where: str = "plan") -> PlacementPlan:
        """The plan that `to_yaml` wrote, checked; raises as `from_json` does."""
        try:
            raw = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"not YAML: {str(error).splitlines()[0]}",
                where=where,
                hint="name a plan that `flowrl plan CONFIG -o FILE.yaml` wrote",
            ) from error
        return _from_raw(raw, where)


class _PlanFile(BaseModel):
    """Its settings hold for the dataclasses inside too; only reading a plan needs its validator."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    plan: PlacementPlan


def _from_raw(raw: object, where: str) -> PlacementPlan:
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != PLAN_VERSION:
        raise ConfigError(
            "not a plan of this format",
            where=f"{where}: version",
            found=repr(version),
            expected=str(PLAN_VERSION),
            hint="name a plan, or make one: flowrl plan CONFIG -o FILE",
        )
    try:
        check_numbers(raw, where)
        # JSON is where strict types and lists for tuples go together.
        text = json.dumps({"plan": raw}, default=str)
        plan = _PlanFile.model_validate_json(text, strict=True).plan
    except ValidationError as error:
        raise form_error(error, where) from error
    except PlanError as error:
        if error.where == "layout" and (key := _wrong_layout(raw)) is not None:
            error.where = f"{where}: {key}"
        raise
    return check_plan(plan, where)


def _wrong_layout(raw: object, key: str = "") -> str | None:
    """The key of the first layout in what was read that no layout can be."""
    if isinstance(raw, dict) and raw.keys() == asdict(ONE_DEVICE).keys():
        try:
            Layout(**raw)
        except PlanError:
            return key
        except TypeError:
            return None
    inner = (
        raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    )
    found = (_wrong_layout(one, f"{key}.{name}" if key else str(name)) for name, one in inner)
    return next((one for one in found if one is not None), None)
