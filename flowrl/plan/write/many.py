"""A schedule on devices, written down as a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.cluster.pool import ResourcePool
from flowrl.cost.layout import ONE_DEVICE
from flowrl.graph.ir import Graph, Op
from flowrl.plan.assign import (
    Bar,
    bars,
    bottleneck,
    pieces,
    schedule_step,
)
from flowrl.plan.check.whole import check_plan
from flowrl.plan.dtypes import role_dtype
from flowrl.plan.explain.efficiencies import assumed_efficiencies
from flowrl.plan.explain.reasons import alternatives_of, notes_of, reasons_of
from flowrl.plan.host import MAIN_PROCESS, place_hosted, plan_sizes, pool_summary
from flowrl.plan.many import Chosen, Searched
from flowrl.plan.many_form import EngineFlags
from flowrl.plan.names import device_names
from flowrl.plan.operations import place_channels, place_operations
from flowrl.plan.parameters import parameter_classes
from flowrl.plan.prediction import CostSource
from flowrl.plan.problem_of import weight_ways
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import (
    PLAN_VERSION,
    Channel,
    MachineSummary,
    Operation,
    Placement,
    PlacementPlan,
    PoolSummary,
    PredictedSpan,
    Prediction,
    Reason,
    ResidencySwitch,
    StartUnit,
    Transport,
    WeightRoute,
)
from flowrl.plan.search import Asynchronous, Schedule, leaves, seconds_of
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork
from flowrl.plan.ways.trainers import Turn, nodes_in_turn, turns_of
from flowrl.plan.write.engine_flags import engine_flags
from flowrl.plan.write.held import held_memory, sharing_sets
from flowrl.plan.write.regions import (
    environment_costs,
    environment_spans,
    place_environments,
    with_environment,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Of a plan, what stands where and how it is reached.

    Attributes:
        reasons: Why roles without a model are where they are.
    """

    placements: tuple[Placement, ...]
    operations: tuple[Operation, ...]
    weight_routes: tuple[WeightRoute, ...]
    channels: tuple[Channel, ...]
    reasons: tuple[Reason, ...]


def write_plan(
    graph: Graph,
    request: PlanRequest,
    pool: ResourcePool,
    searched: Searched,
    hosted: list[RoleRequest],
) -> PlacementPlan:
    """The plan of the best schedule that was found.

    Args:
        hosted: Roles without a model of flowrl's.
    """
    chosen = searched.best
    parts = written(graph, request, pool, chosen, hosted)
    plan = PlacementPlan(
        version=PLAN_VERSION,
        graph=graph.name,
        pool=_pool(pool, chosen),
        sizes=plan_sizes(request),
        placements=parts.placements,
        operations=parts.operations,
        residency=tuple(switches_of(chosen)),
        weight_routes=parts.weight_routes,
        channels=parts.channels,
        prediction=prediction_of(chosen, graph, pool),
        alternatives=alternatives_of(searched),
        reasons=(*reasons_of(searched), *parts.reasons, *request.reasons),
        schedule=schedule_step(
            chosen.posed.problem, chosen.schedule, nodes_in_turn(chosen.posed.tasks)
        ),
        kind=str(chosen.kind),
        engine_flags=tuple(engine_flags_of(chosen, request)),
        pins=searched.pins.decisions,
        notes=notes_of(searched, request, graph),
    )
    return check_plan(plan)


def written(
    graph: Graph,
    request: PlanRequest,
    pool: ResourcePool,
    chosen: Chosen,
    hosted: list[RoleRequest],
) -> Written:
    """What stands where, by a schedule on devices."""
    models = list(_model_placements(chosen, request))
    models += place_environments(chosen, request, pool)
    placed = {placement.role for placement in models}
    beside, why = place_hosted([role for role in hosted if role.name not in placed], graph, pool)
    by_role = {placement.role: placement for placement in (*models, *beside)}
    operations = _operations(graph, by_role, request, chosen, pool)
    return Written(
        placements=tuple(by_role.values()),
        operations=operations,
        weight_routes=tuple(_routes(graph, chosen)),
        channels=tuple(_channels(graph, by_role, operations, request)),
        reasons=tuple(why),
    )


def _pool(pool: ResourcePool, chosen: Chosen) -> PoolSummary:
    """The pool, with what times followed from: of nodes that are used in part, that part."""
    groups = [group for group in pool.groups() if group.spec is not None]
    used = {chosen.posed.group_of(task.id).addresses: task.id for task in chosen.posed.tasks}
    sizes = {
        address: chosen.posed.group_of(task).node_size
        for addresses, task in used.items()
        for address in addresses
    }
    number = {address: i for i, group in enumerate(groups) for address in group.addresses}
    summary = pool_summary(pool)
    return replace(
        summary,
        devices=tuple(
            replace(device, machine=number.get(device.address)) for device in summary.devices
        ),
        machines=tuple(
            MachineSummary(
                node_size=next(
                    (sizes[one] for one in group.addresses if one in sizes),
                    group.machine.node_size,
                ),
                spec=group.machine.spec,
            )
            for group in groups
        ),
    )


