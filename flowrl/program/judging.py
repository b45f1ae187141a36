"""What judges said, as numbers: scores that responses state, and win rates of pairs.

verdicts = judge.generate(fl.prompts_of(answers, template=DUEL, opponent=1), n=2)
scores = fl.win_rate(fl.parse(verdicts, regex=r"WINNER: ([12])", otherwise=0.0))
"""

from __future__ import annotations

from flowrl.graph.sample_sets import answered_prompts, sample_sets
from flowrl.graph.signatures import SCORE
from flowrl.program.children import mean_of_children
from flowrl.program.formulas import add_map
from flowrl.program.handles import Rollout, Scores
from flowrl.program.operation import Call
from flowrl.specs.maps import FirstWins, MapSpec, Parse, WinRate
from flowrl.specs.names import operation
from flowrl.specs.prompts import PromptTemplate
from flowrl.user_lines import trace_error


@operation
def parse(rollout: Rollout, *, regex: str, otherwise: float) -> Scores:
    r"""The number that each response states: what a judge said, as scores.

        scores = fl.parse(judge.generate(questions), regex=r"SCORE: (\d+)", otherwise=0.0)

    It is the first group of the last match in the response, or the whole match of an expression
    without groups. `fl.select.parsed` leaves samples without a number out instead.

    Args:
        rollout: The samples.
        regex: A regular expression, as Python's `re` has them, that does not match the empty text.
        otherwise: The score where it finds no number, or does not end within a second.
    """
    return add_parse(Call("fl.parse"), rollout, regex=regex, otherwise=otherwise)


def add_parse(call: Call, rollout: Rollout, *, regex: str, otherwise: float | None) -> Scores:
    """Adds the map that finds numbers in responses; NaN without `otherwise`."""
    call.trace()
    samples = call.handle("rollout", rollout, Rollout)
    spec = call.spec(Parse(regex=regex, otherwise=otherwise))
    given = add_map(call, spec, (samples,))
    return Scores(given.tracer, given.node, (SCORE,))


@operation
def win_rate(*verdicts: Scores) -> Scores:
    """The share of comparisons that each sample wins, of verdicts on pairs of its group.

    A verdict is 1 where the first response wins and 2 where the second one does; every other
    number is a tie. With v = 1 where the first wins, 0 where the second does, 1/2 for a tie, and
    V(i, j) the mean of v over the verdicts on sample i against sample j::

        score(i) = mean over opponents k of (V(i, i + k) + 1 - V(i - k, i)) / 2

    where i + k and i - k are places in the group, the first following the last. Each sample is the
    first one as often as the second one, so a judge's preference for a position shifts no score.

    Args:
        verdicts: Numbers that answers to `fl.prompts_of(rollout, template=..., opponent=k)` state,
            as `fl.parse` gives them; of several sets of pairs one for each.
    """
    call = Call("fl.win_rate")
    tracer = call.trace()
    if not verdicts:
        raise call.refuse("verdicts", None, "the scores of one or more sets of verdicts")
    graph = tracer.graph()
    made = sample_sets(graph)
    opponents: list[int] = []
    means: list[Scores] = []
    for each in verdicts:
        given = call.handle("verdicts", each, Scores)
        asked = answered_prompts(graph, graph.node(made[given.node]))
        spec = None if asked is None else graph.node(asked).attr("spec")
        if not isinstance(spec, PromptTemplate) or spec.opponent is None:
            raise trace_error(
                f"{call.name} gets {given.kind} of '{given.node}', which are no verdicts on pairs",
                expected="what was parsed of the answers to fl.prompts_of(..., opponent=1)",
            )
        opponents.append(spec.opponent)
        means.append(mean_of_children(_scores(call, FirstWins(), given)))
    return _scores(call, WinRate.of(opponents), *means)


def _scores(call: Call, spec: MapSpec, *given: Scores) -> Scores:
    mapped = add_map(call, spec, given)
    return Scores(mapped.tracer, mapped.node, (SCORE,))
