"""Pass@k training: a set of k answers counts as right if one of them is.

Chen et al., "Pass@k training for adaptively balancing exploration and exploitation of large
reasoning models", 2025 (arXiv:2508.10751). Of n answers to a prompt, m are wrong. Every subset of k
answers is a group of its own with the reward 1 if it holds a right answer, and an answer's
advantage is the mean over the subsets that it is in. Summed over all subsets that is

    f       = C(m, k) / C(n, k)                      the share of subsets without a right answer
    sigma   = sqrt(f (1 - f))                        the deviation of their rewards
    A_right = f / sigma                                                            (equation 14)
    A_wrong = (f - C(m - 1, k - 1) / C(n - 1, k - 1)) / sigma                      (equation 15)

Prompts of which fewer than k answers are wrong teach nothing (sigma = 0), so the policy goes on to
what it cannot solve yet; k = 1 is GRPO's advantage.
"""

from __future__ import annotations

from math import comb, sqrt

import numpy as np

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch


@fl.advantage.own()
def of_subsets(batch: AdvantageBatch, *, k: int = 4) -> np.ndarray:
    """Equations 14 and 15; a score above 0 is right."""
    right, advantages = np.asarray(batch.scores) > 0, np.zeros(len(batch.scores))
    for group in np.unique(batch.groups):
        rows = np.asarray(batch.groups) == group
        num, wrong = int(rows.sum()), int((rows & ~right).sum())
        if num < k:
            raise ValueError(
                f"k={k} answers of a group of {num}: set train.group_size to {k} or more"
            )
        fails = comb(wrong, k) / comb(num, k)
        if 0 < fails < 1:
            sigma, others = sqrt(fails * (1 - fails)), comb(wrong - 1, k - 1) / comb(num - 1, k - 1)
            advantages[rows] = np.where(right[rows], fails, fails - others) / sigma
    return advantages


@fl.workflow
def pass_at_k(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, k: int = 4, clip: float = 0.2
) -> None:
    """GRPO for the best of k answers instead of each of them."""
    rollout = actor.generate(prompts)
    advantages = of_subsets(verifier.score(rollout), k=k)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(clip))
