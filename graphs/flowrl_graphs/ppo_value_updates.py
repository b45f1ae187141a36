"""PPO whose critic learns more often than its policy.

Cobbe et al., "Phasic policy gradient", 2020 (arXiv:2009.04416), algorithm 1: on the samples of a
step the value function makes more passes (E_V) than the policy (E_pi). Its auxiliary phase, which
distils values into the policy's body, is left out: critic and policy share nothing here. Advantages
and losses are those of `flowrl_graphs.ppo`,

    A_t, R_t = GAE of the critic before its updates
    L_V      = as of PPO, `value_updates` times, each with `train.mini_batches` optimizer updates
    J        = as of PPO, in every `actor_every`-th step

The advantages come from the values before the step, because a critic that has seen the returns of
these very samples has learned part of their noise.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def ppo_value_updates(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
    value_updates: int = 3,
    actor_every: int = 1,
    clip: float = 0.2,
    value_clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> None:
    """PPO with `value_updates` passes of the critic for each step."""
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(
        verifier.score(rollout), values, rollout, gamma=gamma, lam=lam
    )
    near_old, surrogate = fl.loss.value_clip(value_clip), fl.loss.policy_clip(clip)
    for _ in range(value_updates):
        critic = critic.update(rollout, returns=returns, values=values, loss=near_old)
    actor.update(rollout, advantages=advantages, loss=surrogate, every=actor_every)
