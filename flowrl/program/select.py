"""`fl.select`: which samples of each group are kept.

    best, scores = fl.select.top(rollout, scores, k=1)                   # best of n
    good, scores = fl.select.threshold(rollout, scores, at_least=1.0)    # rejection sampling
    pairs = fl.select.best_and_worst(rollout, scores)                    # what DPO learns from

A selection makes another set of samples, as a filter does; it is made when the batch is complete.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from flowrl.graph.signatures import PREFERRED, SCORE
from flowrl.graph.types import Op
from flowrl.ids import NodeId
from flowrl.program.data import Pairs
from flowrl.program.handles import Rollout, Scores
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    is_number,
    operation,
    refuse_argument,
)
from flowrl.program.tracer import Tracer
from flowrl.specs import SelectSpec
from flowrl.specs.filters import BestAndWorst, RandomK, Threshold, Top
from flowrl.specs.names import raise_missing

__all__ = ["best_and_worst", "random", "threshold", "top"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        raise_missing(__name__, name, __all__)


@operation
def top(rollout: Rollout, scores: Scores, *, k: int = 1) -> tuple[Rollout, Scores]:
    """The `k` best samples of each group; of equal ones those that were sampled first.

    Args:
        rollout: The samples.
        scores: One for each of them.
        k: Of each group.
    """
    name = "fl.select.top"
    return _smaller(name, rollout, scores, Top(k=_count(name, "k", k)))


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
    name = "fl.select.threshold"
    if (
        isinstance(at_least, bool)
        or not isinstance(at_least, int | float)
        or not isfinite(at_least)
    ):
        raise refuse_argument(name, "at_least", at_least, "a finite number")
    return _smaller(name, rollout, scores, Threshold(at_least=float(at_least)))


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
    name = "fl.select.random"
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise refuse_argument(name, "seed", seed, "a whole number")
    return _smaller(name, rollout, scores, RandomK(k=_count(name, "k", k), seed=seed))


@operation
def best_and_worst(rollout: Rollout, scores: Scores, *, tolerance: float = 1e-8) -> Pairs:
    """The best and the worst sample of each group, as a pair with the best one first.

    Args:
        rollout: The samples.
        scores: One for each of them.
        tolerance: Groups whose scores differ by at most this are left out.
    """
    name = "fl.select.best_and_worst"
    if not is_number(tolerance):
        raise refuse_argument(name, "tolerance", tolerance, "a number from 0 up")
    spec = BestAndWorst(tolerance=float(tolerance))
    tracer, node, samples = _select(name, rollout, scores, spec)
    return Pairs(tracer, node, (*samples.fields, PREFERRED))


def _smaller(
    name: str, rollout: Rollout, scores: Scores, spec: SelectSpec
) -> tuple[Rollout, Scores]:
    tracer, node, samples = _select(name, rollout, scores, spec)
    return Rollout(tracer, node, samples.fields), Scores(tracer, node, (SCORE,))


def _select(
    name: str, rollout: Rollout, scores: Scores, spec: SelectSpec
) -> tuple[Tracer, NodeId, Rollout]:
    tracer = current_tracer(name)
    samples = check_handle(rollout, Rollout, operation=name, argument="rollout")
    scored = check_handle(scores, Scores, operation=name, argument="scores")
    node = tracer.add(
        Op.SELECT,
        name="select",
        reads={"rollout": samples.read(), "scores": scored.read()},
        outputs=(*samples.fields, PREFERRED if spec.pairs else SCORE),
        attrs={"spec": spec},
    )
    return tracer, node, samples


def _count(name: str, argument: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse_argument(name, argument, value, "a whole number from 1 up")
    return value
