"""Scores that a node cannot use, where they come from rule terms.

Bounds that no sample or group can meet are refused, and penalties below 0 for `max_rl`.

What a role of the backend `verify` can score follows from its terms: a rule that matches or not
gives 0 or 1, a penalty lies between its worst and 0, and a function of the user's own may give
anything. Where every term is 0 or 1, the means that a group of n samples can have are known too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.compiler.sizes import SizedStage
from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.rewards import (
    CosineLengthTerm,
    OverlongTerm,
    PythonReward,
    RepetitionTerm,
    RewardTerm,
    StopProperlyTerm,
)
from flowrl.errors import ConfigError, combine
from flowrl.graph import Graph, Node, Op
from flowrl.specs.advantage import MaxRL
from flowrl.specs.filters import BestAndWorst, Difficulty, Threshold, ZeroVariance

__all__ = ["check_score_bounds"]

_MAX_MEANS = 10_000
"""Of so many different means some lies between any two bounds that a person writes."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """What a sample can score.

    Attributes:
        low: The least.
        high: The most.
        weights: Where the score is a sum of terms that are 0 or 1, the weight of each.
    """

    low: float
    high: float
    weights: tuple[float, ...] | None


def check_score_bounds(loaded: LoadedConfig, stages: Sequence[SizedStage]) -> None:
    """Checks the filters and selections of all stages.

    Raises:
        ConfigError: One of them removes whatever the reward's terms can give.
    """
    problems = [problem for stage in stages for problem in _of_stage(loaded, stage.lowered)]
    if problems:
        raise combine(problems)


def _of_stage(loaded: LoadedConfig, graph: Graph) -> Problems:
    for node in graph.of_op(Op.FILTER, Op.SELECT, Op.ADVANTAGE):
        if graph.feeding(node.id, "scores") is None:
            continue
        scored, size = _scored_by(graph, node)
        role = str(scored.role)
        # Other plug-ins read the same terms as they like.
        if scored.op is not Op.SCORE or scored.attr("by") == "model":
            continue
        if loaded.config.roles[role].backend != "verify":
            continue
        terms, key = loaded.config.terms_of(role)
        found = _scores(terms) if terms else None
        reason = None if found is None else _refused(node, found, size)
        if found is not None and reason is not None:
            what, expected = reason
            yield ConfigError(
                f"{node.id} ({node.attr('spec')}) {what}",
                where=" and ".join(filter(None, (str(node.source or ""), loaded.where(key)))),
                found=f"the terms of {role!r} score from {found.low:g} to {found.high:g}",
                expected=expected,
                hint=f"change the bounds of {node.id}, or the terms of {role!r}",
            )


def _scored_by(graph: Graph, node: Node) -> tuple[Node, int | None]:
    """The node that made the scores, and the size of the groups, where all are of one size."""
    size: int | None = None
    known = True
    while True:
        edge = graph.feeding(node.id, "scores")
        assert edge is not None  # the verifier of graphs proves it
        node = graph.node(edge.src)
        if node.op is Op.SELECT:
            known = False
        elif node.op is not Op.FILTER:
            break
    rollout = graph.feeding(node.id, "rollout")
    drawn = None if rollout is None else graph.node(rollout.src)
    while drawn is not None and drawn.op is Op.FILTER:
        before = graph.feeding(drawn.id, "rollout")
        drawn = None if before is None else graph.node(before.src)
    if known and drawn is not None and drawn.op is Op.GENERATE:
        number = drawn.attr("n")
        size = number if isinstance(number, int) else None
    return node, size


def _refused(node: Node, scores: _Scores, size: int | None) -> tuple[str, str] | None:
    """What a node does wrong, and what its bounds or terms would have to be; None where nothing."""
    spread = scores.high - scores.low
    match node.attr("spec"):
        case Difficulty(low=low, high=high):
            if low >= scores.high or high <= scores.low:
                return (
                    "removes every group: no mean score is between its bounds, which are strict",
                    f"low below {scores.high:g} and high above {scores.low:g}",
                )
            means = None if size is None else _means(scores, size)
            if means is not None and not any(low < mean < high for mean in means):
                below = max((mean for mean in means if mean <= low), default=scores.low)
                above = min((mean for mean in means if mean >= high), default=scores.high)
                return (
                    f"removes every group: of {size} samples no mean score is between its bounds, "
                    "which are strict",
                    f"low below {below:g} or high above {above:g}",
                )
        case Threshold(at_least=at_least) if at_least > scores.high:
            return "removes every sample", f"at_least of at most {scores.high:g}"
        case ZeroVariance(tolerance=tolerance) | BestAndWorst(tolerance=tolerance) if (
            tolerance >= spread
        ):
            return (
                "removes every group: no scores differ by more than the tolerance",
                f"a tolerance below {spread:g}" if spread else "terms whose scores differ",
            )
        case MaxRL() if scores.low < 0:
            return (
                "divides by the mean score of each group, and scores below 0 bring it to 0",
                "terms that add up to at least 0 (fl.advantage.group_relative takes any)",
            )
    return None


def _means(scores: _Scores, size: int) -> set[float] | None:
    """The means that a group can have; None where they are unknown or too many to matter."""
    if scores.weights is None:
        return None
    sums = {0.0}
    for weight in scores.weights:
        sums = {known + weight * number for known in sums for number in range(size + 1)}
        if len(sums) > _MAX_MEANS:
            return None
    return {total / size for total in sums}


def _scores(terms: Sequence[RewardTerm]) -> _Scores | None:
    """What terms add up to; None where a term may give anything."""
    ranges: dict[str, tuple[float, float]] = {}
    counted: dict[str, float] = {}  # the weight of each term that is in the sum
    for term in terms:
        found = _range(term, ranges)
        if found is None:
            return None
        ranges[term.name] = found
        if isinstance(term, StopProperlyTerm | CosineLengthTerm):
            counted[term.name] = counted.pop(term.of)
        else:
            counted[term.name] = term.weight
    ends = [
        (weight * ranges[name][0], weight * ranges[name][1]) for name, weight in counted.items()
    ]
    rules = {term.name for term in terms if _is_rule(term)}
    return _Scores(
        low=sum(min(pair) for pair in ends),
        high=sum(max(pair) for pair in ends),
        weights=tuple(counted.values()) if set(counted) <= rules else None,
    )


def _is_rule(term: RewardTerm) -> bool:
    """Whether a term is 1 or 0."""
    shapes = PythonReward | OverlongTerm | RepetitionTerm | StopProperlyTerm | CosineLengthTerm
    return not isinstance(term, shapes)


def _range(term: RewardTerm, before: dict[str, tuple[float, float]]) -> tuple[float, float] | None:
    match term:
        case PythonReward() | OverlongTerm(cap=False):
            return None
        case OverlongTerm():
            return -term.factor, 0.0
        case RepetitionTerm():
            return term.max_penalty, 0.0
        case StopProperlyTerm():
            low, high = before[term.of]
            factor = term.coefficient
            cut_off = (factor,) if factor < 0 else (factor * low, factor * high)
            return min(low, *cut_off), max(high, *cut_off)
        case CosineLengthTerm():
            ends = (term.wrong_short, term.wrong_long, term.correct_short, term.correct_long)
            return min(ends), max(ends)
        case _:
            return 0.0, 1.0
