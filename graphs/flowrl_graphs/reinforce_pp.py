"""REINFORCE++: PPO's clipped objective without a critic, with advantages of the whole batch.

Hu et al., "REINFORCE++: an efficient RLHF algorithm with robustness to both prompt and reward
models", 2025 (arXiv:2501.03262), section 3. The reward of token t of answer i is the score at its
last token, less a KL penalty at each; the advantage is the sum of what follows, standardised over
all response tokens of the batch and not of a group,

    c_i  = score_i                      REINFORCE++, of one answer a prompt or more
    c_i  = score_i - mean of the group  REINFORCE++-baseline, `baseline=true`
    r_it = [t is the last] c_i - kl (log pi_behaviour(o_it) - log pi_reference(o_it))
    G_it = sum over u >= t of r_iu
    A_it = (G_it - mean(G)) / std(G)
    w_it = pi(o_it) / pi_behaviour(o_it)
    J    = mean over tokens of  min(w_it A_it, clip(w_it, 1 - clip, 1 + clip) A_it)
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def reinforce_pp(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    reference: fl.Policy,
    group_size: int | None = None,
    baseline: bool = False,
    clip: float = 0.2,
    kl: float = 0.0,
) -> None:
    """REINFORCE++, and its baseline form.

    `group_size=None` takes `train.group_size`. With `kl=0` there is no reference, and the config
    need not name one.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    advantages = fl.advantage.reinforce_pp(
        scores,
        rollout,
        mean="group" if baseline else "none",
        reference=reference.logprobs(rollout) if kl else None,
        kl=kl,
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
