"""Advantages: scores of samples in, one number a sample or a token out. numpy only.

`group` and `rewards` give one number a sample, `token`, `gae` and `turns` one a token, `own` what a
function of the user's own says; `returns` and `partition` hold the steps that they are made of,
`padding` the way from and to batches.
`flowrl.algo.resolve` finds the function of a specification.
"""

from __future__ import annotations

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, Turns
from flowrl.algo.advantages.gae import gae
from flowrl.algo.advantages.group import (
    centre_scores,
    gpg,
    group_relative,
    leave_one_out,
    length_weighted,
    max_rl,
    pass_at_k,
)
from flowrl.algo.advantages.own import own
from flowrl.algo.advantages.padding import Padding
from flowrl.algo.advantages.returns import kl_penalty, rewards_to_go, token_rewards, whiten
from flowrl.algo.advantages.rewards import normalise_then_sum, weighted_sum
from flowrl.algo.advantages.token import distill, optimal_token_baseline, reinforce_pp, remax
from flowrl.algo.advantages.turns import group_in_group

__all__ = [
    "AdvantageBatch",
    "AdvantageResult",
    "Padding",
    "Turns",
    "centre_scores",
    "distill",
    "gae",
    "gpg",
    "group_in_group",
    "group_relative",
    "kl_penalty",
    "leave_one_out",
    "length_weighted",
    "max_rl",
    "normalise_then_sum",
    "optimal_token_baseline",
    "own",
    "pass_at_k",
    "reinforce_pp",
    "remax",
    "rewards_to_go",
    "token_rewards",
    "weighted_sum",
    "whiten",
]
