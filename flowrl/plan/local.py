"""Who draws on this machine: the executor's own process, or processes on other cores.

A plan for one device has all its models in the main process. What it leaves open is where samples
are drawn:

- `temporal`: drawing and learning take turns. In the main process, where the engine reads the
  trainer's weights in place; or in processes of their own, each with a copy, on all cores.
- `spatial`: the same turns, with each engine bound to a core that the trainer leaves free. Scores
  are computed beside the drawing in both.
- `asynchronous`: engines draw all the time, ahead of the trainer, where the workflow's
  `max_staleness` allows it.

Forward passes (references, old logprobs, values) run on the whole batch, in the main process, when
all samples are drawn. They could begin on the first groups while engines of other processes draw,
but no plan offers that: which samples share a pass would depend on which ends first, and with it
the last bit of what is learned; and the process that would compute them drives the drawing.

In synchronous plans a sample depends on the seed and its number alone, so they all learn from the
same samples, to the same weights bit for bit. The logprobs that an engine computes are the one
exception: which samples share a batch shows in their last bit, and so in a loss that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from flowrl.cost.demand import phase_of
from flowrl.cost.memory import MemoryPart, Phase, format_bytes
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph, Op
from flowrl.plan.host import MAIN_PROCESS
from flowrl.plan.schema import (
    Operation,
    PlacementPlan,
    PredictedMemory,
    Reason,
    Rejection,
    Transport,
)

LocalKind: TypeAlias = Literal["temporal", "spatial", "asynchronous"]

ASYNCHRONOUS: Literal["asynchronous"] = "asynchronous"

MANY = 8
"""Engines up to which each number is looked at; beyond are powers of two, and all cores."""

ENGINE_PROCESSES = "engine processes"
"""What they hold is called in a plan's memory."""

MOST_ENGINES = 1024
"""Engines of a role, as `roles.ROLE.num_engines` has it."""

