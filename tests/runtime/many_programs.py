"""Programs of every kind, small enough to run whole: what `test_many_programs` and resumption use.

Each has a configuration of three steps without a warm start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flowrl as fl
from tests.runtime.tiny_runs import REWARD, tiny_config

TAIL = {"kind": "format", "name": "tail", "pattern": ".*[0-4]"}


def config_of(program: str, runs: Path, *, steps: int = 3, **changes: Any) -> dict[str, Any]:
    """The configuration of one program of this file, in the only stage of a run."""
    config = tiny_config(runs)
    config |= {"stages": [program], "stage": {}, "workflow": f"{__file__}:{program}", "args": {}}
    config["train"] = {**config["train"], "steps": steps, "prompts_per_step": 4}
    config["eval"] = {**config["eval"], "every": 0, "num": 8}
    actor = config["roles"]["actor"]
    fresh = {key: actor[key] for key in ("backend", "model", "tokenizer")}
    roles = {
        "critic": {"backend": "torch", "copy_of": "actor", "optimizer": {"learning_rate": 1e-2}},
        "model": fresh,
        "rival": {"backend": "torch", "copy_of": "actor"},
        "teacher": fresh,
        "judge": {"backend": "verify", "terms": [TAIL, {**REWARD, "weight": 0.5}]},
        "game": {
            "backend": "environment",
            "environment": str(Path(__file__).parents[2] / "examples" / "guess.py:Guess"),
            "options": {"size": 4},
            "timeout_s": 60.0,
        },
    }
    config["roles"] = {**config["roles"], **roles}
    return {**config, **changes}


def games_of(runs: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of `guessing`: another vocabulary and rows of its own."""
    config = config_of("guessing", runs, **changes)
    rows = str(Path(__file__).parents[2] / "examples" / "guess.jsonl")
    config["data"] = {"train": rows, "eval": rows, "max_prompt_tokens": 2}
    config["roles"]["actor"]["tokenizer"] = {"kind": "char", "alphabet": "#0123456789abcdef<>=?"}
    config["train"]["sampling"] = {"max_tokens": 1}
    config["rewards"] = {}
    config["eval"]["metric"] = "solved"
    return config


def debates_of(runs: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of `debate`: two policies of one model, and a court."""
    config = config_of("debate", runs, **changes)
    court = str(Path(__file__).with_name("court.py:Court"))
    config["roles"] = {
        "pro": config["roles"]["actor"],
        "con": {"backend": "torch", "copy_of": "pro"},
        "court": {"backend": "environment", "environment": court, "timeout_s": 60.0},
    }
    config["rewards"] = {}
    config["train"] |= {"sampling": {"max_tokens": 1}, "mini_batches": 1}
    config["eval"]["metric"] = "con_score"
    return config


@fl.workflow
def actor_critic(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
    reference: fl.Policy,
) -> None:
    """PPO whose reference is refreshed every other step, with an adaptive penalty."""
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    logprobs = reference.logprobs(rollout)
    advantages, returns = fl.advantage.gae(verifier.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=values)
    kl = fl.kl.k3(0.1, target=1e-3, horizon=100)
    loss = fl.loss.policy_clip(0.2)
    actor.update(rollout, advantages=advantages, reference=logprobs, loss=loss, kl=kl)
    reference.sync(actor, every=2)


@fl.workflow
def versions(
    prompts: fl.Prompts, *, actor: fl.Policy, critic: fl.Critic, verifier: fl.Reward
) -> None:
    """PPO whose advantages are of the critic after its update, and that logs how far it moved."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    values = critic.values(rollout)
    _, returns = fl.advantage.gae(scores, values, rollout)
    critic2 = critic.update(rollout, returns=returns, values=values)
    advantages, _ = fl.advantage.gae(scores, critic2.values(rollout), rollout)
    actor2 = actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))
    fl.log("after", actor2.logprobs(rollout))


@fl.workflow
def slow_actor(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
    reference: fl.Policy,
) -> None:
    """PPO with a critic that is updated in every step, and a policy in every second one."""
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    logprobs = reference.logprobs(rollout)
    advantages, returns = fl.advantage.gae(verifier.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=values)
    kl, loss = fl.kl.k3(0.1), fl.loss.policy_clip(0.2)
    actor.update(rollout, advantages=advantages, reference=logprobs, loss=loss, kl=kl, every=2)


@fl.workflow
def summed(
    prompts: fl.Prompts, examples: fl.Examples, *, actor: fl.Policy, verifier: fl.Reward
) -> None:
    """A policy gradient and, in the same optimizer updates, a little of the examples."""
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    loss = 0.5 * fl.loss.policy_clip(0.2, anchor="old")
    advantages = fl.advantage.group_relative(scores)
    actor.update(
        fl.sum(
            fl.term(rollout, advantages=advantages, loss=loss),
            0.1 * fl.term(examples),
        )
    )


