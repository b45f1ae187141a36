"""GRPO whose reference follows the policy: a moving average of its weights, or resets to it.

Ramé et al., "WARP: on the benefits of weight averaged rewarded policies", 2024 (arXiv:2406.16768),
use the moving average of the policy as the anchor of the KL penalty, so that the penalty relaxes as
the policy learns (equation EMA, with mu = 1 - decay). After every step,

    theta_reference = decay * theta_reference + (1 - decay) * theta_actor

The paper's policy gradient is REINFORCE with the penalty in the reward, and it goes on to merge the
policies of several runs; here the rest is GRPO (`flowrl_graphs.grpo`), the penalty in the loss.

With `decay=0, every=200, reset_optimizer=True` it is the reference reset of Liu et al., "ProRL",
2025 (arXiv:2505.24864): the reference becomes the policy, whose optimizer forgets its moments.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def reference_ema(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    reference: fl.Policy,
    decay: float = 0.99,
    every: int = 1,
    reset_optimizer: bool = False,
    kl: float = 0.05,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> None:
    """GRPO with a reference that follows the policy after every `every`-th step."""
    rollout = actor.generate(prompts)
    rollout, scores = fl.filter.zero_variance(rollout, verifier.score(rollout))
    actor.update(
        rollout,
        advantages=fl.advantage.group_relative(scores),
        reference=reference.logprobs(rollout),
        loss=fl.loss.policy_clip(clip_low, clip_high),
        kl=fl.kl.k3(kl),
    )
    reference.sync(actor, every=every, decay=decay, reset_optimizer=reset_optimizer)
