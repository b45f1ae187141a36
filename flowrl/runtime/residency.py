"""Carries out a plan's residency switches: who gives device memory back, and takes it, before what.

A plan has switches only where roles that share a device do not fit on it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowrl.errors import PlanError
from flowrl.ids import NodeId, RoleName
from flowrl.plan.schema import PlacementPlan
from flowrl.runtime.workers import PolicyWorker

__all__ = ["Residency"]


class Residency:
    """The switches of one stage's plan.

    Raises:
        PlanError: a switch that the workers do not know, or of a role that is not open.
    """

    def __init__(self, plan: PlacementPlan, policies: Mapping[RoleName, PolicyWorker]) -> None:
        self._before: dict[NodeId, list[Callable[[], None]]] = {}
        for switch in plan.residency:
            worker = policies.get(RoleName(switch.role))
            switches = {} if worker is None else _switches(worker)
            try:
                act = switches[switch.what, switch.action]
            except KeyError:
                raise PlanError(
                    f"cannot {switch.action} the {switch.what} of role {switch.role!r}",
                    where="plan: residency",
                    expected="kv cache, parameters or optimizer of an open role; release or take",
                ) from None
            self._before.setdefault(NodeId(switch.before), []).append(act)

    def switch(self, node: NodeId) -> None:
        """Makes the switches that belong before `node` runs; making them again changes nothing."""
        for act in self._before.get(node, ()):
            act()


def _switches(worker: PolicyWorker) -> dict[tuple[str, str], Callable[[], None]]:
    train = worker.train
    known: dict[tuple[str, str], Callable[[], None]] = {
        (what, action): act
        for what in ("parameters", "optimizer")  # a trainer moves both at once
        for action, act in (("release", train.offload), ("take", train.reload))
    }
    if worker.generate is not None:
        known["kv cache", "release"] = worker.generate.sleep
        known["kv cache", "take"] = worker.generate.wake
    return known
