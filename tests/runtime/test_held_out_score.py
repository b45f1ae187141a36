"""Whose score a held-out sample has: that from which the policy learns, never any that is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import flowrl as fl
from flowrl.config.rewards import RewardsConfig
from flowrl.config.roles import RoleConfig
from flowrl.errors import ConfigError
from flowrl.program.workflow import Workflow
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.step_report import reported_score
from flowrl.runtime.setup.evaluation import evaluated_rollout, held_out_score
from tests.runtime.node_world import lowered

EXACT, NUMERIC = {"kind": "exact_match"}, {"kind": "numeric_match"}


@fl.map(reads="score", gives="score", per_sample=True)
def doubled(batch):
    return 2 * batch["score"]


@fl.map(reads="score", gives="advantage")
def centred(batch):
    return batch["score"] - batch["score"].mean()


@fl.workflow
def played(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
    actor.update(rollout, doubled(scores))


@fl.workflow
def mapped_advantage(
    prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, verifier: fl.Reward
):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
    fl.log("rule", verifier.score(rollout))
    kept, scores = fl.filter.zero_variance(rollout, doubled(scores))
    actor.update(kept, advantages=centred(scores), loss=fl.loss.reinforce())


@fl.workflow
def by_rule(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, verifier: fl.Reward):
    rollout, _ = fl.interact(actor, game, prompts, max_turns=2)
    actor.update(rollout, doubled(verifier.score(rollout)))


@fl.workflow
def summed(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, verifier: fl.Reward):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
    actor.update(rollout, fl.weighted_sum((scores, 1.0), (verifier.score(rollout), 0.5)))


@fl.workflow
def selected(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    fl.log("judged", judge.score(rollout))
    best, _ = fl.select.top(rollout, verifier.score(rollout), k=1)
    actor.update(best, loss=fl.loss.cross_entropy())


@fl.workflow
def two_rewards(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = (judge.score(rollout), 1.0), (verifier.score(rollout), 1.0)
    actor.update(rollout, advantages=fl.advantage.normalise_then_sum(*scores))


@fl.workflow
def modelled(prompts: fl.Prompts, actor: fl.Policy, model: fl.RewardModel):
    rollout = actor.generate(prompts)
    actor.update(rollout, model.score(rollout))


@fl.workflow
def scored_and_plain(
    prompts: fl.Prompts, actor: fl.Policy, teacher: fl.Policy, verifier: fl.Reward
):
    rollout = actor.generate(prompts)
    plain = actor.generate(prompts, n=1)
    fl.log("teacher", teacher.logprobs(plain))
    actor.update(rollout, verifier.score(rollout))


def config(score: str | None = None, own_terms: bool = True, rules: bool = True):
    """What `held_out_score` reads of a config."""
    terms = {"judge": (NUMERIC,) if own_terms else None}
    roles = {
        name: RoleConfig(backend="verify", terms=terms.get(name)) for name in ("judge", "verifier")
    }
    roles["game"] = RoleConfig(backend="environment", environment="game.py:Game")
    rewards = RewardsConfig(terms=(EXACT,) if rules else ())
    return SimpleNamespace(
        roles=roles,
        rewards=rewards,
        eval=SimpleNamespace(score=score),
        terms_of=lambda role: (
            rewards.terms if roles[role].terms is None else roles[role].terms,
            "key",
        ),
    )


def role_of(workflow: Workflow, **options) -> str | None:
    parts = GraphParts(lowered(workflow))
    return held_out_score(config(**options), "actor", [parts])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workflow", "role"),
    [
        (played, "game"),
        (mapped_advantage, "game"),
        (by_rule, "verifier"),
        (selected, "verifier"),
        (modelled, None),
        (scored_and_plain, "verifier"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_it_is_that_of_the_role_behind_maps_filters_and_selections(workflow, role):
    assert role_of(workflow) == role


@pytest.mark.parametrize(
    ("workflow", "roles"), [(summed, "game, verifier"), (two_rewards, "judge, verifier")]
)
def test_of_several_the_config_says_which(workflow: Workflow, roles: str):
    with pytest.raises(ConfigError, match="may be that of several roles") as caught:
        role_of(workflow)
    assert f"found: {roles}, from which 'actor' learns" in str(caught.value)
    assert role_of(workflow, score="verifier") == "verifier"


def test_roles_with_the_same_terms_give_the_same_score():
    assert role_of(two_rewards, own_terms=False) == "judge"


@pytest.mark.parametrize(
    ("workflow", "expected"), [(played, "game"), (modelled, "nothing: rewards.terms score")]
)
def test_a_role_that_does_not_score_is_refused(workflow: Workflow, expected: str):
    with pytest.raises(ConfigError, match=f"expected: {expected}"):
        role_of(workflow, score="verifier")


def test_what_scores_another_stage_scores_where_the_config_has_no_terms_for_all():
    stages = [GraphParts(lowered(workflow)) for workflow in (selected, modelled)]
    with pytest.raises(ConfigError, match="several roles"):
        held_out_score(config(rules=False), "actor", stages)  # type: ignore[arg-type]
    alone = [GraphParts(lowered(workflow)) for workflow in (scored_and_plain, modelled)]
    assert held_out_score(config(rules=False), "actor", alone) == "verifier"  # type: ignore[arg-type]


def test_the_evaluated_rollout_is_one_that_is_scored():
    parts = GraphParts(lowered(scored_and_plain))
    evaluated = evaluated_rollout("actor", [parts])  # type: ignore[arg-type]
    assert evaluated is not None
    assert evaluated[1].node.id == "actor.generate"


def test_a_step_reports_the_score_that_its_selection_reads():
    parts = GraphParts(lowered(selected))
    node = reported_score(parts, parts.rollouts[0].node.id)
    assert node is not None
    assert node.id == "verifier.score"
