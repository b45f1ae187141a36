"""Judging groups, and what a step's rows say."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import CheckpointError
from flowrl.runtime.stage import group_judge, part_of


@fl.workflow
def filtered(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)


@fl.workflow
def unfiltered(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, verifier.score(rollout))


def test_a_graph_without_filters_judges_nothing():
    assert group_judge(unfiltered.trace()) is None


def test_groups_of_equal_scores_are_filtered_with_the_reason_and_others_kept():
    judge = group_judge(filtered.trace())
    assert judge is not None
    groups = [[1.0, 1.0], [0.0, 1.0], [0.5], [0.25, 0.25, 0.25]]
    reason = "zero_variance"
    assert judge(groups) == [reason, None, reason, reason]


def test_a_missing_part_of_a_checkpoint_is_named():
    assert part_of({"cursor": {"epoch": 1}}, "cursor") == {"epoch": 1}
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        part_of({"cursor": {}}, "scheduler")
    with pytest.raises(CheckpointError, match="holds no cursor"):
        part_of({"cursor": 3}, "cursor")
