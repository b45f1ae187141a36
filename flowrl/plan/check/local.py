"""What of a plan for this machine follows from who draws, and from other numbers in it.

Proven of a plan's file that is read alone. With its configuration all of this is made anew
(`flowrl.plan.settle_local`, `flowrl.sim.price_local`), and what the file said otherwise is told.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.cost.memory import format_bytes
from flowrl.errors import PlanError
from flowrl.graph.ir import Op
from flowrl.plan.check.numbers import PRICE_ANEW
from flowrl.plan.local import (
    ENGINE_PROCESSES,
    LocalChoice,
    engines_of,
    local_choice,
    memory_with_engines,
)
from flowrl.plan.schema import PlacementPlan, PredictedMemory, Transport


def check_local(plan: PlacementPlan, where: str) -> None:
    """Numbers that are written twice are alike; ways of weights, memory and reasons are those of
    who draws.

    Raises:
        PlanError: they are not; names the key.
    """
    _check_numbers(plan, where)
    choice = local_choice(plan)
    if choice is None:
        return
    _check_routes(plan, where)
    _check_memory(plan, choice, where)
    _check_reasons(plan, choice, where)


def _check_numbers(plan: PlacementPlan, where: str) -> None:
    placements = {one.role: (i, one) for i, one in enumerate(plan.placements)}
    for i, one in enumerate(plan.operations):
        if one.role not in placements:
            continue
        number, role = placements[one.role]
        facts = {"replicas": ("replicas", one.replicas, role.replicas)}
        if one.op == Op.GENERATE:
            facts = {"chunk": ("num_slots", one.chunk, role.num_slots)}
        for key, (of, found, expected) in facts.items():
            if found != expected:
                raise PlanError(
                    f"{one.node} and its role have different numbers",
                    where=f"{where}: operations.{i}.{key}",
                    found=f"{key} {found}",
                    expected=f"{expected} (placements.{number}.{of})",
                    hint=PRICE_ANEW,
                )


def _check_routes(plan: PlacementPlan, where: str) -> None:
    for i, route in enumerate(plan.weight_routes):
        number = engines_of(plan, route.destination).processes
        if (route.transport == Transport.FOLDER) != (number > 0):
            raise PlanError(
                "weight routes do not lead to the processes that generate",
                where=f"{where}: weight_routes.{i}.transport",
                found=f"{route.transport}, for {_drawn_by(number)}",
                expected=str(Transport.FOLDER)
                if number
                else f"{Transport.IN_PLACE}, as in the main process",
                hint=PRICE_ANEW,
            )


def _drawn_by(number: int) -> str:
    return f"{number} engine process{'es' * (number > 1)}" if number else "the main process"


def _check_memory(plan: PlacementPlan, choice: LocalChoice, where: str) -> None:
    """Engine processes hold what one of them takes, times how many there are."""
    bare = tuple(_without_processes(one) for one in plan.prediction.memory)
    alone = replace(plan, prediction=replace(plan.prediction, memory=bare))
    engines = {role: number for role, number in choice.engines if number}
    expected = memory_with_engines(alone, engines)
    for i, (found, one) in enumerate(zip(plan.prediction.memory, expected, strict=True)):
        said, takes = _of_processes(found), _of_processes(one)
        if said != takes:
            raise PlanError(
                f"engine processes hold other memory than is predicted, in {one.memory.phase} of "
                f"{one.active}",
                where=f"{where}: prediction.memory.{i}.memory.parts",
                found=f"{format_bytes(said)} of {ENGINE_PROCESSES}",
                expected=f"{format_bytes(takes)}, for {choice}",
                hint=PRICE_ANEW,
            )


def _without_processes(entry: PredictedMemory) -> PredictedMemory:
    parts = tuple(one for one in entry.memory.parts if one.name != ENGINE_PROCESSES)
    return replace(entry, memory=replace(entry.memory, parts=parts))


def _of_processes(entry: PredictedMemory) -> int:
    return sum(one.nbytes for one in entry.memory.parts if one.name == ENGINE_PROCESSES)


def _check_reasons(plan: PlacementPlan, choice: LocalChoice, where: str) -> None:
    """What is told of who draws is what the plan decides; a step is told of it."""
    known = dict(choice.engines)
    for i, reason in enumerate(plan.reasons):
        roles = [one.removesuffix(".generate") for one in reason.subject.split(", ")]
        is_of_drawing = all(f"{one}.generate" in reason.subject.split(", ") for one in roles)
        if not is_of_drawing or not set(roles) <= set(known):
            continue
        of_roles = replace(choice, engines=tuple((role, known[role]) for role in roles))
        told = f"{choice.kind}: {of_roles}"
        if told != reason.choice:
            raise PlanError(
                f"{reason.subject} is not what the plan gives reasons for",
                where=f"{where}: kind",
                found=told,
                expected=f"{reason.choice} (reasons.{i}.choice)",
                hint=PRICE_ANEW,
            )
