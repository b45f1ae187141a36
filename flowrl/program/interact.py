"""`fl.interact`: rollouts of several turns, against an environment.

    rollout, scores = fl.interact(actor, game, prompts, n=8, max_turns=4)

The policy and the environment are two roles, which may be placed apart; between them turns and
observations go round, sample by sample, until the environment is done. What comes out is a rollout
like any other: tokens of the observations are part of each sample, and no loss counts them.
"""

from __future__ import annotations

from flowrl.graph.signatures import (
    OBSERVATION,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SCORE,
    STATE,
    TOKEN_REWARD,
    TOKENS,
    TURN,
)
from flowrl.graph.types import Op
from flowrl.program.data import Prompts
from flowrl.program.handles import Rollout, Scores
from flowrl.program.operation import check_handle, operation, refuse_argument
from flowrl.program.policy import Policy, sampling_attrs
from flowrl.program.roles import Environment, Role, begin
from flowrl.program.tracer import Read
from flowrl.specs import Grammar, Sampling

__all__ = ["MAX_OBSERVATION_TOKENS", "interact"]

MAX_OBSERVATION_TOKENS = 64
"""Tokens of an observation where the program does not say."""

SECOND_PLAYER = (
    "let the environment call the other model (a server, say), or give each policy an fl.interact "
    "of its own"
)
"""The hint where two models are to act in one episode."""


@operation
def interact(
    policy: Policy,
    environment: Environment,
    prompts: Prompts,
    n: int | None = None,
    *,
    max_turns: int = 8,
    max_observation_tokens: int = MAX_OBSERVATION_TOKENS,
    sampling: Sampling | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    grammar: Grammar | None = None,
) -> tuple[Rollout, Scores]:
    """`n` episodes for each prompt.

    Args:
        policy: Who acts: each turn is one response.
        environment: Who answers: an observation, a reward, and whether the episode is over.
        prompts: Tasks; an episode begins with the prompt and the environment's first observation.
        n: Episodes for each prompt; `train.group_size` of the config where it is None.
        max_turns: Turns of the policy at most.
        max_observation_tokens: Tokens of an observation at most; a longer one ends the episode.
        sampling: Sampling options; `max_tokens` is of one turn.
        temperature: This option alone, as `max_tokens` is.
        grammar: What a turn may look like.

    Returns:
        The rollout, whose response mask leaves observations out, and the sum of each episode's
        rewards. The rollout also knows turns and their rewards, for advantages per turn.
    """
    name = "fl.interact"
    _check_roles(name, policy, environment)
    for limit, argument in (
        (max_turns, "max_turns"),
        (max_observation_tokens, "max_observation_tokens"),
    ):
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise refuse_argument(name, argument, limit, "a whole number from 1 up")
    tracer = begin(policy, Op.GENERATE)
    tracer.refuse_after_update(policy.name, Op.GENERATE)
    begin(environment, Op.INTERACT)
    source = check_handle(prompts, Prompts, operation=name, argument="prompts")
    options: dict[str, float | int | None] = {"temperature": temperature, "max_tokens": max_tokens}
    attrs = sampling_attrs(name, n, sampling, grammar, options)
    region = tracer.region()
    episodes = tracer.add(
        Op.INTERACT,
        name=f"{environment.name}.interact",
        role=environment.name,
        region=region,
        reads={"prompts": source.read()},
        attrs={"max_turns": max_turns, "max_observation_tokens": max_observation_tokens},
    )
    turns = tracer.add(
        Op.GENERATE,
        name=f"{policy.name}.generate",
        role=policy.name,
        region=region,
        reads={"observation": Read(episodes, (OBSERVATION,))},
        attrs=attrs,
    )
    tracer.feed(episodes, "turns", Read(turns, (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS)))
    fields = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS, TURN, TOKEN_REWARD, STATE)
    return Rollout(tracer, episodes, fields), Scores(tracer, episodes, (SCORE,))


def _check_roles(name: str, policy: object, environment: object) -> None:
    """Raises TraceError unless one policy acts in one environment."""
    for value, kind, argument in (
        (policy, Policy, "policy"),
        (environment, Environment, "environment"),
    ):
        if not isinstance(value, kind):
            expected = f"{kind.kind}, a role of the workflow"
            hint = None
            if _are_two(policy, environment):
                expected = f"one policy and one environment: here {expected}"
                hint = SECOND_PLAYER
            raise refuse_argument(name, argument, value, expected, hint)


def _are_two(policy: object, environment: object) -> bool:
    """True if two models are to act, rather than roles passed in the wrong order."""
    if isinstance(policy, Environment):
        return False
    other = isinstance(environment, Role) and environment.learns
    return other or _policies(policy) + _policies(environment) > 1


def _policies(value: object) -> int:
    """Returns the number of policies in one argument, alone or in a list, tuple or dict."""
    match value:
        case Policy():
            return 1
        case list() | tuple() | set() | frozenset():
            return sum(isinstance(one, Policy) for one in value)
        case dict():
            return sum(isinstance(one, Policy) for one in (*value, *value.values()))
        case _:
            return 0