_OF_TRAINER = ("optimizer", "master weights", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngines:
    """What draws for a role.

    Attributes:
        processes: Of their own; 0 where the main process draws.
        cores: The core of each, counted among those that the run may use; empty leaves it to the
            operating system.
    """

    processes: int
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRequest:
    """What is open, and what is not.

    Attributes:
        roles: That draw.
        fixed: Engines of a role, where somebody said so.
        num_cores: That the run may use; 1 where the models are on an accelerator, whose engines no
            core is chosen for.
        kind: That somebody asked for, `auto` otherwise.
        where: Who asked.
        may_run_ahead: Samples may be older than the weights.
        must_run_ahead: Some policy of the scheduler is about generating ahead.
        in_process: Another executor draws in its own process only.
        in_workers: Another executor draws in workers only, which have no cores of their own.
    """

    roles: tuple[str, ...]
    fixed: Mapping[str, int]
    num_cores: int
    kind: Literal["auto"] | LocalKind = "auto"
    where: str = "plan.kind"
    may_run_ahead: bool = False
    must_run_ahead: bool = False
    in_process: bool = False
    in_workers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChoice:
    """One of the ways.

    Attributes:
        engines: Processes that draw, by role; 0 is the main process.
        pinned: Each is bound to a core, from the second on.
    """

    kind: LocalKind
    engines: tuple[tuple[str, int], ...]
    pinned: bool = False

    def __str__(self) -> str:
        if not any(number for _, number in self.engines):
            return "generated in the main process"
        several = len(self.engines) > 1
        words = ", ".join(
            f"{f'{role}: ' if several else ''}{number} engine process{'es' * (number != 1)}"
            for role, number in self.engines
        )
        return f"{words}{' on other cores than the trainer' * self.pinned}"


def default_choice(request: LocalRequest) -> LocalChoice:
    """What is taken where nothing was measured: the fewest moving parts of what is asked for.

    Whoever allows older samples asks to draw ahead, unless another kind is asked for: nothing else
    makes use of them. So it is one process that draws all the time then, and else the main one.

    Raises:
        PlanError: what is asked for cannot be.
    """
    cores = request.num_cores
    kind = request.kind
    ahead = request.may_run_ahead or request.must_run_ahead
    if request.in_process:
        # What such an executor cannot do it says itself.
        return _choice(request, ASYNCHRONOUS if ahead else "temporal", 0)
    if kind == ASYNCHRONOUS and not ahead:
        raise PlanError(
            "no sample may be generated ahead of the trainer",
            where=request.where,
            found="asynchronous, and max_staleness=0",
            hint="set train.max_staleness to 1 or more, or ask for another kind",
        )
    if kind not in ("auto", ASYNCHRONOUS) and request.must_run_ahead:
        raise PlanError(
            "a policy of the scheduler applies to samples generated ahead of the trainer",
            where=request.where,
            found=kind,
            expected="auto or asynchronous",
            hint="take train.policies.admission and over_sampling prompts out",
        )
    if kind == "spatial":
        wanted = max(
            [cores - 1, *request.fixed.values()] if not request.fixed else request.fixed.values()
        )
        if not 1 <= wanted < cores:
            raise PlanError(
                "there are too few cores for each engine to have one besides the trainer's",
                where=request.where,
                found=f"{cores} core{'s' * (cores != 1)}, {max(1, wanted)} engine processes",
                expected="a core for the trainer and one for each engine",
                hint="ask for temporal, or for fewer engines",
            )
        return _choice(request, kind, wanted, pinned=True)
    if ahead and kind != "temporal":
        return _choice(request, ASYNCHRONOUS, 1)
    return _choice(request, "temporal", 0)


def asked_ahead(request: LocalRequest, choice: LocalChoice) -> str | None:
    """Why a choice that nothing was measured for draws ahead; None where that is not the reason."""
    if choice.kind != ASYNCHRONOUS or request.kind != "auto":
        return None
    what = "max_staleness" if request.may_run_ahead else "a policy of the scheduler"
    return f"{what} asks to generate ahead of the trainer"


def _choice(
    request: LocalRequest, kind: LocalKind, number: int, *, pinned: bool = False
) -> LocalChoice:
    def of_role(role: str) -> int:
        if request.in_process:
            return 0
        own = request.fixed.get(role, number)
        if request.in_workers:
            return max(1, own)
        # One engine that takes turns with the trainer needs no process.
        return 0 if own == 1 and number == 0 else own

    return LocalChoice(
        kind=kind, engines=tuple((role, of_role(role)) for role in request.roles), pinned=pinned
    )


def local_choices(request: LocalRequest) -> tuple[LocalChoice, ...]:
    """All ways that are open, the fewest moving parts first; the default among them."""
    found = dict.fromkeys(_choices(request)) if request.num_cores > 1 else {}
    return tuple(found) or (default_choice(request),)


def _choices(request: LocalRequest) -> Iterator[LocalChoice]:
    cores, ahead = request.num_cores, request.may_run_ahead or request.must_run_ahead

    def wanted(kind: LocalKind) -> bool:
        can = not (request.in_process or (request.in_workers and kind == "spatial"))
        return can and request.kind in ("auto", kind)

    def numbers(most: int) -> Iterator[int]:
        if not request.fixed:
            yield from (n for n in range(1, most + 1) if n <= MANY or n == most or not n & (n - 1))
        elif max(request.fixed.values()) <= most:
            yield max(request.fixed.values())

    if not request.roles or request.in_process:
        yield default_choice(request)
        return
    if wanted("temporal") and not request.must_run_ahead:
        yield _choice(request, "temporal", 0)
        for number in numbers(cores):
            yield _choice(request, "temporal", number)
    if wanted("spatial") and not request.must_run_ahead:
        for number in numbers(cores - 1):
            yield _choice(request, "spatial", number, pinned=True)
    if wanted(ASYNCHRONOUS) and ahead:
        for number in numbers(cores - 1):
            yield _choice(request, ASYNCHRONOUS, number)


def with_choice(
    plan: PlacementPlan, graph: Graph, choice: LocalChoice, reasons: tuple[Reason, ...] = ()
) -> PlacementPlan:
    """A plan for one device with its drawing placed.

    Args:
        plan: As `make_plan` makes it, with everything in the main process.
        reasons: Why.
    """
    engines = {role: number for role, number in choice.engines if number}
    nodes = {n.id for n in graph.of_op(Op.GENERATE) if n.role in engines}
    return replace(
        plan,
        kind=choice.kind,
        operations=tuple(
            _drawn(operation, engines[operation.role or ""], pinned=choice.pinned)
            if operation.node in nodes
            else operation
            for operation in plan.operations
        ),
        weight_routes=tuple(
            replace(route, transport=Transport.FOLDER) if route.destination in engines else route
            for route in plan.weight_routes
        ),
        channels=tuple(
            replace(channel, transport=Transport.PIPE)
            if nodes & {channel.source, channel.destination}
            else channel
            for channel in plan.channels
        ),
        prediction=replace(
            plan.prediction,
            memory=memory_with_engines(plan, engines),
        ),
        reasons=(*plan.reasons, *reasons, *_whole_batches(graph, choice)),
    )


def _whole_batches(graph: Graph, choice: LocalChoice) -> Iterator[Reason]:
    """Why forward passes wait for all samples where other processes draw them."""
    if choice.kind == ASYNCHRONOUS or not any(number for _, number in choice.engines):
        return
    for node in graph.nodes:
        if phase_of(node) in (Phase.LOGPROBS, Phase.VALUES, Phase.SCORES):
            yield Reason(
                subject=node.id,
                choice="on the whole batch, when all samples are generated",
                why="synchronous plans learn the same to the last bit",
                rejected=(
                    Rejection(
                        choice="group by group, while engines generate",
                        constraint="which samples share a pass would depend on which ends first, "
                        f"and {MAIN_PROCESS} drives generation meanwhile",
                    ),
                ),
            )


def local_choice(plan: PlacementPlan) -> LocalChoice | None:
    """The way in which a plan for one device draws; None of a plan that draws nothing."""
    drawing = [one for one in plan.operations if one.op == Op.GENERATE and one.role]
    roles = dict.fromkeys(one.role or "" for one in drawing)
    if not roles or plan.kind not in ("temporal", "spatial", ASYNCHRONOUS):
        return None
    return LocalChoice(
        kind=plan.kind,  # type: ignore[arg-type]  # one of the three, as asked above
        engines=tuple((role, engines_of(plan, role).processes) for role in roles),
        pinned=any(one.cores for one in drawing),
    )


def _drawn(operation: Operation, number: int, *, pinned: bool) -> Operation:
    cores = tuple(range(1, number + 1)) if pinned else ()
    return replace(operation, process=operation.node, replicas=number, cores=cores)


def memory_with_engines(
    plan: PlacementPlan, engines: Mapping[str, int]
) -> tuple[PredictedMemory, ...]:
    """The memory of a plan with everything in the main process, with that of engine processes.

    Args:
        engines: How many draw for a role.
    """
    return tuple(_with_processes(plan, entry, engines) for entry in plan.prediction.memory)


def _with_processes(
    plan: PlacementPlan, entry: PredictedMemory, engines: Mapping[str, int]
) -> PredictedMemory:
    """A phase's memory with the copies that engine processes hold all the time."""
    parts = []
    for role, number in engines.items():
        drawing = [
            one.memory
            for one in plan.prediction.memory
            if one.active == role and one.memory.phase is Phase.ROLLOUT
        ]
        if not drawing or entry.device not in plan.placement(role).devices:
            continue
        each = sum(
            part.nbytes
            for part in drawing[0].parts
            if (part.role == role and part.name not in _OF_TRAINER) or part.name == "runtime"
        )
        parts.append(MemoryPart(role=role, name=ENGINE_PROCESSES, nbytes=number * each))
    return replace(entry, memory=replace(entry.memory, parts=(*entry.memory.parts, *parts)))


def over_budget(plan: PlacementPlan) -> str | None:
    """What does not fit, in words; None where all does."""
    for device in plan.pool.devices:
        peak = plan.prediction.peak(device.address)
        if peak is not None and peak.memory.total > device.budget_bytes:
            return (
                f"needs {format_bytes(peak.memory.total)} of {format_bytes(device.budget_bytes)} "
                f"on {device.address}"
            )
    return None


def engines_that_fit(plan: PlacementPlan, role: str) -> int:
    """Returns how many engine processes of a role this machine has memory for, by the plan."""
    number, most = engines_of(plan, role).processes, MOST_ENGINES
    for device in plan.pool.devices:
        peak = plan.prediction.peak(device.address)
        held = sum(
            part.nbytes
            for part in (() if peak is None else peak.memory.parts)
            if (part.role, part.name) == (role, ENGINE_PROCESSES)
        )
        if peak is not None and held:
            free = device.budget_bytes - peak.memory.total
            most = min(most, number + max(0, free * number // held))
    return most


def engines_of(plan: PlacementPlan, role: str) -> LocalEngines:
    """What draws for a role, by the plan."""
    for operation in plan.operations:
        if operation.op == Op.GENERATE and operation.role == role:
            if operation.process in ("", MAIN_PROCESS):
                break
            return LocalEngines(processes=operation.replicas, cores=operation.cores)
    return LocalEngines(processes=0)
