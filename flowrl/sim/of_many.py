"""The model of a stage whose plan is over many devices: its schedule, as devices run it.

Everything about an operation is the operation's own: its devices, layout, slots and KV cache, and
whether it begins on groups. (Its role's placement says only where the role is at all.)

- Every set of devices that always works together is a lane (`flowrl.sim.device_lanes`); an
  operation takes all lanes of its devices at once, so those that share devices take turns.
- Each replica of a rollout is an engine. Rollouts that draw with one role on the same devices in
  the same layout share engines; others have their own, and draw at once where devices are not
  shared.
- An operation that the plan lets begin on groups streams in the plan's chunks
  (`flowrl.sim.streams`). One that waits for its batch works through it in the chunks in which the
  schedule passes it on; what nobody reads is done in one piece, after the others. In an
  asynchronous plan the first part of the schedule runs ahead of the trainer.
- New weights take the lanes they leave and those they come to.

Rewards and environments are processes beside, as in `flowrl.sim.of_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.compiler import CompiledStage
from flowrl.cost.demand import phase_of
from flowrl.cost.layout import Layout
from flowrl.errors import PlanError
from flowrl.graph import Node, Op
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.names import device_names
from flowrl.plan.options import ENGINES
from flowrl.plan.schema import Operation, PlacementPlan, StartUnit, WeightRoute
from flowrl.sim.costs import LinearCost
from flowrl.sim.device_lanes import DeviceLanes
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.rollouts_of_plan import (
    RolloutMaker,
    is_filtered,
    origins_of,
    rollout_nodes,
    samples_read,
    switch_seconds,
    untimed,
    waits_for,
)
from flowrl.sim.times import EngineTimes, NodeTimes, StageTimes
from flowrl.wording import counted

MAIN = "main"
"""The main process."""

DRIVER = "rollout"
"""What drives an asynchronous rollout."""


def model_of_many(
    stage: CompiledStage, times: StageTimes, *, num_engines: Mapping[str, int]
) -> SimModel:
    """What is simulated of a stage with a schedule.

    Args:
        num_engines: Engines of each generating role, where they are not the plan's.

    Raises:
        ConfigError: a role that draws, whose times nobody knows.
        PlanError: an operation of a model that stands on no device.
    """
    return _Maker(stage, times, num_engines).make()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Engines that draw for some rollouts.

    Attributes:
        replicas: The devices of each.
    """

    name: str
    player: Operation
    replicas: tuple[tuple[str, ...], ...]


