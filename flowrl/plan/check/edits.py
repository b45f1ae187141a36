"""Whether what a hand may write into a plan means something: words, pins, and facts of the pool."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flowrl.errors import PlanError
from flowrl.graph.ir import Op
from flowrl.plan.check.numbers import UNDO

if TYPE_CHECKING:
    from flowrl.plan.many_form import PinnedDecision
    from flowrl.plan.schema import Operation, PlacementPlan


_RECOMPUTE = ("none", "selective", "full")
_OFFLOAD = ("optimizer", "all")
_SHARD = ("none", "optimizer", "full")


_PINNED = (
    *("tp", "pp", "dp", "cp", "ep"),
    *("devices", "environment", "micro_tokens", "offload", "recompute"),
)
"""As `flowrl.plan.pins` reads them."""


def check_edits(plan: PlacementPlan, where: str) -> None:
    """Raises PlanError for the first that does not; names the key."""
    for i, pin in enumerate(plan.pins):
        _check_pin(plan, pin, f"{where}: pins.{i}")
    if plan.schedule is None:
        return
    _check_words(plan, where)
    _check_alike(plan, where)


def _check_pin(plan: PlacementPlan, pin: PinnedDecision, where: str) -> None:
    """A pin decides something that can be pinned, of operations that its subject means."""
    if pin.field not in _PINNED:
        raise PlanError(
            "nothing of this name can be pinned",
            where=f"{where}.field",
            found=repr(pin.field),
            expected=f"one of {', '.join(_PINNED)}",
            hint="write one of them, or take the pin out",
        )
    meant = [one.node for one in plan.operations if _means(pin.subject, one, plan)]
    strange = [node for node in pin.nodes if node not in meant]
    if strange or not pin.nodes:
        raise PlanError(
            f"a pin of {pin.subject} says another operation than that means",
            where=f"{where}.nodes",
            found=", ".join(pin.nodes) or "none",
            expected=f"some of {', '.join(meant)}" if meant else f"no pin of {pin.subject}",
            hint="write what the subject means, or take the pin out",
        )


def _means(subject: str, operation: Operation, plan: PlacementPlan) -> bool:
    """Whether a pin of this subject may be about an operation, the region that it is in, or the
    trainer whose updates are one."""
    near = [
        one
        for one in plan.operations
        if one is operation
        or (one.region is not None and one.region == operation.region)
        or (one.op == operation.op == Op.UPDATE and one.role == operation.role)
    ]
    return any(
        subject in (one.node, one.op, one.node.rpartition(".")[2], one.role)
        or (subject == "rollout" and one.op in (Op.GENERATE, Op.INTERACT))
        for one in near
    )


def _check_alike(plan: PlacementPlan, where: str) -> None:
    """Devices are of the kind and the node that their machine and their address say."""
    first: dict[int, int] = {}
    for i, one in enumerate(plan.pool.devices):
        node, slash, device = one.address.rpartition("/")
        only = node if slash else plan.pool.devices[0].node  # addresses of one node do not say it
        of = f"pool.devices.{i}.address" if slash else "pool.devices.0.node"
        facts: list[tuple[str, object, object, str]] = [
            ("node", one.node, only, of),
            ("type", one.type, device.partition(":")[0], f"pool.devices.{i}.address"),
        ]
        if one.machine is not None:
            spec = plan.pool.machines[one.machine].spec
            facts.append(("type", one.type, spec.type, f"pool.machines.{one.machine}.spec"))
            number = first.setdefault(one.machine, i)
            like = plan.pool.devices[number]
            facts += [
                (key, getattr(one, key), getattr(like, key), f"pool.devices.{number}")
                for key in ("name", "memory_bytes", "num_cores")
            ]
        for key, found, expected, of in facts:
            if found != expected:
                raise PlanError(
                    f"{one.address} is another device than its machine or address says",
                    where=f"{where}: pool.devices.{i}.{key}",
                    found=str(found),
                    expected=f"{expected} ({of})",
                    hint=UNDO,
                )
    used = Counter(one.machine for one in plan.pool.devices)
    for i in range(len(plan.pool.machines)):
        if not used[i]:
            raise PlanError(
                "no device is of this machine", where=f"{where}: pool.machines.{i}", hint=UNDO
            )


def _check_words(plan: PlacementPlan, where: str) -> None:
    """Values that mean something."""
    for i, operation in enumerate(plan.operations):
        for key, values, known in (
            ("recompute", (operation.recompute,), _RECOMPUTE),
            ("offload", operation.offload, _OFFLOAD),
            ("shard", (operation.shard,), _SHARD),
        ):
            strange = [value for value in values if value not in known]
            if strange:
                raise PlanError(
                    f"{operation.node} cannot have this",
                    where=f"{where}: operations.{i}.{key}",
                    found=repr(strange[0]),
                    expected=f"one of {', '.join(known)}",
                    hint="write one of them, or undo the edit",
                )
