"""Rejection sampling: a policy imitates those of its own answers that are right.

RAFT (Dong et al., "RAFT: reward ranked finetuning for generative foundation model alignment", 2023,
arXiv:2304.06767) fine-tunes on the best answer to each prompt; for rewards that say right or wrong
it keeps every right one (Xiong et al., "A minimalist approach to LLM reasoning: from rejection
sampling to reinforce", 2025, arXiv:2504.11343, section 2):

    J = 1 / tokens  sum over answers i with r_i >= at_least  sum_t log pi(o_it | q, o_i<t)

There is no advantage and no ratio: answers that are wrong teach nothing. The paper's best of n is
`fl.select.top(rollout, scores, k=1)` in place of the threshold.
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def raft(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    group_size: int | None = None,
    at_least: float = 1.0,
) -> None:
    """Cross-entropy on answers that score enough. `group_size=None` takes `train.group_size`."""
    rollout = actor.generate(prompts, n=group_size)
    good, _ = fl.select.threshold(rollout, verifier.score(rollout), at_least=at_least)
    actor.update(good, loss=fl.loss.cross_entropy())
