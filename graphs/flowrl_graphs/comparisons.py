"""A reward model that learns from comparisons of the policy's own answers.

Ouyang et al., "Training language models to follow instructions with human feedback", 2022
(arXiv:2203.02155), section 3.1, step 2: what labelers compare are outputs of a policy, so that the
reward model knows the mistakes which that policy makes. The annotator stands for the labelers and
names the best and the worst answer, o_w and o_l, of each group; from them the reward model learns
by equation 1:

    L = - mean over pairs of  log sigmoid(r(q, o_w) - r(q, o_l))

The paper takes all pairs of a group, this program one. The policy stays as it is.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def comparisons(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    reward: fl.RewardModel,
    annotator: fl.Reward,
    group_size: int | None = None,
) -> None:
    """Bradley-Terry on the best and the worst of each group.

    `group_size=None` takes `train.group_size`.
    """
    rollout = actor.generate(prompts, n=group_size)
    preferences = fl.select.best_and_worst(rollout, annotator.score(rollout))
    reward.update(preferences, loss=fl.loss.bradley_terry())
