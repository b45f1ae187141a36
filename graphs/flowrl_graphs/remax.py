"""ReMax: REINFORCE whose baseline is the score of the greedy answer.

Li et al., "ReMax: a simple, effective, and efficient reinforcement learning method for aligning
large language models", 2024 (arXiv:2310.10505), algorithm 1. With o the sampled and o* the greedy
answer to the same prompt, and a KL penalty at each token,

    b   = r(o*)
    A_t = r(o) - b - kl * sum over u >= t of (log pi_behaviour(o_u) - log pi_reference(o_u))
    J   = mean over answers of  sum over t of  log pi(o_t | q, o_<t) A_t

The baseline costs one answer more a prompt, and no critic. Where the paper samples one answer a
prompt, `group_size` may be more; all of them share the greedy one.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def remax(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    reference: fl.Policy,
    group_size: int | None = None,
    kl: float = 0.0,
) -> None:
    """Sampled answers against the greedy one.

    `group_size=None` takes `train.group_size`. With `kl=0` there is no reference, and the config
    need not name one.
    """
    rollout = actor.generate(prompts, n=group_size)
    greedy = actor.generate(prompts, n=1, temperature=0)
    advantages = fl.advantage.remax(
        verifier.score(rollout),
        rollout,
        baseline=verifier.score(greedy),
        reference=reference.logprobs(rollout) if kl else None,
        kl=kl,
    )
    loss = fl.loss.reinforce(aggregation="sequence-mean-token-sum")
    actor.update(rollout, advantages=advantages, loss=loss)
