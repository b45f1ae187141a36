"""What advantages and losses read, and the arguments of their nodes that give it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from flowrl.errors import GraphError
from flowrl.graph.ir import Field, Graph, Node, per
from flowrl.graph.signatures import (
    PART,
    PREFERRED,
    ROLLOUT_LOGPROBS,
    SIGNATURES,
    STATE,
    TOKEN_REWARD,
    TURN,
)


@dataclass(frozen=True, slots=True)
class Need:
    """How a formula is given a field of its batch.

    Attributes:
        arguments: The arguments that give it, any of them.
        hint: What to write.
        fields: The fields that the argument must carry.
        inserted: True if a pass computes it where the program does not pass it.
    """

    arguments: tuple[str, ...]
    hint: str
    fields: tuple[Field, ...] = ()
    inserted: bool = False


_OF_EPISODES = "pass the rollout that fl.interact returned"
_OF_REFERENCE = "pass reference=reference.logprobs(rollout), or set kl=0"

ADVANTAGE_NEEDS: Mapping[str, Need] = {
    "scores": Need(("scores",), "pass what verifier.score(rollout) returned"),
    "mask": Need(("rollout",), "pass the rollout that was scored"),
    "logprobs": Need(("rollout",), "pass a rollout that a role generated", (ROLLOUT_LOGPROBS,)),
    "turns": Need(("rollout",), _OF_EPISODES, (TURN, TOKEN_REWARD, STATE)),
    "token_rewards": Need(("rollout",), _OF_EPISODES, (TOKEN_REWARD,)),
    "process_rewards": Need(
        ("token_rewards",),
        'pass token_rewards=prm.score(rollout, per="token"), or what a map gave as token_reward',
    ),
    "values": Need(("values",), "pass values=critic.values(rollout)"),
    "baselines": Need(
        ("baseline",),
        "pass baseline=verifier.score(actor.generate(prompts, n=1, temperature=0))",
    ),
    "sum_pi_squared": Need(("policy",), "pass policy=actor.logprobs(rollout)"),
    "reference_logprobs": Need(("reference",), _OF_REFERENCE),
    "source": Need(("rollout",), "pass what fl.concat returned", (PART,)),
    "rewards": Need(("scores_2",), "pass the scores of several rewards"),
}
"""For each field of `AdvantageBatch`: how an advantage is given it."""

LOSS_NEEDS: Mapping[str, Need] = {
    "advantages": Need(
        ("rewards", "advantages"),
        "pass advantages=fl.advantage.group_relative(scores), or rewards=scores",
    ),
    "reference_logprobs": Need(("reference",), _OF_REFERENCE),
    "returns": Need(("returns",), "pass returns= of advantages, returns = fl.advantage.gae(...)"),
    "old_values": Need(("values",), "pass values=critic.values(rollout)"),
    "old_logprobs": Need(("old",), "pass old=actor.logprobs(rollout)", inserted=True),
    "behaviour_logprobs": Need(
        ("rollout",),
        "pass a rollout that a role generated, or loss=fl.loss.cross_entropy(); of examples with "
        "a rollout, fl.concat(..., missing_logprob=0.0) says which logprob they have",
        (ROLLOUT_LOGPROBS,),
    ),
    "preferred": Need(
        ("rollout",),
        "pass pairs: fl.Pairs, or what fl.select.best_and_worst or fl.pair returned",
        (PREFERRED,),
    ),
}
"""For each field of `TokenBatch`: how a loss is given it."""


def check_needs(
    graph: Graph, node: Node, reader: str, names: Collection[str], table: Mapping[str, Need]
) -> Iterator[GraphError]:
    """Yields what a formula reads and is not given, and arguments that it does not read.

    Args:
        reader: The formula, for messages.
        names: The fields of its batch that it reads.
        table: How it is given each field.
    """
    used: set[str] = set()
    for name in names:
        need = table.get(name)
        if need is None:
            what = f"{reader} needs '{name}', which no operation gives"
            yield node.error(what, expected=", ".join(table))
            continue
        edges = [e for a in need.arguments if (e := graph.feeding(node.id, a)) is not None]
        if not edges and not need.inserted and not used & set(need.arguments):
            wanted = " or ".join(f"'{argument}'" for argument in need.arguments)
            purpose = "" if name in need.arguments else f" for its {name}"
            yield node.error(f"{reader} needs {wanted}{purpose}", hint=need.hint)
        used.update(need.arguments)
        missing = [(f, e) for e in edges for f in need.fields if f.name not in e.fields]
        for field, edge in missing[:1]:
            gives = ", ".join(edge.fields)
            yield node.error(
                f"{reader} needs '{field.name}' {per(field)}, but '{edge.src}' gives {gives}",
                hint=need.hint,
            )
    signature = SIGNATURES[node.op]
    optional = {a for need in table.values() for a in need.arguments}
    optional -= {argument.name for argument in signature.arguments if argument.required}
    for argument in node.inputs:
        if argument in optional and argument not in used:
            hint = f"leave {argument} out, or use one that reads it"
            yield node.error(f"{reader} does not use its {argument}", hint=hint)
