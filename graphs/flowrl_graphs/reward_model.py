"""A reward model that learns from pairs of answers of which one is preferred.

Ouyang et al., "Training language models to follow instructions with human feedback", 2022
(arXiv:2203.02155), equation 1: for a prompt q, the preferred answer o_w and the other one o_l,

    L = - mean over pairs of  log sigmoid(r(q, o_w) - r(q, o_l))

where r is the model's number at an answer's last token (Bradley and Terry, 1952).
"""

from __future__ import annotations

import flowrl as fl


@fl.workflow
def reward_model(pairs: fl.Pairs, *, reward: fl.RewardModel) -> None:
    """Bradley-Terry on preference pairs."""
    reward.update(pairs, loss=fl.loss.bradley_terry())
