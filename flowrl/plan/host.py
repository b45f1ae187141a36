"""What runs beside the models, on the CPU of a host: scorers and environments."""

from __future__ import annotations

from flowrl.cluster.pool import ResourcePool
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph, Op
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import (
    DeviceSummary,
    Placement,
    PlanSizes,
    PoolSummary,
    Reason,
)

MAIN_PROCESS = "main"


def place_hosted(
    roles: list[RoleRequest], graph: Graph, pool: ResourcePool
) -> tuple[list[Placement], list[Reason]]:
    """Where roles without a model of flowrl's run, and why.

    Raises:
        PlanError: the pool has no CPU.
    """
    placements: list[Placement] = []
    reasons: list[Reason] = []
    host = _host_address(pool)
    for role in roles:
        plays = any(node.role == role.name for node in graph.of_op(Op.INTERACT))
        placements.append(_place_environment(role, host) if plays else _place_scorer(role, host))
        reasons.append(_environment_reason(role) if plays else _scorer_reason(role))
    return placements, reasons


def _place_scorer(role: RoleRequest, host: str) -> Placement:
    return Placement(
        role=role.name,
        backend=role.backend,
        devices=(host,),
        process=role.name,
        dtype="none",
        replicas=role.num_workers,
        head="none",
    )


def _place_environment(role: RoleRequest, host: str) -> Placement:
    return Placement(
        role=role.name,
        backend=role.backend,
        devices=(host,),
        process=MAIN_PROCESS,
        dtype="none",
        head="none",
    )


def _host_address(pool: ResourcePool) -> str:
    for address, _, device in pool:
        if device.type == "cpu":
            return address
    raise PlanError(
        "the pool has no CPU to run scorers on",
        where="cluster",
        found=", ".join(sorted(pool.types)) or "no device",
        expected="a CPU that is not reserved",
        hint="give a node cores and memory_gib in the cluster file; every node then has a CPU",
    )


def _scorer_reason(role: RoleRequest) -> Reason:
    count = f"{role.num_workers} process" + ("es" if role.num_workers > 1 else "")
    return Reason(
        subject=role.name,
        choice=f"{count} of its own",
        why="a reward that hangs or crashes cannot stop the models",
    )


def _environment_reason(role: RoleRequest) -> Reason:
    return Reason(
        subject=role.name,
        choice="the main process, on the CPU",
        why="its episodes wait for the policy most of the time, and it holds no device memory",
    )


def pool_summary(pool: ResourcePool) -> PoolSummary:
    """The pool as the plan keeps it."""
    return PoolSummary(
        devices=tuple(
            DeviceSummary(
                address=address,
                node=node.name,
                type=device.type,
                name=device.name,
                memory_bytes=device.memory_bytes,
                budget_bytes=device.budget_bytes,
                num_cores=device.num_cores,
            )
            for address, node, device in pool
        ),
        warnings=pool.warnings,
    )


def plan_sizes(request: PlanRequest) -> PlanSizes:
    """The sizes as the plan keeps them."""
    return PlanSizes(
        prompts_per_step=request.prompts_per_step,
        group_size=request.group_size,
        mini_batches=request.mini_batches,
        micro_batch=request.micro_batch,
        max_prompt_tokens=request.max_prompt_tokens,
        max_response_tokens=request.max_response_tokens,
        max_length=request.max_length,
    )
