"""The way to run a task that a plan's file has decided, priced as the planner prices its own.

A file says layout, recomputation, offload, micro-batches, slots and cache; times, and what shares
devices with what, follow from them and from the configuration.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.cost.role_memory import (
    MemoryOptions,
    offloadable_bytes,
    parameter_bytes,
    resident_bytes,
)
from flowrl.cost.source import Recompute
from flowrl.errors import PlanError
from flowrl.plan.schema import Operation
from flowrl.plan.ways.candidate import RECOMPUTE, Candidate
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.region_ways import with_split
from flowrl.plan.ways.regions import Split, splits
from flowrl.plan.ways.task_rules import parameter_form
from flowrl.plan.ways.tasks import TaskWork

_OFFLOAD = ("optimizer", "all")


def decided_task(task: TaskWork, operation: Operation) -> TaskWork:
    """The task with the slots that an operation says."""
    return replace(task, slots=operation.slots) if task.generates and operation.slots else task


def decided_way(
    made: Candidates,
    task: TaskWork,
    operation: Operation,
    plays: Operation | None,
    where: str,
) -> Candidate:
    """What an operation decides, with the time that it takes; whether it fits is not asked.

    Args:
        plays: Of a task of episodes, the operation of its environment.
        where: Names the operation in the file.

    Raises:
        PlanError: no layout, or another decision, that the task can have; names its key.
    """
    _check_layout(made, task, operation, where)
    _check_words(made, task, operation, where)
    if task.generates:
        way = _rollout(made, task, operation)
    elif task.updates:
        way = _update(made, task, operation)
    else:
        way = _forward(made, task, operation)
    if task.region is None or plays is None or plays.environment is None:
        return way
    split = _split(made, task, operation, plays, where)
    played = with_split(made, task, way, split)
    if played is None:
        raise PlanError(
            f"the devices of {operation.node} or their hosts do not hold its environment",
            where=f"{where}.devices",
            hint="give the environment devices of its own, or hosts with more memory",
        )
    return played


def _check_layout(made: Candidates, task: TaskWork, operation: Operation, where: str) -> None:
    layout = operation.layout
    found = made.layouts(task, layout.num_devices)
    if layout in found.possible:
        return
    values = {f"{name}={getattr(layout, name)}": name for name in ("tp", "pp", "cp", "dp", "ep")}
    why = [f"{one.choice} {one.constraint}" for one in found.refused if one.choice in values]
    near = [one.nearest for one in found.refused if one.choice in values and one.nearest]
    possible = sorted(found.possible, key=lambda one: _apart(one, layout))
    raise PlanError(
        f"{operation.node} cannot run in the layout that the file gives it"
        + (f": {'; '.join(why)}" if why else ""),
        where=f"{where}.layout",
        found=layout.describe(),
        expected=f"for example {' or '.join(one.describe() for one in possible[:3])}"
        if possible
        else f"another number of devices than {layout.num_devices}",
        hint=f"take {near[0]} in its place" if near else "take one of these, or undo the edit",
    )


def _apart(one: object, other: object) -> int:
    names = ("tp", "pp", "cp", "dp", "ep")
    return sum(getattr(one, name) != getattr(other, name) for name in names)


def _check_words(made: Candidates, task: TaskWork, operation: Operation, where: str) -> None:
    """Values that mean something, of what the task does."""
    longest = made.request.max_length
    problems: list[tuple[bool, str, object, str]] = [
        (
            operation.recompute not in (RECOMPUTE if task.updates else ("none",)),
            "recompute",
            operation.recompute,
            f"one of {', '.join(RECOMPUTE)}" if task.updates else "none: it has no backward pass",
        ),
        (
            bool(set(operation.offload) - set(_OFFLOAD if task.updates else ("all",)))
            or (task.generates and bool(operation.offload)),
            "offload",
            ", ".join(operation.offload),
            "optimizer, all, both or nothing"
            if task.updates
            else "nothing"
            if task.generates
            else "all or nothing",
        ),
        (
            operation.shard != task.library.shard,
            "shard",
            operation.shard,
            f"{task.library.shard}, as {task.library.name} does",
        ),
        (
            not task.generates and operation.micro_tokens < longest,
            "micro_tokens",
            operation.micro_tokens,
            f"at least {longest:,}, the tokens of the longest sample",
        ),
        (
            task.generates and operation.kv_tokens < longest,
            "kv_tokens",
            operation.kv_tokens,
            f"at least {longest:,}, the tokens of the longest sample",
        ),
        (task.generates and operation.slots < 1, "slots", operation.slots, "at least 1"),
    ]
    for is_wrong, key, found, expected in problems:
        if is_wrong:
            raise PlanError(
                f"{operation.node} cannot have this",
                where=f"{where}.{key}",
                found=f"{key} {found}",
                expected=expected,
                hint="write what is expected, or undo the edit",
            )


def _options(made: Candidates, task: TaskWork, operation: Operation) -> MemoryOptions:
    return made.memory_options(
        task,
        recompute=_recompute(operation),
        packed_tokens=operation.micro_tokens or None,
        kv_tokens=operation.kv_tokens if task.generates else None,
        offload_optimizer="optimizer" in operation.offload,
    )


def _recompute(operation: Operation) -> Recompute:
    return next(one for one in RECOMPUTE if one == operation.recompute)


def _rollout(made: Candidates, task: TaskWork, operation: Operation) -> Candidate:
    layout, work = operation.layout, made.work(task, operation.layout)
    estimate = made.cost.rollout(
        task.shape,
        layout,
        made.machine,
        samples=task.samples,
        group_size=task.group_size,
        prompt_tokens=task.prompt_tokens,
        lengths=made.options.lengths,
        slots=work.num_slots,
        kv_tokens=operation.kv_tokens,
    )
    options = made.memory_options(task, kv_tokens=0)
    weights = parameter_bytes(task.shape, layout, work, options) if task.library.in_place else 0
    return Candidate(
        layout=layout,
        estimate=estimate,
        resident=weights,
        peak=weights,
        weight_bytes=weights,
        form=parameter_form(task, layout) if weights else f"engine {layout.describe()}",
        kv_tokens=operation.kv_tokens,
        slots=work.num_slots,
    )


def _forward(made: Candidates, task: TaskWork, operation: Operation) -> Candidate:
    layout, work = operation.layout, made.work(task, operation.layout)
    weights = parameter_bytes(task.shape, layout, work, _options(made, task, operation))
    estimate = made.cost.forward(
        task.shape,
        layout,
        made.machine,
        samples=task.samples,
        prompt_tokens=task.prompt_tokens,
        lengths=made.options.lengths,
        micro_tokens=operation.micro_tokens,
        shard=task.library.shard,
    )
    kept = Candidate(
        layout=layout,
        estimate=estimate,
        resident=weights,
        peak=weights,
        weight_bytes=weights,
        form=parameter_form(task, layout),
        micro_tokens=operation.micro_tokens,
    )
    if "all" not in operation.offload:
        return kept
    ways = 2 if task.trains else 1
    move_s = ways * made.cost.move(weights, made.machine).seconds
    return _away(replace(kept, move_s=move_s, offload=("all",), host=weights))


def _update(made: Candidates, task: TaskWork, operation: Operation) -> Candidate:
    layout, work = operation.layout, made.work(task, operation.layout)
    streams, away = ("optimizer" in operation.offload), ("all" in operation.offload)
    options = _options(made, task, operation)
    base = made.memory_options(task, offload_optimizer=streams)
    weights = parameter_bytes(task.shape, layout, work, base)
    moved = offloadable_bytes(task.shape, layout, work, base)
    stays = 0
    if streams:
        whole = resident_bytes(task.shape, layout, work, made.memory_options(task))
        stays = whole - resident_bytes(task.shape, layout, work, base)
    kept = Candidate(
        layout=layout,
        estimate=made.train(task, layout, options),
        resident=weights,
        peak=weights,
        weight_bytes=weights,
        form=parameter_form(task, layout),
        recompute=_recompute(operation),
        micro_tokens=operation.micro_tokens,
        offload=tuple(one for one in _OFFLOAD if one in operation.offload),
        host=stays,
    )
    if not away:
        return kept
    move_s = 2 * made.cost.move(moved, made.machine).seconds
    return _away(replace(kept, move_s=move_s, host=stays + moved))


def _away(kept: Candidate) -> Candidate:
    """The same with its parameters on the host between its turns."""
    form = f"{kept.form}, from the host"
    return replace(kept, resident=0, peak=0, weight_bytes=0, form=form)


def _split(
    made: Candidates, task: TaskWork, operation: Operation, plays: Operation, where: str
) -> Split:
    """Where the file has the environment."""
    assert task.region is not None
    assert plays.environment is not None
    mine, elsewhere = set(made.group.addresses), made.outside.get(task.id)
    apart = plays.environment.mode == "apart"
    own = sum(one in mine and one not in operation.devices for one in plays.devices) if apart else 0
    policy = operation.layout.num_devices
    found = splits(
        made.group,
        policy + own,
        (policy,),
        task.region.environment,
        outside=elsewhere,
        sharers=task.region.sharers,
    )
    for split in found:
        if (split.mode, split.policy, split.own) == (plays.environment.mode, policy, own):
            return split
    raise PlanError(
        f"the environment of {operation.node} cannot be where the file has it",
        where=f"{where}.devices",
        found=f"{plays.node} {plays.environment.mode} on {len(plays.devices)} devices",
        hint="undo the edit, or make the plan again: flowrl plan CONFIG -o FILE",
    )