@fl.workflow
def moving_reference(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    rival: fl.Policy,
    verifier: fl.Reward,
    reference: fl.Policy,
) -> None:
    """A reference that is an average of the policy, and one that it is reset to."""
    rollout = actor.generate(prompts)
    fl.log("rival", rival.logprobs(rollout))
    logprobs = reference.logprobs(rollout)
    actor.update(rollout, verifier.score(rollout), reference=logprobs, kl=fl.kl.k3(0.1))
    reference.sync(actor, decay=0.5)
    rival.sync(actor, every=2, reset_optimizer=True)


@fl.workflow
def reward_modelling(
    prompts: fl.Prompts, pairs: fl.Pairs, *, actor: fl.Policy, model: fl.RewardModel
) -> None:
    """A reward model that learns from pairs and scores rollouts meanwhile."""
    rollout = actor.generate(prompts)
    scores = model.score(rollout)
    fl.log("model_score", scores)
    kept, kept_scores = fl.filter.difficulty(rollout, scores, low=-100.0, high=100.0)
    actor.update(kept, kept_scores)
    model.update(pairs, loss=fl.loss.bradley_terry())


@fl.workflow
def preferences(pairs: fl.Pairs, *, actor: fl.Policy, reference: fl.Policy) -> None:
    """DPO."""
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.1))


@fl.workflow
def own_preferences(
    prompts: fl.Prompts, *, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward
) -> None:
    """DPO on the best and the worst of the policy's own answers."""
    rollout = actor.generate(prompts)
    pairs = fl.select.best_and_worst(rollout, verifier.score(rollout))
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.1))


@fl.workflow
def preferred_solutions(prompts: fl.Prompts, *, actor: fl.Policy, reference: fl.Policy) -> None:
    """DPO on the solutions of the rows and the policy's own answers to them."""
    rollout = actor.generate(prompts)
    pairs = fl.pair(preferred=fl.Examples.of(prompts), other=rollout)
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.1))
    reference.sync(actor, every=2)


@fl.advantage.own(needs=("source",))
def without_solutions(batch):
    """The score less the mean of the prompt's own answers."""
    own = batch.source < 2
    means = [batch.scores[own & (batch.groups == group)].mean() for group in batch.groups]
    return batch.scores - np.array(means)


@fl.workflow
def split_and_joined(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward
) -> None:
    """Two kinds of rows, each with a reward of its own; solutions join the answers to one kind."""
    low = fl.where(prompts, row="a", one_of=range(50))
    high = fl.where(prompts, row="a", none_of=range(50))
    mine, theirs = actor.generate(low), actor.generate(high)
    solutions = fl.Examples.of(high)
    rollout, scores = fl.concat(
        (mine, verifier.score(mine)),
        (theirs, judge.score(theirs)),
        (solutions, judge.score(solutions)),
        missing_logprob=0.0,
    )
    even, even_scores = fl.where((rollout, scores), row="b", none_of=range(1, 100, 2))
    fl.log("even", even_scores)
    fl.log("judged_even", judge.score(even))
    advantages = without_solutions(scores, rollout)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


@fl.workflow
def greedy_baseline(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """ReMax: two rollouts of one policy."""
    rollout = actor.generate(prompts)
    greedy = actor.generate(prompts, n=1, temperature=0)
    advantages = fl.advantage.remax(
        verifier.score(rollout), rollout, baseline=verifier.score(greedy)
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.reinforce())


@fl.workflow
def two_rewards(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward
) -> None:
    """A weighted sum of two rewards, shaped by length, before the filter."""
    rollout = actor.generate(prompts)
    scores = fl.weighted_sum((verifier.score(rollout), 1.0), (judge.score(rollout), 0.5))
    scores = fl.shaping.soft_overlong(scores, rollout, max_tokens=6, buffer=4)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)


