"""How a graph runs on a pool of devices."""

from __future__ import annotations

from flowrl.plan.make import make_plan, workload
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import PlacementPlan, check_plan, load_plan, save_plan

__all__ = [
    "PlacementPlan",
    "PlanRequest",
    "RoleRequest",
    "check_plan",
    "load_plan",
    "make_plan",
    "save_plan",
    "workload",
]
