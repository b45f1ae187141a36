"""Trees of rollouts: a response is continued again from where it was least certain.

Hou et al., "TreeRL", 2025 (arXiv:2506.11902), branch at tokens of high uncertainty, and take the
mean score of the leaves below a node as its value V. Guo et al., "Segment policy optimization",
2025 (arXiv:2505.23564), give a segment the advantage V(its end) - V(its beginning). With a trunk
i that is cut before token c, its score r_i and the scores r_ik of its branches,

    V_i  = mean over k of r_ik                        the value at the cut
    A_t  = V_i - mean of V over the prompt's trunks   tokens t < c of the trunk
    A_t  = r_i - V_i                                  tokens t >= c of the trunk
    A_ik = r_ik - V_i                                 all tokens of a branch

A branch learns from its own tokens alone: those before the cut belong to its prompt. TreeRL adds
V - V(root) to each of these and divides by the root of the number of leaves; this does not.
"""

from __future__ import annotations

import numpy as np

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch
from flowrl.algo.maps import Array


@fl.advantage.own(per="token", needs=("mask", "logprobs", "rewards"))
def around_cut(batch: AdvantageBatch) -> Array:
    """Advantages of trunks, of their scores and of the values at their cuts; `[N, T]`."""
    assert batch.mask is not None
    assert batch.logprobs is not None
    assert batch.rewards is not None
    scores, values = batch.rewards.T
    roots = np.array([values[batch.groups == group].mean() for group in batch.groups])
    cuts = np.argmin(np.where(batch.mask, batch.logprobs, np.inf), axis=1)
    before = np.arange(batch.mask.shape[1]) < cuts[:, None]
    result: Array = np.where(before, (values - roots)[:, None], (scores - values)[:, None])
    return result


@fl.workflow
def tree_rollouts(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    verifier: fl.Reward,
    branches: int = 4,
    group_size: int | None = None,
    clip: float = 0.2,
) -> None:
    """Trunks and branches in one update; `group_size=None` takes `train.group_size` trunks."""
    trunk = actor.generate(prompts, n=group_size)
    leaves = actor.generate(fl.prompts_of(trunk, cut=fl.cut.least_likely()), n=branches)
    scores = verifier.score(leaves)
    values = fl.mean_of_children(scores)
    segments = around_cut([verifier.score(trunk), values], trunk)
    within = fl.advantage.group_relative(scores, std="none")
    loss = fl.loss.policy_clip(clip)
    trunk_term = fl.term(trunk, advantages=segments, loss=loss)
    actor.update(fl.sum(trunk_term, fl.term(leaves, advantages=within, loss=loss)))