class _Maker:
    def __init__(
        self, stage: CompiledStage, times: StageTimes, num_engines: Mapping[str, int]
    ) -> None:
        self.stage = stage
        self.graph = stage.graph
        self.plan: PlacementPlan = stage.plan
        self.times = times
        self.num_engines = num_engines
        is_ahead = self.plan.schedule is not None and self.plan.schedule.kind == "asynchronous"
        self.staleness = stage.context.max_staleness if is_ahead else 0
        self.origins = origins_of(self.graph)
        self.tasks = {
            operation.node: _placed(operation)
            for operation in self.plan.operations
            if phase_of(self.graph.node(operation.node)) is not None
        }
        self.pools: dict[str, _Pool] = {}  # by the operation that draws
        self._make_pools()
        self.devices = DeviceLanes([*self._device_sets()])
        unused = {lane for devices in self._unused() for lane in self.devices.of(devices)}
        self.lanes = {
            lane.name: replace(lane, in_use=lane.name not in unused)
            for lane in self.devices.models()
        }
        self._lane(MAIN, "driver")
        self.ahead = _part_ahead(self.plan)
        self.passed_on = _passed_on(self.plan, self._read_by_tasks())
        self.notes: list[str] = []

    def make(self) -> SimModel:
        """The whole model."""
        engines = tuple(self._engines())
        rollouts = tuple(self._rollouts())
        ops = (*self._ops(), *self._routes())
        ahead = self.staleness if rollouts else 0
        return SimModel(
            name=self.stage.name,
            driver=self._lane(DRIVER, "driver") if ahead else MAIN,
            lanes=tuple(self.lanes.values()),
            engines=engines,
            rollouts=rollouts,
            ops=_in_order(ops, self.plan),
            trainer=MAIN,
            host=self.times.host,
            ahead=ahead,
            times=self.times.source,
            notes=(*self._untimed(), *self.notes),
        )

    def _untimed(self) -> Iterator[str]:
        for name, task in self.tasks.items():
            known = name in self.times.nodes or (task.role or "", task.op) in self.times.ops
            if task.op != Op.GENERATE and not known:
                yield f"no time is known for {name}, so it takes none"

    # Lanes

    def _lane(self, name: str, device: str) -> str:
        self.lanes.setdefault(name, LaneModel(name=name, device=device))
        return name

    def _device_sets(self) -> Iterator[tuple[str, ...]]:
        for pool in self.pools.values():
            yield from pool.replicas
        for task in self.tasks.values():
            yield task.devices
        for operation in self.plan.operations:
            if self._on_accelerators(operation):
                yield operation.devices
        yield from self._unused()

    def _on_accelerators(self, operation: Operation) -> bool:
        """Whether it is an environment that computes on accelerators."""
        device = self.plan.pool.device(operation.devices[0]) if operation.devices else None
        return operation.op == Op.INTERACT and device is not None and device.type != "cpu"

    def _environment_lane(self, node: Node) -> str:
        """Of the devices or the cores of hosts that this region has it on."""
        operation = self.plan.operation(node.id)
        if self._on_accelerators(operation):
            return self._lane_of(operation.devices)
        plays = [one.node for one in self.plan.operations if one.role == node.role]
        if len(plays) == 1:
            return self._hosted(node.role or "")[0]
        # Each region has a part of the cores: its calls do not wait for another one's.
        return self._lane(node.id, device_names(operation.devices) or "driver")

    def _unused(self) -> Iterator[tuple[str, ...]]:
        """Devices of the kinds that the plan is over, on which nothing runs."""
        used = {device for task in self.tasks.values() for device in task.devices}
        for operation in self.plan.operations:
            if self._on_accelerators(operation):
                used.update(operation.devices)
        kinds = {device.name for device in self.plan.pool.devices if device.address in used}
        rest = [
            device.address
            for device in self.plan.pool.devices
            if device.name in kinds and device.address not in used
        ]
        if rest:
            yield tuple(rest)

    def _hosted(self, role: str) -> list[str]:
        """Lanes of a role beside the models: one a process."""
        placement = self.plan.placement(role)
        where = device_names(placement.devices) if placement.devices else "driver"
        if placement.process == MAIN:
            return [self._lane(role, where)]
        number = max(1, placement.replicas)
        names = [
            placement.process if number == 1 else f"{placement.process}[{i}]" for i in range(number)
        ]
        return [self._lane(name, where) for name in names]

    # Engines and rollouts

    def _make_pools(self) -> None:
        made: dict[object, _Pool] = {}
        names: set[str] = set()
        for node in self.graph.of_op(Op.GENERATE):
            player = self.tasks[node.id]
            key = (player.role, player.devices, player.layout, player.slots, player.kv_tokens)
            if key not in made:
                role = player.role or ""
                name = player.node if role in names else role
                names.add(name)
                made[key] = _Pool(name=name, player=player, replicas=_replicas(player))
            self.pools[player.node] = made[key]

    def _engines(self) -> Iterator[EngineModel]:
        for pool in {pool.name: pool for pool in self.pools.values()}.values():
            player, role = pool.player, pool.player.role or ""
            number = self.num_engines.get(role, len(pool.replicas))
            lanes = [self._lane_of(devices) for devices in pool.replicas[:number]]
            kind = f"as {device_names(pool.replicas[0])}"
            for i in range(len(pool.replicas), number):
                lanes.append(self._lane(f"{player.node}[{i}]", kind))
            if number > len(pool.replicas):
                more = counted(number - len(pool.replicas), "engine")
                self.notes.append(
                    f"{more} of {player.node} on devices that the plan has not, for its own hold "
                    f"{len(pool.replicas)}; roles.{role}.num_engines={number} plans for so many"
                )
            for i, lane in enumerate(lanes):
                yield self._engine(f"{player.node}[{i}]", pool, lane)

    def _lane_of(self, devices: tuple[str, ...]) -> str:
        """One lane for all these devices: a group, where some of them work by themselves too."""
        parts = self.devices.of(devices)
        if len(parts) == 1:
            return parts[0]
        name = device_names(devices)
        self.lanes.setdefault(name, LaneModel(name=name, device=name, parts=parts))
        return name

    def _engine(self, name: str, pool: _Pool, lane: str) -> EngineModel:
        times, slots = self._engine_times(pool.player), self._slots(pool.player)
        return EngineModel(
            name=name,
            role=pool.name,
            lane=lane,
            times=times.step,
            num_slots=slots,
            capacity=GIVEN_PER_SLOT * slots,
            kv_tokens=times.kv_tokens,
            load_s=times.load_s,
            poll=times.poll,
            keeps_prefixes=pool.player.library in ENGINES,
            reserve=times.reserve,
        )

    def _engine_times(self, player: Operation) -> EngineTimes:
        role = player.role or ""
        times = self.times.players.get(player.node) or self.times.engines.get(role)
        if times is None:
            raise untimed(role, self.times)
        return times

    def _slots(self, player: Operation) -> int:
        return player.slots or max(1, self.plan.placement(player.role or "").num_slots)

    def _rollouts(self) -> Iterator[RolloutModel]:
        maker = RolloutMaker(
            stage=self.stage,
            times=self.times,
            staleness=self.staleness,
            origins=self.origins,
            lane_of=self._environment_lane,
            lanes_of=self._hosted,
        )
        for node in rollout_nodes(self.graph):
            drawing = [self.pools[player.id] for player in self.graph.generators_of(node)]
            pools = [
                (pool.name, self.num_engines.get(pool.player.role or "", len(pool.replicas)))
                for pool in drawing
            ]
            earlier = self._read_by(node.id) - {node.id}
            yield maker.make(node, pools=pools, after=sorted(earlier))

    def _read_by(self, node: str) -> set[str]:
        """The rollouts whose samples a node reads, directly or not, itself included."""
        draws = {one.id for one in rollout_nodes(self.graph)}
        found: set[str] = set()
        seen, waiting = {node}, [node]
        while waiting:
            name = waiting.pop()
            if name in draws:
                found.add(name)
            for edge in self.graph.in_edges(self.graph.node(name).id):
                if not edge.carried and edge.src not in seen:
                    seen.add(edge.src)
                    waiting.append(edge.src)
        return found

    # Operations

    def _ops(self) -> Iterator[OpModel]:
        drawing = (Op.SOURCE, Op.GENERATE, Op.INTERACT)
        batch = [
            operation
            for operation in self.plan.operations
            if operation.op not in drawing
            and (operation.start is StartUnit.BATCH or operation.node in self.tasks)
        ]
        names = {operation.node for operation in batch}
        made: dict[str, OpModel] = {}
        for operation in batch:
            op = self._begun(operation, self._op(operation, names), made)
            made[op.name] = op
            yield op

    def _begun(self, operation: Operation, op: OpModel, made: Mapping[str, OpModel]) -> OpModel:
        """The operation with when it begins: on groups, on its batch, or when the trainer does.

        What waits for the trainer, because it reads from an operation that does, begins on chunks
        when that one is done.
        """
        if operation.node not in self.tasks or op.rollout is None or op.every > 1:
            return op
        before = self._tasks_before(operation.node)
        read = self._read_by(operation.node)
        beside = tuple(sorted(read - {op.rollout}))
        follows = all(made[name].streams for name in before)
        if operation.start in (StartUnit.SAMPLE, StartUnit.GROUP) and operation.chunk > 0:
            by_sample = operation.start is StartUnit.SAMPLE and not beside
            if not (beside and self._loses_groups()):
                chunk = operation.chunk
                if operation.start is StartUnit.SAMPLE and not by_sample:  # of whole prompts
                    of_prompt = operation.num_samples / self.plan.sizes.prompts_per_step
                    chunk = max(1, round(chunk / of_prompt))
                beside = beside if follows else ()  # all are there, when the trainer is
                op = replace(op, after=before, beside=beside, whole=not follows)
                return replace(op, chunk=chunk, by_sample=by_sample)
            what, why = operation.start, "prompts that it reads twice may be filtered"
            self.notes.append(f"{op.name} does not begin on {what}s, as planned: {why}")
        early = operation.node in self.ahead or (len(self.pools) > 1 and not beside)
        chunk, ahead = self.passed_on.get(operation.node, 0), early and follows
        if chunk or ahead:
            return replace(op, after=before, chunk=chunk, whole=chunk > 0, ahead=ahead)
        return op

    def _loses_groups(self) -> bool:
        """Whether rollouts may end a step with groups of other prompts."""
        return self.stage.config.train.refill or any(
            operation.op == Op.FILTER for operation in self.plan.operations
        )

    def _op(self, operation: Operation, names: set[str]) -> OpModel:
        role = operation.role or ""
        known = self.times.nodes.get(operation.node)
        read = samples_read(self.graph, self.plan, self.origins, operation)
        share = read.share
        if known is None:  # times of a role are of one replica
            by_role = self.times.ops.get((role, operation.op), LinearCost())
            known, share = NodeTimes(cost=by_role), share / max(1, operation.replicas)
        sync = operation.op == Op.SYNC
        sizes = self.plan.sizes
        prompt = sum(self.times.prompts.values) / len(self.times.prompts.values)
        response = self.times.response_tokens
        return OpModel(
            name=operation.node,
            op=operation.op,
            lanes=self._lanes_of(operation),
            cost=self._sync_cost(operation) if sync else known.cost,
            after=waits_for(operation, self.plan, names),
            rollout=read.rollout,
            share=share,
            kept_only=is_filtered(self.plan, operation.node),
            calls=sizes.mini_batches if operation.op == Op.UPDATE else 1,
            micro_batch=operation.micro_batch,
            fixed_s=known.move_s + switch_seconds(self.plan, self.times, operation.node),
            rows=0 if read.rollout or sync else operation.num_samples,
            tokens_per_row=prompt + (sizes.max_response_tokens if response is None else response),
            publishes=self._published(operation),
            every=operation.every,
            piece_s=known.piece_s,
        )

    def _lanes_of(self, operation: Operation) -> tuple[str, ...]:
        if operation.node in self.tasks:
            return self.devices.of(operation.devices)
        if operation.op == Op.SYNC:
            return self._lanes_between(self._routes_after(operation.node))
        if operation.role is not None:
            return tuple(self._hosted(operation.role))
        return ()

    def _read_by_tasks(self) -> set[str]:
        """Operations of models that others read; what updates make is of the next step."""
        read = {before for node in self.tasks for before in self._tasks_before(node)}
        return {node for node in read if self.tasks[node].op != Op.UPDATE}

    def _tasks_before(self, node: str) -> tuple[str, ...]:
        """Operations of models that a node waits for, through what takes no time; no rollouts."""
        found: dict[str, None] = {}
        seen, waiting = {node}, [node]
        while waiting:
            for before in self.plan.operation(waiting.pop()).after:
                if before in seen:
                    continue
                seen.add(before)
                task = self.tasks.get(before)
                if task is None:
                    waiting.append(before)
                elif task.op != Op.GENERATE:
                    found[before] = None
        return tuple(found)

    # Weights

    def _routes_after(self, node: str) -> list[WeightRoute]:
        return [route for route in self.plan.weight_routes if route.after == node]

    def _sync_cost(self, sync: Operation) -> LinearCost:
        measured = self.times.ops.get((sync.role or "", sync.op))
        return measured or _way_s(self._routes_after(sync.node), sync.every)

    def _lanes_between(self, routes: list[WeightRoute]) -> tuple[str, ...]:
        """Where weights leave, and where they come to."""
        devices: dict[str, None] = {}
        for route in routes:
            for task in self.tasks.values():
                leaves = task.op == Op.UPDATE and task.role == route.source
                comes = task.node == route.node or (
                    route.node is None and task.op == Op.GENERATE and task.role == route.destination
                )
                if leaves or comes:
                    devices.update(dict.fromkeys(task.devices))
        return self.devices.of(devices)

    def _published(self, operation: Operation) -> tuple[str, ...]:
        """Pools whose engines serve new weights when an operation ends."""
        found: dict[str, None] = {}
        for route in self._routes_after(operation.node):
            for node, pool in self.pools.items():
                if route.destination == pool.player.role and route.node in (None, node):
                    found[pool.name] = None
        return tuple(found)

    def _routes(self) -> Iterator[OpModel]:
        """Weights that travel from an update to what no sync of the program is about."""
        for route in self.plan.weight_routes:
            update = self.plan.operation(route.after)
            if update.op != Op.UPDATE or not route.seconds:
                continue
            yield OpModel(
                name=f"weights of {route.source} to {route.node or route.destination}",
                op=str(Op.SYNC),
                lanes=self._lanes_between([route]),
                cost=_way_s([route], route.every),
                after=(update.node,),
                every=route.every,
            )