def _addresses(chosen: Chosen, numbers: Iterable[int]) -> tuple[str, ...]:
    every = chosen.posed.addresses
    return tuple(every[number] for number in numbers)


def _model_placements(chosen: Chosen, request: PlanRequest) -> Iterator[Placement]:
    """One a role: where any of its work is done, divided as its training (or first work) is."""
    tasks: dict[str, list[TaskWork]] = {}
    for task in chosen.posed.tasks:
        tasks.setdefault(task.role.name, []).append(task)
    for name, own in tasks.items():
        role = own[0].role
        main = next((task for task in own if task.updates), own[0])
        numbers = sorted({number for task in own for number in chosen.numbers[task.id]})
        layout = chosen.ways[main.id].layout
        draws = next((task for task in own if task.generates), None)
        yield Placement(
            role=name,
            backend=role.backend,
            devices=_addresses(chosen, numbers),
            # On CPUs the local executor runs them, with its models in one process.
            process=MAIN_PROCESS if chosen.posed.group_of(main.id).device.type == "cpu" else name,
            dtype=role_dtype(role, request, chosen.posed.group_of(main.id).device),
            layout=layout if layout.num_devices == len(numbers) else ONE_DEVICE,
            replicas=chosen.ways[(draws or main).id].layout.dp,
            num_slots=chosen.ways[draws.id].slots if draws is not None else 0,
            trainable=main.updates,
            copy_of=role.copy_of if role.copy_of in tasks else None,
            head=role.head,
        )


