"""Lists of plans and sizes, for people: the best plans, how many devices, more of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flowrl.cost.memory import format_bytes
from flowrl.plan.explain.efficiencies import efficiency_note
from flowrl.plan.local import local_choice
from flowrl.plan.schema import PlacementPlan
from flowrl.plan.show.many import device_seconds, schedule_lines, seconds_text
from flowrl.plan.sizing import HOST_BYTES, HOST_CORES, Job, Size
from flowrl.wording import counted, percent


def one_line(plan: PlacementPlan) -> str:
    """`temporal on 64 devices, 92.7 s a step`."""
    parts = plan.placements if plan.schedule is None else plan.operations
    timed = [one for one in plan.operations if one.seconds is not None] or parts
    used = dict.fromkeys(device for one in timed for device in one.devices)
    where = next(iter(used)) if len(used) == 1 else counted(len(used), "device")
    step_s = plan.prediction.step_s
    step = "" if step_s is None else f", {seconds_text(step_s)} a step"
    return f"{plan.kind} on {where}{step}"


def top_lines(
    plan: PlacementPlan, most: int, *, of_file: bool = False, by_time: bool = True
) -> list[str]:
    """The plan and its alternatives, ascending by what is to be little, and why there are fewer
    than were asked for. The plan is not the first where others are a little faster but
    more complex.

    Args:
        of_file: The plan was written, with as many as were asked for then.
        by_time: Steps are to be short (`plan.objective`); else their device time is to be little.
    """
    if plan.prediction.step_s is None:
        choice = local_choice(plan)
        if choice is None or plan.kind == "temporal":
            return ["models take turns on one device: there is one plan"]
        return [f"there is one plan: {plan.kind}, {choice}"]
    best = "; ".join(
        f"{one.node} on {len(one.devices)} ({one.layout.describe()})"
        for one in plan.operations
        if one.seconds is not None
    )
    if plan.schedule is None:
        best = str(local_choice(plan))
    lines = []
    if any(one.source == "assumed" for one in plan.prediction.confidence):
        lines = ["seconds are estimated from assumed times; `flowrl profile` measures them"]
    others = plan.alternatives[: most - 1]
    step_s: float | None = plan.prediction.step_s
    mine = (step_s if by_time else plan.prediction.device_s) or math.inf
    rows = [(mine, step_s, plan.kind, best, "the plan")]
    for other in others:
        least = other.step_s if by_time else other.device_s
        rows.append((least or math.inf, other.step_s, other.kind, other.summary, other.why_not))
    rows.sort(key=lambda row: row[0])
    for number, (least, step, kind, summary, why) in enumerate(rows, start=1):
        time = "-" if step is None else seconds_text(step)
        time += "" if by_time else f", {device_seconds(least)}"
        is_first = number == 1 and why == "the plan"
        lines.append(f"{number}. {kind}, {time}: {summary}" + ("" if is_first else f": {why}"))
    found = 1 + len(plan.alternatives)
    if found < most:
        lines.append(f"only {found} {_why_fewer(plan, found, most, of_file=of_file)}")
    return lines


def _why_fewer(plan: PlacementPlan, found: int, most: int, *, of_file: bool) -> str:
    if of_file:
        verb = "is" if found == 1 else "are"
        return f"{verb} in the file: flowrl plan CONFIG --top {most} looks for more"
    differ = "differs" if found == 1 else "differ"
    if plan.schedule is None:
        return f"{differ}: no other way to generate fits here and is allowed"
    pins = " that pins leave" if plan.pins else ""
    return (
        f"{differ}: of the best schedules{pins}, all others have "
        "the kind, chunks, devices, layouts and recomputation of one of these"
    )


def fewest_lines(size: Size, job: Job) -> list[str]:
    """How many devices a job needs, and what it is then."""
    nodes = -(-size.devices // job.node_size)
    where = f"{nodes} nodes" if nodes > 1 else f"a node of {job.node_size}"
    if size.devices < job.node_size:
        where = f"of {where}"
    return [
        f"at least {size.devices} x {job.spec.name} ({where})",
        f"  a step takes {seconds_text(size.step_s)}, {device_seconds(size.device_s)}",
        f"  {_host_line(job)}",
        *(f"  {note}" for note in efficiency_note(job.spec)),
        *([f"  a device fills up to {size.host}"] if size.host else []),
        *([f"  looked at {size.thinned}"] if size.thinned else []),
        *([f"  devices idle, for {size.uneven}"] if size.uneven else []),
        *(f"  {line}" for line in schedule_lines(size.schedule, size.kind)),
        *(f"  {task}: {words}" for task, words in size.ways),
    ]


def _host_line(job: Job) -> str:
    """What hosts can hold of a model (offload), on which the answer may rest, and who says so."""
    if job.host is None:
        return (
            f"hosts of {format_bytes(HOST_BYTES)} and {HOST_CORES} cores for {job.node_size} "
            "devices are assumed; --cluster FILE says others"
        )
    return f"hosts as the cluster has them: each device may fill {format_bytes(job.host)} of one"


def sweep_lines(found: Sequence[Size | int], job: Job) -> list[str]:
    """A table of what more devices give; speed-up is to the fewest that fit. Rows are marked
    in which devices idle for the size of the batch alone."""
    rows = [("devices", "a step", "speed-up", "of ideal", "device-s/sample", "idle", "schedule")]
    first: Size | None = None
    for one in found:
        if isinstance(one, int):
            rows.append((str(one), "does not fit", "-", "-", "-", "-", "-"))
            continue
        first = first or one
        faster = first.step_s / one.step_s
        rows.append(
            (
                str(one.devices) if one.used == one.devices else f"{one.devices} ({one.used} used)",
                seconds_text(one.step_s),
                f"{faster:.2f}",
                f"{100 * faster * first.devices / one.devices:.0f} %",
                f"{one.device_s:.2f}",
                percent(one.idle_share, 1),
                f"{one.kind} *" if one.uneven else one.kind,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        f"on {job.spec.name}",
        *(
            "  "
            + "  ".join(
                cell.rjust(width) if i < len(row) - 1 else cell
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ),
        *(
            f"* devices idle, for {one.uneven}"
            for one in found
            if isinstance(one, Size) and one.uneven
        ),
        *_thinned_lines(found),
        _host_line(job),
        *efficiency_note(job.spec),
    ]


def _thinned_lines(found: Sequence[Size | int]) -> Iterator[str]:
    """Where not every schedule was looked at, and what was."""
    rules: dict[str, list[str]] = {}
    for one in found:
        if isinstance(one, Size) and one.thinned:
            rules.setdefault(one.thinned, []).append(str(one.devices))
    for rule, devices in rules.items():
        yield f"of {', '.join(devices)} devices: looked at {rule}"
