"""The memory proof: what a device holds in each phase, and what to change where it is too much.

Roles that share a device take turns. All of them keep what is resident (parameters, optimizer, KV
cache), and the one that works needs its working memory besides; so a phase is the sum of all
residents and one role's working memory. Where an engine can give its KV cache back (`sleep`) and
only that makes a phase fit, it does so outside of rollouts; its own weights go with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flowrl.cost.memory import (
    MemoryPart,
    Phase,
    PhaseMemory,
    Workload,
    format_bytes,
    resident_memory,
    working_memory,
)
from flowrl.cost.models import ModelShape
from flowrl.errors import PlanError

MIB = 1 << 20

RUNTIME_BYTES = {"cpu": 512 * MIB, "cuda": 768 * MIB, "npu": 1024 * MIB}
"""What the framework takes before the first tensor. On the CPU: its libraries (a process that has
imported torch and transformers measures 350 MB) and room for buffers. On an accelerator: the
context and loaded kernels; estimates, not measured here."""


class DoesNotFit(PlanError):
    """A device does not hold all that takes turns on it.

    Attributes:
        over: What is needed of a device's memory, as a multiple of what there is; infinite where
            nobody knows. Memory of hosts is easier to have.
    """

    over: float = math.inf

    def by(self, over: float) -> DoesNotFit:
        """The same error, with what is needed."""
        self.over = over
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A role on a device.

    Attributes:
        phases: What the role does there.
        can_sleep: Its engine can give the KV cache back.
        can_recompute: Its trainer can compute activations again, and was not asked to.
        ranks: Processes that train it together, each on a share of the batch.
    """

    role: str
    shape: ModelShape
    work: Workload
    phases: tuple[Phase, ...]
    can_sleep: bool = False
    can_recompute: bool = False
    ranks: int = 1

    def adjusted(self, micro_batch: int, num_slots: int) -> Tenant:
        """The same with smaller sizes; larger ones than it has are ignored."""
        work = replace(
            self.work,
            micro_batch=min(self.work.micro_batch, micro_batch),
            num_slots=min(self.work.num_slots, num_slots),
        )
        return replace(self, work=work)

    def recomputed(self) -> Tenant:
        """The same with all activations computed again, where that can be."""
        if not self.can_recompute:
            return self
        return replace(self, work=replace(self.work, recompute="full"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """What a device holds in each phase.

    Attributes:
        phases: `(working role, memory)`.
        sleeping: Roles that give their KV cache back outside of rollouts.
    """

    phases: tuple[tuple[str, PhaseMemory], ...]
    sleeping: tuple[str, ...] = ()

    @property
    def peak(self) -> PhaseMemory:
        """The phase that holds most."""
        return max((memory for _, memory in self.phases), key=lambda memory: memory.total)


def fit_device(
    tenants: tuple[Tenant, ...],
    *,
    address: str,
    device_type: str,
    name: str,
    budget: int,
    train_key: str = "train",
) -> DeviceFit:
    """The memory of a device in every phase, proven to be within `budget` bytes.

    Raises:
        PlanError: it is not; carries the numbers, and the largest sizes that fit.
    """
    fit = _best_fit(tenants, device_type, budget)
    if fit.peak.total <= budget:
        return fit
    role, memory = max(fit.phases, key=lambda entry: entry[1].total)
    raise DoesNotFit(
        f"{memory.phase} does not fit on {address} ({name}): needs {format_bytes(memory.total)} "
        f"of {format_bytes(budget)}: {memory.describe()}",
        where=f"roles.{role}",
        hint=_smallest_change(tenants, device_type, budget, train_key),
    )


def _best_fit(tenants: tuple[Tenant, ...], device_type: str, budget: int) -> DeviceFit:
    awake = _measure(tenants, device_type, sleeping=())
    sleepers = tuple(tenant.role for tenant in tenants if tenant.can_sleep)
    if awake.peak.total <= budget or not sleepers:
        return awake
    asleep = _measure(tenants, device_type, sleeping=sleepers)
    return asleep if asleep.peak.total < awake.peak.total else awake


def _measure(tenants: tuple[Tenant, ...], device_type: str, sleeping: tuple[str, ...]) -> DeviceFit:
    runtime = MemoryPart(role="", name="runtime", nbytes=RUNTIME_BYTES[device_type])
    phases = []
    for active in tenants:
        for phase in active.phases:
            parts = [runtime]
            for tenant in tenants:
                rolls_out = tenant is active and phase is Phase.ROLLOUT
                for part in resident_memory(tenant.role, tenant.shape, tenant.work):
                    away = part.name in ("kv cache", "engine weights") and tenant.role in sleeping
                    if not away or rolls_out:
                        parts.append(part)
            working = working_memory(active.role, active.shape, active.work, phase)
            parts += [*working, *_rank_processes(tenants, active, phase, runtime, working)]
            phases.append((active.role, PhaseMemory(phase=phase, parts=tuple(parts))))
    return DeviceFit(phases=tuple(phases), sleeping=sleeping)


def _rank_processes(
    tenants: tuple[Tenant, ...],
    active: Tenant,
    phase: Phase,
    runtime: MemoryPart,
    working: tuple[MemoryPart, ...],
) -> Iterator[MemoryPart]:
    """What trainers of several ranks hold besides what one process would.

    Together they have one model, optimizer and gradients. Each has libraries of its own and, when
    it opens, whole parameters; of passes at work each has one.
    """
    for tenant in tenants:
        if tenant.ranks == 1:
            continue
        resident = resident_memory(tenant.role, tenant.shape, tenant.work)
        parameters = sum(part.nbytes for part in resident if part.name == "parameters")
        nbytes = tenant.ranks * (runtime.nbytes + parameters)
        if tenant is active and phase is not Phase.ROLLOUT:
            nbytes += (tenant.ranks - 1) * sum(part.nbytes for part in working)
        yield MemoryPart(role=tenant.role, name="rank processes", nbytes=nbytes)


def _smallest_change(
    tenants: tuple[Tenant, ...], device_type: str, budget: int, train_key: str
) -> str:
    """The way out: one size, or recomputation, where one is enough; else both sizes, all three, or
    what the job needs at least."""
    found = _smaller_sizes(tenants, device_type, budget, train_key)
    again = tuple(tenant.recomputed() for tenant in tenants)
    if again == tenants:
        return found or _least_words(tenants, device_type)
    roles = " and ".join(
        f"roles.{tenant.role}.recompute=full" for tenant in tenants if tenant.can_recompute
    )
    total = _best_fit(again, device_type, budget).peak.total
    if total <= budget:
        words = f"set {roles} (it fits with {format_bytes(total)})"
        return f"{found}; or {words}" if found else words
    if found:
        return found
    both = _smaller_sizes(again, device_type, budget, train_key)
    if both is None:
        return _least_words(again, device_type)
    return f"set {roles} and {both.removeprefix('set ')}"


def _least_words(tenants: tuple[Tenant, ...], device_type: str) -> str:
    smallest = tuple(tenant.adjusted(1, 1) for tenant in tenants)
    least = _best_fit(smallest, device_type, 0).peak.total
    again = any(tenant.work.recompute == "full" for tenant in tenants)
    return (
        f"even one row and one slot{', and all computed again,' if again else ''} need "
        f"{format_bytes(least)}: take a device with more memory, a smaller model or shorter samples"
    )


def _smaller_sizes(
    tenants: tuple[Tenant, ...], device_type: str, budget: int, train_key: str
) -> str | None:
    """One size where one is enough, else both; None where they are not."""

    def total(micro_batch: int, num_slots: int) -> int:
        smaller = tuple(tenant.adjusted(micro_batch, num_slots) for tenant in tenants)
        return _best_fit(smaller, device_type, budget).peak.total

    def note(micro_batch: int, num_slots: int) -> str:
        return f"the largest that fits, with {format_bytes(total(micro_batch, num_slots))}"

    rows = max(tenant.work.micro_batch for tenant in tenants)
    slots = max(tenant.work.num_slots for tenant in tenants)
    generating = ", ".join(
        f"roles.{tenant.role}.num_slots" for tenant in tenants if tenant.work.num_slots
    )
    best = _largest(rows, lambda size: total(size, slots) <= budget)
    if best:
        return f"set {train_key}.micro_batch={best} ({note(best, slots)})"
    best = _largest(slots, lambda size: total(rows, size) <= budget)
    if best:
        return f"set {generating}={best} ({note(rows, best)})"
    both = _largest(slots, lambda size: total(1, size) <= budget)
    if both:
        best = _largest(rows, lambda size: total(size, both) <= budget)
        return f"set {generating}={both} and {train_key}.micro_batch={best} ({note(best, both)})"
    return None


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that fits; 0 where none does. `fits` is monotone."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
