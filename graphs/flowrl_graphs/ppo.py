"""PPO: a clipped policy gradient with a critic.

Schulman et al., "Proximal policy optimization algorithms", 2017 (arXiv:1707.06347), equation 7,
with advantages by generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438,
equation 16) and, as in language models' fine-tuning from human preferences (Ziegler et al., 2019,
arXiv:1909.08593, section 2), the score at the last token and a KL penalty at each,

    r_t     = [t is the last] score - kl (log pi_behaviour(o_t) - log pi_reference(o_t))
    delta_t = r_t + gamma V(s_t+1) - V(s_t)
    A_t     = sum over l of (gamma lam)^l delta_t+l,  standardised over the batch's tokens
    R_t     = A_t + V(s_t)   (before that)
    w_t     = pi(o_t | q, o_<t) / pi_behaviour(o_t | q, o_<t)
    J       = mean over tokens of  min(w_t A_t, clip(w_t, 1 - clip, 1 + clip) A_t)
    L_V     = mean over tokens of  max((V - R_t)^2, (clip(V, V_old - v, V_old + v) - R_t)^2) / 2

The critic is a role of its own. Its clip is that of the paper's reference code, not of the paper.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def ppo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    critic: fl.Critic,
    verifier: fl.Reward,
    reference: fl.Policy,
    group_size: int | None = None,
    clip: float = 0.2,
    value_clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl: float = 0.0,
) -> None:
    """PPO with a critic.

    `group_size=None` takes `train.group_size`. With `kl=0` there is no reference, and the config
    need not name one.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
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
