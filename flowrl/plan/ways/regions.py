"""A task whose samples are episodes: where its environment is, and what both take together.

A region (`interact`) is one task of the search. Its ways (`flowrl.plan.ways.region_ways`) are
those in which its policy alone draws on some devices, each with the places of its environment:

- **together**: on the same devices. An environment of accelerators takes turns with the policy on
  them, and both are held there. One of CPUs is on the hosts of these devices: it has its part of
  their cores (of the only node all of them, where the other devices idle: `flowrl.plan.groups`),
  and works while the policy draws for other episodes.
- **apart**: on devices of its own, both at once. An environment of accelerators has some of the
  task's devices, `n = a + b`; or, where it takes another kind of them than its policy is on, those
  of that kind that the planner sets aside for it (`flowrl.plan.elsewhere`), and the task has `n`.
  One of CPUs needs no accelerator, so it is apart only on nodes that have none, of whose cores each
  region has an equal part.

Times are those of `flowrl.cost.episode_time`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.episodes import CallSeconds
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.options import EnvironmentRequest

Mode: TypeAlias = Literal["together", "apart"]

HOST_SHARE = 0.8
"""Of a host's memory, for what devices and environments put there; the rest is the programs' own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the two of a region are.

    Attributes:
        policy: Devices of the policy.
        own: Accelerators of the environment alone, of the kind that its policy is on.
        elsewhere: Those of another kind, which are none of the task's devices.
        kind: What these are.
        at_once: Calls that the environment serves at once.
        takes_turns: Both compute on the same devices.
        nbytes: Of the environment, on each of its accelerators.
        host: Likewise in the host's memory, for each device of the policy.
    """

    mode: Mode
    policy: int
    own: int = 0
    elsewhere: int = 0
    kind: str = ""
    at_once: float
    takes_turns: bool = False
    nbytes: int = 0
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A way's environment.

    Attributes:
        calls: What they take.
        policy_s: Work of the policy in a step.
        environment_s: Work of the environment.
        bound: What the time is: see `flowrl.cost.episode_time.PlayedEstimate`.
    """

    split: Split
    calls: CallSeconds
    policy_s: float
    environment_s: float
    bound: str

    def work(self) -> tuple[tuple[int, float], ...]:
        """Devices and the seconds that they work in a step, of the policy and the environment."""
        split = self.split
        both_s = self.policy_s + (self.environment_s if split.takes_turns else 0.0)
        return (split.policy, both_s), (split.own + split.elsewhere, self.environment_s)


def splits(
    group: DeviceGroup,
    num_devices: int,
    counts: Sequence[int],
    environment: EnvironmentRequest,
    *,
    outside: DeviceGroup | None = None,
    sharers: int = 1,
) -> Iterator[Split]:
    """The ways to share `num_devices` of a group, together first.

    Args:
        counts: Sizes that blocks may have.
        outside: Devices of another kind that are set aside for the environment.
        sharers: Regions that share nodes without accelerators.
    """
    concurrency, nbytes = environment.concurrency, environment.nbytes
    if group.device.type == "cpu":
        # The executor's own process holds both, and its environment is a thread of it.
        yield Split(mode="together", policy=num_devices, at_once=1.0, takes_turns=True)
        return
    if not environment.accelerated:
        per_node = concurrency or max(1, group.host_cores)
        yield Split(
            mode="together",
            policy=num_devices,
            at_once=max(1.0, per_node * num_devices / group.node_size),
            host=-(-nbytes // group.node_size),
        )
        if group.spare_cores and sharers * nbytes <= HOST_SHARE * group.spare_bytes:
            calls = concurrency * len(group.spare) if concurrency else group.spare_cores
            yield Split(mode="apart", policy=num_devices, at_once=calls / sharers)
        return
    each = concurrency or 1
    if environment.kind not in (None, group.kind):
        if outside is not None and nbytes <= room(outside):
            yield Split(
                mode="apart",
                policy=num_devices,
                elsewhere=len(outside.addresses),
                kind=outside.kind,
                at_once=float(each * len(outside.addresses)),
                nbytes=nbytes,
            )
        return
    yield Split(
        mode="together",
        policy=num_devices,
        at_once=float(each * num_devices),
        takes_turns=True,
        nbytes=nbytes,
    )
    for policy in policy_sizes(num_devices, counts):
        own = num_devices - policy
        yield Split(mode="apart", policy=policy, own=own, at_once=float(each * own), nbytes=nbytes)


def room(group: DeviceGroup) -> int:
    """Bytes of each device of a group that an environment may fill."""
    return group.budget_bytes - RUNTIME_BYTES[group.device.type]


def policy_sizes(num_devices: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Devices of a policy beside an environment's: a block, or what a block leaves."""
    sizes = {size for size in counts if size < num_devices}
    return tuple(sorted(sizes | {num_devices - size for size in sizes}))


def split_numbers(
    split: Split | None, numbers: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The devices of a block that the policy has, and those of the environment alone.

    The larger part comes first, so that whole nodes begin at a node.
    """
    if split is None or not split.own:
        return tuple(numbers), ()
    if split.policy >= split.own:
        return tuple(numbers[: split.policy]), tuple(numbers[split.policy :])
    return tuple(numbers[split.own :]), tuple(numbers[: split.own])
