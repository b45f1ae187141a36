"""What the stages, the rewards and the environments of a run read of data rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.config.rewards import ExactMatch, Gsm8kMatch, NumericMatch, PythonReward, RewardTerm
from flowrl.config.schema import RunConfig
from flowrl.config.user_functions import environment_parameters, reward_parameters
from flowrl.data.rows import RowNeeds, Split
from flowrl.graph import Graph, Op

__all__ = ["row_needs"]


def row_needs(config: RunConfig, graphs: Sequence[Graph], split: Split) -> RowNeeds:
    """What a row must have beside its prompt.

    A function of the user's own asks for the answer by a parameter of that name. Where its file
    does not tell (it is decorated, or imported), a reward is taken to ask for it, and an
    environment is not: it is given the whole row.

    Args:
        graphs: Of all stages.
    """
    kinds = {node.attr("data") for graph in graphs for node in graph.of_op(Op.SOURCE)}
    train = split == "train"
    terms = list(_terms(config, graphs, train=train))
    return RowNeeds(
        answer=any(map(_reads_answer, terms)) or _environment_reads(config, graphs),
        number=any(isinstance(term, Gsm8kMatch | NumericMatch) for term in terms),
        solution=train and bool(kinds & {"examples", "pairs"}),
        rejected=train and "pairs" in kinds,
    )


def _terms(config: RunConfig, graphs: Sequence[Graph], *, train: bool) -> Iterator[RewardTerm]:
    """The reward terms that score responses to the rows."""
    scores = [
        node
        for graph in graphs
        for node in graph.of_op(Op.SCORE)
        if node.attr("by") != "model" and node.role is not None
    ]
    roles = {str(node.role) for node in scores}
    terms = [config.terms_of(role)[0] for role in sorted(roles)]
    # The turns of an episode are scored by its environment.
    draws = any(node.region is None for graph in graphs for node in graph.of_op(Op.GENERATE))
    if draws or not train:
        # Told of all that is drawn and of held-out samples, also where no program scores by them.
        terms.append(config.rewards.terms)
    if scores or draws or not train:
        yield from (term for several in terms for term in several)


def _environment_reads(config: RunConfig, graphs: Sequence[Graph]) -> bool:
    """Whether an environment reads the rows' answers."""
    used = {str(role) for graph in graphs for role in graph.roles}
    for role in used & set(config.roles):
        target = config.roles[role].environment
        asked = None if target is None else environment_parameters(target, "reset")
        # `**kwargs` passes on whatever there is.
        if asked is not None and "answer" in (*asked.required, *asked.optional):
            return True
    return False


def _reads_answer(term: RewardTerm) -> bool:
    match term:
        case ExactMatch() | NumericMatch() | Gsm8kMatch():
            return True
        case PythonReward():
            asked = reward_parameters(term.function)
            return asked is None or asked.asks_for("answer")
        case _:
            return False
