"""`fl.advantage`: how scores become the weights of the policy gradient.

Most read the scores alone. Those that look at tokens read the rollout too, the same one that was
scored or what a filter left of both.
"""

from typing import TYPE_CHECKING

from flowrl.program.advantage.node import own
from flowrl.program.advantage.scores import (
    gpg,
    group_relative,
    leave_one_out,
    length_weighted,
    max_rl,
    normalise_then_sum,
    pass_at_k,
)
from flowrl.program.advantage.tokens import (
    distill,
    gae,
    group_in_group,
    optimal_token_baseline,
    reinforce_pp,
    remax,
)
from flowrl.specs.names import raise_missing

__all__ = [
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
    "own",
    "pass_at_k",
    "reinforce_pp",
    "remax",
]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        raise_missing(__name__, name, __all__)
