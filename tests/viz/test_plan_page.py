"""The page of a plan: the timeline, what it leads to, and that no name is markup."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flowrl import api
from flowrl.plan import PlacementPlan
from flowrl.viz.plan import render_plan


@pytest.fixture(scope="module")
def plan(repository) -> PlacementPlan:
    """Generation runs ahead of the trainer, on other devices."""
    words = [
        f"cluster={repository / 'configs/clusters/h100_8x8.yaml'}",
        f"data.train={repository / 'tests/data/gsm8k_test.jsonl'}",
        "plan.kind=asynchronous",
        "train.max_staleness=1",
    ]
    compiled = api.compile(None, repository / "configs/grpo_qwen25_7b.yaml", overrides=words)
    return compiled.stages[-1].plan


def blocks(page: str) -> list[tuple[str, float, float, float, float]]:
    """The operation, x, y, width and border of each block."""
    found = re.findall(
        r"<title>(\S+) on [^<]*</title>\s*<rect x=\"(\S+)\" y=\"(\S+)\" width=\"(\S+)\" .*"
        r'stroke-width="(\d)"',
        page,
    )
    return [(node, *map(float, numbers)) for node, *numbers in found]


def test_the_timeline_has_a_block_for_each_span_in_its_place(plan):
    page = render_plan(plan)
    spans = plan.prediction.timeline
    drawn = blocks(page)
    assert sorted(block[0] for block in drawn) == sorted(span.node for span in spans)
    end_s = max(plan.prediction.step_s, *(span.end_s for span in spans))
    by_place = {(span.node, round(1000 * span.begin_s / end_s, 2)): span for span in spans}
    for node, x, _, width, border in drawn:
        span = by_place[node, x]
        assert width == pytest.approx(max(1, 1000 * (span.end_s - span.begin_s) / end_s), abs=0.01)
        assert (border == 3) == (node == plan.prediction.bottleneck)
    for at, (_, x, y, width, _) in enumerate(drawn):
        assert 0 <= x <= x + width <= 1001
        for _, other_x, other_y, other_width, _ in drawn[:at]:
            assert y != other_y or x + width <= other_x + 0.02 or other_x + other_width <= x + 0.02


def test_blocks_lead_to_their_costs(plan):
    page = render_plan(plan)
    targets = set(re.findall(r'href="#([^"]+)"', page))
    assert targets == {f"cost-{i}" for i in range(len(plan.prediction.confidence))}
    assert targets <= set(re.findall(r'id="([^"]+)"', page))
    for cost in plan.prediction.confidence:
        for name, _ in cost.parts:
            assert f"{name} " in page


def test_the_page_begins_with_what_cannot_run_here_and_names_the_bottleneck(plan):
    page = render_plan(plan)
    first = page.index("cannot run here: ")
    assert first < page.index("A step over time")
    assert page.count("cannot run here: ") == sum("cannot run" in note for note in plan.notes)
    assert f"the step waits most for {plan.prediction.bottleneck}" in page


def test_alternatives_are_sorted_by_their_time(plan):
    page = render_plan(replace(plan, alternatives=plan.alternatives[::-1]))
    steps = sorted(other.step_s for other in plan.alternatives)
    assert len(steps) > 1
    places = [
        page.index(other.summary + "</td><td>" + other.why_not)
        for other in sorted(plan.alternatives, key=lambda each: each.step_s)
    ]
    assert places == sorted(places)


def test_memory_is_shown_by_device_and_phase(plan):
    page = render_plan(plan)
    assert page.count('class="memory"') == len(plan.prediction.memory)
    for entry in plan.prediction.memory:
        many = f" and {entry.num_devices - 1} like it" if entry.num_devices > 1 else ""
        assert f"{entry.device}{many}: {entry.active} {entry.memory.phase}, " in page


def test_names_of_the_user_are_no_markup(plan):
    odd = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    spans = [replace(span, node=odd, device=odd) for span in plan.prediction.timeline]
    prediction = replace(plan.prediction, timeline=tuple(spans), bottleneck=odd)
    reasons = tuple(replace(reason, subject=odd, why=odd) for reason in plan.reasons)
    page = render_plan(
        replace(plan, graph=odd, prediction=prediction, reasons=reasons, notes=(odd,))
    )
    assert "<script" not in page
    assert "<img" not in page
    assert "plan of &lt;script&gt;" in page


def test_a_plan_for_this_machine_has_no_timeline_and_its_assumed_times(repository):
    cluster = f"cluster={repository / 'configs/clusters/laptop.yaml'}"
    compiled = api.compile(None, repository / "configs/quickstart.yaml", overrides=[cluster])
    page = render_plan(compiled.stages[-1].plan)
    assert "This plan has no timeline." in page
    assert "<td>assumed" in page
    assert "actor generates 64 prompts x 8 samples" in page
