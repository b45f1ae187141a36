"""Why a plan over many devices is as it is, and what it takes for granted.

For each choice the runner-up with what it would have cost; for each size that is impossible the
constraint with its numbers; for what does not fit, what it needs and what makes it fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowrl.cost.layout import Layout
from flowrl.cost.memory import Phase, PhaseMemory, format_bytes
from flowrl.cost.role_memory import role_memory
from flowrl.graph.ir import Graph, Op
from flowrl.plan.assign import schedule_step
from flowrl.plan.explain.ahead import ahead_notes
from flowrl.plan.explain.beside import Cause, Lost, faster_ones, lost
from flowrl.plan.explain.cache import cache_notes
from flowrl.plan.explain.efficiencies import efficiency_notes
from flowrl.plan.explain.host import host_notes
from flowrl.plan.explain.regions import region_notes, region_reason
from flowrl.plan.explain.room import why_not_all
from flowrl.plan.explain.sizes import impossible_sizes
from flowrl.plan.explain.streams import stream_notes
from flowrl.plan.explain.took import by_step_time, measure, took_apart
from flowrl.plan.explain.unlike import unlike
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.many import Chosen, Searched
from flowrl.plan.names import cache_words, memory_words, way_words
from flowrl.plan.request import PlanRequest
from flowrl.plan.schema import Alternative, Reason, Rejection
from flowrl.plan.search import Kind
from flowrl.plan.show.many import device_seconds, seconds_text
from flowrl.plan.ways.candidate import RECOMPUTE, Candidate
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.region_ways import like
from flowrl.plan.ways.tasks import TaskWork
from flowrl.plan.ways.trainers import nodes_in_turn
from flowrl.plan.write.held import most_held
from flowrl.wording import counted

MOST_RUNNERS_UP = 2

AS_FAST = "as fast"
"""Of two steps that differ by less than a thousandth."""

_KIND_WORDS = {
    Kind.TEMPORAL: "all operations take turns on the same devices",
    Kind.SPATIAL: "each has devices of its own",
    Kind.HYBRID: "some operations take turns, others run at the same time",
    Kind.ASYNCHRONOUS: "rollouts run ahead of the trainer",
}


def alternatives_of(searched: Searched) -> tuple[Alternative, ...]:
    """The other schedules, nearest first."""
    found: list[Alternative] = []
    seen = [(summary_of(searched.best), searched.best)]
    for one in sorted(searched.others, key=lambda other: other.objective):
        summary = summary_of(one)
        alike = next((other for words, other in seen if words == summary), None)
        if alike is not None:
            summary += f"; {unlike(one, alike)}"
        seen.append((summary_of(one), one))
        why = _why_not(one, searched)
        samples = max(task.samples for task in one.posed.tasks)
        found.append(
            Alternative(
                summary=summary,
                step_s=one.step_s,
                why_not=why,
                kind=str(one.kind),
                device_s=one.step_s * one.used / samples,
                schedule=schedule_step(
                    one.posed.problem, one.schedule, nodes_in_turn(one.posed.tasks)
                ),
            )
        )
    return tuple(found)


def _why_not(one: Chosen, searched: Searched) -> str:
    """What an alternative takes beside the best, and why it is not the plan all the same."""
    best, options = searched.best, searched.posed.candidates.options
    time, more = beside(one.step_s, best.step_s), one.step_s - best.step_s
    share = 100 * more / best.step_s if best.step_s else 0.0
    used = f", on {counted(one.used, 'device')}" if one.used != best.used else ""
    by_time = by_step_time(best)
    if (by_time and share >= 0.05) or (not by_time and one.objective >= 1.0005 * best.objective):
        plain = by_time or (more > 0 and not used)
        return f"{time}{used}{'' if plain else _more_device_time(one, best)}"
    if options.kind not in ("auto", str(one.kind)):
        return f"{time}{used}, but {options.kind_where} asks for {options.kind}"
    return f"{time}{used}, but more complex"


def beside(step_s: float, best_s: float) -> str:
    """How much longer or shorter a step is than another: `27.5 s (29.3 %) longer`."""
    more = step_s - best_s
    share = 100 * more / best_s if best_s else 0.0
    if abs(share) < 0.05:
        return AS_FAST
    return f"{seconds_text(abs(more))} ({abs(share):.1f} %) {'longer' if more > 0 else 'shorter'}"


def _more_device_time(one: Chosen, best: Chosen) -> str:
    """What it loses where devices are dear rather than time."""
    share = 100 * (one.objective / best.objective - 1) if best.objective else 0.0
    return f", and {share:.1f} % more device time, of which plan.objective asks for little"


def reasons_of(searched: Searched) -> tuple[Reason, ...]:
    """The schedule, then each task."""
    best = searched.best
    reasons = [_schedule_reason(searched)]
    for task in best.posed.tasks:
        reasons.append(_layout_reason(task, best, searched))
        reasons += region_reason(task, best, searched)
        reasons += _memory_reasons(task, best, searched)
    return tuple(reasons)


def notes_of(searched: Searched, request: PlanRequest, graph: Graph) -> tuple[str, ...]:
    """What the plan takes for granted, and what cannot run here."""
    best = searched.best
    notes = [f"assumed: {one}" for one in request.options.assumptions]
    notes += _library_notes(best)
    by_model = any(task.phase is Phase.SCORES for task in best.posed.tasks)
    if graph.of_op(Op.SCORE) and not by_model:
        notes.append("assumed: rules score on the hosts while samples come, and take no time here")
    notes += efficiency_notes(best)
    notes += region_notes(best)
    notes += host_notes(best)
    notes += cache_notes(best)
    notes += stream_notes(best)
    notes += ahead_notes(best, request)
    if searched.thinned:
        notes.append(f"looked at {searched.thinned}")
    idle = len(best.posed.addresses) - best.used
    if idle:
        word = "device is" if idle == 1 else "devices are"
        notes.append(f"{idle} {word} left idle: no larger block is better")
    return tuple(notes)


def _library_notes(best: Chosen) -> Iterator[str]:
    """Backends that declare less than the plan asks of them."""
    assumed: dict[tuple[str, str], list[str]] = {}
    for task in best.posed.tasks:
        if not task.declared:
            used = _dimensions(best.ways[task.id].layout, task)
            assumed.setdefault((task.role.backend, task.library.name), []).append(
                f"{task.title} ({used})"
            )
    for (backend, library), tasks in assumed.items():
        yield (
            f"cannot run here: backend {backend} declares no parallel layouts, and the plan takes "
            f"{library} for {', '.join(tasks)}; it needs a backend that declares them"
        )


def _dimensions(layout: Layout, task: TaskWork) -> str:
    used = [name for name in ("tp", "pp", "cp", "ep", "dp") if getattr(layout, name) > 1]
    if task.library.shard == "full" and layout.shards > 1:
        used.append("fsdp")
    return " ".join(used) or "one device"


def _schedule_reason(searched: Searched) -> Reason:
    best = searched.best
    rejected = []
    for kind in Kind:
        of_kind = [one for one in searched.others if one.kind is kind]
        if kind is best.kind or not of_kind:
            continue
        other = min(of_kind, key=lambda one: one.objective)
        rejected.append(
            Rejection(
                choice=f"{kind}: {summary_of(other)}",
                constraint=f"{_why_not_kind(kind, other, searched)}: {took_apart(other, best)}",
            )
        )
    step = f"a step takes {seconds_text(best.step_s)}"
    if not by_step_time(best):
        step += f", {device_seconds(measure(best))}"
    return Reason(
        subject="schedule",
        choice=f"{best.kind}: {summary_of(best)}",
        why=f"{_KIND_WORDS[best.kind]}; {step}",
        rejected=tuple(rejected),
    )


def _why_not_kind(kind: Kind, other: Chosen, searched: Searched) -> str:
    """What the best schedule of another kind has against it, before both are measured."""
    best, options = searched.best, searched.posed.candidates.options
    saved, by_time = measure(best) - measure(other), by_step_time(best)
    if saved < 0:
        dearer = f"it takes more device time, on {counted(other.used, 'device')}"
        return "its step takes longer" if by_time else dearer
    if saved > 0 and options.kind not in ("auto", str(kind)):
        return f"{options.kind_where} asks for {options.kind}"
    if saved > 0:
        worth = seconds_text(saved) if by_time else device_seconds(saved)
        return f"its complexity is not worth {worth}"
    return "its step takes as long" if by_time else "it takes as much device time"


def summary_of(one: Chosen) -> str:
    """`actor.generate on 64 (tp 4, dp 16); actor.update on 64 (tp 2, dp 32)`."""
    parts = []
    for task in one.posed.tasks:
        layout = one.ways[task.id].layout
        parts.append(f"{task.title} on {layout.num_devices} ({layout.describe()})")
    return "; ".join(parts)


def _layout_reason(task: TaskWork, best: Chosen, searched: Searched) -> Reason:
    way = best.ways[task.id]
    made = best.posed.made(task.id)
    only = searched.pins.filters.get(task.id, Filter())
    found = made.layouts(task, way.layout.num_devices)
    rejected: list[Rejection] = []
    ways: list[Candidate] = []
    for layout in found.possible:
        if layout == way.layout or not only.takes(layout):
            continue
        fitting = list(like(made, task, layout, replace(only, layout=()), way))
        if fitting:
            ways.append(min(fitting, key=lambda one: one.seconds))
        else:
            rejected.append(_too_large(task, layout, best, replace(only, layout=())))
    ways.sort(key=lambda one: one.seconds)
    ahead = task.generates and best.kind is Kind.ASYNCHRONOUS
    sooner = [one for one in ways if one.seconds < way.seconds]
    faster = [(one, lost(task, one, best)) for one in sooner]
    runners_up = [_faster(other, why, ahead=ahead) for other, why in faster]
    runners_up += [_slower(other, way) for other in ways[len(faster) :]]
    pinned = [f"{name}={size}" for name, size in only.layout]
    why = f"pinned ({', '.join(pinned)})" if pinned else _why(way, ways, faster, ahead=ahead)
    if len(task.operations) > 1:
        why += f"; one trainer does {task.title}, one after the other"
    return Reason(
        subject=task.id,
        choice=describe(way),
        why=why,
        rejected=(
            *runners_up[:MOST_RUNNERS_UP],
            *why_not_all(task, best, only, searched.whole),
            *rejected,
            *impossible_sizes(task, made, found),
        ),
    )


def _why(
    way: Candidate,
    others: Sequence[Candidate],
    faster: Sequence[tuple[Candidate, Lost]],
    *,
    ahead: bool,
) -> str:
    seconds = seconds_text(way.seconds)
    if not others:
        return f"the only layout on {_devices(way)} that fits: {seconds} a step"
    if not faster:
        return f"the fastest layout on {_devices(way)}: {seconds} a step"
    if ahead and way.period_s < min(other.period_s for other in others):
        period = seconds_text(way.period_s)
        return f"{seconds} for one batch, and the fastest for many of them: {period} each"
    return f"{seconds} a step, and {faster_ones(one.cause for _, one in faster)}"


def _devices(way: Candidate) -> str:
    return counted(way.layout.num_devices, "device")


def _slower(other: Candidate, way: Candidate) -> Rejection:
    slower = seconds_text(other.seconds - way.seconds)
    constraint = f"{slower} slower ({seconds_text(other.seconds)})"
    return Rejection(choice=describe(other), constraint=constraint)


def _faster(other: Candidate, why: Lost, *, ahead: bool) -> Rejection:
    steady = f"; {seconds_text(other.period_s)} each of many" if ahead else ""
    constraint = f"faster alone ({seconds_text(other.seconds)}{steady}), but {why.words}"
    return Rejection(choice=describe(other), constraint=constraint)


def _too_large(task: TaskWork, layout: Layout, best: Chosen, only: Filter) -> Rejection:
    """A layout in which even the thriftiest way needs more than a device has, or its host."""
    made, group = best.posed.made(task.id), best.posed.group_of(task.id)
    need, options, work = made.needs(task, layout, only)
    need += RUNTIME_BYTES[group.device.type]
    if need <= group.budget_bytes:
        return Rejection(choice=layout.describe(), constraint=_only_so(task, layout, made, only))
    memory = role_memory(task.role.name, task.shape, layout, work, task.phase, options)
    total = format_bytes(need)
    even = "even recomputed and offloaded" if task.updates else "even with one sample at a time"
    if only.recompute or only.offload or only.micro_tokens:
        even = "as it is pinned"
    return Rejection(
        choice=layout.describe(),
        constraint=f"needs {total} of {format_bytes(group.budget_bytes)} {even}: "
        + memory.describe(),
    )


def _only_so(task: TaskWork, layout: Layout, made: Candidates, only: Filter) -> str:
    """How a task fits the device in a layout in which no way was tried that does."""
    longest = made.request.max_length
    if task.region is not None and made.of_layout(task, layout, only):
        return "leaves too little memory for its environment on its devices or their hosts"
    small = replace(only, micro_tokens=longest)
    if not task.generates and made.of_layout(task, layout, small):
        return f"fits alone only in micro-batches of {longest:,} tokens, which a pin may ask for"
    return (
        "fits the device only with more in the memory of its host than the "
        f"{format_bytes(made.host or 0)} that each device has there"
    )


def _memory_reasons(task: TaskWork, best: Chosen, searched: Searched) -> Iterator[Reason]:
    """Why something is computed again, is on the host, or has less of the device."""
    way = best.ways[task.id]
    if task.updates and (way.recompute != "none" or way.offload):
        memory = _plain_memory(task, way, best)
        budget = best.posed.group_of(task.id).budget_bytes
        runtime = RUNTIME_BYTES[best.posed.group_of(task.id).device.type]
        total = memory.total + runtime
        only = searched.pins.filters.get(task.id, Filter())
        yield Reason(
            subject=f"{task.id} memory",
            choice=", ".join(memory_words(way.recompute, way.offload)),
            why=_why_so(task, best, only, fits=total <= budget),
            rejected=(
                Rejection(
                    choice="nothing recomputed or offloaded",
                    constraint=f"needs {format_bytes(total)} of {format_bytes(budget)}: "
                    + f"{memory.describe()}, runtime {format_bytes(runtime)}"
                    + _fits_with(task, way, best),
                ),
            ),
        )
    if task.generates:
        yield Reason(
            subject=f"{task.id} kv cache",
            choice=cache_words(way.kv_tokens, way.slots),
            why=cache_why(task.id, best),
        )


def _why_so(task: TaskWork, best: Chosen, only: Filter, *, fits: bool) -> str:
    """Why something of an update is computed again or is on the host.

    Args:
        fits: Whether it fits its devices alone without.
    """
    asked = (("recompute", only.recompute), ("offload", only.offload))
    pinned = [f"{name}={value}" for name, value in asked if value is not None]
    if pinned:
        return f"pinned ({', '.join(pinned)})"
    way, made = best.ways[task.id], best.posed.made(task.id)
    alike = made.of_layout(task, way.layout, replace(only, layout=()))
    others = [one for one in alike if _spares(one, way)]
    for one in sorted(others, key=lambda one: (one.plainness >= way.plainness, one.seconds)):
        why = lost(task, one, best)
        if why.cause not in (Cause.ROOM, Cause.HOST):
            words = ", ".join(memory_words(one.recompute, one.offload)) or "none of it"
            return f"it would fit with {words}, but {why.words}"
    if fits:
        return "only this leaves enough memory for the other operations on its devices"
    return "it does not fit otherwise"


def _spares(one: Candidate, way: Candidate) -> bool:
    """Whether a way does without something that another one computes again or has on the host."""
    steps = RECOMPUTE.index(one.recompute), RECOMPUTE.index(way.recompute)
    return steps[0] < steps[1] or not set(way.offload) <= set(one.offload)


def cache_why(task: str, chosen: Chosen) -> str:
    """What an engine's cache takes of the fullest of its devices, as the memory table has it."""
    held = most_held(chosen, task)
    cache = sum(part.nbytes for part in held.parts if part.name == "kv cache")
    return (
        f"{format_bytes(cache)} of each device, whose peak is {format_bytes(held.total)} while it "
        "generates"
    )


def _fits_with(task: TaskWork, way: Candidate, best: Chosen) -> str:
    """The single changes with which an update fits a device alone."""
    made, layout = best.posed.made(task.id), way.layout
    changes = {
        f"{kind} recompute": replace(way, recompute=kind, offload=())
        for kind in RECOMPUTE
        if kind != "none"
    }
    changes["the optimizer on the host"] = replace(way, recompute="none", offload=("optimizer",))
    wider = replace(layout, dp=2 * layout.dp)
    changes[f"dp {wider.dp}"] = replace(way, layout=wider, recompute="none", offload=())
    fits = [words for words, one in changes.items() if made.memory(task, one).total <= made.budget]
    return f"; fits alone with {' or '.join(fits)}" if fits else ""


def _plain_memory(task: TaskWork, way: Candidate, best: Chosen) -> PhaseMemory:
    return best.posed.made(task.id).memory(task, replace(way, recompute="none", offload=()))


def describe(way: Candidate) -> str:
    """A candidate in few words."""
    return way_words(way.layout, way.recompute, way.offload)
