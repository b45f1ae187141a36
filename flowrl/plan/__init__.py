"""How a graph runs on a pool of devices."""

from __future__ import annotations

from flowrl.plan.make import make_plan
from flowrl.plan.place import place
from flowrl.plan.plan_file import load_plan, save_plan
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import PlacementPlan, Reason, Rejection, check_plan
from flowrl.plan.workload import workload

__all__ = [
    "PlacementPlan",
    "PlanRequest",
    "Reason",
    "Rejection",
    "RoleRequest",
    "check_plan",
    "load_plan",
    "make_plan",
    "place",
    "save_plan",
    "workload",
]
