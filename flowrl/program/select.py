"""`fl.select`: which samples of each group are kept.

    best, scores = fl.select.top(rollout, scores, k=1)                   # best of n
    good, scores = fl.select.threshold(rollout, scores, at_least=1.0)    # rejection sampling
    pairs = fl.select.best_and_worst(rollout, scores)                    # what DPO learns from

A selection makes another set of samples, as a filter does; it is made when the batch is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.graph.signatures import PREFERRED
from flowrl.program.formulas import add_subset, subset_of
from flowrl.program.handles import Rollout, Scores
from flowrl.program.judging import add_parse
from flowrl.program.operation import Call
from flowrl.program.sets import Pairs
from flowrl.specs.filters import BestAndWorst, Parsed, RandomK, Threshold, Top
from flowrl.specs.names import operation, refusing_others

__all__ = ["best_and_worst", "parsed", "random", "threshold", "top"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there
    __getattr__ = refusing_others(__name__, __all__)


top = subset_of(Top, __name__)
threshold = subset_of(Threshold, __name__)
random = subset_of(RandomK, __name__)


@operation
def parsed(rollout: Rollout, *, regex: str) -> tuple[Rollout, Scores]:
    """The samples that state a number, with that number as their score; see `fl.parse`.

    Args:
        rollout: The samples.
        regex: The expression that finds the number.
    """
    scores = add_parse(Call("fl.select.parsed"), rollout, regex=regex, otherwise=None)
    return add_subset(Parsed(), rollout, scores)


@operation
def best_and_worst(rollout: Rollout, scores: Scores, *, tolerance: float = 1e-8) -> Pairs:
    """The best and the worst sample of each group, as a pair with the best one first.

    Args:
        rollout: The samples.
        scores: One for each of them.
        tolerance: Groups whose scores differ by at most this are left out.
    """
    kept, _ = add_subset(BestAndWorst(tolerance=tolerance), rollout, scores)
    return Pairs(kept.tracer, kept.node, (*kept.fields, PREFERRED))
