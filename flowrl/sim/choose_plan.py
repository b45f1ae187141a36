"""Chooses among the plans for this machine by simulating each of them, with measured times.

The simulator runs the very plan: the scheduler that runs it for real, on a virtual clock. So what
is compared are whole steps, with what one process waits for another, and with what they take from
each other: cores, and the interpreter of the main process. Several processes are the harder ones to
predict, so that `DOUBT` is added to their steps before plans are compared.

The fastest is taken; of plans within `TIE` of it the one with the fewest moving parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.compiler import CompiledStage
from flowrl.compiler.lengths import assumed_lengths
from flowrl.config.schema import PlanConfig
from flowrl.graph import Op
from flowrl.plan.local import LocalChoice, over_budget
from flowrl.plan.schema import Alternative, PlacementPlan, Reason, Rejection
from flowrl.sim.of_plan import longest_response, model_of_stage, rollout_nodes
from flowrl.sim.planned_times import planned_lengths
from flowrl.sim.report import seconds_text
from flowrl.sim.rollouts_of_plan import prompt_lengths
from flowrl.sim.run import simulate
from flowrl.sim.times import StageTimes
from flowrl.sim.workload import Workload, open_workload
from flowrl.wording import percent

TIE = 0.02
"""Share of a step that no prediction tells apart."""

DOUBT = 0.1
"""Share of a step by which predictions of several processes may be too low: the bound that they are
held to (benchmarks/results/simulator.md)."""

_WARM_UP, _STEPS = 2, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One way to draw, simulated.

    Attributes:
        step_s: Seconds of a step on average, behind the first ones.
    """

    choice: LocalChoice
    plan: PlacementPlan
    step_s: float

    @property
    def cautious_s(self) -> float:
        """What plans are compared by."""
        apart = any(number for _, number in self.choice.engines)
        return self.step_s * (1 + DOUBT * apart)


def choose_plan(
    stage: CompiledStage, times: StageTimes, plan: PlanConfig, seed: int
) -> CompiledStage:
    """The stage by its fastest plan, priced where it is the only one; as it is where nothing draws.

    Args:
        plan: Says what lengths to expect.

    Raises:
        FlowError: the stage cannot be simulated.
    """
    if stage.local is None or not stage.local.request.roles or stage.local.request.in_process:
        return stage
    found, too_large = predicted_choices(stage, times, plan, seed)
    if not found:
        return stage
    chosen = best_of(found)
    others = sorted((one for one in found if one is not chosen), key=lambda one: one.step_s)
    reason = Reason(
        subject=", ".join(f"{role}.generate" for role in stage.local.request.roles),
        choice=f"{chosen.choice.kind}: {chosen.choice}",
        why=f"a step takes {seconds_text(chosen.step_s)}{of_all_groups(stage)}, by {times.source}",
        rejected=(*(_slower(one, chosen) for one in others), *too_large),
    )
    made = stage.local.plan(stage.graph, chosen.choice, (reason,))
    return stage.with_plan(
        replace(
            made,
            prediction=replace(made.prediction, step_s=chosen.step_s),
            alternatives=tuple(_alternative(one, chosen) for one in others),
            notes=(*made.notes, *notes_of(stage, plan)),
        )
    )


def notes_of(stage: CompiledStage, plan: PlanConfig) -> tuple[str, ...]:
    """What simulated steps take for granted."""
    assumed = [
        note
        for node in rollout_nodes(stage.graph)
        for note in assumed_lengths(plan, longest_response(stage, node))
    ]
    return tuple(dict.fromkeys(assumed))


def of_all_groups(stage: CompiledStage) -> str:
    """What a run's own step may have less of than the one that plans are chosen by."""
    return " where no group is filtered" if stage.graph.of_op(Op.FILTER) else ""


def best_of(found: Sequence[Predicted]) -> Predicted:
    """The one to take of some plans, which are in the order of their moving parts."""
    best = min(one.cautious_s for one in found)
    return next(one for one in found if one.cautious_s <= (1 + TIE) * best)


def predicted_choices(
    stage: CompiledStage, times: StageTimes, plan: PlanConfig, seed: int
) -> tuple[list[Predicted], list[Rejection]]:
    """Every choice that fits, simulated, the fewest moving parts first; and those that do not fit.

    Raises:
        FlowError: the stage cannot be simulated.
    """
    workloads = workloads_of(stage, times, plan, seed)
    fitting, too_large = choices_that_fit(stage)
    found: list[Predicted] = []
    for choice, made in fitting:
        step_s = simulated_step_s(stage.with_plan(made), times, workloads, seed)
        found.append(Predicted(choice=choice, plan=made, step_s=step_s))
    return found, too_large


def choices_that_fit(
    stage: CompiledStage,
) -> tuple[list[tuple[LocalChoice, PlacementPlan]], list[Rejection]]:
    """Every choice that fits with its plan, the fewest moving parts first; and why others do not.

    The stage has choices.
    """
    assert stage.local is not None
    fitting: list[tuple[LocalChoice, PlacementPlan]] = []
    too_large: list[Rejection] = []
    for choice in stage.local.choices():
        made = stage.local.plan(stage.graph, choice)
        lack = over_budget(made)
        if lack is None:
            fitting.append((choice, made))
        else:
            too_large.append(Rejection(choice=f"{choice.kind}: {choice}", constraint=lack))
    return fitting, too_large


def simulated_step_s(
    stage: CompiledStage, times: StageTimes, workloads: Mapping[str, Workload], seed: int
) -> float:
    """Seconds of a step by the stage's plan on average, behind the first ones.

    Raises:
        FlowError: the stage cannot be simulated.
    """
    model = model_of_stage(stage, times)
    report = simulate(model, steps=_WARM_UP + _STEPS, workloads=workloads, seed=seed)
    later = report.steps[_WARM_UP:]
    return sum(step.wall_s for step in later) / len(later)


def workloads_of(
    stage: CompiledStage, times: StageTimes, plan: PlanConfig, seed: int
) -> dict[str, Workload]:
    """What each rollout is given: lengths as the `plan` section says, or as plans assume them.

    Raises:
        ConfigError, DataError: the lengths cannot be read.
    """
    found: dict[str, Workload] = {}
    for node in rollout_nodes(stage.graph):
        longest = longest_response(stage, node)
        found[node.id] = open_workload(
            planned_lengths(plan, longest),
            stage=stage.name,
            rollout=node.id,
            seed=seed,
            prompts=prompt_lengths(stage.graph, node, times, longest),
            longest=longest,
        )
    return found


def _slower(one: Predicted, chosen: Predicted) -> Rejection:
    return Rejection(choice=f"{one.choice.kind}: {one.choice}", constraint=_why_not(one, chosen))


def _why_not(one: Predicted, chosen: Predicted) -> str:
    if one.step_s <= (1 + TIE) * chosen.step_s:
        faster = one.step_s < (1 - TIE) * chosen.step_s
        words = "not by more than a prediction may be wrong" if faster else "no faster"
        return f"{seconds_text(one.step_s)} a step: {words}, with more moving parts"
    return f"{seconds_text(one.step_s)} a step, {percent(one.step_s / chosen.step_s - 1)} more"


def _alternative(one: Predicted, chosen: Predicted) -> Alternative:
    return Alternative(
        summary=str(one.choice),
        step_s=one.step_s,
        why_not=_why_not(one, chosen),
        kind=one.choice.kind,
    )
