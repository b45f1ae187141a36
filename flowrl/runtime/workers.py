"""The workers of a policy, and how workers are waited for.

A policy that trains and generates in one process has one copy of its weights: the engine reads the
trainer's parameters in place, so publishing a version moves no bytes.

`Residency` carries out the plan's residency switches: which role offloads, and which one reloads,
before a node runs. A plan has switches only where roles that share a device do not fit on it
together. `wait_for_any` waits for the first of several workers that has output.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.plugin import NO_OPTIONS, Plugin, not_offered
from flowrl.backend.protocols import (
    GenerateBackend,
    PolicyContext,
    ScoreContext,
    Service,
    Weights,
    WeightsKind,
)
from flowrl.backend.registry import find, require_usable
from flowrl.errors import BackendError, PlanError
from flowrl.ids import EngineId, NodeId, RoleName, engine_id
from flowrl.plan.schema import PlacementPlan
from flowrl.runtime.trainers import Trainer


def require(
    name: str, service: Service, context: PolicyContext | ScoreContext | EnvironmentContext
) -> Plugin:
    """Returns the plug-in `name`, usable on this machine and offering `service`.

    Args:
        context: What it is to open for.

    Raises:
        BackendError: it is not; the hint shows what to do.
    """
    plugin = find(name)
    if service not in plugin.capabilities.services:
        raise not_offered(plugin, service, f"roles.{context.role}.backend")
    of_engine = context.engine_options if isinstance(context, PolicyContext) else NO_OPTIONS
    require_usable(name, context.role, context.options, of_engine)
    return plugin


@dataclass(slots=True, kw_only=True)
class PolicyWorker:
    """The workers of a role with a model.

    Attributes:
        generate: The engine next to the trainer; None if the role never generates.
        stale: The weights were trained since they were last published.
        version: Version of the weights that the engine serves; counts publications.
    """

    role: RoleName
    context: PolicyContext
    train: Trainer
    generate: GenerateBackend | None
    stale: bool = False
    version: int = 0

    @property
    def engine_id(self) -> EngineId:
        """The engine's name for the scheduler and for logs."""
        return engine_id(self.role, 0)

    @property
    def engine(self) -> GenerateBackend:
        """The engine; the plan promises it for roles that generate."""
        if self.generate is None:
            raise BackendError(f"role {self.role!r} was opened without an engine")
        return self.generate

    def publish(self, version: int) -> None:
        """Serves the trainer's weights as `version`."""
        self.version, self.stale = version, False
        self.engine.load(Weights(version=version, kind=WeightsKind.IN_PLACE))

    def close(self) -> None:
        """Ends both workers."""
        if self.generate is not None:
            self.generate.close()
        self.train.close()


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

    def has_switches(self, node: NodeId) -> bool:
        """True if switches belong before `node` runs."""
        return node in self._before

    def switch(self, node: NodeId) -> None:
        """Makes the switches that belong before `node` runs; making them again changes nothing."""
        for act in self._before.get(node, ()):
            act()  # ends before the next one begins, which may need the memory


def _switches(worker: PolicyWorker) -> dict[tuple[str, str], Callable[[], None]]:
    train = worker.train
    known: dict[tuple[str, str], Callable[[], None]] = {
        (what, action): act
        for what in ("parameters", "optimizer")  # a trainer moves both at once
        for action, act in (
            ("release", lambda: train.offload().result()),
            ("take", lambda: train.reload().result()),
        )
    }
    if worker.generate is not None:
        known["kv cache", "release"] = worker.generate.sleep
        known["kv cache", "take"] = worker.generate.wake
    return known


@runtime_checkable
class Waitable(Protocol):
    """A worker in another process, whose `poll` returns at once."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do."""
        ...

    def seconds_to_limit(self) -> float:
        """Seconds after which `poll` must be called to enforce a time limit."""
        ...


def wait_for_any(workers: Iterable[Waitable], timeout_s: float, *extra: int) -> None:
    """Waits until a worker has output, or `timeout_s` is over.

    Args:
        extra: Further descriptors that end the wait when they are readable.
    """
    waited = list(workers)
    limits = [worker.seconds_to_limit() for worker in waited]
    # A little late rather than a little early, which would spin.
    timeout_s = max(0.0, min([timeout_s, *(limit + 0.001 for limit in limits)]))
    # poll, because select ends at descriptor 1023.
    poller = select.poll()
    for descriptor in (*(worker.fileno() for worker in waited), *extra):
        poller.register(descriptor, select.POLLIN)
    poller.poll(1000.0 * timeout_s)
