"""A plan for this machine that a hand has edited, priced by its decisions.

Times come from where those of the planner's own plan came from (`flowrl.sim.choose_plan`,
`flowrl.sim.estimate_plans`), and its plan and the alternatives to it are told beside the file's. A
file that decides what the planner would takes over all that the planner says of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from flowrl.compiler import CompiledStage
from flowrl.config.schema import PlanConfig
from flowrl.plan.local import LocalChoice, local_choice
from flowrl.plan.plan_fields import differences
from flowrl.plan.prediction import Alternative, Prediction, Reason, Rejection
from flowrl.plan.schema import Placement, PlacementPlan
from flowrl.sim.choose_plan import notes_of, of_all_groups, simulated_step_s, workloads_of
from flowrl.sim.estimate_plans import assumed_for, estimate_model, with_estimate
from flowrl.sim.of_plan import model_of_stage
from flowrl.sim.report import seconds_text
from flowrl.sim.times import StageTimes
from flowrl.wording import percent

_DECIDES = "the plan's file decides so"

_AS_FAST = "as fast"

_TOLD_APART = ("profile", "estimates")
"""Subjects of reasons why no better times are known."""


def price_local(
    stage: CompiledStage,
    given: PlacementPlan,
    plan: PlanConfig,
    seed: int,
    times: StageTimes | None,
) -> PlacementPlan:
    """A plan with the step, the reasons and the alternatives that its decisions have.

    Args:
        stage: By the planner's own plan.
        given: That the executor can run, and which draws something.
        plan: Says what lengths to expect.
        times: Measured ones; None takes those that are assumed.

    Raises:
        FlowError: the stage cannot be simulated, or nothing can be assumed of its times.
    """
    own, choice = stage.plan, local_choice(given)
    assert stage.local is not None
    assert choice is not None
    if not _decides_otherwise(given, own):
        return replace(
            given,
            prediction=replace(own.prediction, memory=given.prediction.memory),
            reasons=own.reasons,
            alternatives=own.alternatives,
            notes=own.notes,
        )
    made, by_what = _with_step(stage, given, plan, seed, times)
    took = made.prediction.step_s or 0.0
    others = tuple(_others(own, choice, took))
    reason = Reason(
        subject=", ".join(f"{role}.generate" for role in stage.local.request.roles),
        choice=f"{choice.kind}: {choice}",
        why=f"{_DECIDES}; a step takes {seconds_text(took)}{by_what}",
        rejected=tuple(
            Rejection(
                choice=f"{one.kind}: {one.summary}",
                constraint=one.why_not
                if one.step_s is None
                else f"{seconds_text(one.step_s)} a step, {_beside(one.step_s, took)}",
            )
            for one in others
        ),
    )
    reasons = stage.local.plan(stage.graph, choice, (reason,)).reasons
    left = [one for one in own.reasons if one.subject in _TOLD_APART]
    return replace(
        made,
        reasons=(*_as_placed(reasons, made), *left),
        alternatives=others,
        notes=(*stage.local.base.notes, *(notes_of(stage, plan) if times is not None else ())),
    )


def _with_step(
    stage: CompiledStage,
    given: PlacementPlan,
    plan: PlanConfig,
    seed: int,
    times: StageTimes | None,
) -> tuple[PlacementPlan, str]:
    """The plan with nothing predicted but its memory and its step, and what that is told by.

    Args:
        stage, given, plan, seed, times: As of `price_local`.
    """
    bare = replace(given, prediction=Prediction(memory=given.prediction.memory))
    if times is None:
        times = assumed_for(stage, plan)
        model = model_of_stage(stage.with_plan(bare), times)
        found = estimate_model(model, workloads_of(stage, times, plan, seed))
        return with_estimate(bare, found), f", estimated by times {times.source}"
    workloads = workloads_of(stage, times, plan, seed)
    step_s = simulated_step_s(stage.with_plan(bare), times, workloads, seed)
    made = replace(bare, prediction=replace(bare.prediction, step_s=step_s))
    return made, f"{of_all_groups(stage)}, by {times.source}"


def _decides_otherwise(given: PlacementPlan, own: PlacementPlan) -> bool:
    """Whether a plan differs in anything but what follows, and the devices as they were found."""
    return any(
        key.partition(".")[0] not in ("prediction", "pool") for key, _, _ in differences(given, own)
    )


def _others(own: PlacementPlan, choice: LocalChoice, step_s: float) -> Iterator[Alternative]:
    """The planner's own plan and the alternatives to it, beside a file's."""
    mine = local_choice(own)
    if mine is not None:
        same = ", as the configuration has it" if mine == choice else ""
        yield Alternative(
            summary=f"{mine}{same}",
            step_s=own.prediction.step_s,
            why_not=_than_decided(own.prediction.step_s, step_s),
            kind=own.kind,
        )
    for one in own.alternatives:
        if (one.kind, one.summary) != (choice.kind, str(choice)):
            yield replace(one, why_not=_than_decided(one.step_s, step_s))


def _than_decided(other_s: float | None, step_s: float) -> str:
    if other_s is None:
        return "not what the file decides"
    words = _beside(other_s, step_s)
    return f"{words} {'as' if words == _AS_FAST else 'than'} what the file decides"


def _beside(other_s: float, step_s: float) -> str:
    more = other_s / step_s - 1 if step_s else 0.0
    if abs(more) < 0.005:
        return _AS_FAST
    return f"{percent(abs(more))} {'longer' if more > 0 else 'shorter'}"


def _as_placed(reasons: Iterable[Reason], plan: PlacementPlan) -> Iterator[Reason]:
    """Reasons of placements; those that are not of the file's decisions give way to these."""
    placements = {one.role: one for one in plan.placements}
    for reason in reasons:
        decided = _decided(reason, placements)
        if decided in (None, reason.choice):
            yield reason
        else:
            yield Reason(subject=reason.subject, choice=decided or "", why=_DECIDES)


def _decided(reason: Reason, placements: Mapping[str, Placement]) -> str | None:
    """What placements have of a reason's subject; None where it is of something else."""
    role, _, field = reason.subject.rpartition(".")
    if role in placements:
        known = {"dtype": placements[role].dtype, "num_slots": str(placements[role].num_slots)}
        return known.get(field)
    named = [placements[name] for name in reason.subject.split(", ") if name in placements]
    if not named:
        return None
    if all(one.head == "none" for one in named):
        one = named[0]
        count = f"{one.replicas} process{'es' * (one.replicas > 1)}"
        return f"{count} of its own" if one.process == one.role else None
    return ", ".join(dict.fromkeys(device for one in named for device in one.devices))