@fl.workflow
def old_policy(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """A loss whose anchor is the policy at the start of the step, and a log before a filter."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    fl.log("before", scores)
    kept, kept_scores = fl.filter.zero_variance(rollout, scores)
    loss = fl.loss.policy_clip(anchor="old", correction=fl.loss.truncate(2.0))
    actor.update(kept, kept_scores, loss=loss)


@fl.map(reads=("score", "score_2"), gives="score")
def lead(batch):
    """How far a sample is ahead of the rival's in its place."""
    return batch["score"] - batch["score_2"]


@fl.workflow
def self_play(
    prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy, verifier: fl.Reward
) -> None:
    """A policy against a copy of itself, which is brought up to date every other step."""
    mine, theirs = actor.generate(prompts), rival.generate(prompts)
    scores = lead(verifier.score(mine), verifier.score(theirs))
    actor.update(mine, scores)
    rival.sync(actor, every=2)


@fl.workflow
def two_learners(
    prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy, verifier: fl.Reward
) -> None:
    """Two policies that both learn, the second of which begins as a copy of the first."""
    mine, theirs = actor.generate(prompts), rival.generate(prompts)
    rival.update(theirs, verifier.score(theirs))
    actor.update(mine, verifier.score(mine))


@fl.workflow
def distillation(prompts: fl.Prompts, *, actor: fl.Policy, teacher: fl.Policy) -> None:
    """A student that generates and a teacher that judges each token."""
    rollout = actor.generate(prompts)
    logprobs = teacher.logprobs(rollout)
    advantages = fl.advantage.distill(rollout, teacher=logprobs)
    loss = fl.loss.policy_clip(0.2)
    actor.update(rollout, advantages=advantages, reference=logprobs, loss=loss, kl=fl.kl.full(0.1))


@fl.workflow
def best_of_n(
    prompts: fl.Prompts, examples: fl.Examples, *, actor: fl.Policy, verifier: fl.Reward
) -> None:
    """Expert iteration: imitates its best answers, and examples beside them."""
    rollout = actor.generate(prompts)
    best, scores = fl.select.top(rollout, verifier.score(rollout), k=1)
    fl.log("best", scores)
    actor.update(best, loss=fl.loss.cross_entropy())
    actor.update(examples)


@fl.workflow
def guessing(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment) -> None:
    """Episodes of several turns, with advantages of each turn."""
    rollout, scores = fl.interact(actor, game, prompts, max_turns=3, max_observation_tokens=1)
    advantages = fl.advantage.group_in_group(scores, rollout)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


@fl.workflow
def replaying(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """RePO on prompts that are sometimes solved: fresh samples, and then earlier ones."""
    rollout = actor.generate(fl.where(prompts, row="a", one_of=range(100)))  # of all rows
    scores = verifier.score(rollout)
    kept, kept_scores = fl.filter.zero_variance(rollout, scores)
    old, old_scores = fl.replay(kept, kept_scores, n=2, capacity=6, max_age=2)
    fl.log("replayed_score", old_scores)
    advantages = fl.advantage.group_relative(old_scores)
    actor.update(rollout, scores)
    actor.update(old, advantages=advantages, loss=fl.loss.policy_clip(0.2))


@fl.workflow
def generation(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Scored samples as data, together with greedy ones; nothing is updated."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    fl.log("before", scores)
    fl.filter.zero_variance(rollout, scores)
    greedy = actor.generate(prompts, n=1, temperature=0)
    fl.shaping.soft_overlong(verifier.score(greedy), greedy, max_tokens=6, buffer=6)


@fl.workflow
def stated_numbers(prompts: fl.Prompts, *, actor: fl.Policy) -> None:
    """Scores that responses state themselves, before a filter and as a selection."""
    rollout = actor.generate(prompts)
    digits = fl.parse(rollout, regex=r"(\d)$", otherwise=-1.0)
    rollout, digits = fl.filter.zero_variance(rollout, digits)
    rollout, digits = fl.select.parsed(rollout, regex=r"(\d)$")
    actor.update(rollout, digits)


def scored_by(role: str, program: str, runs: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a program with several rewards, of which one scores held-out samples."""
    config = config_of(program, runs, **changes)
    return {**config, "eval": {**config["eval"], "score": role}}


@fl.workflow
def debate(prompts: fl.Prompts, *, pro: fl.Policy, con: fl.Policy, court: fl.Environment) -> None:
    """Two policies take turns in one episode, and each learns from its own."""
    (mine, my_scores), (theirs, their_scores) = fl.interact(
        (pro, con), court, prompts, max_turns=4, max_observation_tokens=1
    )
    loss = fl.loss.policy_clip(0.2)
    for policy, turns, scores in ((pro, mine, my_scores), (con, theirs, their_scores)):
        policy.update(turns, advantages=fl.advantage.group_relative(scores), loss=loss)


CONFIGS: Mapping[str, Any] = {
    **{
        program: lambda runs, program=program, **changes: config_of(program, runs, **changes)
        for program in (
            "actor_critic",
            "versions",
            "slow_actor",
            "summed",
            "moving_reference",
            "reward_modelling",
            "preferences",
            "own_preferences",
            "preferred_solutions",
            "split_and_joined",
            "greedy_baseline",
            "old_policy",
            "self_play",
            "two_learners",
            "distillation",
            "best_of_n",
            "generation",
            "replaying",
            "stated_numbers",
        )
    },
    "two_rewards": lambda runs, **changes: scored_by("verifier", "two_rewards", runs, **changes),
    "guessing": games_of,
    "debate": debates_of,
}
"""For each program, what makes its configuration."""
