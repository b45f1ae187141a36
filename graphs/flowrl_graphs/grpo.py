"""GRPO: group relative policy optimisation, with the options that the field settled on.

Shao et al., "DeepSeekMath", 2024 (arXiv:2402.03300), equations 3 and 4. For a prompt q and a group
of G answers o_1 .. o_G of the behaviour policy,

    A_i  = (r_i - mean(r)) / (std(r) + eps)
    w_it = pi(o_it | q, o_i<t) / pi_behaviour(o_it | q, o_i<t)
    J    = mean over tokens of  min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)
           - kl * k3(pi || pi_reference)

Where the defaults differ from the paper, they follow Yu et al., "DAPO", 2025 (arXiv:2503.14476):
no KL penalty (section 2.3), a higher upper clip (section 3.1, `clip_high=0.28`), groups with equal
scores removed (section 3.2; `train.refill=true` in the config draws others in their place), the
mean over all tokens of the batch instead of over each answer first (section 3.3).
"""

from __future__ import annotations

from typing import Literal

import flowrl as fl


@fl.workflow
def grpo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    reference: fl.Policy,
    group_size: int | None = None,
    std: Literal["group", "batch", "none"] = "group",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"
    ] = "token-mean",
    kl: float = 0.0,
    drop_zero_variance: bool = True,
) -> None:
    """Group relative policy optimisation.

    `group_size=None` takes `train.group_size`. With `kl=0` there is no reference, and the config
    need not name one.
    """
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    if drop_zero_variance:
        rollout, scores = fl.filter.zero_variance(rollout, scores)
    advantages = fl.advantage.group_relative(scores, std=std)
    actor.update(
        rollout,
        advantages=advantages,
        reference=reference.logprobs(rollout) if kl else None,
        loss=fl.loss.policy_clip(clip_low, clip_high, aggregation=aggregation),
        kl=fl.kl.k3(kl),
    )
