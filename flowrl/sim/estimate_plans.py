"""Ranks the plans for this machine where nothing was measured: in closed form, by assumed times.

    a step    drawing + loading new weights + everything on whole batches, in turns
              the longer of the two halves, where samples are drawn ahead

Drawing is that of `flowrl.cost.rollout_time`, shared by the engines; a sample that another process
draws is sent for `WIRE_S`. Environments and engines wait for each other, turn by turn.

The times are round numbers for a kind of device, so they rank plans and say little about seconds.
Therefore the plain plan of what is asked for (`default_choice`: with `max_staleness` one that draws
ahead) is taken where it fits, whatever is estimated: what a run computes, to the last bit, is not
to hang on guesses. The others are told beside it, as estimated. `flowrl profile`
measures, and `flowrl.sim.choose_plan` then simulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.compiler import CompiledStage
from flowrl.config.schema import EnvironmentTimesConfig, PlanConfig
from flowrl.cost.lengths import ConstantLengths, EmpiricalLengths
from flowrl.cost.rollout_time import rollout_estimate
from flowrl.cost.source import Estimate
from flowrl.graph import Node, Op
from flowrl.plan.local import ASYNCHRONOUS, LocalChoice, LocalRequest, asked_ahead, default_choice
from flowrl.plan.prediction import CostSource
from flowrl.plan.schema import Alternative, PlacementPlan, Reason, Rejection
from flowrl.sim.choose_plan import choices_that_fit, workloads_of
from flowrl.sim.costs import BatchWork, batch_work
from flowrl.sim.episodes import EnvironmentTimes
from flowrl.sim.model import OpModel, RolloutModel, SimModel
from flowrl.sim.of_plan import model_of_stage
from flowrl.sim.report import seconds_text
from flowrl.sim.times import StageTimes, assumed_times
from flowrl.sim.workload import GroupDraw, Workload
from flowrl.wording import percent

WIRE_S = 25e-6
"""Of the driver, for a sample that comes from another process. Measured steps of 512 samples took
11 to 13 ms longer with one engine process than in place (benchmarks/results/plans_measured.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """What a step of a plan is estimated to take.

    Attributes:
        step_s: All of it.
        draw_s: Of each rollout, by name: drawing, environments and messages.
        ops_s: Of each operation on whole batches, by name.
        load_s: Of engines that take over new weights.
    """

    step_s: float
    draw_s: Mapping[str, float]
    ops_s: Mapping[str, float]
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A choice with its plan and its estimate."""

    choice: LocalChoice
    plan: PlacementPlan
    found: Estimated


def estimated_plan(
    stage: CompiledStage, plan: PlanConfig, seed: int, times: StageTimes | None = None
) -> CompiledStage:
    """The stage by the plain plan, or where that does not fit by the best; all are told.

    Args:
        plan: Says what lengths to expect.
        times: By default those that are assumed of its devices.

    Raises:
        FlowError: a stage of whose times nothing can be assumed, or lengths that cannot be read.
    """
    if stage.local is None or len(stage.local.choices()) < 2:
        return stage
    times = assumed_for(stage, plan, times)
    workloads = workloads_of(stage, times, plan, seed)
    ways: list[_Way] = []
    fitting, too_large = choices_that_fit(stage)
    for choice, made in fitting:
        model = model_of_stage(replace(stage, plan=made), times)
        ways.append(_Way(choice=choice, plan=made, found=estimate_model(model, workloads)))
    if not ways:
        return stage
    plain = default_choice(stage.local.request)
    best = min(ways, key=lambda way: way.found.step_s)
    chosen = next((way for way in ways if way.choice == plain), best)
    return stage.with_plan(_told(stage, chosen, ways, too_large, times))


def assumed_for(
    stage: CompiledStage, plan: PlanConfig, times: StageTimes | None = None
) -> StageTimes:
    """Times that are assumed of a stage's devices, with environments as `plan` has them.

    Args:
        times: Take the place of those that are assumed.

    Raises:
        FlowError: nothing can be assumed of a stage's times.
    """
    times = assumed_times(stage) if times is None else times
    given = {
        str(node.role): _mean_call(plan.environments[node.role], node)
        for node in stage.graph.of_op(Op.INTERACT)
        if node.role in plan.environments
    }
    return replace(times, environments={**times.environments, **given})


def with_estimate(plan: PlacementPlan, found: Estimated) -> PlacementPlan:
    """The plan with what a step of it is estimated to take."""
    seconds = {**found.draw_s, **found.ops_s}
    return replace(
        plan,
        prediction=replace(
            plan.prediction,
            step_s=found.step_s,
            confidence=tuple(
                CostSource(node=name, seconds=value, source="assumed")
                for name, value in seconds.items()
                if value
            ),
        ),
    )


def _mean_call(given: EnvironmentTimesConfig, node: Node) -> EnvironmentTimes:
    """A reset and as many steps as an episode may have turns, each as long as their mean."""
    turns = node.attr("max_turns")
    assert isinstance(turns, int)
    reset_s = given.step_s if given.reset_s is None else given.reset_s
    return EnvironmentTimes(
        call_s=(turns * given.step_s + reset_s) / (turns + 1), wait_s=given.wait_s
    )


def _told(
    stage: CompiledStage,
    chosen: _Way,
    ways: Sequence[_Way],
    too_large: Sequence[Rejection],
    times: StageTimes,
) -> PlacementPlan:
    assert stage.local is not None
    # sorted is stable: of equal ones the fewest moving parts come first.
    others = sorted(
        (way for way in ways if way is not chosen), key=lambda way: round(way.found.step_s, 9)
    )
    reason = Reason(
        subject=", ".join(f"{role}.generate" for role in stage.local.request.roles),
        choice=f"{chosen.choice.kind}: {chosen.choice}",
        why=f"{_why(stage.local.request, chosen, others, times)}; "
        "`flowrl profile` measures what they take",
        rejected=(
            *(
                Rejection(
                    choice=f"{way.choice.kind}: {way.choice}", constraint=_why_not(way, chosen)
                )
                for way in others
            ),
            *too_large,
        ),
    )
    made = stage.local.plan(stage.graph, chosen.choice, (reason,))
    return replace(
        with_estimate(made, chosen.found),
        alternatives=tuple(
            Alternative(
                summary=str(way.choice),
                step_s=way.found.step_s,
                why_not=_why_not(way, chosen),
                kind=way.choice.kind,
            )
            for way in others
        ),
    )


def _why(request: LocalRequest, chosen: _Way, others: Sequence[_Way], times: StageTimes) -> str:
    step = f"{seconds_text(chosen.found.step_s)} a step, estimated by times {times.source}"
    asked = asked_ahead(request, chosen.choice)
    if asked is not None:
        return f"{step}; {asked}, this is the plainest way to, and nothing is measured"
    if all(way.found.step_s >= chosen.found.step_s for way in others):
        return step
    return f"{step}; it is the plainest, and nothing that was measured speaks for another"


def _why_not(way: _Way, chosen: _Way) -> str:
    mine, best = way.found.step_s, chosen.found.step_s
    if mine < best:
        return f"estimated {best / mine:.2f} times as fast, but nothing is measured"
    if round(mine, 9) == round(best, 9):
        asked = chosen.choice.kind == ASYNCHRONOUS != way.choice.kind
        return f"estimated as fast, {'and not ahead' if asked else 'with more moving parts'}"
    return f"estimated {percent(mine / best - 1)} longer" if best else "estimated slower"


def estimate_model(model: SimModel, workloads: Mapping[str, Workload]) -> Estimated:
    """What a step of a simulated stage takes, in closed form; see the module."""
    drawn = {rollout.name: _drawn(rollout, workloads[rollout.name]) for rollout in model.rollouts}
    work = {
        rollout.name: batch_work(
            drawn[rollout.name],
            (lambda drawn: 0) if rollout.environment is None else rollout.environment.shape.said,
        )
        for rollout in model.rollouts
    }
    draw_s = {
        rollout.name: _draw_s(rollout, model, drawn[rollout.name]) for rollout in model.rollouts
    }
    published = {role for op in model.ops for role in op.publishes}
    load_s = sum(
        max(engine.load_s for engine in model.engines if engine.role == role)
        for role in published & {engine.role for engine in model.engines}
    )
    ops_s = {op.name: _op_s(op, work) for op in model.ops}
    rows = sum(one.rows for one in work.values())
    host_s = model.host.step_s + model.host.row_s * rows
    first = sum(draw_s.values()) + load_s + model.host.sample_s * rows
    second = sum(ops_s.values()) + host_s
    step_s = max(first, second) if model.ahead else first + second
    return Estimated(step_s=step_s, draw_s=draw_s, ops_s=ops_s, load_s=load_s)


def _drawn(rollout: RolloutModel, workload: Workload) -> list[GroupDraw]:
    size = rollout.settings.group_size
    return [workload.group(number, size) for number in range(rollout.groups)]


def _draw_s(rollout: RolloutModel, model: SimModel, groups: Sequence[GroupDraw]) -> float:
    """Seconds of drawing; of policies that take turns, what they draw one after the other."""
    values = [float(length) for group in groups for length in group.lengths]
    turns = Counter(rollout.turns or (rollout.role,))
    drawn_s = sum(
        _pool_s(rollout, model, groups, pool, number / turns.total())
        for pool, number in turns.items()
    )
    return drawn_s + _played_s(rollout, values)


def _pool_s(
    rollout: RolloutModel, model: SimModel, groups: Sequence[GroupDraw], pool: str, share: float
) -> float:
    """Seconds in which the engines of a pool draw their share of a rollout's tokens."""
    engines = [engine for engine in model.engines if engine.role == pool]
    values = [share * length for group in groups for length in group.lengths]
    one, longest = engines[0], max(values)
    prompt = sum(group.prompt_tokens for group in groups) / len(groups)
    step = one.times
    alike = longest == min(values)
    found = rollout_estimate(
        lambda rows, context: Estimate(seconds=step.decode_s(rows, context, context)),
        lambda rows, tokens: Estimate(seconds=step.prefill_s(rows, rows * tokens)),
        replicas=len(engines),
        samples=len(values),
        group_size=rollout.settings.group_size,
        prompt_tokens=prompt,
        lengths=ConstantLengths(tokens=longest)
        if alike
        else EmpiricalLengths(values=tuple(values)),
        slots=one.num_slots,
        kv_tokens=one.kv_tokens or int(2 * one.num_slots * (prompt + longest + 1)),
    )
    apart = one.lane not in (model.driver, model.trainer)
    return found.seconds + WIRE_S * len(values) * apart


def _played_s(rollout: RolloutModel, drawn: Sequence[float]) -> float:
    """Seconds in which the engine waits for its environment: a reset, and a step behind each turn.

    All calls are one thread's; what they wait for beside is waited for once a turn.
    """
    if rollout.environment is None:
        return 0.0
    times, shape = rollout.environment.times, rollout.environment.shape
    turns = [len(shape.turns(int(tokens))) for tokens in drawn]
    calls = sum(turns) + len(turns)
    return calls * times.call_s + (max(turns) + 1) * times.wait_s


def _op_s(op: OpModel, work: Mapping[str, BatchWork]) -> float:
    if op.rollout is not None:
        mine = work[op.rollout]
    else:
        tokens = op.rows * op.tokens_per_row
        mine = BatchWork(rows=op.rows, tokens=tokens, distinct=tokens)
    mine = mine.scaled(op.share, calls=op.calls, micro_batch=op.micro_batch)
    return (op.fixed_s + op.cost(mine)) / op.every
