"""PPO against a reward model, which goes on learning what is preferred among the policy's answers.

Ouyang et al., "Training language models to follow instructions with human feedback", 2022
(arXiv:2203.02155), sections 3.1 and 3.5. The score of an answer is the number that a reward model
gives it, and the policy learns by PPO with a KL penalty to where it began (equation 2, without the
pretraining term; `ppo.py` has the formulas):

    score = r(q, o)
    r_t   = [t is the last] score - kl (log pi_behaviour(o_t) - log pi_reference(o_t))

Meanwhile comparisons of the current policy's own answers train the reward model (equation 1; in
section 3.1 the two take turns, in Christiano et al., 2017, arXiv:1706.03741, section 2.2, they go
on side by side, as here). An annotator names the best and the worst answer, o_w and o_l, of each
group:

    L = - mean over pairs of  log sigmoid(r(q, o_w) - r(q, o_l))

What the policy finds out about the reward model's mistakes is so held against it. The annotator
stands for whoever compares: the policy never sees its scores. Stages before this one teach the
reward model: `reward_model` from pairs of the data, `comparisons` from the policy's first answers.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def ppo_rm(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    reward: fl.RewardModel,
    annotator: fl.Reward,
    reference: fl.Policy,
    group_size: int | None = None,
    clip: float = 0.2,
    value_clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl: float = 0.02,
) -> None:
    """PPO whose scores are a reward model's.

    `group_size=None` takes `train.group_size`. With `kl=0` there is no reference, and the config
    need not name one.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = reward.score(rollout)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(
        scores,
        values,
        rollout,
        gamma=gamma,
        lam=lam,
        reference=reference.logprobs(rollout) if kl else None,
        kl=kl,
    )
    critic.update(rollout, returns=returns, values=values, loss=fl.loss.value_clip(value_clip))
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
    preferences = fl.select.best_and_worst(rollout, annotator.score(rollout))
    reward.update(preferences, loss=fl.loss.bradley_terry())
