"""Handles taken for what they are not: several things, data, the wrong way round."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import GraphError


@fl.map(reads=("score", "text"))
def length(batch):
    return batch.score


def refusal(program) -> fl.FlowError:
    with pytest.raises(fl.FlowError) as caught:
        fl.workflow(program).trace()
    return caught.value


def test_pairs_are_one_thing():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        _best, _worst = fl.select.best_and_worst(rollout, reward.score(rollout))

    error = refusal(program)
    assert error.what == "the pairs of 'select' cannot be unpacked: it is one thing"
    assert error.hint.startswith("keep it in one variable and pass it whole")


def test_a_rollout_and_its_logprobs_are_one_thing():
    def program(prompts: fl.Prompts, actor: fl.Policy):
        _rollout, *_rest = actor.generate(prompts)

    error = refusal(program)
    assert "cannot be unpacked" in error.what
    assert error.hint.startswith("keep it in one variable and pass it whole")


def test_advantages_without_returns_are_one_thing():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        _advantages, _returns = fl.advantage.group_relative(reward.score(rollout))

    error = refusal(program)
    assert "cannot be unpacked" in error.what


def test_a_loop_is_no_unpacking():
    def program(prompts: fl.Prompts, actor: fl.Policy):
        for _ in actor.generate(prompts):
            pass

    error = refusal(program)
    assert "cannot be used in a loop or with *" in error.what


def test_a_loss_of_pairs_on_a_rollout_is_told_before_scores_that_nothing_uses():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, reference: fl.Policy):
        rollout = actor.generate(prompts)
        reward.score(rollout)
        actor.update(rollout, reference=reference.logprobs(rollout), loss=fl.loss.dpo(0.1))

    error = refusal(program)
    assert isinstance(error, GraphError)
    assert "update(loss=dpo) needs 'preferred' per sample" in error.what
    assert (
        error.hint == "pass pairs: fl.Pairs, or what fl.select.best_and_worst or fl.pair returned"
    )


def test_what_an_update_lacks_is_told_before_logprobs_that_nothing_uses():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, reference: fl.Policy):
        rollout = actor.generate(prompts)
        reference.logprobs(rollout)
        actor.update(rollout, reward.score(rollout), kl=fl.kl.k3(0.1))

    error = refusal(program)
    assert "needs 'reference' logprobs" in error.what


def test_pairs_without_a_loss_are_shown_one_before_logprobs_that_nothing_uses():
    def program(prompts: fl.Prompts, actor: fl.Policy, before: fl.Policy):
        pairs = fl.pair(preferred=fl.Examples.of(prompts), other=before.generate(prompts, n=1))
        actor.update(pairs, reference=before.logprobs(pairs))

    assert refusal(program).hint == "pass loss=fl.loss.dpo(0.1)"


def test_samples_without_rewards_may_be_imitated():
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        good, _ = fl.select.threshold(rollout, judge.score(rollout), at_least=1.0)
        actor.update(good)

    assert "loss=fl.loss.cross_entropy()" in refusal(program).hint


def test_rewards_of_examples_with_a_rollout_ask_for_the_logprob_that_examples_have():
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        sets = actor.generate(prompts), fl.Examples.of(prompts)
        actor.update(*fl.concat(*((each, judge.score(each)) for each in sets)))

    error = refusal(program)
    assert "cross-entropy" not in error.what
    assert "fl.concat(..., missing_logprob=0.0)" in error.hint


def test_an_update_by_another_policy_is_shown_the_sync():
    def program(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy):
        reference.update(actor)

    assert "reference.sync(actor)" in refusal(program).hint


def test_a_rollout_in_the_place_of_scores_is_to_be_scored_or_parsed():
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Policy):
        rollout = actor.generate(prompts)
        duel = "{response}{opponent}"
        fl.win_rate(judge.generate(fl.prompts_of(rollout, template=duel, opponent=1), n=1))

    assert "fl.parse(rollout, regex=..., otherwise=0.0)" in refusal(program).hint


def test_token_rewards_come_from_a_reward_model():
    def program(prompts: fl.Prompts, actor: fl.Policy, prm: fl.Reward):
        rollout = actor.generate(prompts)
        scores = prm.score(rollout)
        fl.advantage.reinforce_pp(scores, rollout, token_rewards=scores)

    assert "of an fl.RewardModel" in refusal(program).hint


def test_a_list_of_handles_is_described_and_passed_one_by_one():
    def program(prompts: fl.Prompts, actor: fl.Policy, teachers: list[fl.Policy]):
        rollout = actor.generate(prompts)
        fl.advantage.distill(rollout, teacher=[t.logprobs(rollout) for t in teachers])

    error = refusal(program)
    assert error.found.startswith("the logprobs of 'teachers_1.logprobs' and the logprobs of")
    assert error.hint.startswith("it takes one of them")


def test_a_refresh_the_wrong_way_round_is_turned():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, reference: fl.Policy):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        actor.update(rollout, scores, reference=reference.logprobs(rollout), kl=fl.kl.k3(0.1))
        actor.sync(reference, every=10)

    error = refusal(program)
    assert error.hint.endswith("the role that takes weights comes first: reference.sync(actor)")


def test_a_refresh_before_the_update_is_not_turned():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, reference: fl.Policy):
        rollout = actor.generate(prompts)
        reference.sync(actor, decay=0.99)
        actor.update(rollout, reward.score(rollout))

    assert refusal(program).hint == "write it after actor.update(...)"


def test_scores_that_are_joined_go_with_their_samples():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        one, other = actor.generate(prompts), actor.generate(prompts)
        fl.concat(reward.score(one), reward.score(other))

    error = refusal(program)
    assert error.found == "the scores of 'reward.score'"
    assert error.hint == (
        "join values with their samples: rollout, scores = fl.concat((a, a_scores), (b, b_scores))"
    )


def test_a_rollout_given_as_prompts_is_told_to_become_prompts():
    def program(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Policy):
        critic.generate(actor.generate(prompts))

    assert 'fl.prompts_of(rollout, template="{prompt}' in refusal(program).hint


@fl.map(reads="response_mask", gives="long/samples")
def long(batch):
    return batch.lengths


@fl.map(reads=("response_mask", "score"), gives="worth/samples")
def worth(batch):
    return batch.lengths * batch["score"]


@pytest.mark.parametrize("mixed", [long, worth])
def test_a_map_of_a_rollout_and_of_data_is_called_once_for_each(mixed):
    def program(prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        other = rollout if mixed is long else scores
        fl.log("mixed", mixed(examples, other))
        actor.update(rollout, scores)

    error = refusal(program)
    assert "is read of the first argument" in error.hint or "'examples'" in error.what


def test_an_unknown_name_is_answered_with_all_names():
    def program(prompts: fl.Prompts, actor: fl.Policy):
        fl.weighted(actor.generate(prompts))

    offered = refusal(program).expected.removeprefix("one of ").split(", ")
    left_out = {name for name in set(fl.__all__) - set(offered) if not name.endswith("Error")}
    assert left_out == {"WorkerDied", "__version__"}


@pytest.mark.parametrize(
    ("kind", "way_out"), [(fl.Pairs, "fl.pair"), (fl.Examples, "fl.Examples.of(prompts)")]
)
def test_a_type_of_data_that_is_called_is_told_what_makes_it(kind, way_out: str):
    def program(prompts: fl.Prompts, actor: fl.Policy):
        rollout = actor.generate(prompts)
        actor.update(kind(rollout, rollout), loss=fl.loss.dpo(0.1))

    error = refusal(program)
    assert error.what.startswith(f"fl.{kind.__name__} is a type")
    assert way_out in error.hint


@pytest.mark.parametrize("several", [dict, lambda pairs: [each for _, each in pairs]])
def test_several_environments_are_told_that_each_has_its_part_of_the_prompts(several):
    def program(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, web: fl.Environment):
        rollout, scores = fl.interact(actor, several([("a", game), ("b", web)]), prompts)
        actor.update(rollout, scores)

    error = refusal(program)
    assert "fl.where" in error.hint
    assert "fl.concat" in error.hint


def test_a_map_over_two_sets_is_told_to_join_them_first():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        fl.log("n", length(reward.score(rollout), fl.Examples.of(prompts)))
        actor.update(rollout, reward.score(rollout))

    assert "fl.concat" in refusal(program).hint


@pytest.mark.parametrize("decorator", [fl.advantage.own, fl.loss.own, fl.map])
def test_a_decorator_without_parentheses_is_told_so(decorator):
    with pytest.raises(fl.TraceError) as caught:
        decorator(lambda batch: batch.scores)
    assert "it has parentheses: @fl." in caught.value.hint
