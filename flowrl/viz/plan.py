"""A plan as one page: a step over time, memory by phase, alternatives and reasons.

Blocks of the timeline lead to their costs and reasons further down, by links; the page has no
scripts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.cost import format_bytes
from flowrl.plan import PlacementPlan
from flowrl.plan.explain.top import one_line
from flowrl.plan.prediction import CostSource, PredictedMemory, PredictedSpan
from flowrl.plan.show.many import seconds_text
from flowrl.plan.show.plan import not_here, step_sentences
from flowrl.viz.labels import ROLE_COLOURS, RoleColour
from flowrl.viz.page import render_page
from flowrl.wording import percent

_WIDTH = 1000
"""Units of the picture for the time of a step."""
_LANE = 46
_CHARACTER = 6.6
_MEMORY_REM = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A bar of the timeline, in units of the picture, and its place in the table of costs."""

    node: str
    place: int
    x: float
    y: float
    width: float
    lines: Sequence[str]
    title: str
    colour: RoleColour
    is_bottleneck: bool


def render_plan(plan: PlacementPlan) -> str:
    """Returns the page of a plan."""
    prediction = plan.prediction
    rows = _rows(prediction.timeline or ())
    end_s = max((span.end_s for span in prediction.timeline or ()), default=0.0)
    end_s = max(end_s, prediction.step_s or 0.0)
    alternatives = sorted(plan.alternatives, key=lambda each: (each.step_s is None, each.step_s))
    values = {
        "title": f"plan of {plan.graph}",
        "blockers": not_here(plan),
        "summary": one_line(plan),
        "facts": _facts(plan),
        "rows": [(device, at * _LANE, len(lanes) * _LANE) for device, at, lanes in rows],
        "blocks": [block for row in rows for block in _blocks(plan, row, end_s)],
        "ticks": [(_WIDTH * i / 5, seconds_text(end_s * i / 5)) for i in range(6)],
        "width": _WIDTH,
        "height": sum(len(lanes) for _, _, lanes in rows) * _LANE,
        "costs": [_cost(plan, cost) for cost in prediction.confidence],
        "memory": [_memory(plan, entry) for entry in prediction.memory],
        "alternatives": [
            (each.kind, "" if each.step_s is None else seconds_text(each.step_s), each.summary,
             each.why_not)
            for each in alternatives
        ],
        "step": step_sentences(plan),
        "reasons": plan.reasons,
        "notes": [note for note in plan.notes if note not in not_here(plan)],
    }  # fmt: skip
    return render_page("plan.html", values, styles=("page.css",))


_Row = tuple[str, int, Sequence[Sequence[PredictedSpan]]]
"""The devices, the number of lanes above, and the lanes, in which no span overlaps another."""


def _rows(timeline: Sequence[PredictedSpan]) -> list[_Row]:
    rows: list[_Row] = []
    above = 0
    for device in dict.fromkeys(span.device for span in timeline):
        lanes: list[list[PredictedSpan]] = []
        for span in sorted(timeline, key=lambda each: (each.begin_s, each.end_s)):
            if span.device == device:
                free = (lane for lane in lanes if lane[-1].end_s <= span.begin_s + 1e-9)
                lane = next(free, None)
                if lane is None:
                    lanes.append(lane := [])
                lane.append(span)
        rows.append((device, above, lanes))
        above += len(lanes)
    return rows


def _blocks(plan: PlacementPlan, row: _Row, end_s: float) -> list[_Block]:
    device, above, lanes = row
    nodes = [cost.node for cost in plan.prediction.confidence]
    blocks = []
    for at, lane in enumerate(lanes):
        for span in lane:
            seconds = seconds_text(span.end_s - span.begin_s)
            width = _WIDTH * (span.end_s - span.begin_s) / end_s if end_s else 0.0
            room = int(width / _CHARACTER)
            short = next((name for name in _names(span.node) if len(name) <= room), None)
            blocks.append(
                _Block(
                    node=span.node,
                    place=nodes.index(span.node) if span.node in nodes else -1,
                    x=round(_WIDTH * span.begin_s / end_s, 2) if end_s else 0.0,
                    y=(above + at) * _LANE,
                    width=round(max(width, 1.0), 2),
                    lines=[short, seconds] if short is not None else [],
                    title=f"{span.node} on {device}\n{seconds}, from {seconds_text(span.begin_s)} "
                    f"to {seconds_text(span.end_s)}",
                    colour=_colour(plan, span.node),
                    is_bottleneck=span.node == plan.prediction.bottleneck,
                )
            )
    return blocks


def _names(node: str) -> tuple[str, str]:
    """`actor.update`, `update`."""
    return node, node.partition(".")[2] or node


def _colour(plan: PlacementPlan, node: str) -> RoleColour:
    roles = [placement.role for placement in plan.placements]
    owner = {operation.node: operation.role for operation in plan.operations}.get(node)
    place = roles.index(owner) if owner in roles else len(roles)
    return ROLE_COLOURS[place % len(ROLE_COLOURS)]


def _facts(plan: PlacementPlan) -> list[str]:
    prediction = plan.prediction
    facts = []
    if prediction.bottleneck is not None:
        facts.append(f"the step waits most for {prediction.bottleneck}")
    if prediction.idle_share is not None:
        facts.append(f"devices are idle for {percent(prediction.idle_share, 1)} of it")
    if prediction.sync_s is not None:
        facts.append(f"new weights take {seconds_text(prediction.sync_s)}")
    if prediction.tokens_per_device_s is not None:
        facts.append(f"{prediction.tokens_per_device_s:,.0f} tokens a second and device")
    return facts


def _cost(plan: PlacementPlan, cost: CostSource) -> dict[str, object]:
    reasons = [reason for reason in plan.reasons if reason.subject == cost.node]
    return {
        "node": cost.node,
        "seconds": seconds_text(cost.seconds),
        "source": f"{cost.source}, {cost.assumed}" if cost.assumed else cost.source,
        "parts": [(name, seconds_text(seconds)) for name, seconds in cost.parts],
        "reasons": [f"{reason.choice}: {reason.why}" for reason in reasons],
    }


def _memory(plan: PlacementPlan, entry: PredictedMemory) -> dict[str, object]:
    budget = next(
        (each.budget_bytes for each in plan.pool.devices if each.address == entry.device), 0
    )
    total = entry.memory.total
    many = f" and {entry.num_devices - 1} like it" if entry.num_devices > 1 else ""
    full = budget or total or 1
    return {
        "device": f"{entry.device}{many}",
        "phase": f"{entry.active} {entry.memory.phase}",
        "total": f"{format_bytes(total)} of {format_bytes(budget)}"
        if budget
        else format_bytes(total),
        "width": round(_MEMORY_REM * min(total / full, 1.0), 2),
        "whole": _MEMORY_REM,
        "parts": textwrap.fill(entry.memory.describe(), 120),
    }
