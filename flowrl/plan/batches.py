"""Batches that replicas share evenly: sizes of a step near the one that is asked for.

A trainer's replicas get equal numbers of the samples of an update, those of a forward pass of the
samples of a step. On 24 devices a 7B model may have 3, 6, 12 or 24 replicas, none of which divides
the 1,024 samples of a quarter of 512 prompts with 8 samples each: no layout takes all of them, and
504 or 516 prompts allow one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.plan.request import PlanRequest
from flowrl.plan.ways.layouts import uneven_replicas
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.task_rules import layout_rules
from flowrl.plan.ways.tasks import TaskWork

FARTHEST = 2
"""Times as many prompts of a step, or mini-batches, or as few: other batches are another job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many prompts a step has, and optimizer updates."""

    prompts: int
    mini_batches: int

    def asked(self, request: PlanRequest) -> PlanRequest:
        """The request with this batch."""
        return replace(request, prompts_per_step=self.prompts, mini_batches=self.mini_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """A task that is on fewer devices than there are, because no replicas on all of them share its
    samples evenly.

    Attributes:
        devices: All that there are.
        replicas: Numbers of them that there might be on so many.
    """

    task: TaskWork
    devices: int
    replicas: tuple[int, ...]

    @property
    def rows(self) -> str:
        """`1,024 samples of an update`."""
        task = self.task
        if task.updates:
            return f"{task.even_rows:,} samples of an update"
        return f"{task.samples:,} samples of a step"


def uneven_tasks(
    tasks: Sequence[TaskWork],
    used: Mapping[str, int],
    group: DeviceGroup,
    request: PlanRequest,
    filters: Mapping[str, Filter],
) -> tuple[Uneven, ...]:
    """The tasks of a plan that are so.

    Args:
        tasks: Those that are on devices of the group.
        used: Devices of each, by name.
        filters: What pins leave; of a task whose devices are pinned nothing is said.
    """
    devices, found = len(group.addresses), []
    for task in tasks:
        only = filters.get(task.id, Filter())
        free = task.region is None and only.devices is None and not task.generates
        if free and used[task.id] < devices:
            rules = layout_rules(task, request, group.node_size)
            replicas = uneven_replicas(task.shape, devices, rules, only.takes)
            if replicas:
                found.append(Uneven(task=task, devices=devices, replicas=replicas))
    return tuple(found)


def batches_near(
    replicas: Sequence[tuple[TaskWork, Collection[int]]], request: PlanRequest
) -> tuple[Batch, ...]:
    """The nearest batches that some numbers of replicas share evenly: fewer prompts and more, and
    fewer and more mini-batches of as many prompts, where these do.

    Args:
        replicas: Of each task, one of which must divide its samples.
    """
    prompts, parts = request.prompts_per_step, request.mini_batches

    def fits(batch: Batch) -> bool:
        return all(
            any(_rows(task, batch, prompts) % one == 0 for one in some) for task, some in replicas
        )

    fewer = range((prompts - 1) // parts * parts, math.ceil(prompts / FARTHEST) - 1, -parts)
    more = range((prompts // parts + 1) * parts, FARTHEST * prompts + 1, parts)
    divisors = [one for one in range(1, FARTHEST * parts + 1) if prompts % one == 0]
    ranges: list[Iterator[Batch]] = [
        (Batch(prompts=one, mini_batches=parts) for one in fewer),
        (Batch(prompts=one, mini_batches=parts) for one in more),
        (Batch(prompts=prompts, mini_batches=one) for one in reversed(divisors) if one < parts),
        (Batch(prompts=prompts, mini_batches=one) for one in divisors if one > parts),
    ]
    found = (next(filter(fits, some), None) for some in ranges)
    return tuple(one for one in found if one is not None)


def _rows(task: TaskWork, batch: Batch, prompts: int) -> int:
    """Samples that replicas share evenly, of another batch.

    Args:
        prompts: That the task has now.
    """
    if not task.updates:
        return task.samples // prompts * batch.prompts
    return math.gcd(
        *(
            one.samples // prompts * batch.prompts // batch.mini_batches
            for one in task.updated
            if one.rows
        )
    )


def batch_sizes(batches: Sequence[Batch], request: PlanRequest) -> tuple[str, str]:
    """What batches have otherwise than the request: prompts of a step, and mini-batches.

    Returns:
        `504 or 516` of each; empty where all have what the request has.
    """
    prompts = [one.prompts for one in batches if one.prompts != request.prompts_per_step]
    parts = [one.mini_batches for one in batches if one.mini_batches != request.mini_batches]
    return " or ".join(map(str, prompts)), " or ".join(map(str, parts))


def batch_keys(batches: Sequence[Batch], request: PlanRequest) -> Iterator[str]:
    """`train.prompts_per_step to 504 or 516`, and likewise mini-batches."""
    names = ("prompts_per_step", "mini_batches")
    for name, numbers in zip(names, batch_sizes(batches, request), strict=True):
        if numbers:
            yield f"{request.train_key}.{name} to {numbers}"
