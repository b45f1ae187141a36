"""DAPO: decoupled clip and dynamic sampling policy optimization.

Yu et al., "DAPO: an open-source LLM reinforcement learning system at scale", 2025
(arXiv:2503.14476), equations 8 and 9. For a prompt q and a group of G answers o_1 .. o_G of which
some are right and some wrong,

    A_i  = (r_i - mean(r)) / std(r)
    w_it = pi(o_it | q, o_i<t) / pi_behaviour(o_it | q, o_i<t)
    J    = 1 / sum_i |o_i|  sum_i sum_t  min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)

Its four parts and where they are here: clip-higher (section 3.1) is `clip_high > clip_low`; dynamic
sampling (section 3.2) is the filter, which removes groups of equal scores, and `train.refill=true`
in the config, which draws others in their place; the loss of tokens (section 3.3) is `token-mean`.
The soft overlong punishment (3.4, equation 13) is a term of the reward. There is no KL penalty.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def dapo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> None:
    """Clip-higher, groups with something to learn from, the mean over all tokens.

    `group_size=None` takes `train.group_size`.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    advantages = fl.advantage.group_relative(scores, std="group")
    loss = fl.loss.policy_clip(clip_low, clip_high, aggregation="token-mean")
    actor.update(rollout, advantages=advantages, loss=loss)
