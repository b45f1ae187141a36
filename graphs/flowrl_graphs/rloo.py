"""RLOO: REINFORCE with a leave-one-out baseline.

Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization for learning from human
feedback in LLMs", 2024 (arXiv:2402.14740). A whole answer is one action, and the baseline of each
of the k answers to a prompt is the mean score of the other k - 1,

    A_i = r_i - 1 / (k - 1)  sum over j != i of r_j
    J   = 1 / samples  sum_i A_i  sum_t log pi(o_it | q, o_i<t)

so that log pi of the whole answer is the sum over its tokens (`sequence-mean-token-sum`). The
gradient is that of the policy that drew the answers: one update a step (`mini_batches: 1`), no
staleness. The KL penalty that the paper takes off the reward is left out.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def rloo(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
) -> None:
    """REINFORCE leave-one-out. `group_size=None` takes `train.group_size`."""
    rollout = actor.generate(prompts, n=group_size)
    scores = verifier.score(rollout)
    advantages = fl.advantage.leave_one_out(scores)
    loss = fl.loss.reinforce(aggregation="sequence-mean-token-sum")
    actor.update(rollout, advantages=advantages, loss=loss)
