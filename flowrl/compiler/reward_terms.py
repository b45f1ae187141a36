"""The consequences of reward terms: the scores that are possible, and the fields of data rows.

The scores of a role of the backend `verify` follow from its terms: a rule that matches or not gives
0 or 1, a penalty lies between its worst and 0, and a function of the user's own may give anything.
Filters and selections that no such score meets are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.rewards import (
    CosineLengthTerm,
    Gsm8kMatch,
    NumericMatch,
    PythonReward,
    RewardTerm,
    StopProperlyTerm,
    Term,
)
from flowrl.config.schema import RunConfig
from flowrl.config.user_functions import environment_parameters, reward_reads_answer
from flowrl.errors import ConfigError, raise_all
from flowrl.graph import Graph, Node, Op, score_source
from flowrl.specs import MapSpec, RowCondition
from flowrl.specs.advantage import MaxRL
from flowrl.specs.filters import BestAndWorst, Difficulty, Threshold, ZeroVariance
from flowrl.specs.maps import ROW_PREFIX

if TYPE_CHECKING:
    from flowrl.data.rows import RowNeeds, Split


def check_score_bounds(loaded: LoadedConfig, graphs: Sequence[Graph]) -> None:
    """Checks the filters, selections and advantages of all lowered graphs.

    Raises:
        ConfigError: One of them removes, or cannot use, whatever the reward's terms can give.
    """
    raise_all(problem for graph in graphs for problem in _unusable_scores(loaded, graph))


def _unusable_scores(loaded: LoadedConfig, graph: Graph) -> Problems:
    for node in graph.of_op(Op.FILTER, Op.SELECT, Op.ADVANTAGE):
        scored = score_source(graph, node.id)
        if scored is None:
            continue
        role = str(scored.role)
        # Other plug-ins read the same terms as they like.
        if scored.op is not Op.SCORE or scored.attr("by") == "model":
            continue
        if loaded.config.roles[role].backend != "verify":
            continue
        terms, key = loaded.config.terms_of(role)
        bounds = _score_bounds(terms) if terms else None
        reason = None if bounds is None else _refused(node, *bounds)
        if bounds is not None and reason is not None:
            what, expected = reason
            yield ConfigError(
                f"{node.id} ({node.attr('spec')}) {what}",
                where=" and ".join(filter(None, (str(node.source or ""), loaded.where(key)))),
                found=f"the terms of {role!r} score from {bounds[0]:g} to {bounds[1]:g}",
                expected=expected,
                hint=f"change the bounds of {node.id}, or the terms of {role!r}",
            )


def _refused(node: Node, lowest: float, highest: float) -> tuple[str, str] | None:
    """Returns what a node does to all scores, and the bounds that it needs; None if it is right."""
    spread = highest - lowest
    match node.attr("spec"):
        case Difficulty(low=low, high=high) if low >= highest or high <= lowest:
            return (
                "removes every group: no mean score is between its bounds, which are strict",
                f"low below {highest:g} and high above {lowest:g}",
            )
        case Threshold(at_least=at_least) if at_least > highest:
            return "removes every sample", f"at_least of at most {highest:g}"
        case ZeroVariance(tolerance=tolerance) | BestAndWorst(tolerance=tolerance) if (
            tolerance >= spread
        ):
            return (
                "removes every group: no scores differ by more than the tolerance",
                f"a tolerance below {spread:g}" if spread else "terms whose scores differ",
            )
        case MaxRL() if lowest < 0:
            return (
                "divides by the mean score of each group, and scores below 0 bring it to 0",
                "terms that add up to at least 0 (fl.advantage.group_relative takes any)",
            )
    return None


def _score_bounds(terms: Sequence[RewardTerm]) -> tuple[float, float] | None:
    """Returns the lowest and highest sum of terms; None where a term may give anything."""
    ranges: dict[str, tuple[float, float]] = {}
    weights: dict[str, float] = {}  # of the terms that are in the sum
    for term in terms:
        bounds = _range(term, ranges)
        if bounds is None:
            return None
        ranges[term.name] = bounds
        if isinstance(term, StopProperlyTerm | CosineLengthTerm):
            weights[term.name] = weights.pop(term.of)
        else:
            weights[term.name] = term.weight
    ends = [sorted(weight * end for end in ranges[name]) for name, weight in weights.items()]
    return sum(low for low, _ in ends), sum(high for _, high in ends)


def _range(term: RewardTerm, before: dict[str, tuple[float, float]]) -> tuple[float, float] | None:
    match term:
        case StopProperlyTerm():
            low, high = before[term.of]
            factor = term.coefficient
            cut_off = (factor,) if factor < 0 else (factor * low, factor * high)
            return min(low, *cut_off), max(high, *cut_off)
        case CosineLengthTerm():
            ends = (term.wrong_short, term.wrong_long, term.correct_short, term.correct_long)
            return min(ends), max(ends)
        case _:
            return term.score_range()


# The fields of data rows that stages, rewards and environments read.


def row_needs(config: RunConfig, graphs: Sequence[Graph], split: Split) -> RowNeeds:
    """Returns the fields that a row must have besides its prompt.

    A function of the user's own asks for the answer by a parameter of that name. Where its file
    does not show its parameters (it is decorated, or imported), a reward is taken to ask for it,
    and an environment is not: it is given the whole row.

    Args:
        graphs: Those of all stages.
    """
    from flowrl.data.rows import RowNeeds  # planning reads no rows

    kinds = {node.attr("data") for graph in graphs for node in graph.of_op(Op.SOURCE)}
    train = split == "train"
    terms = _scoring_terms(config, graphs, train=train)
    return RowNeeds(
        answer=any(map(_reads_answer, terms)) or _environment_reads(config, graphs),
        number=any(isinstance(term, Gsm8kMatch | NumericMatch) for term in terms),
        solution=train and bool(kinds & {"examples", "pairs"}),
        rejected="pairs" in kinds,
        fields=_fields_read(graphs, train=train),
    )


def _fields_read(graphs: Sequence[Graph], *, train: bool) -> tuple[str, ...]:
    """Returns the paths of the fields of rows that maps read, and that splits read.

    Held-out prompts are split too; maps and splits of samples are of training rows.
    """
    nodes = [node for graph in graphs for node in graph.of_op(Op.MAP, Op.WHERE)]
    held_out = [node for node in nodes if node.op is Op.WHERE and "prompts" in node.inputs]
    specs = [node.attr("spec") for node in (nodes if train else held_out)]
    keys = [key for spec in specs if isinstance(spec, MapSpec) for key in spec.reads]
    paths = [key.removeprefix(ROW_PREFIX) for key in keys if key.startswith(ROW_PREFIX)]
    paths += [spec.field for spec in specs if isinstance(spec, RowCondition)]
    return tuple(dict.fromkeys(paths))


def _scoring_terms(
    config: RunConfig, graphs: Sequence[Graph], *, train: bool
) -> tuple[RewardTerm, ...]:
    """Returns the reward terms that score responses to the rows."""
    scores = (node for graph in graphs for node in graph.of_op(Op.SCORE))
    roles = {str(n.role) for n in scores if n.attr("by") != "model" and n.role is not None}
    terms = tuple(term for role in sorted(roles) for term in config.terms_of(role)[0])
    # The turns of an episode are scored by its environment.
    generates = any(node.region is None for graph in graphs for node in graph.of_op(Op.GENERATE))
    if generates or not train:
        # They are reported of all responses and held-out samples, even where no program uses them.
        return terms + config.rewards.terms
    return terms


def _reads_answer(term: RewardTerm) -> bool:
    if isinstance(term, PythonReward):
        return reward_reads_answer(term.function)
    return isinstance(term, Term) and term.reads_answer


def _environment_reads(config: RunConfig, graphs: Sequence[Graph]) -> bool:
    """True if an environment reads the rows' answers."""
    used = {str(role) for graph in graphs for role in graph.roles}
    for role in used & set(config.roles):
        target = config.roles[role].environment
        asked = None if target is None else environment_parameters(target, "reset")
        # `**kwargs` passes on whatever there is.
        if asked is not None and "answer" in (*asked.required, *asked.optional):
            return True
    return False
