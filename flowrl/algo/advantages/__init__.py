"""Advantages: scores of samples in, one number a sample or a token out. numpy only.

`batch` holds the inputs and results, `group` computes one number a sample, `token` one a token.
`flowrl.algo.resolve` finds the function of a specification.
"""

from __future__ import annotations

from flowrl.algo.advantages.batch import (
    AdvantageBatch,
    AdvantageResult,
    Padding,
    Turns,
    rewards_to_go,
    token_rewards,
    whiten,
)
from flowrl.algo.advantages.group import (
    centre_scores,
    gpg,
    group_relative,
    leave_one_out,
    length_weighted,
    max_rl,
    normalise_then_sum,
    pass_at_k,
    weighted_sum,
)
from flowrl.algo.advantages.token import (
    distill,
    gae,
    group_in_group,
    optimal_token_baseline,
    reinforce_pp,
    remax,
)

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
    "leave_one_out",
    "length_weighted",
    "max_rl",
    "normalise_then_sum",
    "optimal_token_baseline",
    "pass_at_k",
    "reinforce_pp",
    "remax",
    "rewards_to_go",
    "token_rewards",
    "weighted_sum",
    "whiten",
]
