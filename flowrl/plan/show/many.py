"""The parts of a printed plan that only a plan over many devices has.

What a step takes and what it waits for; the schedule as a tree; each operation's devices, layout
and time; the flags of inference servers; what is taken for granted.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.names import device_names, offload_words
from flowrl.plan.schema import (
    Operation,
    PlacementPlan,
    PredictedMemory,
    PredictedSpan,
    Reason,
    WeightRoute,
)
from flowrl.wording import HOURS, hours_text, percent

Rows = tuple[tuple[str, ...], ...]

SHORT_S = 10.0
"""The times of a step shorter than this many seconds have milliseconds."""

NOT_HERE = "cannot run here: "
"""The beginning of notes that are shown before everything else."""

_IMPOSSIBLE = "="
"""In the name of a rejected size (`tp=8`), which only `--explain` lists."""


def many_tables(plan: PlacementPlan) -> list[tuple[str, Rows]]:
    """Tables by title."""
    if plan.schedule is None:
        return []
    return [("operations", _operation_rows(plan)), ("times, in seconds of a step", _times(plan))]


def many_lists(plan: PlacementPlan) -> list[tuple[str, list[str]]]:
    """Lists by title, some of them empty."""
    if plan.schedule is None:
        return []
    return [
        ("a step takes", _summary(plan)),
        ("schedule", schedule_lines(plan.schedule, plan.kind)),
        ("engines", [f"{one.node}: {one.engine} {one.command()}" for one in plan.engine_flags]),
        ("pinned", [f"{pin.subject}.{pin.field}={pin.value}" for pin in plan.pins]),
        ("notes", [note for note in plan.notes if not note.startswith(NOT_HERE)]),
    ]


def schedule_lines(schedule: ScheduleStep, kind: str) -> list[str]:
    """The schedule as a tree; above it its kind, where no step of the tree is named by it."""
    mixed = ["hybrid: some operations take turns, others run at the same time"]
    return [*(mixed if kind == "hybrid" else ()), *schedule.draw()]


def plain_reasons(plan: PlacementPlan, *, explain: bool) -> tuple[Reason, ...]:
    """The reasons to tell: all with `explain`, else without sizes that are merely impossible."""
    if explain or plan.schedule is None:
        return plan.reasons
    found = []
    for reason in plan.reasons:
        kept = [item for item in reason.rejected if _IMPOSSIBLE not in item.choice]
        found.append(
            Reason(
                subject=reason.subject,
                choice=reason.choice,
                why=reason.why,
                rejected=tuple(kept[:2]),
            )
        )
    return tuple(found)


def _accelerators(plan: PlacementPlan) -> tuple[int, int]:
    """Those that anything stands on, and all of the pool."""
    every = {device.address for device in plan.pool.devices if device.type != "cpu"}
    used = {address for operation in plan.operations for address in operation.devices}
    return len(every & used), len(every)


def _summary(plan: PlacementPlan) -> list[str]:
    prediction = plan.prediction
    if prediction.step_s is None:
        return []
    sources = sorted({one.source for one in prediction.confidence})
    assumed = sorted({one.assumed for one in prediction.confidence if one.assumed})
    granted = f", {' and '.join(assumed)} assumed" if assumed else ""
    lines = [
        f"{seconds_text(prediction.step_s)}, predicted from {' and '.join(sources)} costs"
        f"{granted}; "
        f"bottleneck: {prediction.bottleneck}"
    ]
    if prediction.idle_share is not None:
        idle = f"{percent(prediction.idle_share, 1)} of device time is idle"
        used, known = _accelerators(plan)
        lines.append(idle if used == known else f"{idle}, of the {used} of {known} that are used")
    if prediction.sync_s:
        lines.append(f"{seconds_text(prediction.sync_s)} of the step is weight sync")
    if prediction.device_s is not None:
        lines.append(device_seconds(prediction.device_s))
    if prediction.tokens_per_device_s is not None:
        tokens = _rate(prediction.tokens_per_device_s)
        lines.append(f"{tokens} tokens/s per device, prompts and responses of all samples")
    return lines


def _rate(number: float) -> str:
    """In whole ones, or two digits of what is less than ten."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def _operation_rows(plan: PlacementPlan) -> Rows:
    rows = [("operation", "devices", "layout", "details")]
    for operation in plan.operations:
        if operation.seconds is not None:
            rows.append(
                (
                    operation.node,
                    f"{len(operation.devices)}: {device_names(operation.devices)}",
                    operation.layout.describe(),
                    _details(operation),
                )
            )
        elif operation.environment is not None:
            use = operation.environment
            words = f"{use.mode}, {use.at_once:,.0f} calls at once, {use.turns:g} turns an episode"
            where = f"{len(operation.devices)}: {device_names(operation.devices)}"
            rows.append((operation.node, where, "-", words))
    return tuple(rows)