def _placed(operation: Operation) -> Operation:
    if not operation.devices:
        raise PlanError(
            "a model's operation has no device",
            where=f"operations: {operation.node}",
            hint="make the plan again with `flowrl plan`",
        )
    return operation


def _replicas(player: Operation) -> tuple[tuple[str, ...], ...]:
    """The devices of each replica, in order."""
    layout: Layout = player.layout
    size = min(layout.model_devices, len(player.devices))
    number = len(player.devices) // size
    return tuple(player.devices[i * size : (i + 1) * size] for i in range(number))


def _part_ahead(plan: PlacementPlan) -> frozenset[str]:
    """The operations of a later step than the trainer's."""
    if plan.schedule is None or plan.schedule.kind != "asynchronous":
        return frozenset()
    return frozenset(_leaves(plan.schedule.parts[0]))


def _passed_on(plan: PlacementPlan, read: Set[str]) -> dict[str, int]:
    """Groups of a piece of each operation of a part that feeds another one in chunks.

    Args:
        read: What passes anything on.
    """
    found: dict[str, int] = {}
    steps = [plan.schedule] if plan.schedule is not None else []
    while steps:
        step = steps.pop()
        steps += step.parts
        if step.chunks > 1:
            groups = -(-plan.sizes.prompts_per_step // step.chunks)
            for node in read & set(_leaves(step.parts[0])):
                found[node] = min(groups, found.get(node, groups))
    return found


def _leaves(step: ScheduleStep) -> Iterator[str]:
    if step.node is not None:
        yield step.node
    for part in step.parts:
        yield from _leaves(part)


def _way_s(routes: list[WeightRoute], every: int) -> LinearCost:
    """The plan's seconds are those of a step on average; they are spent every so many steps."""
    return LinearCost(call_s=every * sum(route.seconds or 0.0 for route in routes))


def _in_order(ops: tuple[OpModel, ...], plan: PlacementPlan) -> tuple[OpModel, ...]:
    """Each after those that it waits for."""
    found: dict[str, OpModel] = {}
    waiting = list(ops)
    while waiting:
        ready = [op for op in waiting if found.keys() >= set(op.after)]
        if not ready:
            raise PlanError(
                "operations wait for each other",
                where=f"the plan of {plan.graph}",
                found=", ".join(op.name for op in waiting),
                hint="undo the edit of `after`, or make the plan again: flowrl plan CONFIG -o FILE",
            )
        for op in ready:
            found[op.name] = op
            waiting.remove(op)
    return tuple(found.values())
