"""A plan as one page: a step over time, memory by phase, alternatives and reasons.

Blocks of the timeline lead to their costs and reasons further down, by links; the page has no
scripts.
"""

from __future__ import annotations

import textwrap

from flowrl.cost import format_bytes
from flowrl.plan import PlacementPlan
from flowrl.plan.explain.top import one_line
from flowrl.plan.prediction import CostSource, PredictedMemory, PredictedSpan
from flowrl.plan.show.many import seconds_text
from flowrl.plan.show.plan import not_here, step_sentences
from flowrl.viz.gantt import Bar, gantt
from flowrl.viz.labels import ROLE_COLOURS, RoleColour
from flowrl.viz.page import render_page
from flowrl.wording import percent

_MEMORY_REM = 40


def render_plan(plan: PlacementPlan) -> str:
    """Returns the page of a plan."""
    prediction = plan.prediction
    timeline = prediction.timeline or ()
    end_s = max([span.end_s for span in timeline] + [prediction.step_s or 0.0])
    alternatives = sorted(plan.alternatives, key=lambda each: (each.step_s is None, each.step_s))
    values = {
        "title": f"plan of {plan.graph}",
        "blockers": not_here(plan),
        "summary": one_line(plan),
        "facts": _facts(plan),
        "timeline": gantt([_bar(plan, span) for span in timeline], end_s),
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


def _bar(plan: PlacementPlan, span: PredictedSpan) -> Bar:
    nodes = [cost.node for cost in plan.prediction.confidence]
    seconds = seconds_text(span.end_s - span.begin_s)
    return Bar(
        row=span.device,
        begin_s=span.begin_s,
        end_s=span.end_s,
        names=(span.node, span.node.partition(".")[2] or span.node),
        note=seconds,
        title=f"{span.node} on {span.device}\n{seconds}, from {seconds_text(span.begin_s)} "
        f"to {seconds_text(span.end_s)}",
        colour=_colour(plan, span.node),
        href=f"cost-{nodes.index(span.node)}" if span.node in nodes else "",
        is_marked=span.node == plan.prediction.bottleneck,
    )


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
