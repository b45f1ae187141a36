"""Judging groups, and what a step's rows say."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import CheckpointError
from flowrl.graph import Graph
from flowrl.ids import GroupId, SampleId
from flowrl.runtime.judge import GroupJudge, group_judge
from flowrl.runtime.payloads import Payload
from flowrl.runtime.rollout_parts import GraphParts
from flowrl.runtime.stage import part_of
from tests.runtime.node_world import lowered


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


def judge_of(graph: Graph) -> GroupJudge | None:
    parts = GraphParts(graph)
    return group_judge(parts, parts.rollouts[0], lambda node, step: None)


def scored(groups: list[list[float]]) -> list[tuple[GroupId, list[tuple[SampleId, Payload]]]]:
    """Groups whose samples `verifier` gave these scores."""
    rows = []
    for index, scores in enumerate(groups):
        payloads = [Payload(item=None, scores={"verifier": score}) for score in scores]
        members = [(f"0/{index}/{i}", payload) for i, payload in enumerate(payloads)]
        rows.append((f"0/{index}", members))
    return rows


def test_a_graph_without_filters_judges_nothing():
    assert judge_of(lowered(unfiltered)) is None


def test_groups_of_equal_scores_are_filtered_with_the_reason_and_others_kept():
    judge = judge_of(lowered(filtered))
    assert judge is not None
    groups = scored([[1.0, 1.0], [0.0, 1.0], [0.5], [0.25, 0.25, 0.25]])
    reason = "zero_variance"
    assert judge(groups) == [reason, None, reason, reason]


def test_a_missing_part_of_a_checkpoint_is_named():
    assert part_of({"cursor": {"epoch": 1}}, "cursor") == {"epoch": 1}
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        part_of({"cursor": {}}, "scheduler")
    with pytest.raises(CheckpointError, match="holds no cursor"):
        part_of({"cursor": 3}, "cursor")
