"""Small programs, one for each feature of the language that has to learn.

All are written for sums of two numbers, with a policy that gets some of them right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch
from flowrl.algo.losses import TokenBatch, TokenLoss


def digits_in_place(response: str, answer: str) -> float:
    """The share of the answer's digits that stand where they belong."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


@fl.workflow
def built_in_grpo(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """GRPO of flowrl's own parts."""
    rollout = actor.generate(prompts)
    advantages = fl.advantage.group_relative(verifier.score(rollout), std="group")
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


@fl.advantage.own()
def over_group(batch: AdvantageBatch, *, eps: float = 1e-6) -> npt.NDArray[np.floating]:
    """Scores about their group's mean, over its standard deviation."""
    advantages = np.zeros(len(batch.scores))
    for group in np.unique(batch.groups):
        members = batch.groups == group
        centred = batch.scores[members] - batch.scores[members].mean()
        advantages[members] = centred / (batch.scores[members].std(ddof=1) + eps)
    return advantages


@fl.loss.own(needs=("advantages", "behaviour_logprobs"), corrects_behaviour=True, proportional=True)
def clipped(logprobs: torch.Tensor, batch: TokenBatch, *, clip: float = 0.2) -> TokenLoss:
    """PPO's clipped objective, negated, and the shares of tokens that the clip holds back."""
    assert batch.advantages is not None
    assert batch.behaviour_logprobs is not None
    ratio = (logprobs - batch.behaviour_logprobs).exp()
    free = -batch.advantages * ratio
    bounded = -batch.advantages * ratio.clamp(1 - clip, 1 + clip)
    held = bounded > free
    means = {
        "clip_fraction_low": (held & (ratio < 1)).float(),
        "clip_fraction_high": (held & (ratio > 1)).float(),
    }
    return TokenLoss(values=torch.where(held, bounded, free), means=means)


@fl.workflow
def own_grpo(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """GRPO of parts that a user wrote."""
    rollout = actor.generate(prompts)
    advantages = over_group(verifier.score(rollout))
    actor.update(rollout, advantages=advantages, loss=clipped(clip=0.2))


@fl.workflow
def several_rewards(
    prompts: fl.Prompts, *, actor: fl.Policy, right: fl.Reward, digits: fl.Reward
) -> None:
    """A whole answer counts, and each digit of it a little."""
    rollout = actor.generate(prompts)
    whole, parts = right.score(rollout), digits.score(rollout)
    fl.log("right", whole)
    fl.log("digits", parts)
    scores = fl.weighted_sum((whole, 1.0), (parts, 0.3))
    advantages = fl.advantage.group_relative(scores)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


@fl.workflow
def mutual(prompts: fl.Prompts, *, red: fl.Policy, blue: fl.Policy, verifier: fl.Reward) -> None:
    """Two policies that learn from rewards, and a little from each other."""
    rollouts = {red: red.generate(prompts), blue: blue.generate(prompts)}
    taught = {}
    for student, teacher in ((red, blue), (blue, red)):
        rollout = rollouts[student]
        taught[student] = fl.advantage.distill(
            rollout,
            teacher=teacher.logprobs(rollout),
            coefficient=0.1,
            scores=verifier.score(rollout),
            score_weight=1.0,
        )
    for student, rollout in rollouts.items():
        student.update(rollout, advantages=taught[student], loss=fl.loss.policy_clip(0.2))


@fl.workflow
def refreshed_reference(
    prompts: fl.Prompts, *, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward
) -> None:
    """A penalty on the distance to the policy of up to 20 steps ago."""
    rollout = actor.generate(prompts)
    advantages = fl.advantage.group_relative(verifier.score(rollout))
    actor.update(
        rollout,
        advantages=advantages,
        reference=reference.logprobs(rollout),
        loss=fl.loss.policy_clip(0.2),
        kl=fl.kl.k3(0.05),
    )
    reference.sync(actor, every=20)


@fl.workflow
def best_of_n(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Imitates the best answer to each prompt that it answers rightly sometimes, not always."""
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    best, _ = fl.select.top(rollout, scores, k=1)
    actor.update(best, loss=fl.loss.cross_entropy())


@fl.workflow
def online_dpo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    reference: fl.Policy,
    verifier: fl.Reward,
    beta: float = 0.3,
) -> None:
    """Prefers a right answer of its own to a wrong one."""
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    pairs = fl.select.best_and_worst(rollout, scores)
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(beta))


@fl.workflow
def decoupled(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """The clip is about the policy at the start of the step; weights correct for the sampler's."""
    rollout = actor.generate(prompts)
    advantages = fl.advantage.group_relative(verifier.score(rollout))
    loss = fl.loss.policy_clip(0.2, anchor="old", correction=fl.loss.truncate(2.0))
    actor.update(rollout, advantages=advantages, loss=loss)


@fl.workflow
def nested(prompts: fl.Prompts, *, red: fl.Policy, blue: fl.Policy, verifier: fl.Reward) -> None:
    """A workflow that calls another, for each of two policies."""
    for policy in (red, blue):
        built_in_grpo(prompts, actor=policy, verifier=verifier)