def _operations(
    graph: Graph,
    placements: Mapping[str, Placement],
    request: PlanRequest,
    chosen: Chosen,
    pool: ResourcePool,
) -> tuple[Operation, ...]:
    cut = pieces(chosen.posed.problem, chosen.schedule)
    tasks = {
        turn.node: (task, turn) for task in chosen.posed.tasks for turn in _turns(task, chosen)
    }
    found = []
    for operation in place_operations(graph, placements, request):
        if operation.node not in tasks:
            found.append(_of_driver(with_environment(operation, chosen, pool), graph, chosen))
            continue
        task, turn = tasks[operation.node]
        way = chosen.ways[task.id]
        chunks = cut.get(task.id, 1)
        prompts = -(-request.prompts_per_step // chunks)
        found.append(
            replace(
                operation,
                devices=_addresses(chosen, chosen.numbers[task.id]),
                start=StartUnit.GROUP if chunks > 1 else operation.start,
                replicas=way.layout.dp,
                chunk=prompts if chunks > 1 else way.slots,
                micro_batch=0 if task.generates else max(1, way.micro_tokens // request.max_length),
                layout=way.layout,
                library="" if task.declared else task.library.name,
                shard=task.library.shard,
                recompute=way.recompute,
                offload=way.offload,
                micro_tokens=way.micro_tokens,
                kv_tokens=way.kv_tokens,
                slots=way.slots,
                seconds=turn.seconds,
                steady_s=_steady_seconds(task.id, way, chosen.schedule),
                move_s=turn.move_s,
            )
        )
    return tuple(found)


def _turns(task: TaskWork, chosen: Chosen) -> tuple[Turn, ...]:
    return turns_of(task, chosen.ways[task.id], chosen.posed.made(task.id))


def _steady_seconds(task: str, way: Candidate, schedule: Schedule) -> float | None:
    """Of a task that works on later batches than the trainer, from one of them to the next."""
    is_ahead = task in _ahead(schedule) and way.period_s < way.seconds
    return way.period_s if is_ahead else None


def _ahead(schedule: Schedule) -> frozenset[str]:
    """The tasks that work on later batches than the trainer."""
    if not isinstance(schedule, Asynchronous):
        return frozenset()
    return frozenset(leaf.task for leaf in leaves(schedule.first))


def _of_driver(operation: Operation, graph: Graph, chosen: Chosen) -> Operation:
    """Of a sync, the devices that new weights come to."""
    if operation.op != Op.SYNC:
        return operation
    role = graph.node(operation.node).role
    draws = [task for task in chosen.posed.tasks if task.role.name == role and task.generates]
    first = draws[0] if draws else None
    if first is None:
        return operation
    return replace(operation, devices=_addresses(chosen, chosen.numbers[first.id]))


def _channels(
    graph: Graph,
    placements: Mapping[str, Placement],
    operations: tuple[Operation, ...],
    request: PlanRequest,
) -> Iterator[Channel]:
    """As of one device, but payloads may have to leave the machine, and may come in pieces."""
    by_node = {operation.node: operation for operation in operations}
    for channel in place_channels(graph, placements):
        ends = by_node[channel.source], by_node[channel.destination]
        nodes = {address.partition("/")[0] for one in ends for address in one.devices}
        apart = all(one.devices for one in ends) and len(nodes) > 1
        reader = ends[1]
        capacity = 0
        if reader.start is StartUnit.GROUP and reader.seconds is not None:
            capacity = reader.chunk * -(-reader.num_samples // request.prompts_per_step)
        yield replace(
            channel,
            transport=Transport.NETWORK if apart else channel.transport,
            capacity=capacity,
        )


def _routes(graph: Graph, chosen: Chosen) -> Iterator[WeightRoute]:
    """From the update of each role to every task that uses its weights elsewhere, or otherwise."""
    syncs = {str(node.role): str(node.id) for node in graph.of_op(Op.SYNC)}
    for (update, name), every in weight_ways(graph, chosen.posed.tasks).items():
        task, trained = chosen.posed.task(name), chosen.posed.task(update)
        apart = chosen.numbers[update] != chosen.numbers[name]
        same = chosen.ways[update].form == chosen.ways[name].form
        in_place = not task.generates and not apart and same
        own, last = task.role.name == trained.role.name, trained.updated[-1].node
        if in_place and own:
            continue
        reads = task.library.in_place and own and not apart
        yield WeightRoute(
            source=trained.role.name,
            destination=task.role.name,
            # What scores with the weights that its own role trains waits for no sync.
            after=last if own and not task.generates else syncs.get(task.role.name, last),
            transport=Transport.IN_PLACE if reads else Transport.COLLECTIVE,
            source_layout=chosen.ways[update].layout,
            destination_layout=chosen.ways[name].layout,
            parameter_classes=parameter_classes(trained.shape),
            every=every,
            node=None if reads else name,
            seconds=chosen.syncs[update, name],
        )


def switches_of(chosen: Chosen) -> list[ResidencySwitch]:
    """What is taken before a task and given back before the next one on its devices; before the
    same task first what is given back."""
    return sorted(_switches(chosen), key=lambda switch: switch.action == "take")


def _switches(chosen: Chosen) -> Iterator[ResidencySwitch]:
    order = [bar.task for bar in sorted(_bars(chosen), key=lambda bar: (bar.begin_s, bar.end_s))]
    for task in chosen.posed.tasks:
        what = _moves(task, chosen)
        place = order.index(task.id)
        turn = order[place + 1 :] + order[:place]
        given = {} if what is None else _given_before(task, chosen, turn)
        taken = sorted(number for numbers in given.values() for number in numbers)
        switches: list[tuple[str, str, Sequence[int]]] = []
        if taken:
            switches.append(("take", task.id, taken))
        switches += [("release", name, numbers) for name, numbers in given.items()]
        for action, before, numbers in switches:
            yield ResidencySwitch(
                role=task.role.name,
                device=device_names(_addresses(chosen, numbers)),
                what=str(what),
                action=action,
                before=before,
            )


def _given_before(
    task: TaskWork, chosen: Chosen, turn: Sequence[str]
) -> Mapping[str, Sequence[int]]:
    """The devices that a task gives back before each of those that follow it there.

    A server gives all of its devices back when something follows on one of them; servers that have
    theirs alone keep what they hold. What is not an engine's moves as a whole.

    Args:
        turn: The other tasks, in the order in which they come after this one.
    """
    numbers = chosen.numbers[task.id]
    size = chosen.ways[task.id].layout.server_devices if task.generates else len(numbers)
    given: dict[str, list[int]] = {}
    for first in range(0, len(numbers), size):
        server = numbers[first : first + size]
        here = (name for name in turn if not set(server).isdisjoint(chosen.numbers[name]))
        following = next(here, None)
        if following is not None:
            given.setdefault(following, []).extend(server)
    return given


def _moves(task: TaskWork, chosen: Chosen) -> str | None:
    if task.generates:
        what = "kv cache" if task.library.in_place else "engine weights and kv cache"
        return what if task.library.sleeps else None
    if "all" not in chosen.ways[task.id].offload:
        return None
    return "parameters and optimizer" if task.updates else "parameters"


def _bars(chosen: Chosen) -> list[Bar]:
    return list(bars(chosen.posed.problem, chosen.schedule))


def engine_flags_of(chosen: Chosen, request: PlanRequest) -> Iterator[EngineFlags]:
    """How the engines of a schedule are started."""
    shared = {task for tasks in sharing_sets(chosen) if len(tasks) > 1 for task in tasks}
    for task in chosen.posed.tasks:
        if task.generates:
            way = chosen.ways[task.id]
            flags = engine_flags(
                task,
                way,
                chosen.posed.made(task.id).memory(task, way),
                memory_bytes=chosen.posed.group_of(task.id).device.memory_bytes,
                max_length=request.max_length,
                dtype=role_dtype(task.role, request, chosen.posed.group_of(task.id).device),
                sleeps=task.id in shared,
            )
            if flags is not None:
                yield flags


def prediction_of(chosen: Chosen, graph: Graph, pool: ResourcePool) -> Prediction:
    """What a schedule on devices takes and holds."""
    problem, total = chosen.posed.problem, chosen.device_step_s
    samples = max(task.samples for task in chosen.posed.tasks)
    return Prediction(
        memory=held_memory(chosen),
        step_s=chosen.step_s,
        timeline=tuple(_timeline(chosen, graph, pool)),
        bottleneck=_longest_turn(bottleneck(problem, chosen.schedule), chosen),
        idle_share=chosen.idle_share,
        sync_s=chosen.sync_s,
        device_s=total / samples,
        tokens_per_device_s=_step_tokens(chosen) / total if total else None,
        confidence=(
            *(
                CostSource(
                    node=turn.node,
                    seconds=turn.seconds,
                    source=turn.estimate.source,
                    parts=_parts(turn),
                    assumed=assumed_efficiencies(chosen.posed.group_of(task.id).machine.spec)
                    if turn.estimate.source == "analytic"
                    else "",
                )
                for task in chosen.posed.tasks
                for turn in _turns(task, chosen)
            ),
            *environment_costs(chosen),
        ),
    )


def _parts(turn: Turn) -> tuple[tuple[str, float], ...]:
    """What a turn's seconds are made of; what is on the host comes from there in them."""
    moved = (("to the host and back", turn.move_s),) if turn.move_s else ()
    return (*turn.estimate.parts, *moved)


def _step_tokens(chosen: Chosen) -> float:
    """Of prompts and responses of all samples of a step, by their mean lengths."""
    posed = chosen.posed
    drawing = [task for task in posed.tasks if task.generates]
    counted = drawing or [max(posed.tasks, key=lambda task: task.samples)]
    return sum(
        task.samples * (task.prompt_tokens + posed.made(task.id).options.lengths.mean)
        for task in counted
    )


def _longest_turn(task: str, chosen: Chosen) -> str:
    """The longest operation of a task."""
    return max(_turns(chosen.posed.task(task), chosen), key=lambda turn: turn.seconds).node


def _in_turn(bar: Bar, chosen: Chosen) -> Iterator[tuple[str, float, float]]:
    """The operations of a bar's task, with when each begins and ends.

    They take turns in each piece: an operation begins in the first and ends in the last.
    """
    turns = _turns(chosen.posed.task(bar.task), chosen)
    whole = sum(turn.seconds for turn in turns)
    begin_s, done = bar.begin_s, 0.0
    for turn in turns:
        done += turn.seconds
        last = turn is turns[-1] or not whole
        end_s = bar.end_s if last else bar.end_s - bar.last_s * (1 - done / whole)
        yield turn.node, begin_s, end_s
        begin_s = bar.begin_s + (bar.first_s * done / whole if whole else 0.0)


def _timeline(chosen: Chosen, graph: Graph, pool: ResourcePool) -> Iterator[PredictedSpan]:
    end = seconds_of(chosen.posed.problem, chosen.schedule)
    begun = {bar.task: (bar.begin_s, bar.end_s) for bar in _bars(chosen)}
    for bar in sorted(_bars(chosen), key=lambda bar: (bar.begin_s, bar.end_s)):
        for node, begin_s, end_s in _in_turn(bar, chosen):
            yield PredictedSpan(
                node=node,
                device=device_names(_addresses(chosen, chosen.numbers[bar.task])),
                begin_s=begin_s,
                end_s=end_s,
            )
    yield from environment_spans(chosen, begun, pool)
    syncs = {str(node.role): str(node.id) for node in graph.of_op(Op.SYNC)}
    for (_, name), seconds in chosen.syncs.items():
        role = chosen.posed.task(name).role.name
        if seconds:
            yield PredictedSpan(
                node=syncs.get(role, f"weights to {name}"),
                device=device_names(_addresses(chosen, chosen.numbers[name])),
                begin_s=end,
                end_s=end + seconds,
            )
            end += seconds
