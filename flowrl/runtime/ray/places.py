"""Where the workers of a run are in its Ray cluster.

An engine has a place: CPUs and accelerators of one node that Ray reserves for it. Places are taken
before anything is opened, node by node: nodes without this process come first, because trainers
compute here, and a node is filled before the next. A place whose node is gone is replaced by one
on any other node. Scorers and environments reserve nothing: each goes to the node that has most
CPUs left when it starts.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from flowrl.errors import BackendError
from flowrl.wording import counted

Resources = Mapping[str, float]
"""Numbers by Ray's names: `CPU`, `GPU`, `NPU`."""

_log = logging.getLogger(__name__)

_RETRY_S = 0.1
_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Resources of a node that are reserved for one worker.

    Attributes:
        node: Ray's id of the node.
        resources: The worker's resources.
    """

    node: str
    resources: Resources
    group: PlacementGroup

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Starts an actor there."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)


class Places:
    """The places of a run; see the module. Ray must be initialised.

    Args:
        timeout_s: Seconds in which resources are reserved; those of a worker that has just ended
            come back late.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._here = ray.get_runtime_context().get_node_id()
        self._held: dict[str, Place] = {}
        self._lost: set[str] = set()

    def reserve(
        self, names: Sequence[str], each: Resources, *, patience_s: float | None = None
    ) -> None:
        """Reserves a place for each worker that has none yet.

        Args:
            names: Names of the workers.
            each: Resources of each of them, all on one node.
            patience_s: In place of `timeout_s`.

        Raises:
            BackendError: the cluster does not have them, or they are not free.
        """
        names = [name for name in names if name not in self._held]
        end = time.monotonic() + (self._timeout_s if patience_s is None else patience_s)
        # Nodes that could never hold them are refused at once, busy ones after a while.
        while names and assigned(self._totals(), each, len(names), last=self._here) is not None:
            made = self._made(names, each)
            if made is not None:
                self._held |= made
                return
            if time.monotonic() > end:
                break
            time.sleep(_RETRY_S)
        if names:
            raise self._refusal(names, each)

    def place(self, name: str) -> Place:
        """Returns the place of a worker, a new one if its node is gone.

        Raises:
            BackendError: no other node has room for it.
        """
        place = self._held[name]
        node = next((node for node in self._nodes() if node["NodeID"] == place.node), None)
        if node is not None and _answers(node):
            return place
        _log.warning("the node of %s is gone; another one is looked for", name)
        self._lost.add(place.node)
        self.give_back(name)
        self.reserve([name], place.resources)
        return self._held[name]

    def roomiest(self) -> NodeAffinitySchedulingStrategy | str:
        """Returns how to start an actor on the node with most CPUs left."""
        free = self._free()
        nodes = sorted(free, key=lambda node: (-free[node].get("CPU", 0.0), node == self._here))
        alive = {node["NodeID"]: node for node in self._nodes()}
        for node in nodes:
            if node not in alive:
                continue
            if _answers(alive[node]):
                # Where nothing is reserved, Ray heeds no soft affinity.
                return NodeAffinitySchedulingStrategy(node, soft=False)
            self._lost.add(node)
        return "DEFAULT"

    def give_back(self, name: str) -> None:
        """Gives the place of a worker back, if it has one."""
        place = self._held.pop(name, None)
        if place is not None:
            remove_placement_group(place.group)

    def release(self) -> None:
        """Gives all places back; idempotent."""
        for name in list(self._held):
            self.give_back(name)

    # Inside

    def _nodes(self) -> list[Mapping[str, object]]:
        return [
            node
            for node in ray.nodes()
            if node["Alive"] and (node["NodeID"] not in self._lost or _answers(node))
        ]

    def _totals(self) -> dict[str, Resources]:
        return {str(node["NodeID"]): node["Resources"] for node in self._nodes()}  # type: ignore[misc]

    def _free(self) -> dict[str, Resources]:
        totals, listed = self._totals(), available_resources_per_node()

        def free(node: str, kind: str) -> float:
            # The listing is late by what was reserved just now.
            own = [place.resources.get(kind, 0) for place in self._of(node)]
            return min(float(listed[node].get(kind, 0)), totals[node].get(kind, 0) - sum(own))

        return {
            node: {kind: free(node, kind) for kind in totals[node]}
            for node in totals
            if node in listed
        }

    def _of(self, node: str) -> list[Place]:
        return [place for place in self._held.values() if place.node == node]

    def _made(self, names: Sequence[str], each: Resources) -> dict[str, Place] | None:
        nodes = assigned(self._free(), each, len(names), last=self._here)
        if nodes is None:
            return None
        made = {
            name: Place(
                node=node,
                resources=each,
                group=placement_group(
                    [dict(each)], bundle_label_selector=[{"ray.io/node-id": node}]
                ),
            )
            for name, node in zip(names, nodes, strict=True)
        }
        # Somebody else may have taken them in between.
        if all(place.group.wait(1.0) for place in made.values()):
            return made
        for place in made.values():
            remove_placement_group(place.group)
        return None

    def _refusal(self, names: Sequence[str], each: Resources) -> BackendError:
        totals, free = self._totals().values(), self._free().values()
        kinds = [
            f"{counted(int(sum(node.get(kind, 0) for node in totals)), kind)}, "
            f"{int(sum(node.get(kind, 0) for node in free))} free"
            for kind in each
        ]
        wanted = " and ".join(counted(int(number), kind) for kind, number in each.items())
        return BackendError(
            f"the Ray cluster has no place for {', '.join(names)}",
            where="executor=ray",
            found=f"{counted(len(totals), 'node')} with {'; '.join(kinds)}",
            expected=f"{counted(len(names), 'worker')} with {wanted} each, on one node",
            hint="ask for fewer engines (roles.ROLE.num_engines), or join a larger cluster: "
            "RAY_ADDRESS=HOST:PORT flowrl run CONFIG executor=ray",
        )


def assigned(
    free: Mapping[str, Resources], each: Resources, num: int, *, last: str
) -> list[str] | None:
    """Returns the node of each of `num` workers; None where they do not fit.

    Args:
        free: Resources by node.
        each: Resources of each worker.
        last: The node that is filled last.
    """

    def fitting(node: str) -> int:
        return min(int(free[node].get(kind, 0) // number) for kind, number in each.items())

    def nodes() -> Iterator[str]:
        # Names decide between equal nodes, so that a run is placed alike when it is repeated.
        for node in sorted(free, key=lambda node: (node == last, -fitting(node), node)):
            yield from [node] * fitting(node)

    found = [node for node, _ in zip(nodes(), range(num), strict=False)]
    return found if len(found) == num else None


def _answers(node: Mapping[str, object]) -> bool:
    """True if a node can be connected to, which shows earlier than Ray that it is gone."""
    address = (str(node["NodeManagerAddress"]), int(str(node["NodeManagerPort"])))
    try:
        with socket.create_connection(address, _CONNECT_S):
            return True
    except OSError:
        return False
