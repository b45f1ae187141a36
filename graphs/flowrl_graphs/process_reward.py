"""GRPO with process supervision: a model scores every step, and a token answers for later steps.

Shao et al., "DeepSeekMath", 2024 (arXiv:2402.03300), section 4.1.3. A process reward model gives
each step of an answer the chance that the answer will be right. Rewards are normalised over all
steps of a group, and the advantage of a token is the sum over the steps that end at it or later:

    r_j = sigmoid(prm(q, o up to the end of step j))
    R_j = (r_j - mean of the group's r) / std of the group's r
    A_t = weight * sum over steps j that end at t or later of R_j  +  r_o - mean of the group's r_o

The paper does not add the outcome r_o (`outcome=False`). The model needs no labels of steps: it
learns, from the same answers and before it scores them, to tell from every prefix whether the
answer will be right (Cobbe et al., 2021, arXiv:2110.14168, section 4.3); with `learn=False` it was
trained elsewhere. A step ends with `separator`; with an empty one every token is a step.
"""

from __future__ import annotations

import numpy as np

import flowrl as fl
from flowrl.algo.maps import Array, MapBatch


@fl.map(reads=("token_reward", "response_mask"), gives="token_reward")
def normalised(batch: MapBatch, *, weight: float = 1.0) -> Array:
    """The chance at the end of each step, in standard deviations from the group's mean."""
    numbers = batch["token_reward"].astype(np.float64)
    chance, rewards = 1 / (1 + np.exp(-numbers)), np.zeros(len(numbers))
    for group in np.unique(batch.groups):
        own = batch["response_mask"] & (numbers != 0) & batch.spread(batch.groups == group)
        if own.sum() > 1:
            rewards[own] = (chance[own] - chance[own].mean()) / (chance[own].std(ddof=1) + 1e-6)
    return (weight * rewards).astype(np.float32)


@fl.workflow
def process_reward(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    prm: fl.RewardModel,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip: float = 0.2,
    separator: str = "\n\n",
    weight: float = 1.0,
    outcome: bool = True,
    learn: bool = True,
) -> None:
    """Process supervision by a reward model. `group_size=None` takes `train.group_size`."""
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout) if outcome or learn else None
    prm = prm.update(rollout, scores, loss=fl.loss.outcome(per="token")) if learn else prm
    steps = prm.score(rollout, per="step" if separator else "token", separator=separator or None)
    rewards, given = normalised(steps, rollout, weight=weight), scores if outcome else None
    advantages = fl.advantage.reinforce_pp(
        given, rollout, mean="group" if outcome else "none", token_rewards=rewards, whiten=False
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
