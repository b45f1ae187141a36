"""Dr.GRPO: GRPO done right, without its two biases.

Liu et al., "Understanding R1-Zero-like training: a critical perspective", 2025 (arXiv:2503.20783),
section 3. GRPO divides an advantage by the standard deviation of its group, which favours prompts
that are nearly always or nearly never solved, and a sample's loss by its own length, which favours
long wrong answers. Without both (section 3.2),

    A_i  = r_i - mean(r)
    w_it = pi(o_it | q, o_i<t) / pi_behaviour(o_it | q, o_i<t)
    J    = 1 / (samples x L)  sum_i sum_t  min(w_it A_i, clip(w_it, 1 - clip, 1 + clip) A_i)

with one constant L for all samples: the largest number of response tokens, `max_tokens`. There is
no KL penalty.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def dr_grpo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """Group relative policy optimisation without division by deviations and lengths.

    `group_size=None` takes `train.group_size`. Groups of equal scores stay in the batch: they add
    no gradient, and they count in the constant denominator.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    advantages = fl.advantage.group_relative(scores, std="none")
    loss = fl.loss.policy_clip(clip, aggregation="constant")
    actor.update(rollout, advantages=advantages, loss=loss)
