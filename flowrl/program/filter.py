"""`fl.filter`: which groups reach the update.

A filter takes a rollout and its scores and returns both without the groups that it removed. What
follows uses what it returned, so a program says plainly which samples an update sees:

    rollout, scores = fl.filter.zero_variance(rollout, scores)

It is decided group by group, as soon as the last member of a group has its score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.program.formulas import add_subset, subset_of
from flowrl.program.handles import Rollout, Scores
from flowrl.specs.filters import Difficulty, ZeroVariance
from flowrl.specs.names import operation, refusing_others

__all__ = ["difficulty", "zero_variance"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there
    __getattr__ = refusing_others(__name__, __all__)


@operation
def zero_variance(
    rollout: Rollout, scores: Scores, *, tolerance: float = 1e-8
) -> tuple[Rollout, Scores]:
    """Removes groups whose scores are all equal: their advantages are 0, they teach nothing.

    Args:
        rollout: The samples.
        scores: One for each of them.
        tolerance: Groups with max - min at most this are removed.
    """
    return add_subset(ZeroVariance(tolerance=tolerance), rollout, scores)


difficulty = subset_of(Difficulty, __name__)
