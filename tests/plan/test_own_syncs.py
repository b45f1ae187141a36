"""Where new weights take a good part of a step, layouts are chosen with what theirs take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrl.cost.lengths import ConstantLengths
from flowrl.graph import Graph
from flowrl.plan import PlanRequest, make_plan, own_syncs
from flowrl.plan.prediction import Prediction
from flowrl.plan.search import evaluate, leaves
from flowrl.plan.ways.plain_ways import with_option
from tests.plan.many_cases import h100, pinned, request, searched
from tests.sizes import every

SIZES = ("rollout.tp=1", "rollout.tp=2", "rollout.tp=4", "rollout.pp=4", "actor.tp=1", "actor.pp=2")


def short_answers(*pins: str, tokens: int = 6, prompts: int = 16, **changes: Any) -> PlanRequest:
    """Answers of a few tokens, so that a step is hardly longer than its sync."""
    lengths = ConstantLengths(tokens=tokens)
    wanted = request(lengths=lengths, prompt_tokens=50.0, alternatives=0, **changes)
    return pinned(replace(wanted, prompts_per_step=prompts, mini_batches=1), *pins)


@pytest.mark.parametrize(
    ("tokens", "prompts", "devices"), every(4, [(6, 8, 8), (6, 16, 16), (2, 16, 64), (60, 8, 32)])
)
def test_no_pinned_size_makes_a_shorter_step(grpo: Graph, tokens: int, prompts: int, devices: int):
    def planned(*pins: str) -> Prediction:
        asked = short_answers(*pins, tokens=tokens, prompts=prompts)
        return make_plan(grpo, asked, h100(devices)).prediction

    best = planned()
    assert best.step_s is not None
    assert best.sync_s is not None
    assert best.sync_s > 0.1 * best.step_s
    for pin in SIZES:
        other = planned(pin)
        assert other.step_s is not None
        assert best.step_s <= 1.01 * other.step_s, pin


def test_engines_take_a_layout_of_which_each_device_takes_less_and_the_plan_says_why(grpo: Graph):
    """With tp 4 alone a device takes a quarter of the weights, and with pp 4 too a sixteenth."""
    plan = make_plan(grpo, short_answers(), h100(64))
    layout = plan.operation("actor.generate").layout
    assert layout.tp * layout.pp > 4
    (why,) = (one for one in plan.reasons if one.subject == "actor.generate")
    assert any("weight sync takes " in one.constraint for one in why.rejected)


def test_where_weights_are_quick_beside_the_step_nothing_is_searched_again(
    grpo: Graph, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(own_syncs, "search_posed", refuse)
    lengths = ConstantLengths(tokens=2048)
    plan = make_plan(grpo, request(lengths=lengths, alternatives=0), h100(8)).prediction
    assert plan.step_s is not None
    assert plan.sync_s is not None
    assert 0 < plan.sync_s < 0.01 * plan.step_s


def test_plainer_ways_are_held_against_their_own_syncs(grpo: Graph):
    """A plainer layout that would make the sync longer by more than a hundredth of the step is
    not taken for being plain."""
    asked = request(alternatives=0)
    found = searched(grpo, asked, h100(16))
    posed, best = found.posed, found.best
    for leaf in leaves(best.schedule):
        for option in posed.problem.task(leaf.task).options:
            way = posed.candidate(leaf.task, option)
            if option.devices != leaf.option.devices or leaf.task != "actor.update":
                continue
            changed = with_option(best.schedule, leaf.task, option)
            layouts = {name: one.layout for name, one in best.ways.items()}
            sync_s = sum(
                own_syncs.own_syncs(
                    posed,
                    posed.travels,
                    {**layouts, leaf.task: way.layout},
                    dict.fromkeys(posed.travels, False),
                ).values()
            )
            evaluation = evaluate(posed.problem, changed)
            if evaluation.fits:
                assert best.step_s <= 1.01 * (evaluation.step_s - evaluation.sync_s + sync_s)
