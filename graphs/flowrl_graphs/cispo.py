"""CISPO: clipped importance-sampling weights.

MiniMax, "MiniMax-M1: scaling test-time compute efficiently with lightning attention", 2025
(arXiv:2506.13585), equations 4 and 5. PPO's clip takes the gradient of a token away once its ratio
is out of bounds, and with it the rare tokens that turn a chain of thought. CISPO bounds the weight
and keeps every token's gradient,

    A_i  = (r_i - mean(r)) / std(r)
    w_it = min(max(pi(o_it) / pi_behaviour(o_it), 1 - eps_low), 1 + eps_high), without gradient
    J    = mean over tokens of  w_it A_i log pi(o_it | q, o_i<t)

With `eps_low=1` there is no lower bound; the paper tunes the upper one only.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def cispo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    eps_low: float = 1.0,
    eps_high: float = 0.2,
) -> None:
    """Clipped importance-sampling policy optimization.

    `group_size=None` takes `train.group_size`.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    advantages = fl.advantage.group_relative(scores, std="group")
    actor.update(rollout, advantages=advantages, loss=fl.loss.cispo(eps_low, eps_high))
