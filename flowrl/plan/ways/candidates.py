"""The ways to run a task on so many devices: layouts, recomputation, offload, with times and bytes.

Each way becomes an `Option` of the search, labelled by its place in the tuple. Of ways on equally
many devices that hold weights in equal forms, those are left out that another one is at least as
good as in time, in resident and in peak bytes (`pareto`); of rollouts that may run ahead of the
trainer, in what they take of an engine whose batches overlap too. Those that would be there if no
sample might be stale are there in any case.

What differs besides the layout:
- an update: activations computed again or kept; the optimizer's states on the device, or streamed
  from the host; micro-batches of one or several longest samples; and between its turns everything
  on the device, or everything on the host (then its time has the way there and back in it).
- a forward pass: parameters on the device, or fetched from the host before each turn.
- a rollout: how much of the device its KV cache takes. An engine that sleeps gives back its weights
  and cache between its turns, and keeps what its captured graphs hold on to; weight sync brings the
  weights anew.

Memory is that of the fullest device, proven by `flowrl.cost.role_memory` with the framework's own
share on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Literal, TypeAlias

from flowrl.cluster.hardware import Machine
from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.layout import Layout
from flowrl.cost.memory import PhaseMemory, Workload
from flowrl.cost.occupancy import EngineBatch
from flowrl.cost.role_memory import (
    MemoryOptions,
    kv_capacity,
    offloadable_bytes,
    parameter_bytes,
    resident_bytes,
    role_memory,
    role_peak,
    stage_residents,
    stage_working,
    working_key,
)
from flowrl.cost.rollout_bound import LEAST, RolloutBound, rollout_bound
from flowrl.cost.source import Cost, Estimate, Recompute, one_after_the_other, without
from flowrl.plan.dtypes import role_dtype
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.options import PlanOptions
from flowrl.plan.request import PlanRequest
from flowrl.plan.ways.candidate import RECOMPUTE, Candidate, Rivals, by_time, pareto
from flowrl.plan.ways.layouts import FoundLayouts, layouts
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.task_rules import layout_rules, parameter_form, task_slots, task_workload
from flowrl.plan.ways.tasks import TaskWork, UpdateWork

KV_SHARES = (0.25, 0.4, 0.6, 0.8, 1.0)
"""Of a device that an engine may fill while it works, weights and cache together."""

NO_FASTER = 0.999
"""Of the time with a smaller cache: a larger one that takes as much is not tried further."""

MICRO_SAMPLES = (1, 4)
"""Longest samples that a packed micro-batch holds."""

TIGHT = 0.5
"""Of a device: where an update takes more even with all activations computed again, its optimizer
may stream from the host."""

UNKNOWN = Estimate(seconds=0.0)
"""Of a way whose time is yet to be asked for."""

_Held: TypeAlias = tuple[Workload, tuple[int, ...]]  # and the resident bytes of stages

_DEVICE_TYPES: Mapping[str, Literal["cpu", "cuda", "npu"]] = {
    "cpu": "cpu",
    "cuda": "cuda",
    "npu": "npu",
}


class Candidates:
    """Makes the candidates of one request on one kind of machine.

    Attributes:
        budget: Bytes of a device that roles may use, the framework's own share taken off.
        host: Bytes of its host's memory that each device may fill; None where nobody knows.
        outside: Devices of another kind that are set aside for environments, by task.
        short_of_host: Some way was left out because a host's memory does not hold it.
        ceiling: Seconds of a step: a rollout that takes longer alone may be left out.
    """

    def __init__(
        self,
        request: PlanRequest,
        group: DeviceGroup,
        cost: Cost,
        host: int | None = None,
        outside: Mapping[str, DeviceGroup] | None = None,
    ) -> None:
        self.request = request
        self.options: PlanOptions = request.options
        self.group = group
        self.machine: Machine = group.machine
        self.cost = cost
        self.host = host
        self.outside = outside or {}
        self.budget = group.budget_bytes - RUNTIME_BYTES[self.machine.spec.type]
        self.short_of_host = False
        self.ceiling = math.inf
        self._found: dict[tuple[str, int], FoundLayouts] = {}
        self._made: dict[tuple[str, Layout, Filter], tuple[Candidate, ...]] = {}
        self._working: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._options: dict[tuple[object, ...], MemoryOptions] = {}

    def work(self, task: TaskWork, layout: Layout) -> Workload:
        """What one replica of a task is asked to do at once."""
        dtype = role_dtype(task.role, self.request, self.group.device)
        return task_workload(task, layout, self.request, dtype)

    def options_of(self, task: TaskWork, candidate: Candidate) -> MemoryOptions:
        """What the bytes of a way to run a task follow from besides its layout."""
        return self.memory_options(
            task,
            recompute=candidate.recompute,
            packed_tokens=candidate.micro_tokens or None,
            kv_tokens=candidate.kv_tokens if task.generates else None,
            offload_optimizer="optimizer" in candidate.offload,
        )

    def memory(self, task: TaskWork, candidate: Candidate) -> PhaseMemory:
        """Of the fullest device, by parts."""
        options = self.options_of(task, candidate)
        work = self.work(task, candidate.layout)
        if task.generates:
            work = replace(work, num_slots=candidate.slots)
        name = task.role.name
        return role_memory(name, task.shape, candidate.layout, work, task.phase, options)

    def layouts(self, task: TaskWork, num_devices: int) -> FoundLayouts:
        """Of a task, possible and refused."""
        key = (task.id, num_devices)
        if key not in self._found:
            rules = layout_rules(task, self.request, self.machine.node_size)
            self._found[key] = layouts(task.shape, num_devices, rules)
        return self._found[key]

    def of_task(
        self, task: TaskWork, num_devices: int, only: Filter, *, shared: bool
    ) -> tuple[Candidate, ...]:
        """The ways to run a task on `num_devices` that fit the device alone, fastest first.

        Args:
            shared: Another task holds the same parameters, so it matters in which form.
        """
        free = replace(only, layout=())
        if self._may_be_rivals(task, only):
            found = self._worth_timing(task, num_devices, only)
        else:
            found = [
                one
                for layout in filter(only.takes, self.layouts(task, num_devices).possible)
                for one in self.of_layout(task, layout, free)
            ]
        return self.worth_having(found, task, shared=shared)

    def worth_having(
        self, found: Sequence[Candidate], task: TaskWork, *, shared: bool
    ) -> tuple[Candidate, ...]:
        """Of ways to run a task on equally many devices, those that no other one beats."""
        alone = [one for one in found if not one.overlaps]
        kept = pareto(alone, self.budget, shared=shared)
        if not self._runs_ahead(task):
            return kept
        more = pareto(found, self.budget, shared=shared, overlap=True)
        added = (replace(one, overlaps=True) for one in more if one not in kept)
        return tuple(sorted((*kept, *added), key=by_time))

    def beside(
        self, task: TaskWork, ways: Sequence[Candidate], only: Filter
    ) -> tuple[Candidate, ...]:
        """Faster ways to run a task in the layouts of some that are worth having: others are as
        fast in as little memory, but in other layouts."""
        kept, free = set(ways), replace(only, layout=())
        slowest = {way.layout: way.seconds for way in ways}  # they come fastest first
        return tuple(
            one
            for layout, most in slowest.items()
            for one in self.of_layout(task, layout, free)
            if one.seconds < most and one not in kept
        )

    def _runs_ahead(self, task: TaskWork) -> bool:
        """Whether batches of a task may follow each other without a gap."""
        return task.generates and self.request.max_staleness > 0

    def of_layout(self, task: TaskWork, layout: Layout, only: Filter) -> tuple[Candidate, ...]:
        """All ways to run a task in one layout that fit the device alone.

        They are kept: a plan is explained with those that it was chosen from.
        """
        key = (task.id, layout, only)
        if key not in self._made:
            self._made[key] = tuple(
                candidate
                for candidate in self._ways(task, layout, only)
                if candidate.peak <= self.budget
                and only.keeps(candidate)
                and self.host_holds(candidate.host)
            )
        return self._made[key]

    def host_holds(self, nbytes: int) -> bool:
        """Whether a device's part of its host's memory holds so many; where not, that is noted."""
        if self.host is None or nbytes <= self.host:
            return True
        self.short_of_host = True
        return False

    def _ways(self, task: TaskWork, layout: Layout, only: Filter) -> Iterator[Candidate]:
        if only.micro_tokens is not None and only.micro_tokens < self.request.max_length:
            return iter(())  # a sample is not cut
        if task.generates:
            return self._rollouts(task, layout)
        if task.updates:
            return self._updates(task, layout, only)
        return self._forwards(task, layout, only)

    def needs(
        self, task: TaskWork, layout: Layout, only: Filter
    ) -> tuple[int, MemoryOptions, Workload]:
        """The least that a task needs of a device in a layout, and with which options.

        For messages: what is said when nothing fits.
        """
        work = self.work(task, layout)
        best: tuple[int, MemoryOptions, Workload] | None = None
        for options in self._thriftiest(task, only):
            peak = role_peak(task.shape, layout, work, task.phase, options)
            if best is None or peak < best[0]:
                best = peak, options, work
        assert best is not None
        return best

    def _thriftiest(self, task: TaskWork, only: Filter) -> Iterator[MemoryOptions]:
        micro = only.micro_tokens or self.request.max_length
        recompute = only.recompute or ("full" if task.updates else "none")
        for streams in (False, True) if task.updates else (False,):
            if only.offload is None or ("optimizer" in only.offload) == streams:
                yield self.memory_options(
                    task,
                    recompute=recompute,
                    packed_tokens=None if task.generates else micro,
                    kv_tokens=self.request.max_length if task.generates else None,
                    offload_optimizer=streams,
                )

    def memory_options(
        self,
        task: TaskWork,
        *,
        recompute: Recompute = "none",
        packed_tokens: int | None = None,
        kv_tokens: int | None = None,
        offload_optimizer: bool = False,
    ) -> MemoryOptions:
        """What the bytes of a task follow from besides its layout."""
        device, shard = self.machine.spec.type, task.library.shard
        key = (recompute, shard, offload_optimizer, packed_tokens, kv_tokens, device)
        if key not in self._options:
            self._options[key] = MemoryOptions(
                recompute=recompute,
                shard=shard,
                offload_optimizer=offload_optimizer,
                packed_tokens=packed_tokens,
                kv_tokens=kv_tokens,
                device_type=_DEVICE_TYPES[device],
            )
        return self._options[key]

    def _peak(self, task: TaskWork, layout: Layout, options: MemoryOptions, held: _Held) -> int:
        """`role_peak`; what layouts have alike is computed once."""
        work, residents = held
        key = (task.id, *working_key(layout, work, options))
        if key not in self._working:
            self._working[key] = stage_working(task.shape, layout, work, task.phase, options)
        works = self._working[key]
        return max(one + other for one, other in zip(residents, works, strict=True))

    # Rollouts

    def _rollouts(self, task: TaskWork, layout: Layout) -> Iterator[Candidate]:
        """Those for one batch at a time, and with more for batches that overlap."""
        alone = task_slots(task, layout, 0)
        found = list(self._of_slots(task, layout, alone, overlaps=False))
        yield from found
        if self._runs_ahead(task):
            made = {(one.slots, one.kv_tokens) for one in found}
            slots = task_slots(task, layout, self.request.max_staleness)
            for one in self._of_slots(task, layout, slots, overlaps=True):
                if (one.slots, one.kv_tokens) not in made:
                    yield one

    def _of_slots(
        self, task: TaskWork, layout: Layout, slots: int, *, overlaps: bool
    ) -> Iterator[Candidate]:
        """With caches of several sizes, until a larger one is of no use for a batch alone; for
        batches that overlap with all of them."""
        seconds = math.inf
        for way in self._caches(task, layout, slots):
            timed = replace(way, estimate=self.drawing(task, way), overlaps=overlaps)
            if timed.seconds > NO_FASTER * seconds and not overlaps:
                return
            seconds = timed.seconds
            yield timed

    def _caches(self, task: TaskWork, layout: Layout, slots: int) -> Iterator[Candidate]:
        """With caches of several sizes, small ones first, their time not asked for yet."""
        work = replace(self.work(task, layout), num_slots=slots)
        empty = self.memory_options(task, kv_tokens=0)
        residents = stage_residents(task.shape, layout, work, empty)
        fixed = self._peak(task, layout, empty, (work, residents))
        longest, most = self.request.max_length, work.num_slots * self.request.max_length
        asleep, weights, form = max(residents), 0, f"engine {layout.describe()}"
        if task.library.sleeps:
            asleep -= offloadable_bytes(task.shape, layout, work, empty)
        if task.library.in_place:
            # The KV cache goes and comes; parameters stay, the trainer's own where it is here.
            weights = parameter_bytes(task.shape, layout, work, empty)
            form = parameter_form(task, layout)
        before = 0
        for share in KV_SHARES:
            free = int(self.budget * share) - fixed
            kv_tokens = min(most, kv_capacity(task.shape, layout, free_bytes=max(0, free)))
            if kv_tokens < longest or kv_tokens == before:
                continue
            before = kv_tokens
            options = self.memory_options(task, kv_tokens=kv_tokens)
            residents = stage_residents(task.shape, layout, work, options)
            peak = self._peak(task, layout, options, (work, residents))
            resident = asleep if task.library.sleeps else max(residents)
            if task.library.in_place:
                awake = options if not task.library.sleeps else empty
                resident = resident_bytes(task.shape, layout, work, awake)
            yield Candidate(
                layout=layout,
                estimate=UNKNOWN,
                resident=resident,
                peak=max(peak, resident),
                weight_bytes=weights,
                form=form,
                kv_tokens=kv_tokens,
                slots=slots,
            )

    def with_slots(self, task: TaskWork, way: Candidate, slots: int) -> Candidate:
        """A way to roll out with fewer slots, and what these leave to its cache of as much memory;
        its time with it."""
        most = 1.01 * way.peak  # equal shares of a device come out a little differently
        ways = (one for one in self._caches(task, way.layout, slots) if one.peak <= most)
        fewer = max(ways, key=lambda one: one.kv_tokens, default=replace(way, slots=slots))
        return replace(fewer, estimate=self.drawing(task, fewer))

    def drawing(self, task: TaskWork, way: Candidate) -> Estimate:
        """The time of a rollout."""
        return self.cost.rollout(
            task.shape,
            way.layout,
            self.machine,
            samples=task.samples,
            group_size=task.group_size,
            prompt_tokens=task.prompt_tokens,
            lengths=self.options.lengths,
            slots=way.slots,
            kv_tokens=way.kv_tokens,
        )

    def _may_be_rivals(self, task: TaskWork, only: Filter) -> bool:
        """Whether the time of some ways to run a task spares that of others: nothing but seconds
        and bytes tells them apart."""
        free = only.recompute is None and only.offload is None and only.micro_tokens is None
        alike = not task.library.in_place and not self._runs_ahead(task)
        return task.generates and alike and free

    def _worth_timing(self, task: TaskWork, num_devices: int, only: Filter) -> list[Candidate]:
        """Rollouts but for those that others beat whatever they take.

        Layouts come in the order of the least that they take, for what is known early spares more.
        """
        bound = cache(partial(self._bound, task))
        most = self.ceiling * task.every
        possible = tuple(filter(only.takes, self.layouts(task, num_devices).possible))
        if most < math.inf and all(bound(layout).least_s() > most for layout in possible):
            return []
        caches: dict[Layout, list[Candidate]] = {}
        for layout in possible:
            ways = self._caches(task, layout, task_slots(task, layout, 0))
            caches[layout] = [way for way in ways if way.peak <= self.budget]
        fitting = [layout for layout, ways in caches.items() if ways]
        fitting.sort(key=lambda layout: bound(layout).least_s(caches[layout][-1].kv_tokens))
        rivals, found = Rivals(self.budget), list[Candidate]()
        for layout in fitting:
            free_s: float | None = None
            seconds = math.inf
            for way in caches[layout]:
                least = bound(layout).least_s(way.kv_tokens)
                if least > most or rivals.beat(way, least):
                    continue
                if found and free_s is None:
                    free_s = LEAST * self._free_s(task, way)
                if free_s is not None and (free_s > most or rivals.beat(way, free_s)):
                    continue
                timed = replace(way, estimate=self.drawing(task, way))
                if timed.seconds > NO_FASTER * seconds:
                    break
                seconds = timed.seconds
                rivals.add(timed)
                found.append(timed)
        return found

    def _free_s(self, task: TaskWork, way: Candidate) -> float:
        """Seconds that a rollout in a layout takes if its cache is never full."""
        never_full = way.slots * self.request.max_length
        return self.drawing(task, replace(way, kv_tokens=never_full)).seconds

    def _bound(self, task: TaskWork, layout: Layout) -> RolloutBound:
        """What a rollout in a layout takes at least."""
        slots = task_slots(task, layout, 0)
        batch = EngineBatch(
            replicas=layout.dp,
            samples=task.samples,
            group_size=task.group_size,
            prompt_tokens=task.prompt_tokens,
            slots=slots,
            kv_tokens=slots * self.request.max_length,
        )
        where = (task.shape, layout, self.machine)

        def step_s(rows: int, context: float) -> float:
            return self.cost.decode_step(*where, batch=rows, context=context).seconds

        return rollout_bound(step_s, self.options.lengths, batch)

    # Forward passes

    def _forwards(self, task: TaskWork, layout: Layout, only: Filter) -> Iterator[Candidate]:
        work = self.work(task, layout)
        sizes = (only.micro_tokens,) if only.micro_tokens else self._micro_tokens(task, layout)
        for micro in reversed(sizes):
            options = self.memory_options(task, packed_tokens=micro)
            residents = stage_residents(task.shape, layout, work, options)
            peak = self._peak(task, layout, options, (work, residents))
            if peak <= self.budget:
                break
        else:
            return
        resident = max(residents)
        weights = parameter_bytes(task.shape, layout, work, options)
        estimate = self.cost.forward(
            task.shape,
            layout,
            self.machine,
            samples=task.samples,
            prompt_tokens=task.prompt_tokens,
            lengths=self.options.lengths,
            micro_tokens=micro,
            shard=task.library.shard,
        )
        kept = Candidate(
            layout=layout,
            estimate=estimate,
            resident=resident,
            peak=peak,
            weight_bytes=weights,
            form=parameter_form(task, layout),
            micro_tokens=micro,
        )
        yield kept
        # A frozen model is on the host anyway and need not go back there.
        ways = 2 if task.trains else 1
        yield replace(
            kept,
            move_s=ways * self.cost.move(weights, self.machine).seconds,
            resident=resident - weights,
            weight_bytes=0,
            form=f"{kept.form}, from the host",
            offload=("all",),
            host=weights,
        )

    # Updates

    def _updates(self, task: TaskWork, layout: Layout, only: Filter) -> Iterator[Candidate]:
        work = self.work(task, layout)
        sizes = (only.micro_tokens,) if only.micro_tokens else self._micro_tokens(task, layout)
        form, whole = parameter_form(task, layout), 0  # resident bytes with the optimizer's states
        for streams in (False, True):
            base = self.memory_options(task, offload_optimizer=streams)
            residents = stage_residents(task.shape, layout, work, base)
            resident = max(residents)
            moved = offloadable_bytes(task.shape, layout, work, base)
            weights = parameter_bytes(task.shape, layout, work, base)
            stays = whole - resident if streams else 0
            move_s = 2 * self.cost.move(moved, self.machine).seconds
            whole, least = resident, self.budget + 1
            for micro in sizes:
                for recompute in reversed(RECOMPUTE):
                    options = self.memory_options(
                        task,
                        recompute=recompute,
                        packed_tokens=micro,
                        offload_optimizer=streams,
                    )
                    peak = self._peak(task, layout, options, (work, residents))
                    least = min(least, peak)
                    if peak > self.budget:
                        break  # less is computed again, so more is kept
                    kept = Candidate(
                        layout=layout,
                        estimate=self.train(task, layout, options),
                        resident=resident,
                        peak=peak,
                        weight_bytes=weights,
                        form=form,
                        recompute=recompute,
                        micro_tokens=micro,
                        offload=("optimizer",) if streams else (),
                        host=stays,
                    )
                    yield kept
                    yield Candidate(
                        layout=layout,
                        estimate=kept.estimate,
                        move_s=move_s,
                        resident=resident - moved,
                        peak=peak,
                        form=f"{form}, from the host",
                        recompute=recompute,
                        micro_tokens=micro,
                        offload=(*kept.offload, "all"),
                        host=stays + moved,
                    )
            if least <= TIGHT * self.budget and "optimizer" not in (only.offload or ""):
                return

    def train(self, task: TaskWork, layout: Layout, options: MemoryOptions) -> Estimate:
        """The time of a trainer's updates, one after the other."""
        return one_after_the_other(self.train_each(task, layout, options))

    def train_each(
        self, task: TaskWork, layout: Layout, options: MemoryOptions
    ) -> tuple[Estimate, ...]:
        """The time of each of a trainer's updates, and of its forward passes between them."""
        return tuple(self._train_one(task, one, layout, options) for one in task.updated)

    def _train_one(
        self, task: TaskWork, one: UpdateWork, layout: Layout, options: MemoryOptions
    ) -> Estimate:
        """The time of an update; of a sum the last term has the optimizer's."""
        if not one.rows:
            return self.cost.forward(
                task.shape,
                layout,
                self.machine,
                samples=one.samples,
                prompt_tokens=one.prompt_tokens,
                lengths=self.options.lengths,
                micro_tokens=options.packed_tokens or 0,
                shard=options.shard,
            )
        estimate = self.cost.train(
            task.shape,
            layout,
            self.machine,
            samples=one.samples,
            prompt_tokens=one.prompt_tokens,
            lengths=self.options.lengths,
            mini_batches=self.request.mini_batches,
            micro_tokens=options.packed_tokens or 0,
            recompute=options.recompute,
            shard=options.shard,
            offload_optimizer=options.offload_optimizer,
        )
        return estimate if one.steps else without(estimate, "optimizer", "gradients")

    def _micro_tokens(self, task: TaskWork, layout: Layout) -> tuple[int, ...]:
        """Sizes of packed micro-batches: whole longest samples, no more than a rank's share."""
        longest = self.request.max_length
        mean = task.prompt_tokens + self.options.lengths.mean
        rows = (task.rows or task.samples) / layout.dp
        share = max(longest, int(rows * mean))
        return tuple(sorted({min(number * longest, share) for number in MICRO_SAMPLES}))