def _details(operation: Operation) -> str:
    words = []
    if operation.library:
        words.append(operation.library)
    if operation.slots:
        words.append(f"{operation.slots:,} slots, {operation.kv_tokens:,} KV tokens")
    if operation.recompute != "none":
        words.append(f"{operation.recompute} recompute")
    if operation.micro_tokens:
        words.append(f"micro-batches of {operation.micro_tokens:,} tokens")
    return ", ".join((*words, *offload_words(operation.offload))) or "-"


def _times(plan: PlacementPlan) -> Rows:
    sources = {one.node: one for one in plan.prediction.confidence}
    rows = [("operation", "begins", "ends", "busy", "source", "largest parts")]
    digits = 1 if (plan.prediction.step_s or 0.0) >= SHORT_S else 3
    for span in sorted(plan.prediction.timeline or (), key=lambda span: span.begin_s):
        one = sources.get(span.node)
        parts = sorted(one.parts, key=lambda part: -part[1])[:3] if one is not None else []
        rows.append(
            (
                span.node,
                f"{span.begin_s:.{digits}f}",
                f"{span.end_s:.{digits}f}",
                f"{one.seconds if one is not None else span.end_s - span.begin_s:.{digits}f}",
                one.source if one is not None else "analytic",
                ", ".join(f"{name} {seconds:.{digits}f}" for name, seconds in parts)
                or _where(span),
            )
        )
    return tuple(rows)


def _where(span: PredictedSpan) -> str:
    return f"weights to {span.device}"


def route_sentence(route: WeightRoute, plan: PlacementPlan) -> str:
    """How the slices of a route travel, and how long."""
    time = ""
    if route.seconds is not None:
        time = f", {_route_time(route, route.seconds, plan)}"
    return (
        f"slices from {route.source_layout.describe()} to {route.destination_layout.describe()}"
        f"{time}"
    )


def _route_time(route: WeightRoute, seconds: float, plan: PlacementPlan) -> str:
    """Its own, or in which operation it is counted: weights that are on the host between turns get
    to their slices on the way."""
    if seconds:
        return seconds_text(seconds)
    user = next((one for one in plan.operations if one.node == route.node), None)
    if user is None or not user.move_s:
        return "no time is counted for it"
    return f"with the way to the host and back, {seconds_text(user.move_s)} of {user.node}"


def seconds_text(seconds: float) -> str:
    """`94.2 s`, `410 ms`, `20.4 min`, `3 h 39 min`."""
    if seconds >= HOURS:
        return hours_text(seconds)
    if seconds >= 1000:
        minutes = seconds / 60
        return f"{minutes:.1f} min" if minutes < 99.95 else f"{minutes:.0f} min"
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms"


_OPS = {"rollout": "generate", "scores": "score"}
"""Operations of phases that have another name."""


def phase_names(entries: Sequence[PredictedMemory], plan: PlacementPlan) -> list[str]:
    """A name for each phase of a device: role and phase, or the operation where a role has several
    of them there. Entries come in the order of their operations."""
    seen: dict[str, int] = {}
    names = [f"{entry.active} {entry.memory.phase}" for entry in entries]
    found = []
    for name, entry in zip(names, entries, strict=True):
        at = seen[name] = seen.get(name, -1) + 1
        nodes = [
            operation.node
            for operation in plan.operations
            if operation.role == entry.active
            and operation.op == _OPS.get(entry.memory.phase, entry.memory.phase)
            and entry.device in operation.devices
        ]
        several = names.count(name)
        found.append(nodes[at] if several > 1 and len(nodes) == several else name)
    return found


def seconds_apart(one: float, other: float) -> tuple[str, str]:
    """Both times, in as many digits as tell them apart.

    >>> seconds_apart(93.92, 93.94), seconds_apart(1.0, 2.0)
    (('93.92 s', '93.94 s'), ('1.0 s', '2.0 s'))
    """
    texts = seconds_text(one), seconds_text(other)
    digits = 2
    while texts[0] == texts[1] and one != other and digits <= 9:
        texts = f"{one:,.{digits}f} s", f"{other:,.{digits}f} s"
        digits += 1
    return texts


def device_seconds(seconds: float) -> str:
    """`1.5 device-seconds per sample`."""
    return f"{_device_seconds(seconds, 2)} device-seconds per sample"


def device_seconds_apart(one: float, other: float) -> tuple[str, str]:
    """Returns both numbers of device-seconds, in as many digits as differ.

    >>> device_seconds_apart(1.234, 1.23), device_seconds_apart(0.5, 120.0)
    (('1.234', '1.23'), ('0.5', '120'))
    """
    digits = 2
    while (texts := (_device_seconds(one, digits), _device_seconds(other, digits)))[0] == texts[1]:
        if one == other or digits > 9:
            break
        digits += 1
    return texts


def _device_seconds(seconds: float, digits: int) -> str:
    whole = len(f"{seconds:.0f}") if seconds >= 1 else 0
    return f"{seconds:,.{max(0, digits - whole)}f}" if whole else f"{seconds:.{digits}g}"


def memory_note(num_devices: int) -> str:
    """Behind the name of a device that others are like."""
    return f" and {num_devices - 1} like it" if num_devices > 1 else ""
