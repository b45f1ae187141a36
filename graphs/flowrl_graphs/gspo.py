"""GSPO: group sequence policy optimization.

Zheng et al., "Group sequence policy optimization", 2025 (arXiv:2507.18071), equations 5 to 7. The
unit that is rewarded is the whole answer, so its ratio is what is clipped: the geometric mean of
its tokens' ratios,

    A_i = (r_i - mean(r)) / std(r)
    s_i = (pi(o_i | q) / pi_behaviour(o_i | q)) ^ (1 / |o_i|)
    J   = mean over answers of  min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

A mean of many tokens moves far less than one token, hence the small bounds: those of the paper's
experiments (section 5.1). Short answers and several updates a step want wider ones.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def gspo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> None:
    """Group sequence policy optimization. `group_size=None` takes `train.group_size`."""
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    advantages = fl.advantage.group_relative(scores, std="group")
    actor.update(rollout, advantages=advantages, loss=fl.loss.gspo(clip_low, clip_high))
