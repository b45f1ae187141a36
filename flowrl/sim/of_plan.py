"""The model of a compiled stage: its graph and plan, with times.

What happens sample by sample (generation, rewards, filters on them) is left to the scheduler; every
other operation of the plan works on whole batches, in the plan's order, on the lanes of its role.

Lanes: a process on a CPU is one, and so is the main process with all that it holds, wherever its
models are, for it does one thing at a time. Of other processes each accelerator is one, but those
that an engine needs together are one lane together. Plans over many devices have a schedule of
their own: `flowrl.sim.of_many`.

Engines are in the main process where there is one of a role and the stage is synchronous. Otherwise
they are a *fleet*: each has a process and weights of its own, which it loads from a folder that the
trainer writes. An asynchronous rollout is driven beside the trainer, in a thread of its own. Where
all of that is on this machine's CPU, it shares the cores and the interpreter of the main process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.compiler import CompiledStage
from flowrl.cost.demand import phase_of
from flowrl.graph import Node, Op
from flowrl.plan.local import ASYNCHRONOUS, engines_of
from flowrl.plan.schema import Operation, Placement, PlacementPlan, StartUnit
from flowrl.sim.costs import LinearCost
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.of_many import DRIVER, MAIN, model_of_many
from flowrl.sim.rollouts_of_plan import (
    RolloutMaker,
    is_filtered,
    longest_response,
    origins_of,
    rollout_nodes,
    samples_read,
    switch_seconds,
    untimed,
    waits_for,
)
from flowrl.sim.sharing import Beside
from flowrl.sim.times import EngineTimes, StageTimes

__all__ = ["EXPORT", "MAIN", "longest_response", "model_of_stage", "rollout_nodes"]

EXPORT = "export"
"""The cost of a sync that writes weights into a folder."""


def model_of_stage(
    stage: CompiledStage, times: StageTimes, *, num_engines: Mapping[str, int] | None = None
) -> SimModel:
    """What is simulated of a stage.

    Args:
        num_engines: Engines of each generating role; those that are not named have as many as the
            plan says.

    Raises:
        ConfigError: a stage with episodes, whose environment's times nobody knows.
        PlanError: an edited plan over many devices, that no order of its parts can run.
    """
    if stage.plan.schedule is not None:
        return model_of_many(stage, times, num_engines=num_engines or {})
    return _Maker(stage, times, num_engines or {}).make()


class _Maker:
    def __init__(
        self, stage: CompiledStage, times: StageTimes, num_engines: Mapping[str, int]
    ) -> None:
        self.stage = stage
        self.graph = stage.graph
        self.plan: PlacementPlan = stage.plan
        self.times = times
        self.num_engines = num_engines
        # In a synchronous plan nothing is drawn ahead, however old samples may be.
        ahead = self.plan.kind == ASYNCHRONOUS
        self.staleness = stage.context.max_staleness if ahead else 0
        self.lanes: dict[str, LaneModel] = {}
        self.together = self._devices_of_engines()
        self.of_role = {
            placement.role: self._lanes_of(placement) for placement in self.plan.placements
        }
        if MAIN not in self.lanes:
            self._lane(MAIN, "driver")
        self.origins = origins_of(self.graph)

    def make(self) -> SimModel:
        engines = [engine for role in self._generating() for engine in self._engines(role)]
        drawn = tuple(self._rollouts())
        ahead = self.staleness if drawn else 0
        driver = self._lane(DRIVER, self.lanes[MAIN].device, MAIN) if ahead else MAIN
        apart = any(self._is_fleet(role) for role in self._generating())
        return SimModel(
            name=self.stage.name,
            lanes=tuple(self.lanes.values()),
            engines=tuple(engines),
            rollouts=drawn,
            ops=self._ops(),
            driver=driver,
            trainer=MAIN,
            host=(self.times.host_apart if apart else None) or self.times.host,
            num_cores=self._shared_cores() if apart else 0,
            ahead=ahead,
            times=self.times.source,
            notes=tuple(self._untimed()),
        )

    def _shared_cores(self) -> int:
        """Cores that everything shares; 0 where models are on other devices than one CPU."""
        devices = {device for one in self.plan.placements for device in one.devices}
        found = [self.plan.pool.device(device) for device in devices]
        return found[0].num_cores if len(found) == 1 and found[0].type == "cpu" else 0

    def _untimed(self) -> Iterator[str]:
        """Work of models that takes no time here, because nobody has measured it."""
        for operation in self.plan.operations:
            node, role = self.graph.node(operation.node), operation.role or ""
            streamed = operation.op in (Op.GENERATE, Op.INTERACT)
            if phase_of(node) is None or streamed or (role, operation.op) in self.times.ops:
                continue
            yield f"no time is known for {operation.node}, so it takes none"

    # Lanes

    def _lane(self, name: str, device: str, process: str = "") -> str:
        self.lanes.setdefault(name, LaneModel(name=name, device=device, process=process or name))
        return name

    def _lanes_of(self, placement: Placement) -> tuple[tuple[str, ...], ...]:
        """Lanes of each replica."""
        replicas = max(1, placement.replicas)
        if placement.process == MAIN and replicas == 1:
            return ((self._lane(MAIN, ", ".join(placement.devices)),),)
        found: list[tuple[str, ...]] = []
        for number, devices in enumerate(_devices_of_replicas(placement)):
            if all(self.plan.pool.device(device).type == "cpu" for device in devices):
                process = placement.process if replicas == 1 else f"{placement.process}[{number}]"
                found.append((self._lane(process, devices[0]),))
            else:
                names = dict.fromkeys(self.together.get(device, device) for device in devices)
                found.append(tuple(self._lane(name, name) for name in names))
        return tuple(found)

    def _devices_of_engines(self) -> dict[str, str]:
        """The lane of each accelerator that an engine needs together with others."""
        found: dict[str, str] = {}
        for placement in self.plan.placements:
            if placement.num_slots and placement.process != MAIN:
                for devices in _devices_of_replicas(placement):
                    for device in devices:
                        found.setdefault(device, _together(devices))
        return found

    # Engines and rollouts

    def _generating(self) -> list[str]:
        return list(dict.fromkeys(n.role for n in self.graph.of_op(Op.GENERATE) if n.role))

    def _engines(self, role: str) -> list[EngineModel]:
        placement = self.plan.placement(role)
        number, planned = self._num_engines(role), max(1, placement.replicas)
        times = self.times.engines.get(role)
        if times is None:
            raise untimed(role, self.times)
        if number == planned and not self._is_fleet(role):
            lanes = [replica[0] for replica in self.of_role[role]]
        else:
            lanes = [
                self._lane(f"{role}.generate[{i}]", self._device_of_engine(role, i))
                for i in range(number)
            ]
        return [
            self._engine(role, f"{role}.generate[{i}]", lane, placement.num_slots, times)
            for i, lane in enumerate(lanes)
        ]

    def _num_engines(self, role: str) -> int:
        planned = engines_of(self.plan, role).processes or self.plan.placement(role).replicas
        return self.num_engines.get(role, max(1, planned))

    def _is_fleet(self, role: str) -> bool:
        """Whether the engines of a role are in processes of their own."""
        embedded = self.plan.placement(role).process == MAIN
        apart = engines_of(self.plan, role).processes > 0
        return embedded and (apart or self._num_engines(role) > 1 or self.staleness > 0)

    def _device_of_engine(self, role: str, number: int) -> str:
        """A CPU is shared; of an accelerator, engines beyond the plan's need further ones."""
        device = self.plan.placement(role).devices[0]
        if self.plan.pool.device(device).type == "cpu" or number == 0:
            return device
        return f"{device} + {number}"

    def _engine(
        self, role: str, name: str, lane: str, num_slots: int, times: EngineTimes
    ) -> EngineModel:
        return EngineModel(
            name=name,
            role=role,
            lane=lane,
            times=(times.apart if self._is_fleet(role) else None) or times.step,
            num_slots=num_slots,
            capacity=GIVEN_PER_SLOT * num_slots,
            kv_tokens=times.kv_tokens,
            load_s=times.load_folder_s if self._is_fleet(role) else times.load_s,
            poll=times.poll,
        )

    def _environment_lane(self, node: Node) -> str:
        role = node.role or ""
        return self._lane(role, self.lanes[self.of_role[role][0][0]].device)

    def _rollouts(self) -> Iterator[RolloutModel]:
        """One after the other, as one process or one fleet draws them."""
        maker = RolloutMaker(
            stage=self.stage,
            times=self.times,
            staleness=self.staleness,
            origins=self.origins,
            lane_of=self._environment_lane,
            lanes_of=lambda role: [lane for replica in self.of_role[role] for lane in replica],
        )
        before: list[str] = []
        for node in rollout_nodes(self.graph):
            roles = [player.role or "" for player in self.graph.generators_of(node)]
            pools = [(role, self._num_engines(role)) for role in roles]
            yield maker.make(node, pools=pools, after=before, at_once=True)
            before.append(node.id)

    # Operations

    def _ops(self) -> tuple[OpModel, ...]:
        streaming = (Op.SOURCE, Op.GENERATE, Op.INTERACT)
        batch = [
            operation
            for operation in self.plan.operations
            if operation.op not in streaming and operation.start is StartUnit.BATCH
        ]
        names = {operation.node for operation in batch}
        return tuple(self._op(operation, names) for operation in batch)

    def _op(self, operation: Operation, names: set[str]) -> OpModel:
        role = operation.role or ""
        read = samples_read(self.graph, self.plan, self.origins, operation)
        replicas = max(1, operation.replicas)
        sync = operation.op == Op.SYNC
        kind = EXPORT if sync and role in self._generating() and self._is_fleet(role) else None
        return OpModel(
            name=operation.node,
            op=operation.op,
            lanes=tuple(
                # Replicas may be on devices that an engine needs together.
                dict.fromkeys(lane for replica in self.of_role.get(role, ()) for lane in replica)
            ),
            cost=self.times.ops.get((role, kind or operation.op), LinearCost()),
            after=waits_for(operation, self.plan, names),
            rollout=read.rollout,
            share=read.share / replicas,
            kept_only=is_filtered(self.plan, operation.node),
            calls=self.plan.sizes.mini_batches if operation.op == Op.UPDATE else 1,
            # A plan has none for passes without gradient, which backends cut into pieces, too.
            micro_batch=operation.micro_batch or self.plan.sizes.micro_batch,
            fixed_s=switch_seconds(self.plan, self.times, operation.node),
            rows=0 if read.rollout or sync else operation.num_samples,
            tokens_per_row=fmean(self.times.prompts.values) + self.plan.sizes.max_response_tokens,
            publishes=tuple(
                dict.fromkeys(
                    route.destination
                    for route in self.plan.weight_routes
                    if route.after == operation.node and route.destination in self._generating()
                )
            ),
            every=operation.every,
            threads=self.times.beside.get((role, operation.op), Beside()),
        )


def _together(devices: Sequence[str]) -> str:
    """A name for several devices.

    >>> _together(["n0/cuda:4", "n0/cuda:5", "n0/cuda:6"]), _together(["cuda:0", "cuda:2"])
    ('n0/cuda:4-6', 'cuda:0+cuda:2')
    """
    parts = [device.rpartition(":") for device in devices]
    kinds = {kind for kind, _, _ in parts}
    numbers = [int(number) for _, _, number in parts if number.isdecimal()]
    row = list(range(numbers[0], numbers[0] + len(devices))) if numbers else []
    if len(devices) > 1 and len(kinds) == 1 and numbers == row:
        return f"{kinds.pop()}:{numbers[0]}-{numbers[-1]}"
    return "+".join(devices)


def _devices_of_replicas(placement: Placement) -> list[tuple[str, ...]]:
    """The devices of each replica, in order; where they are fewer, all share them."""
    replicas = max(1, placement.replicas)
    share = max(1, len(placement.devices) // replicas)
    return [
        placement.devices[number * share : (number + 1) * share] or placement.devices
        for number in range(replicas)
    ]
