"""PPO against a reward model, which goes on learning from preferences meanwhile.

Ouyang et al., "Training language models to follow instructions with human feedback", 2022
(arXiv:2203.02155), section 3.5: the score of an answer is the number that a reward model gives it
(equation 1 trains that one, see `reward_model.py`), and the policy learns by PPO with a KL penalty
to where it began (equation 2, without the pretraining term; see `ppo.py` for the formulas),

    score = r(q, o)
    r_t   = [t is the last] score - kl (log pi_behaviour(o_t) - log pi_reference(o_t))

A stage `reward_model` before this one teaches the reward model alone.
"""

from __future__ import annotations

import flowrl as fl
from flowrl_graphs.reward_model import reward_model


@fl.workflow
def ppo_rm(
    prompts: fl.Prompts,
    pairs: fl.Pairs,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    reward: fl.RewardModel,
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
    reward_model(pairs, reward=reward)
