"""Judging groups, and what a step's rows say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flowrl as fl
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import CheckpointError, SchedulerError
from flowrl.graph import Graph
from flowrl.ids import GroupId, NodeId, RoleName, SampleId, group_id
from flowrl.runtime.driver.collected_batch import CollectedBatch
from flowrl.runtime.driver.filters import GroupJudge, group_judge
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart
from flowrl.runtime.driver.payloads import GroupRows, Payload, StepBatch, receive_rollout
from flowrl.runtime.driver.rollout_tree import drop_incomplete, joined_rollouts
from flowrl.runtime.driver.stage import part_of
from flowrl.runtime.driver.step_report import GeneratedRollout
from flowrl.runtime.driver.streaming_tree import checked_ages
from flowrl.specs import FinishReason
from tests.runtime.node_world import Worker, lowered, program_of
from tests.runtime.test_rollouts import prompts
from tests.runtime.test_tree_collection import CRITIQUE, DRAFT


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


@fl.workflow
def shaped(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward):
    rollout = actor.generate(prompts)
    scores = fl.weighted_sum((verifier.score(rollout), 1.0), (judge.score(rollout), 0.5))
    first, scores = fl.filter.zero_variance(rollout, scores)
    scores = fl.shaping.soft_overlong(scores, first, max_tokens=4, buffer=2)
    second, scores = fl.filter.difficulty(first, scores, low=0.0, high=1.2)
    actor.update(second, scores)


def drawn(scores: list[list[tuple[float, float]]], lengths: list[int]) -> list[GroupRows]:
    """Groups with the scores of verifier and judge, and a length of all their responses."""
    rows: list[GroupRows] = []
    for index, (pairs, length) in enumerate(zip(scores, lengths, strict=True)):
        row = Row(
            index=index, prompt="", answer="", solution="", fields={}, where=f"rows:{index + 1}"
        )
        group = group_id(0, index)
        item = PromptItem(
            epoch=0, index=index, group=group, row=row, prompt_ids=np.array([1], np.int64)
        )
        members = [
            (
                SampleId(f"{group}/{i}"),
                Payload(
                    item=item,
                    tokens=np.arange(length),
                    logprobs=np.zeros(length, np.float32),
                    finish=FinishReason.STOP,
                    scores={RoleName("verifier"): a, RoleName("judge"): b},
                ),
            )
            for i, (a, b) in enumerate(pairs)
        ]
        rows.append((group, members))
    return rows


def test_filters_judge_what_maps_make_of_several_scores():
    graph = lowered(shaped)
    program = program_of(graph, {"actor": Worker()})
    judge = group_judge(program.parts, program.parts.rollouts[0], program.run_node)
    assert judge is not None
    groups = drawn(
        [
            [(1.0, 0.0), (0.5, 1.0)],  # both sum to 1
            [(1.0, 0.0), (0.0, 1.0)],  # 1 and 0.5, short
            [(1.0, 1.0), (1.0, 0.0)],  # 1.5 and 1: a mean of 1.25, but for the length
            [(1.0, 1.0), (1.0, 0.0)],
        ],
        lengths=[2, 2, 2, 3],
    )
    assert judge(groups) == ["zero_variance", None, "difficulty", None]
    told = [[payload.judged[NodeId("filter.2")] for _, payload in rows] for _, rows in groups]
    assert told == [[1.0, 1.0], [1.0, 0.5], [1.5, 1.0], [1.0, 0.5]]


def test_what_a_filter_judged_is_what_the_batch_gets():
    graph = lowered(shaped)
    program = program_of(graph, {"actor": Worker()})
    (part,) = program.parts.rollouts
    judge = group_judge(program.parts, part, program.run_node)
    groups = drawn([[(1.0, 0.0), (0.0, 1.0)]], lengths=[3])
    assert judge is not None
    judge(groups)
    step = StepBatch()
    receive_rollout(program.parts, part, step, groups)
    assert step.values[NodeId("filter.2"), "score"].tolist() == [0.5, 0.0]
    assert len(step.sets[NodeId("filter.2")]) == 2


@fl.workflow
def beside(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    greedy = actor.generate(prompts, n=1, temperature=0)
    advantages = fl.advantage.remax(
        verifier.score(rollout), rollout, baseline=verifier.score(greedy)
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.reinforce())


def test_a_prompt_that_one_of_two_rollouts_lost_is_dropped_from_the_other():
    parts = GraphParts(lowered(beside))
    assert joined_rollouts(parts) == [{"actor.generate", "actor.generate.2"}]
    pair = [(1.0, 0.0), (1.0, 0.0)]
    groups = drawn([[(1.0, 0.0)], [(0.0, 0.0)], [(0.5, 0.0)], pair, pair], lengths=[1] * 5)
    ready, taken_out = groups[:3], groups[3:]
    sampled, greedy = (
        GeneratedRollout(
            part=part, items=[], collected=CollectedBatch(groups=list(rows)), version=0
        )
        for part, rows in zip(
            parts.rollouts, (ready, [*ready[:1], *ready[2:], *groups[4:]]), strict=True
        )
    )
    # Of two groups that a filter took out of the first, the second has one.
    sampled.collected.num_filtered_groups = 2
    sampled.collected.filtered = [
        (sample, payload, "dull") for _, members in taken_out for sample, payload in members
    ]
    drop_incomplete([sampled, greedy], joined_rollouts(parts))
    assert [group for group, _ in sampled.collected.groups] == ["0/0", "0/2"]
    assert [(sample, reason) for sample, _, reason in sampled.collected.dropped] == [
        (sample, "no_counterpart") for sample in ("0/1/0", "0/3/0", "0/3/1")
    ]
    assert [(sample, reason) for sample, _, reason in sampled.collected.filtered] == [
        ("0/4/0", "dull"),
        ("0/4/1", "dull"),
    ]
    assert sampled.collected.num_filtered_groups == 1
    assert len(greedy.collected.groups) == 3
    assert greedy.collected.dropped == []


def test_rollouts_that_no_node_compares_are_left_alone():
    assert joined_rollouts(GraphParts(lowered(shaped))) == []


def aged(part: RolloutPart, group: str, *spans: tuple[tuple[int, int], ...]) -> GeneratedRollout:
    """One group, delivered at version 7, whose samples have these version spans."""
    (item,) = prompts(1)
    members = [
        (
            SampleId(f"{group}/{i}"),
            Payload(item=replace(item, group=GroupId(group)), versions=versions),
        )
        for i, versions in enumerate(spans)
    ]
    collected = CollectedBatch(groups=[(GroupId(group), members)], version=7)
    return GeneratedRollout(part=part, items=[], collected=collected, version=7)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_consumed_sample_is_as_old_as_its_oldest_token_and_no_older_than_allowed(staleness: int):
    allowed, limits = 7 - staleness, {DRAFT.node.id: staleness}
    drafts = aged(DRAFT, "0/3", ((7, 3),), ((allowed, 1), (7, 8)), ((7, 2), (allowed, 1)), ())
    expected = {0: 2, staleness: 2} if staleness else {0: 4}
    assert checked_ages([drafts], limits) == expected
    with pytest.raises(SchedulerError, match=f"at most {staleness} publication") as caught:
        checked_ages([aged(DRAFT, "0/3", ((7, 3),), ((allowed - 1, 1), (7, 9)))], limits)
    assert caught.value.where == "sample 0/3/1 of actor.generate"


def test_a_child_is_as_old_as_what_its_prompt_was_made_of():
    drafts = aged(DRAFT, "0/3", ((5, 3),), ((7, 8),))
    critiques = aged(CRITIQUE, "0/3/0", ((7, 3),), ((6, 1), (7, 2)))
    limits = {DRAFT.node.id: 2, CRITIQUE.node.id: 2}
    assert checked_ages([drafts, critiques], limits) == {0: 1, 2: 3}
    with pytest.raises(SchedulerError, match=r"0/3/0/0 of critic\.generate"):
        checked_ages([drafts, critiques], {**limits, CRITIQUE.node.id: 1})


def test_a_missing_part_of_a_checkpoint_is_named():
    assert part_of({"cursor": {"epoch": 1}}, "cursor") == {"epoch": 1}
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        part_of({"cursor": {}}, "scheduler")
    with pytest.raises(CheckpointError, match="holds no cursor"):
        part_of({"cursor": 3}, "cursor")
