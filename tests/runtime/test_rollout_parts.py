"""What streams and what waits for the batch, and which samples a rollout hands over."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.graph import score_source
from flowrl.program.workflow import Workflow
from flowrl.runtime.driver.graph_parts import GraphParts
from tests.runtime.many_programs import greedy_baseline
from tests.runtime.node_world import lowered


def parts_of(workflow: Workflow) -> GraphParts:
    return GraphParts(lowered(workflow))


def names(nodes) -> list[str]:
    return [node.id for node in nodes]


@fl.workflow
def plain(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    actor.update(rollout, scores)


def test_a_filter_of_rule_scores_judges_groups_and_the_batch_has_what_it_keeps():
    parts = parts_of(plain)
    (part,) = parts.rollouts
    assert names(part.scorers) == ["verifier.score"]
    assert names(part.filters) == names(part.ends) == ["filter"]
    assert (part.kept, part.whole) == ("filter", False)
    assert names(parts.batch) == ["advantage", "actor.update", "actor.sync"]
    assert parts.origin("actor.update") == "actor.generate"


@fl.workflow
def logged(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    fl.log("all", scores)
    kept, kept_scores = fl.filter.zero_variance(rollout, scores)
    actor.update(kept, kept_scores)


def test_where_the_unfiltered_samples_are_read_too_the_filter_runs_on_the_batch_again():
    parts = parts_of(logged)
    (part,) = parts.rollouts
    assert (part.kept, part.whole) == ("actor.generate", True)
    assert names(part.ends) == ["filter"]
    batch = ["verifier.score", "log.all", "filter", "advantage", "actor.update", "actor.sync"]
    assert names(parts.batch) == batch


@fl.workflow
def summed(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward):
    rollout = actor.generate(prompts)
    scores = fl.weighted_sum((verifier.score(rollout), 1.0), (judge.score(rollout), 0.5))
    shaped = fl.shaping.soft_overlong(scores, rollout, max_tokens=8, buffer=4)
    first, scores = fl.filter.zero_variance(rollout, shaped)
    second, scores = fl.filter.difficulty(first, scores)
    actor.update(second, scores)


def test_maps_of_one_sample_alone_are_made_before_the_filters_that_read_them():
    parts = parts_of(summed)
    (part,) = parts.rollouts
    assert names(part.scorers) == ["verifier.score", "judge.score"]
    assert names(part.maps) == ["map", "map.2"]
    assert names(part.filters) == ["filter", "filter.2"]
    assert names(part.ends) == ["filter.2"]
    assert part.kept == "filter.2"
    assert parts.chain(part.ends[0]) == ("filter.2", "filter")
    assert names(parts.batch) == ["advantage", "actor.update", "actor.sync"]
    source = score_source(parts.graph, "advantage")
    assert source is not None
    assert source.id == "map.2"


@fl.map(reads=("score", "row.answer", "text"), gives="score", per_sample=True)
def matched(batch):
    return batch["score"] + (batch["text"] == batch["row.answer"])


@fl.workflow
def read_rows(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = matched(verifier.score(rollout), rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)


def test_a_filter_behind_a_map_of_texts_and_rows_judges_groups_as_they_are_scored():
    (part,) = parts_of(read_rows).rollouts
    assert names(part.maps) == ["map"]
    assert names(part.ends) == ["filter"]
    assert part.kept == "filter"


@fl.map(reads="score", gives="score")
def centred(batch):
    return batch["score"] - batch["score"].mean()


@fl.workflow
def of_the_batch(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, centred(verifier.score(rollout)))
    actor.update(rollout, scores)


def test_a_filter_behind_a_map_of_the_whole_batch_waits_for_the_batch():
    parts = parts_of(of_the_batch)
    (part,) = parts.rollouts
    assert part.filters == part.maps == ()
    assert part.kept == "actor.generate"
    assert names(parts.batch)[:3] == ["verifier.score", "map", "filter"]


@fl.workflow
def modelled(prompts: fl.Prompts, actor: fl.Policy, model: fl.RewardModel):
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, model.score(rollout))
    actor.update(rollout, scores)


def test_a_filter_of_a_models_scores_waits_for_the_batch():
    parts = parts_of(modelled)
    (part,) = parts.rollouts
    assert part.scorers == part.filters == ()
    assert names(parts.batch)[:2] == ["model.score", "filter"]


def test_each_rollout_has_a_part_of_its_own():
    parts = parts_of(greedy_baseline)
    assert [part.node.id for part in parts.rollouts] == ["actor.generate", "actor.generate.2"]
    assert [names(part.scorers) for part in parts.rollouts] == [
        ["verifier.score"],
        ["verifier.score.2"],
    ]
    assert parts.origin("advantage") == "actor.generate"


@fl.workflow
def two_ways(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    hard, hard_scores = fl.filter.difficulty(rollout, scores, high=0.5)
    easy, easy_scores = fl.filter.difficulty(rollout, scores, low=0.5)
    actor.update(hard, hard_scores)
    actor.update(easy, easy_scores)


def test_filters_side_by_side_share_the_rollout_and_a_group_stays_where_either_keeps_it():
    (part,) = parts_of(two_ways).rollouts
    assert names(part.ends) == ["filter", "filter.2"]
    assert (part.kept, part.whole) == ("actor.generate", True)


@fl.workflow
def played(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)


def test_an_episode_is_a_rollout_whose_player_generates_and_whose_environment_scores():
    (part,) = parts_of(played).rollouts
    assert (part.node.id, part.generate_node.id) == ("game.interact", "actor.generate")
    assert part.scorers == ()
    assert part.kept == "filter"


@fl.workflow
def of_data(examples: fl.Examples, pairs: fl.Pairs, actor: fl.Policy, model: fl.RewardModel):
    actor.update(examples)
    model.update(pairs, loss=fl.loss.bradley_terry())


def test_data_with_responses_is_worked_on_as_it_is():
    parts = parts_of(of_data)
    assert parts.rollouts == ()
    assert names(parts.sources) == ["examples", "pairs"]
    assert names(parts.batch) == ["actor.update", "model.update"]


@pytest.mark.parametrize("workflow", [plain, logged, summed, of_the_batch, two_ways, played])
def test_every_node_is_drawn_or_run_once(workflow: Workflow):
    parts = parts_of(workflow)
    run = set(names(parts.batch))
    for part in parts.rollouts:
        drawn = {part.node.id, part.generate_node.id, part.source}
        drawn |= set(names((*part.scorers, *part.filters, *part.maps)))
        run |= drawn
    assert run == set(names(parts.graph.nodes))
