"""Times of a stage by the plan that it has: what the planner predicted of a plan over many devices.

Decode steps are the cost source's, one by one, so that the simulated rollout waits for its longest
responses and its slots; work on whole batches takes the seconds that the plan says of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.compiler import CompiledStage
from flowrl.compiler.planning import ASSUMED_SHARE, ASSUMED_SIGMA
from flowrl.config.plan import PlanConfig
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph import Op
from flowrl.plan.schema import Operation, PlacementPlan
from flowrl.sim.cost_steps import AnalyticStep
from flowrl.sim.costs import LinearCost
from flowrl.sim.times import EngineTimes, StageTimes
from flowrl.sim.workload import PromptLengths

__all__ = ["planned_lengths", "planned_times"]


def planned_times(stage: CompiledStage, plan: PlanConfig, cost: Cost | None = None) -> StageTimes:
    """See the module.

    Args:
        plan: Says how long prompts are.
        cost: Of decode steps; by default estimates.

    Raises:
        PlanError: the plan predicts nothing, or is of a device that no catalogue has.
    """
    source = AnalyticCost() if cost is None else cost
    engines: dict[str, EngineTimes] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    for operation in stage.plan.operations:
        if operation.role is None:
            continue
        if operation.op == Op.GENERATE:
            engines[operation.role] = _engine(stage, operation, source)
        elif operation.seconds is not None:
            calls = stage.plan.sizes.mini_batches if operation.op == Op.UPDATE else 1
            key = (operation.role, operation.op)
            seconds.setdefault(key, []).append(operation.seconds / calls)
    for route in stage.plan.weight_routes:
        if route.seconds is not None:
            operation = stage.plan.operation(route.after)
            if operation.op == Op.SYNC and operation.role is not None:
                seconds.setdefault((operation.role, operation.op), []).append(route.seconds)
    prompt = plan.mean_prompt_tokens or ASSUMED_SHARE * stage.plan.sizes.max_prompt_tokens
    return StageTimes(
        source="those that the plan predicts",
        engines=engines,
        ops={key: LinearCost(call_s=sum(some) / len(some)) for key, some in seconds.items()},
        prompts=PromptLengths(values=(max(1, round(prompt)),)),
    )


def _engine(stage: CompiledStage, operation: Operation, cost: Cost) -> EngineTimes:
    role = operation.role or ""
    known = stage.context.costs.get(role)
    if known is None or operation.seconds is None:
        raise PlanError(
            "the plan predicts no times", where=f"plan of {stage.name!r}", found=operation.node
        )
    return EngineTimes(
        step=AnalyticStep(
            cost, known.shape, replace(operation.layout, dp=1), _machine(stage.plan, operation)
        ),
        kv_tokens=operation.kv_tokens or None,
    )


def _machine(plan: PlacementPlan, operation: Operation) -> Machine:
    device = plan.pool.device(operation.devices[0])
    alike = Counter(d.node for d in plan.pool.devices if d.name == device.name)
    return Machine(
        spec=device_spec(device.name, where="cluster"), node_size=max(1, alike[device.node])
    )


def planned_lengths(plan: PlanConfig, longest: int) -> str:
    """The lengths that a plan was made for, as `--lengths` names them."""
    if plan.lengths is not None:
        return str(plan.lengths)
    mean = plan.mean_response_tokens or max(1.0, ASSUMED_SHARE * longest)
    sigma = ASSUMED_SIGMA if plan.sigma is None else plan.sigma
    return f"lognormal:mean={mean:g},sigma={sigma:g}" if sigma else f"constant:{mean:.0f}"
