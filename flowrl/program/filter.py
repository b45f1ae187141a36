"""`fl.filter`: which groups reach the update.

A filter takes a rollout and its scores and returns both without the groups that it removed. What
follows uses what it returned, so a program says plainly which samples an update sees:

    rollout, scores = fl.filter.zero_variance(rollout, scores)

It is decided group by group, as soon as the last member of a group has its score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.program.formulas import subset_of
from flowrl.specs.filters import Difficulty, ZeroVariance
from flowrl.specs.names import refusing_others

__all__ = ["difficulty", "zero_variance"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there
    __getattr__ = refusing_others(__name__, __all__)


zero_variance = subset_of(ZeroVariance, __name__)
difficulty = subset_of(Difficulty, __name__)
