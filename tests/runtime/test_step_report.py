"""The row of a step names what removed its groups."""

from __future__ import annotations

from pathlib import Path

import flowrl as fl
from flowrl.ids import RoleName
from flowrl.observe.run_text import step_line
from flowrl.runtime.driver.collected_batch import CollectedBatch
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import StepBatch, receive_rollout, sample_set
from flowrl.runtime.driver.step_report import GeneratedRollout, StepReport
from tests.runtime.episode_worlds import tokenizer_in
from tests.runtime.node_world import Worker, lowered, program_of
from tests.runtime.test_stage import drawn


def report_of(parts: GraphParts, folder: Path) -> StepReport:
    tokenizer = tokenizer_in(folder)
    return StepReport("grpo", parts, RoleName("actor"), {parts.rollouts[0].node.id: tokenizer})


@fl.workflow
def bounded(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.difficulty(rollout, verifier.score(rollout), low=0.0, high=1.5)
    rollout, scores = fl.filter.difficulty(rollout, scores, low=0.5, high=1.0)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)


def test_groups_are_counted_by_what_removed_them_with_its_bounds(tmp_path: Path):
    groups = drawn([[(score, 0.0)] * 2 for score in (1.0, 0.0, 0.25, 0.75)], [3, 3, 3, 3])
    reasons = ("difficulty", "difficulty", "difficulty", "zero_variance")
    collected = CollectedBatch()
    for (_, members), reason in zip(groups, reasons, strict=True):
        for sample, payload in members:
            payload.score = 9.0  # of another role, which is reported
            collected.filtered.append((sample, payload, reason))
    parts = GraphParts(lowered(bounded))
    one = GeneratedRollout(part=parts.rollouts[0], items=[], collected=collected, version=0)
    report = report_of(parts, tmp_path)
    metrics = report.result(StepBatch(), [one], started=0.0).metrics
    assert metrics.filtered_groups == 4
    assert metrics.filtered_by == {
        "filter:difficulty(low=0.5, high=1.0)": 2,
        "filter:difficulty(low=0.0, high=1.5)": 1,
        "filter:zero_variance(tolerance=1e-08)": 1,
    }
    assert type(metrics).from_json(metrics.to_json()) == metrics
    line = "no update, all 4 groups filtered by difficulty(low=0.5, high=1.0) and difficulty(low=0"
    assert line in step_line(metrics, 1, None)


def test_a_selection_that_takes_nothing_is_named_with_its_bound(tmp_path: Path):
    @fl.workflow
    def imitated(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        good, _ = fl.select.threshold(rollout, verifier.score(rollout), at_least=0.5)
        actor.update(good, loss=fl.loss.cross_entropy())

    collected = CollectedBatch(groups=drawn([[(0.0, 0.0)] * 2, [(0.25, 0.0)] * 2], [3, 3]))
    program = program_of(lowered(imitated), {"actor": Worker()})
    (part,) = program.parts.rollouts
    step = StepBatch()
    receive_rollout(program.parts, part, step, collected.groups)
    program.run(step)
    one = GeneratedRollout(part=part, items=[], collected=collected, version=0)
    report = report_of(program.parts, tmp_path)
    metrics = report.result(step, [one], started=0.0).metrics
    assert metrics.num_samples == 0
    assert metrics.filtered_by == {"select:threshold(at_least=0.5)": 2}


def test_a_step_without_a_row_of_the_data_that_is_learned_has_a_report():
    @fl.workflow
    def parts_of_rows(prompts: fl.Prompts, actor: fl.Policy):
        actor.update(fl.Examples.of(fl.where(prompts, row="topic", equals="maths")))

    program = program_of(lowered(parts_of_rows), {"actor": Worker()})
    (source,) = program.parts.sources
    step = StepBatch(sets={source.id: sample_set(source.id, [])})
    program.run(step)
    report = StepReport("sft", program.parts, RoleName("actor"), {})
    metrics = report.result(step, [], started=0.0).metrics
    assert (metrics.num_samples, metrics.num_tokens, metrics.loss) == (0, 0, None)
