"""The parameter type of a role: what is asked for, or what the device computes in fastest."""

from __future__ import annotations

from flowrl.cluster.pool import Device
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph, Op
from flowrl.plan.request import PlanRequest, RoleRequest


def role_dtype(role: RoleRequest, request: PlanRequest, device: Device) -> str:
    """The parameter type of a role on a device.

    Raises:
        PlanError: a type that its backend has not.
    """
    if role.dtype == "auto" and role.copy_of is not None:
        return role_dtype(request.role(role.copy_of), request, device)
    dtypes = role.capabilities.dtypes
    if role.dtype == "auto":
        return "bfloat16" if device.bfloat16 and "bfloat16" in dtypes else "float32"
    if role.dtype not in dtypes:
        raise PlanError(
            f"backend {role.backend!r} has no parameters of type {role.dtype}",
            where=f"roles.{role.name}.dtype",
            found=role.dtype,
            expected=f"one of {', '.join(sorted(dtypes))}",
            hint=f"set roles.{role.name}.dtype to one of them, or to auto",
        )
    return role.dtype


def check_trained_types(graph: Graph, request: PlanRequest) -> None:
    """Roles that are updated have types in which their backends train.

    Raises:
        PlanError: one that is asked for is not among them.
    """
    for node in graph.of_op(Op.UPDATE):
        if node.role is None:
            continue
        role = asked = request.role(node.role)
        while asked.dtype == "auto" and asked.copy_of is not None:
            asked = request.role(asked.copy_of)
        can = role.capabilities
        if asked.dtype in can.untrained_dtypes:
            raise PlanError(
                f"backend {role.backend!r} does not train parameters of type {asked.dtype}, and "
                f"{node.id} trains {role.name}",
                where=f"roles.{asked.name}.dtype",
                found=asked.dtype,
                expected=f"one of {', '.join(sorted(can.dtypes - can.untrained_dtypes))}",
                hint=f"set roles.{role.name}.dtype to one of them, or to auto",
            )
