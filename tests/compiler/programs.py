"""Programs for the compiler's checks, and a configuration that they are compiled with."""

from __future__ import annotations

from typing import Any

import flowrl as fl

__all__ = ["config", "model"]

TOKENIZER = {"kind": "char", "alphabet": "0123456789+="}


def model(**sizes: Any) -> dict[str, Any]:
    """A role with a new model of its own."""
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
    return {"model": shape | {"max_length": 32} | sizes, "tokenizer": dict(TOKENIZER)}


def config(**changes: Any) -> dict[str, Any]:
    """One stage; the workflow is given to `fl.compile`."""
    return {
        "stages": ["main"],
        "roles": {"actor": model(), "judge": {"backend": "verify"}},
        "data": {"train": {"kind": "arithmetic", "split": "train"}, "max_prompt_tokens": 8},
        "rewards": {"terms": [{"kind": "exact_match"}]},
        "train": {
            "prompts_per_step": 8,
            "group_size": 4,
            "mini_batches": 2,
            "sampling": {"max_tokens": 4},
        },
        **changes,
    }


@fl.workflow
def grpo(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, judge.score(rollout))


@fl.workflow
def by_model(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.RewardModel):
    rollout = actor.generate(prompts)
    actor.update(rollout, judge.score(rollout))


@fl.workflow
def judge_learns(pairs: fl.Pairs, *, judge: fl.RewardModel):
    judge.update(pairs)


@fl.workflow
def ppo(prompts: fl.Prompts, *, actor: fl.Policy, critic: fl.Critic, judge: fl.Reward):
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(judge.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2, anchor="old"))


@fl.workflow
def play(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment):
    rollout, scores = fl.interact(actor, game, prompts)
    actor.update(rollout, scores)


@fl.workflow
def refreshed(prompts: fl.Prompts, *, actor: fl.Policy, other: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    ref = other.logprobs(rollout)
    actor.update(rollout, judge.score(rollout), reference=ref, kl=fl.kl.k3(0.1))
    other.sync(actor, every=2)


@fl.workflow
def compared(prompts: fl.Prompts, *, actor: fl.Policy, other: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    ref = other.logprobs(rollout)
    actor.update(rollout, judge.score(rollout), reference=ref, kl=fl.kl.k3(0.1))


@fl.workflow
def both_learn(examples: fl.Examples, *, actor: fl.Policy, other: fl.Policy):
    actor.update(examples)
    other.update(examples)


@fl.workflow
def constrained(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts, grammar=fl.grammar.regex("[0-9]+"))
    actor.update(rollout, judge.score(rollout))


@fl.workflow
def imitate(examples: fl.Examples, *, actor: fl.Policy):
    actor.update(examples)


@fl.workflow
def play_all(prompts: fl.Prompts, actor: fl.Policy, games: list[fl.Environment]):
    rollout, scores = fl.concat(*(fl.interact(actor, game, prompts) for game in games))
    actor.update(rollout, scores)


@fl.workflow
def taught(prompts: fl.Prompts, student: fl.Policy, verifier: fl.Reward):
    rollout = student.generate(prompts)
    student.update(rollout, verifier.score(rollout))
