"""Rollouts from rollouts in a simulation, and what they ask of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.compiler import CompiledStage, lower
from flowrl.cost.demand import mean_prompt, prompt_bound, samples_per_prompt
from flowrl.graph import Op
from flowrl.sim.faults import Faults, RewardFaults
from flowrl.sim.model import SimModel
from flowrl.sim.of_plan import longest_response, model_of_stage, rollout_nodes
from flowrl.sim.report import SimReport
from flowrl.sim.rollouts_of_plan import prompt_lengths
from flowrl.sim.run import simulate
from flowrl.sim.times import StageTimes, assumed_times
from flowrl.sim.workload import open_workload
from flowrl.specs import Sampling
from tests.runtime.tree_programs import kept_drafts, refinement, tree_of


def stage_of(program: str, tmp_path: Path, **train: object) -> CompiledStage:
    config = tree_of(program, tmp_path)
    config["train"] |= train
    if train.get("max_staleness") and program != "chain_of_one":
        config["args"] = {"ahead": True}
    return fl.compile(None, config).stages[-1]


def simulated(
    stage: CompiledStage,
    model: SimModel,
    times: StageTimes,
    steps: int = 2,
    faults: Faults | None = None,
) -> SimReport:
    workloads = {}
    for node in rollout_nodes(stage.graph):
        longest = longest_response(stage, node)
        workloads[node.id] = open_workload(
            "lognormal:mean=8,sigma=1",
            stage=stage.name,
            rollout=node.id,
            seed=0,
            prompts=prompt_lengths(stage.graph, node, times, longest),
            longest=longest,
        )
    return simulate(model, steps=steps, workloads=workloads, faults=faults)


def test_children_are_drawn_while_other_parents_still_are(tmp_path: Path):
    stage = stage_of("chain_of_one", tmp_path, sampling={"max_tokens": 40})
    times = assumed_times(stage)
    model = model_of_stage(stage, times)
    draft, second = model.rollouts
    assert (draft.parent, second.parent) == (None, draft.name)
    beside = simulated(stage, model, times)
    assert beside.samples["consumed"] == 2 * (16 + 16)
    in_turns = [replace(rollout, parent=None) for rollout in model.rollouts]
    behind = simulated(stage, replace(model, rollouts=tuple(in_turns)), times)
    assert behind.samples == beside.samples
    # One engine draws both: what is short does not wait for the longest.
    assert beside.engines["steps"] < 0.9 * behind.engines["steps"]


def test_what_a_filter_keeps_is_answered_when_its_batch_is_there_and_never_refilled(
    tmp_path: Path,
):
    stage = stage_of("kept_drafts", tmp_path, refill=True)
    times = assumed_times(stage)
    model = model_of_stage(stage, times)
    drafts, seconds = model.rollouts
    assert drafts.settings.refill
    assert not seconds.settings.refill
    assert (seconds.parent, seconds.of_kept) == (drafts.name, True)
    assert simulated(stage, model, times).samples["consumed"] == 2 * (16 + 64)


def test_children_of_what_a_filter_keeps_run_ahead_with_its_batches(tmp_path: Path):
    stage = stage_of("kept_drafts", tmp_path, max_staleness=1)
    times = assumed_times(stage)
    model = model_of_stage(stage, times)
    assert model.ahead == 1
    assert all(rollout.settings.budget or rollout.settings.named for rollout in model.rollouts)
    report = simulated(stage, model, times, steps=4)
    assert report.samples["consumed"] == 4 * (16 + 64)
    assert max(report.ages) == 1


def test_parts_of_the_data_and_several_rollouts_run_ahead_by_steps(tmp_path: Path):
    stage = stage_of("parts_of_the_data", tmp_path, max_staleness=1)
    times = assumed_times(stage)
    model = model_of_stage(stage, times)
    *_, others, second = model.rollouts
    assert model.ahead == 1
    assert all(rollout.settings.named for rollout in model.rollouts)
    assert second.parent == others.name
    report = simulated(stage, model, times, steps=4)
    a_step = 16 + 4 + 2 * 16
    assert report.samples["consumed"] == 4 * a_step
    assert [sum(step.ages.values()) for step in report.steps] == [32] * 4
    assert [max(step.ages) for step in report.steps] == [0, 1, 1, 1]


def test_prompts_that_are_made_of_samples_have_the_tokens_of_these_and_the_template():
    graph = lower(refinement)
    draft, critique, revision = graph.of_op(Op.GENERATE)
    sampling = Sampling(max_tokens=4)
    bounds = [prompt_bound(graph, node, 8, sampling) for node in (draft, critique, revision)]
    longest = 256  # of a response, as the lowered program has it
    assert bounds == [8, 8 + longest + 1, 8 + 2 * longest + 1 + 1 + 8 + 1]
    assert mean_prompt(graph, draft, 5.0, 3.0) == 5.0
    assert mean_prompt(graph, critique, 5.0, 3.0) == 5.0 + 3.0 + 1
    update = graph.node("rival.update")
    assert mean_prompt(graph, update, 5.0, 3.0) == 9.0
    kept = lower(kept_drafts)
    assert mean_prompt(kept, kept.of_op(Op.GENERATE)[1], 5.0, 3.0) == 9.0


def test_the_prompts_of_joined_sets_count_as_often_as_these_have_samples():
    @fl.workflow
    def joined(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
        draft = actor.generate(prompts, n=4)
        second = actor.generate(fl.prompts_of(draft, template="{prompt}{response}="), n=2)
        both = fl.concat(draft, fl.Examples.of(prompts), second, missing_logprob=0.0)
        actor.update(both, verifier.score(both))

    graph = lower(joined)
    (update,) = graph.of_op(Op.UPDATE)
    assert samples_per_prompt(graph, update, 1) == 4 + 1 + 4 * 2
    prompts = (4 + 1) * 5.0 + 4 * 2 * (5.0 + 3.0 + 1)
    assert mean_prompt(graph, update, 5.0, 3.0) == pytest.approx(prompts / 13)


def test_two_rollouts_of_one_policy_answer_the_same_samples_at_once(tmp_path: Path):
    stage = stage_of("two_answers", tmp_path, sampling={"max_tokens": 40})
    times = assumed_times(stage)
    model = model_of_stage(stage, times)
    draft, answers, greedy = model.rollouts
    assert answers.parent == greedy.parent == draft.name
    drafts = 4 * 2
    consumed = simulated(stage, model, times).samples["consumed"]
    assert consumed == 2 * (drafts + 2 * drafts + drafts)


def test_a_tree_runs_ahead_and_children_are_as_old_as_their_parents(tmp_path: Path):
    stage = stage_of("chain_of_one", tmp_path, max_staleness=2, sampling={"max_tokens": 40})
    times = assumed_times(stage)
    model = model_of_stage(stage, times)
    _, second = model.rollouts
    assert model.ahead == 2
    assert second.settings.named
    report = simulated(stage, model, times, steps=8)
    assert report.samples["consumed"] == 8 * (16 + 16)
    by_step = [step.ages for step in report.steps]
    assert max(max(ages) for ages in by_step) <= 2
    assert all(sum(ages.values()) == 32 for ages in by_step)
    # A sample and its child are learned together, and the child is not the younger one.
    assert max(by_step[-1]) > 0
    failing = Faults(rewards=RewardFaults(fail_share=0.1))
    lossy = simulated(stage, model, times, steps=8, faults=failing)
    assert lossy.samples["dropped"] > 0
    assert max(lossy.ages) <= 2
