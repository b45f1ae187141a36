"""Asynchronous GRPO: answers may be drawn from weights that are a few publications old.

Fu et al., "AReaL: a large-scale asynchronous reinforcement learning system for language reasoning",
2025 (arXiv:2505.24298), section 5: bounded staleness (equation 3) and decoupled PPO (equation 5),
which is that of Hilton et al., "Batch size-invariance for policy optimization", 2021
(arXiv:2110.00641), section 3. With pi_old the policy at the start of the step and pi_behaviour the
one that drew the token, up to `max_staleness` publications before,

    A_i  = (r_i - mean(r)) / (std(r) + eps)                   of the group
    c_it = min(pi_old(o_it) / pi_behaviour(o_it), cap)        truncated, without gradient
    w_it = pi(o_it) / pi_old(o_it)
    J    = mean over tokens of  c_it min(w_it A_i, clip(w_it, 1 - clip, 1 + clip) A_i)

The clip bounds how far one step moves the policy, whatever the age of the samples; the weight c
corrects for that age. `train.max_staleness` says how old they may be; 0 makes it synchronous.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def async_grpo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cap: float = 2.0,
) -> None:
    """GRPO on samples of bounded age, decoupled.

    `group_size=None` takes `train.group_size`.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    advantages = fl.advantage.group_relative(scores, std="group")
    loss = fl.loss.policy_clip(clip_low, clip_high, anchor="old", correction=fl.loss.truncate(cap))
    actor.update(rollout, advantages=advantages, loss=loss)
