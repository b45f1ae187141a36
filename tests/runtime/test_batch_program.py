"""Nodes of the batch part: what workers are given, which sets are made, what is steered."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.algo.advantages import Padding
from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.errors import RewardError
from flowrl.graph import Graph
from flowrl.ids import GroupId, NodeId
from flowrl.program.workflow import Workflow
from flowrl.runtime.driver.batch_nodes import turns_of
from flowrl.runtime.driver.filters import group_sizes
from flowrl.runtime.driver.payloads import SampleSet, StepBatch
from flowrl.runtime.groups import LocalGroup, resolved
from flowrl.runtime.trainers import Trainer
from flowrl.specs import Sampling
from tests.runtime.many_programs import greedy_baseline
from tests.runtime.node_world import MASK, OFFSETS, Worker, lowered, program_of, samples, step_with

ROLLOUT = NodeId("actor.generate")
SCORES = {"verifier": [1.0, 0.0, 0.5, 0.5]}
TOKENS = np.array(MASK, bool)


@fl.workflow
def critic(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(
        verifier.score(rollout), values, rollout, whiten=False, lam=1.0
    )
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def test_a_critic_is_given_the_returns_and_what_it_valued_before():
    workers = {"actor": Worker(), "critic": Worker()}
    program = program_of(lowered(critic), workers, mini_batches=2)
    program.run(step_with(samples(ROLLOUT, SCORES)))
    batches = [batch for batch, _ in workers["critic"].updates]
    assert len(batches) == len(workers["actor"].updates) == 2
    values = np.where(TOKENS, np.arange(14) / 10, 0)
    np.testing.assert_allclose(batches[0].old_values, values, rtol=1e-6)
    # With gamma and lambda 1 every token's target is the sample's score.
    scores = np.repeat(SCORES["verifier"], np.diff([0, 3, 5, 10, 14])) * TOKENS
    np.testing.assert_allclose(batches[0].returns, scores, atol=1e-6)
    advantages = workers["actor"].updates[0][0].advantages
    np.testing.assert_allclose(advantages, np.where(TOKENS, scores - values, 0), atol=1e-6)
    assert workers["critic"].stale


class ElsewhereGroup(LocalGroup):
    """Stands for workers that find batches elsewhere: their references are their own."""

    def _put(self, batch: SequenceBatch | TrainBatch) -> object:
        return ("elsewhere", batch)

    def call(self, method: str, *arguments: object) -> Future[Any]:
        return super().call(method, *(resolved(each, self._get) for each in arguments))

    @staticmethod
    def _get(handle: Any) -> object:
        place, batch = handle
        assert place == "elsewhere"
        return batch


def test_samples_are_put_where_each_kind_of_trainer_finds_them():
    workers = {"actor": Worker(), "critic": Worker()}
    workers["critic"].train = Trainer(ElsewhereGroup("critic.train", workers["critic"]))
    program_of(lowered(critic), workers).run(step_with(samples(ROLLOUT, SCORES)))
    for worker in workers.values():
        ((batch, _),) = worker.updates
        assert isinstance(batch.sequences, SequenceBatch)


def test_a_new_version_is_asked_after_its_update():
    @fl.workflow
    def again(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        scores = verifier.score(rollout)
        fl.log("before", actor.logprobs(rollout))
        new = actor.update(rollout, scores)
        fl.log("after", new.logprobs(rollout))

    class Moving(Worker):
        """Its logprobs are the number of its updates."""

        def logprobs(self, sequences: SequenceBatch, temperature: float) -> np.ndarray:
            return np.full(len(sequences.tokens), float(len(self.updates)), np.float32)

    step = step_with(samples(ROLLOUT, SCORES))
    program_of(lowered(again), {"actor": Moving()}).run(step)
    assert step.logged == {"before": 0.0, "after": 1.0}


@fl.workflow
def modelled(prompts: fl.Prompts, pairs: fl.Pairs, actor: fl.Policy, model: fl.RewardModel):
    rollout = actor.generate(prompts)
    actor.update(rollout, model.score(rollout))
    model.update(pairs, loss=fl.loss.bradley_terry())


def test_a_reward_model_scores_and_learns_from_pairs_that_no_mini_batch_separates():
    workers = {"actor": Worker(), "model": Worker()}
    program = program_of(lowered(modelled), workers, mini_batches=2)
    step = step_with(samples(ROLLOUT), samples("pairs"))
    step.values[NodeId("pairs"), "preferred"] = np.array([True, False, True, False])
    program.run(step)
    assert step.values[NodeId("model.score"), "score"].tolist() == [3, 2, 5, 4]
    (first, spec), (_, other) = workers["model"].updates
    assert first.preferred is not None
    assert first.preferred.tolist() == [True, False, True, False]
    assert (spec.mini_batches, other.mini_batches) == (((0, 1),), ((2, 3),))


class Silent(Worker):
    """A model to which all tokens are certain."""

    def logprobs(self, sequences, temperature):
        return np.zeros(len(sequences.tokens), np.float32)


@fl.workflow
def preferring(pairs: fl.Pairs, actor: fl.Policy, reference: fl.Policy):
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.5))


def test_the_margin_of_a_held_out_pair_is_that_of_scores_or_of_implicit_rewards():
    step = step_with(samples("pairs"))
    workers = {"actor": Worker(), "model": Worker(), "reference": Silent()}
    program = program_of(lowered(modelled), workers)
    update = program.parts.graph.node("model.update")
    assert program.pair_margins(update, step).tolist() == [1.0, 1.0]  # lengths 3, 2, 5, 4
    program = program_of(lowered(preferring), workers)
    margins = program.pair_margins(program.parts.graph.node("actor.update"), step)
    logprobs = np.where(MASK, -np.arange(14) / 7, 0)
    first, second, third, fourth = (logprobs[a:b].sum() for a, b in pairwise(OFFSETS))
    expected = [0.5 * (first - second), 0.5 * (third - fourth)]
    np.testing.assert_allclose(margins, expected, rtol=1e-6)
    assert not workers["actor"].updates


def baseline_of(order: list[int], scores: list[float]) -> SampleSet:
    """One greedy answer to each of the two prompts, in any order."""
    every = samples("actor.generate.2", {"verifier": [scores[0], 9, scores[1], 9]})
    return every.select(np.array([2 * group for group in order]))


def test_a_baseline_is_found_by_its_prompt_and_not_by_its_place():
    actor = Worker()
    program = program_of(lowered(greedy_baseline), {"actor": actor})
    drawn = samples(ROLLOUT, SCORES)
    program.run(step_with(drawn, baseline_of([1, 0], [0.25, 0.5])))
    advantages = actor.updates[0][0].advantages
    lengths = [3, 2, 5, 4]
    expected = np.repeat([0.75, -0.25, 0.0, 0.0], lengths) * TOKENS
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_a_prompt_without_its_baseline_is_named():
    program = program_of(lowered(greedy_baseline), {"actor": Worker()})
    with pytest.raises(RewardError, match="no baseline") as caught:
        program.run(step_with(samples(ROLLOUT, SCORES), baseline_of([0], [0.5, 0.5])))
    assert "group 0/1" in str(caught.value)


def test_logprobs_and_updates_have_the_temperature_of_the_rollout_that_they_read():
    @fl.workflow
    def two(prompts: fl.Prompts, actor: fl.Policy, ref: fl.Policy, verifier: fl.Reward):
        for temperature in (0.5, 2.0):
            rollout = actor.generate(prompts, temperature=temperature)
            actor_scores = verifier.score(rollout)
            rollouts.append((rollout, actor_scores, ref.logprobs(rollout)))
        for rollout, scores, reference in rollouts:
            actor.update(rollout, scores, reference=reference, kl=fl.kl.k3(0.1))

    rollouts: list = []
    graph = lowered(two)
    workers = {"actor": Worker(), "ref": Worker()}
    program = program_of(graph, workers)
    program._samplings = {
        node.id: node.attr("sampling") for node in graph.nodes if node.attr("sampling") is not None
    }
    program.run(step_with(samples(ROLLOUT, SCORES), samples("actor.generate.2", SCORES)))
    assert workers["ref"].temperatures == [0.5, 2.0]
    assert [spec.temperature for _, spec in workers["actor"].updates] == [0.5, 2.0]


@fl.workflow
def anchored(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    loss = fl.loss.policy_clip(anchor="old", correction=fl.loss.truncate(2.0))
    actor.update(rollout, verifier.score(rollout), loss=loss)


@pytest.mark.parametrize(
    ("context", "old", "policy"),
    [
        ({"mini_batches": 2}, "forward", "given"),
        ({"mini_batches": 1}, None, "own"),
        (
            {
                "mini_batches": 2,
                "trust_rollout_logprobs": True,
                "shares_weights": {"actor": True},
            },
            "drawn",
            "given",
        ),
    ],
)
def test_the_old_policy_s_logprobs_come_from_where_the_graph_says(
    context: dict, old: str | None, policy: str
):
    actor = Worker()
    program = program_of(lowered(anchored, **context), {"actor": actor}, mini_batches=1)
    program.run(step_with(samples(ROLLOUT, SCORES)))
    ((batch, spec),) = actor.updates
    assert spec.old_policy == policy
    assert batch.behaviour_logprobs is not None
    match old:
        case "forward":
            np.testing.assert_allclose(batch.old_logprobs, -np.arange(14) / 7, rtol=1e-6)
        case "drawn":
            np.testing.assert_array_equal(batch.old_logprobs, batch.behaviour_logprobs)
        case _:
            assert batch.old_logprobs is None


@fl.map(reads=("rollout_logprobs", "score"), gives=("surprise/tokens", "level/samples"))
def surprise(batch):
    return {"surprise": -batch["rollout_logprobs"], "level": 10 * batch["score"]}


@fl.loss.own(needs=("advantages",), extra=("surprise", "level"))
def weighed(logprobs, batch):
    return -batch.advantages * logprobs * batch.extra["surprise"] * batch.extra["level"]


@fl.workflow
def mapped(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    fields = surprise(rollout, scores)
    actor.update(rollout, scores, loss=weighed, extra=fields)


def test_an_own_loss_is_given_the_fields_of_a_map_token_by_token():
    actor = Worker()
    program_of(lowered(mapped), {"actor": actor}).run(step_with(samples(ROLLOUT, SCORES)))
    extra = actor.updates[0][0].extra
    np.testing.assert_allclose(extra["surprise"], np.where(TOKENS, np.arange(1, 15), 0))
    level = np.repeat([10, 0, 5, 5], [3, 2, 5, 4])
    np.testing.assert_allclose(extra["level"], np.where(TOKENS, level, 0))


@fl.workflow
def preferred(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    pairs = fl.select.best_and_worst(rollout, verifier.score(rollout))
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.1))


def test_a_selection_makes_pairs_with_the_better_sample_first():
    actor = Worker()
    scores = {"verifier": [0.0, 1.0, 0.5, 0.5]}
    step = step_with(samples(ROLLOUT, scores))
    program_of(lowered(preferred), {"actor": actor, "reference": Worker()}).run(step)
    ((batch, _),) = actor.updates
    assert batch.sequences.samples == ("0/0/1", "0/0/0")  # the second group has no better one
    assert batch.sequences.tokens.tolist() == [3, 4, 0, 1, 2]
    assert batch.preferred is not None
    assert batch.preferred.tolist() == [True, False]


@fl.workflow
def imitated(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    good, scores = fl.select.threshold(rollout, verifier.score(rollout), at_least=0.5)
    fl.log("good", scores)
    actor.update(good, loss=fl.loss.cross_entropy())


def test_a_threshold_hands_on_the_samples_that_reach_it_and_skips_an_update_without_any():
    actor, step = Worker(), step_with(samples(ROLLOUT, {"verifier": [0.25, 1.0, 0.5, 0.0]}))
    program_of(lowered(imitated), {"actor": actor}).run(step)
    ((batch, _),) = actor.updates
    assert batch.sequences.samples == ("0/0/1", "0/1/0")
    assert step.logged == {"good": 0.75}
    step = step_with(samples(ROLLOUT, {"verifier": [0.25, 0.0, 0.0, 0.0]}))
    program_of(lowered(imitated), {"actor": actor}).run(step)
    assert len(actor.updates) == 1
    assert step.skipped == ["log.good", "actor.update"]


@fl.workflow
def logged(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    fl.log("score", scores)
    fl.log("drawn", rollout)
    kept, kept_scores = fl.filter.zero_variance(rollout, scores)
    fl.log("kept", kept_scores)
    actor.update(kept, kept_scores)


def test_a_filter_on_the_batch_passes_its_fields_on_and_logs_are_means_of_each_set():
    actor = Worker()
    step = step_with(samples(ROLLOUT, SCORES))
    program_of(lowered(logged), {"actor": actor}).run(step)
    ((batch, _),) = actor.updates
    assert batch.sequences.samples == ("0/0/0", "0/0/1")
    assert batch.behaviour_logprobs is not None
    assert batch.behaviour_logprobs.tolist() == [0, -2, -3, 0, -5]
    drawn = float(-np.arange(1, 15)[TOKENS].mean())
    assert step.logged == {"score": 0.5, "kept": 0.5, "drawn": pytest.approx(drawn)}


def test_what_follows_on_an_empty_set_is_skipped_and_counted():
    actor = Worker()
    effects: list[str] = []
    step = step_with(samples(ROLLOUT, {"verifier": [1.0] * 4}))
    program_of(lowered(logged), {"actor": actor}, effects=effects).run(step)
    assert actor.updates == []
    assert effects == []  # nothing was trained, so nothing is published
    assert step.logged["score"] == 1.0
    assert step.skipped == ["log.kept", "advantage", "actor.update"]


@fl.workflow
def refreshed(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    logprobs = reference.logprobs(rollout)
    actor.update(rollout, verifier.score(rollout), reference=logprobs, kl=fl.kl.k3(0.1))
    reference.sync(actor, every=3)


def test_a_reference_is_refreshed_every_so_many_steps_after_the_update():
    effects: list[str] = []
    workers = {"actor": Worker(), "reference": Worker()}
    program = program_of(lowered(refreshed), workers, effects=effects)
    told = []
    for number in range(1, 7):
        program.run(step_with(samples(ROLLOUT, SCORES), number=number))
        told.append(list(effects))
        effects.clear()
    both = ["publish actor", "refresh reference of actor"]
    assert [sorted(each) for each in told] == [["publish actor"]] * 2 + [both] + [
        ["publish actor"]
    ] * 2 + [both]


def test_a_refresh_averages_and_resets_when_it_is_due():
    @fl.workflow
    def averaged(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        fl.log("reference", reference.logprobs(rollout))
        actor.update(rollout, verifier.score(rollout))
        reference.sync(actor, every=2, decay=0.9, reset_optimizer=True)

    effects: list[str] = []
    workers = {"actor": Worker(), "reference": Worker()}
    program = program_of(lowered(averaged), workers, effects=effects)
    for number in (1, 2):
        assert workers["actor"].resets == 0
        program.run(step_with(samples(ROLLOUT, SCORES), number=number))
    assert effects.count("refresh reference of actor with decay 0.9") == 1
    assert (workers["actor"].resets, workers["reference"].resets) == (1, 0)


@fl.map(reads=("score", "score_2"), gives="score")
def lead(batch):
    return batch["score"] - batch["score_2"]


def duel(combine) -> Graph:
    @fl.workflow
    def played(prompts: fl.Prompts, actor: fl.Policy, rival: fl.Policy, verifier: fl.Reward):
        mine, theirs = actor.generate(prompts), rival.generate(prompts)
        actor.update(mine, combine(verifier, mine, theirs))

    return lowered(played)


def rivals() -> StepBatch:
    return step_with(
        samples(ROLLOUT, SCORES), samples("rival.generate", {"verifier": [0.0, 1.0, 0.0, 0.25]})
    )


def test_a_map_compares_what_two_policies_made_of_the_same_prompts_by_place():
    step = rivals()
    graph = duel(lambda verifier, a, b: lead(verifier.score(a), verifier.score(b)))
    program_of(graph, {"actor": Worker(), "rival": Worker()}).run(step)
    assert step.values[NodeId("map"), "score"].tolist() == [1.0, -1.0, 0.5, 0.25]


TURN = [-1, 0, 0, -1, 0, -1, -1, 0, -1, 1, -1, 0, 0, 0]
REWARD = [0, 0, 0.5, 0, 1, 0, 0, 0.25, 0, 0.5, 0, 0, 0, 2]
STATE = [-1, 7, 7, -1, 7, -1, -1, 8, -1, 9, -1, 7, 7, 7]


def test_turns_are_found_with_their_reward_and_state():
    sequences = samples("game.interact", turn=TURN, token_reward=REWARD, state=STATE).sequences
    turns = turns_of(sequences, Padding.of(sequences.offsets, sequences.response_mask))
    assert turns.samples.tolist() == [0, 1, 2, 2, 3]
    assert turns.rewards.tolist() == [0.5, 1.0, 0.25, 0.5, 2.0]
    assert turns.states.tolist() == [7, 7, 8, 9, 7]
    assert turns.tokens.tolist() == [[0, 0, -1], [1, -1, -1], [2, -1, 3], [4, 4, 4]]


@fl.workflow
def episodes(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=2)
    advantages = fl.advantage.group_in_group(scores, rollout, std="none")
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def test_advantages_of_turns_read_the_rollout_s_turns():
    actor = Worker()
    drawn = samples("game.interact", turn=TURN, token_reward=REWARD, state=STATE)
    step = step_with(drawn)
    step.values[NodeId("game.interact"), "score"] = np.array([0.5, 1.0, 0.75, 2.0], np.float32)
    program_of(lowered(episodes), {"actor": actor}).run(step)
    advantages = actor.updates[0][0].advantages
    # Group 0: both episodes begin in state 7, so the turn's part is the episode's again.
    assert advantages is not None
    np.testing.assert_allclose(advantages[[1, 2, 4]], [-0.5, -0.5, 0.5], rtol=1e-6)
    # Group 1: no state is met twice.
    np.testing.assert_allclose(advantages[[7, 9, 11]], [-0.625, -0.625, 0.625], rtol=1e-6)


@fl.workflow
def several(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward):
    rollout = actor.generate(prompts)
    scores = ((verifier.score(rollout), 1.0), (judge.score(rollout), 1.0))
    advantages = fl.advantage.normalise_then_sum(*scores)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def test_an_advantage_of_several_rewards_reads_each_by_itself():
    actor = Worker()
    scores = {"verifier": [1.0, 0.0, 1.0, 0.0], "judge": [0.0, 1.0, 9.0, 3.0]}
    program_of(lowered(several), {"actor": actor}).run(step_with(samples(ROLLOUT, scores)))
    advantages = actor.updates[0][0].advantages
    assert advantages is not None
    # In the first group the two rewards cancel; in the second they agree.
    np.testing.assert_allclose(advantages[[1, 4]], [0, 0], atol=1e-5)
    assert advantages[7] > 0 > advantages[11]


@fl.workflow
def maximum_likelihood(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    advantages = fl.advantage.max_rl(verifier.score(rollout))
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def test_max_rl_refuses_scores_below_0_whose_mean_it_would_divide_by():
    actor = Worker()
    program = program_of(lowered(maximum_likelihood), {"actor": actor})
    program.run(step_with(samples(ROLLOUT, {"verifier": [1.0, 0.0, 0.5, 0.0]})))
    assert len(actor.updates) == 1
    signed = step_with(samples(ROLLOUT, {"verifier": [1.0, -1.0, 0.5, 0.0]}))
    with pytest.raises(RewardError, match=r"test_batch_program\.py:\d+: max_rl divides.*\n.* -1;"):
        program.run(signed)


@fl.workflow
def optimal(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts, temperature=0.5)
    own = actor.logprobs(rollout)
    advantages = fl.advantage.optimal_token_baseline(verifier.score(rollout), rollout, policy=own)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())


def test_a_token_baseline_weighs_by_the_squares_that_the_trainer_gives_at_each_token():
    actor = Worker()
    sampling = Sampling(temperature=0.5, max_tokens=4)
    program = program_of(lowered(optimal), {"actor": actor}, sampling=sampling)
    program.run(step_with(samples(ROLLOUT, SCORES)))
    assert actor.temperatures == [0.5, 0.5]  # of logprobs and of squares
    advantages = actor.updates[0][0].advantages
    assert advantages is not None
    # Of the first group, scores 1 and 0, the first response tokens are at 1 and at 4.
    weights = [1 - 2 * np.exp(-at / 7) + at / 20 for at in (1, 4)]
    baseline = weights[0] / sum(weights)
    np.testing.assert_allclose(advantages[[1, 4]], [1 - baseline, -baseline], rtol=1e-5)


@fl.workflow
def of_outcomes(prompts: fl.Prompts, actor: fl.Policy, ref: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    loss = fl.loss.implicit_reward(0.1)
    actor.update(rollout, verifier.score(rollout), reference=ref.logprobs(rollout), loss=loss)


def test_a_loss_on_outcomes_is_given_the_score_at_each_token_and_refuses_what_is_none():
    actor = Worker()
    program = program_of(lowered(of_outcomes), {"actor": actor, "ref": Worker()})
    program.run(step_with(samples(ROLLOUT, SCORES)))
    score = actor.updates[0][0].extra["score"]
    assert score[TOKENS].tolist() == [1, 1, 0, 0.5, 0.5, 0.5, 0.5, 0.5]
    with pytest.raises(RewardError, match="implicit_reward learns outcomes") as caught:
        program.run(step_with(samples(ROLLOUT, {"verifier": [1.0, -0.5, 0.0, 2.0]})))
    assert caught.value.found == "a score of -0.5"


def test_rows_of_a_set_keep_their_prompts_and_payloads():
    whole = samples(ROLLOUT, SCORES)
    part = whole.select(np.array([3, 0]))
    assert part.groups == (GroupId("0/1"), GroupId("0/0"))
    assert part.payloads == (whole.payloads[3], whole.payloads[0])
    assert part.sequences.lengths.tolist() == [4, 3]
    assert len(whole.select(np.zeros(0, np.int64))) == 0


def test_groups_are_counted_where_they_stand():
    assert group_sizes(np.array([4, 4, 2, 9, 9, 9])) == [2, 1, 3]
    assert group_sizes(np.zeros(0, np.int64)) == []


def test_a_workflow_without_handler_is_refused_by_name():
    def run(workflow: Workflow) -> None:
        graph = lowered(workflow)
        (node,) = (n for n in graph.nodes if n.id == "advantage")
        program_of(graph.replacing(replace(node, op="nonsense")), {"actor": Worker()})

    with pytest.raises(fl.PlanError, match="cannot run 'nonsense'"):
        run(logged)


def test_greedy_samples_have_logprobs_at_temperature_one():
    actor = Worker()
    graph = lowered(logged)
    program = program_of(graph, {"actor": actor}, sampling=Sampling(temperature=0, max_tokens=4))
    program.run(step_with(samples(ROLLOUT, SCORES)))
    assert actor.updates[0][1].temperature == 1.0
