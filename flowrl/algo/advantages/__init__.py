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

__all__ = [
    "AdvantageBatch",
    "AdvantageResult",
    "Padding",
    "Turns",
    "rewards_to_go",
    "token_rewards",
    "whiten",
]
