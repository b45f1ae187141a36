"""`fl.select`: which samples of each group are kept.

    best, scores = fl.select.top(rollout, scores, k=1)                   # best of n
    good, scores = fl.select.threshold(rollout, scores, at_least=1.0)    # rejection sampling
    pairs = fl.select.best_and_worst(rollout, scores)                    # what DPO learns from

A selection makes another set of samples, as a filter does; it is made when the batch is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.graph.ir import Op
from flowrl.graph.signatures import PREFERRED
from flowrl.program.formulas import add_subset
from flowrl.program.handles import Rollout, Scores
from flowrl.program.judging import add_parse
from flowrl.program.sets import Pairs
from flowrl.specs.filters import BestAndWorst, Parsed, RandomK, Threshold, Top
from flowrl.specs.names import operation, refusing_others

__all__ = ["best_and_worst", "parsed", "random", "threshold", "top"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there
    __getattr__ = refusing_others(__name__, __all__)


@operation
def top(rollout: Rollout, scores: Scores, *, k: int = 1) -> tuple[Rollout, Scores]:
    """The `k` best samples of each group; of equal ones those that were sampled first.

    Args:
        rollout: The samples.
        scores: One for each of them.
        k: Of each group.
    """
    return add_subset(Op.SELECT, Top(k=k), rollout, scores)


@operation
def threshold(rollout: Rollout, scores: Scores, *, at_least: float) -> tuple[Rollout, Scores]:
    """The samples that score at least `at_least`, whatever the others of their group do.

    Imitating them is rejection sampling (RAFT, ReST):

        good, _ = fl.select.threshold(rollout, scores, at_least=1.0)
        actor.update(good, loss=fl.loss.cross_entropy())

    A group without such a sample adds nothing, and a step without one makes no update.

    Args:
        rollout: The samples.
        scores: One for each of them.
        at_least: The least score that is kept.
    """
    return add_subset(Op.SELECT, Threshold(at_least=at_least), rollout, scores)


@operation
def parsed(rollout: Rollout, *, regex: str) -> tuple[Rollout, Scores]:
    """The samples that state a number, with that number as their score; see `fl.parse`.

    Args:
        rollout: The samples.
        regex: The expression that finds the number.
    """
    scores = add_parse("fl.select.parsed", rollout, regex=regex, otherwise=None)
    return add_subset(Op.SELECT, Parsed(), rollout, scores)


@operation
def random(
    rollout: Rollout, scores: Scores, *, k: int = 1, seed: int = 0
) -> tuple[Rollout, Scores]:
    """`k` random samples of each group, chosen by their ids: always the same ones.

    Args:
        rollout: The samples.
        scores: One for each of them.
        k: Of each group; all of a smaller one.
        seed: Another seed chooses other samples.
    """
    return add_subset(Op.SELECT, RandomK(k=k, seed=seed), rollout, scores)


@operation
def best_and_worst(rollout: Rollout, scores: Scores, *, tolerance: float = 1e-8) -> Pairs:
    """The best and the worst sample of each group, as a pair with the best one first.

    Args:
        rollout: The samples.
        scores: One for each of them.
        tolerance: Groups whose scores differ by at most this are left out.
    """
    kept, _ = add_subset(Op.SELECT, BestAndWorst(tolerance=tolerance), rollout, scores)
    return Pairs(kept.tracer, kept.node, (*kept.fields, PREFERRED))
