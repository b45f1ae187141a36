"""Whether the schedule of a plan fits its operations.

Every operation that has seconds is in it once, on as many devices as the operation and its
environment have of one kind; what reads comes after what it reads from; what works at once stands
on devices of its own; and only parts that work at once pass a batch in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from flowrl.errors import PlanError
from flowrl.graph.ir import Op
from flowrl.plan.check.numbers import UNDO

if TYPE_CHECKING:
    from flowrl.plan.many_form import ScheduleStep
    from flowrl.plan.schema import Operation, PlacementPlan


def check_schedule(plan: PlacementPlan, where: str) -> None:
    """Raises PlanError where it does not; does nothing for a plan without a schedule."""
    if plan.schedule is None:
        return
    where = f"{where}: schedule"
    nodes = {operation.node: operation for operation in plan.operations}
    seen: set[str] = set()
    for step in _steps(plan.schedule):
        _check_form(step, where, root=step is plan.schedule)
        if step.node is None:
            continue
        if step.node not in nodes:
            raise PlanError(
                "the schedule runs what is no operation",
                where=where,
                found=repr(step.node),
                hint=UNDO,
            )
        if step.node in seen:
            raise PlanError(f"the schedule runs {step.node} twice", where=where, hint=UNDO)
        seen.add(step.node)
        _check_leaf(plan, step, nodes[step.node], where)
    for operation in plan.operations:
        if operation.seconds is not None and operation.node not in seen:
            raise PlanError(f"the schedule does not run {operation.node}", where=where, hint=UNDO)
    _check_order(plan.schedule, nodes, where)
    for step in _steps(plan.schedule):
        if step.kind in ("spatial", "asynchronous"):
            _check_apart(plan, step, nodes, where)


def _steps(step: ScheduleStep) -> Iterator[ScheduleStep]:
    yield step
    for part in step.parts:
        yield from _steps(part)


def _check_order(step: ScheduleStep, nodes: Mapping[str, Operation], where: str) -> None:
    """Raises PlanError where an operation of a first part reads what the second one makes."""
    if not step.parts:
        return
    for i, part in enumerate(step.parts):
        _check_order(part, nodes, f"{where}.parts.{i}")
    first, second = ([one.node for one in _steps(part) if one.node] for part in step.parts)
    for reader in first:
        made = _before(reader, nodes)
        late = next((writer for writer in second if writer in made), None)
        if late is not None:
            raise PlanError(
                f"{reader} reads what {late} makes, and comes before it",
                where=f"{where}.parts",
                found=f"{reader} in parts.0, {late} in parts.1",
                expected=f"{late} in the first part, or in an earlier one",
                hint="exchange the two parts, or undo the edit",
            )


def _before(node: str, nodes: Mapping[str, Operation]) -> set[str]:
    """All that an operation waits for in a step, directly or through others."""
    found: set[str] = set()
    open_ = [node]
    while open_:
        operation = nodes.get(open_.pop())
        fresh = () if operation is None else [one for one in operation.after if one not in found]
        found.update(fresh)
        open_ += fresh
    return found


def _check_form(step: ScheduleStep, where: str, *, root: bool) -> None:
    is_leaf = step.kind == "run"
    if is_leaf != (step.node is not None) or len(step.parts) != (0 if is_leaf else 2):
        raise PlanError(
            "a step of a schedule runs one operation, or has two parts",
            where=where,
            found=f"{step.kind}, node {step.node!r}, {len(step.parts)} parts",
            hint=UNDO,
        )
    if step.kind == "asynchronous" and not root:
        raise PlanError(
            "only a whole schedule is asynchronous, no part of one", where=where, hint=UNDO
        )
    if step.chunks > 1 and step.kind != "spatial":
        raise PlanError(
            "only parts that work at once pass a batch in chunks",
            where=where,
            found=f"{step.kind}, {step.chunks} chunks",
            hint=UNDO,
        )
    sizes = [part.devices for part in step.parts]
    need = max(sizes, default=0) if step.kind == "temporal" else sum(sizes)
    if need > step.devices:
        raise PlanError(
            f"a {step.kind} step on {step.devices} devices has parts that need {need}",
            where=where,
            hint=UNDO,
        )


def region_devices(plan: PlacementPlan, operation: Operation) -> tuple[str, ...]:
    """Devices of an operation, and the accelerators of the environment that it plays with."""
    others = [
        device
        for other in plan.operations
        if other.environment is not None and other.region == operation.region
        for device in other.devices
    ]
    if not others:
        return operation.devices
    mine = set(operation.devices) | {d.address for d in plan.pool.devices if d.type == "cpu"}
    return (*operation.devices, *(device for device in others if device not in mine))


def block_devices(plan: PlacementPlan, operation: Operation) -> tuple[str, ...]:
    """Of those the devices that the schedule counts: an environment's of another kind are beside
    it."""
    devices = region_devices(plan, operation)
    if devices == operation.devices:
        return devices
    kinds = {plan.pool.device(device).name for device in operation.devices}
    return tuple(device for device in devices if plan.pool.device(device).name in kinds)


def _check_leaf(plan: PlacementPlan, step: ScheduleStep, operation: Operation, where: str) -> None:
    devices = len(block_devices(plan, operation))
    if step.devices != devices:
        raise PlanError(
            f"the schedule runs {step.node} on {step.devices} devices, the operation is on "
            f"{devices}",
            where=where,
            hint=UNDO,
        )
    if operation.op != Op.GENERATE and not operation.micro_tokens:
        raise PlanError(
            f"{step.node} works on micro-batches of no tokens",
            where=f"{where}, {step.node}",
            found="micro_tokens 0",
            expected="at least the tokens of a sample",
            hint=UNDO,
        )
    if operation.seconds is not None and operation.move_s > operation.seconds:
        raise PlanError(
            f"the way from the host and back is a part of what {step.node} takes",
            where=f"{where}, {step.node}",
            found=f"move_s {operation.move_s:g}, seconds {operation.seconds:g}",
            expected="move_s up to seconds",
            hint=UNDO,
        )


def _check_apart(
    plan: PlacementPlan, step: ScheduleStep, nodes: Mapping[str, Operation], where: str
) -> None:
    first, second = (
        {
            device
            for leaf in _steps(part)
            if leaf.node
            for device in region_devices(plan, nodes[leaf.node])
        }
        for part in step.parts
    )
    common = sorted(first & second)
    if common:
        raise PlanError(
            f"the parts of a {step.kind} step share {len(common)} devices",
            where=where,
            found=f"{common[0]} and others" if len(common) > 1 else common[0],
            expected="devices of their own",
            hint=UNDO,
        )
