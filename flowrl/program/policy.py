"""`fl.Policy`: a role with a language model, which generates, gives logprobs, and learns.

    rollout = actor.generate(prompts)
    rollout, scores = fl.interact(actor, game, prompts, n=8, max_turns=4)
    (mine, my_scores), (theirs, their_scores) = fl.interact((pro, con), debate, prompts)

In a rollout of several turns, policy and environment are two roles, which may be placed apart. They
exchange turns and observations, sample by sample, until the environment is done. Tokens of the
observations are part of each sample, and no loss counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, TypeAlias, TypedDict, Unpack, cast, overload

from flowrl.graph.ir import Attr, Op
from flowrl.graph.signatures import (
    OBSERVATION,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SCORE,
    STATE,
    TOKEN_REWARD,
    TOKENS,
    TURN,
    WEIGHTS,
)
from flowrl.program.formulas import add_subset
from flowrl.program.handles import (
    Advantages,
    Handle,
    Logprobs,
    Prompts,
    Rollout,
    Samples,
    Scores,
)
from flowrl.program.operation import Call
from flowrl.program.roles import Environment, Role
from flowrl.program.sums import Sum, UpdateArguments, given_arguments
from flowrl.program.tracer import Read
from flowrl.specs import Grammar, Sampling
from flowrl.specs.base import Count, Range
from flowrl.specs.filters import Turns
from flowrl.specs.names import operation
from flowrl.user_lines import trace_error

_Decay: TypeAlias = Annotated[float, Range(low=0.0, high=1.0, below=True)]
_SAMPLES = (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS)


class SamplingOptions(TypedDict, total=False):
    """How samples are generated; `fl.Sampling` documents the single options.

    What is not given, or None, comes from `sampling`, and without that from `train.sampling` of the
    config. `grammar` (`fl.grammar`) is what a response may look like, where the role's backend can.
    """

    sampling: Sampling | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    grammar: Grammar | None


class Policy(Role):
    """A role with a language model: it generates, gives logprobs, and learns."""

    kind = "a policy"
    learns = True

    @operation
    def generate(
        self, prompts: Prompts, n: int | None = None, **options: Unpack[SamplingOptions]
    ) -> Rollout:
        """`n` samples for each prompt.

        Args:
            prompts: What is answered.
            n: Samples for each prompt; `train.group_size` of the config where it is None.
            options: `temperature` and other options of sampling, and a grammar.
        """
        tracer, call = self._begin(Op.GENERATE), Call(f"{self.name}.generate")
        attrs = _sampling_attrs(call, n, options)
        reads = call.reads({"prompts": (prompts, Prompts)})
        node = tracer.add(Op.GENERATE, name=call.name, role=self.name, reads=reads, attrs=attrs)
        return Rollout(tracer, node, _SAMPLES)

    @operation
    def logprobs(self, rollout: Samples) -> Logprobs:
        """This policy's logprob of each response token, at the rollout's temperature."""
        return self._evaluate(Op.LOGPROBS, Logprobs, rollout)

    @operation
    def update(
        self,
        rollout: Samples | Sum,
        rewards: Scores | None = None,
        *,
        every: int = 1,
        **arguments: Unpack[UpdateArguments],
    ) -> Self:
        """Learns from samples: `train.mini_batches` optimizer updates a step.

        Args:
            rollout: Samples: a rollout, the examples of a supervised workflow, or pairs. Or
                `fl.sum(...)` of several, each with arguments of its own.
            rewards: Scores; the config says which advantage is made of them (`algorithm`). A loss
                that learns outcomes reads them as they are.
            every: Steps between updates: it is made in steps `every`, `2 * every`, ... of its
                stage. This update does not use the samples of the other steps, and what it alone
                reads of models is not computed in them.
            advantages: The weight of each sample or token, in place of `rewards`.
            reference: Logprobs of the reference policy, for `kl` or for a loss that compares.
            old: Logprobs of this policy at the start of the step, for a loss whose anchor is the
                old policy. Where it is None they are computed when they are needed.
            loss: What is minimised. None takes the config's for rollouts, and cross-entropy for
                examples.
            kl: Penalty on the distance from `reference`; None, or a coefficient of 0, is none.
            extra: Fields of maps that a loss of your own reads.

        Returns:
            The policy with its new weights, whose `logprobs` run with them in the same step. The
            weights generate from the next step on.
        """
        given = given_arguments(rewards, arguments)
        if isinstance(rollout, Policy):
            hint = f"to take over weights, write {self.name}.sync({rollout.name})"
            raise Call(f"{self.name}.update").refuse("rollout", rollout, "samples", hint)
        if not isinstance(rollout, Sum):
            return self._learn_term(rollout, given, every=every)
        for twice in given:
            raise Call(f"{self.name}.update").refuse(
                twice,
                given[twice],
                "arguments of each term, next to its samples",
                f"write fl.term(samples, {twice}=...)",
            )
        new, name = self, self.tracer.unused_sum()
        for each in rollout.terms:
            attrs = {"sum": name, "weight": each.weight}
            new = new._learn_term(
                each.samples, each.arguments, every=every, attrs=attrs, source=each.source
            )
        return new

    def _learn_term(self, samples: Samples, given: Mapping[str, object], **more: Any) -> Self:
        """Adds an update with the arguments of `update`, or a term of one; see `_learn`."""
        kinds: Mapping[str, type[Handle]] = {
            "rewards": Scores,
            "advantages": Advantages,
            "reference": Logprobs,
            "old": Logprobs,
        }
        reads = Call(f"{self.name}.update").reads(
            {"rollout": (samples, Samples)},
            optional={name: (given.get(name), kind) for name, kind in kinds.items()},
        )
        loss, kl, extra = (cast("Any", given.get(name)) for name in ("loss", "kl", "extra"))
        return self._learn(reads, loss=loss, kl=kl, extra=extra, **more)

    @operation
    def sync(
        self,
        source: Policy,
        *,
        every: int = 1,
        decay: float = 0.0,
        reset_optimizer: bool = False,
    ) -> None:
        """Takes the weights of `source`, as its update leaves them, at the end of a step.

        Args:
            source: A policy that this step updates; its model is of the same shape.
            every: Steps between refreshes: after steps `every`, `2 * every`, ...
            decay: The share of the own weights that stays: the new ones are
                `decay * own + (1 - decay) * source`, an exponential moving average. 0 is a copy.
            reset_optimizer: Whether the optimizer of `source` forgets its moments then. Its
                schedule of learning rates goes on.
        """
        tracer, call = self._begin(Op.SYNC), Call(f"{self.name}.sync")
        if not isinstance(source, Policy) or source.name == self.name:
            raise call.refuse("source", source, "another policy of the workflow")
        call.check("every", every, Count)
        call.check("decay", decay, _Decay)
        call.check("reset_optimizer", reset_optimizer, bool)
        attrs: dict[str, Attr] = {"in_place": False, "every": every}
        if decay:
            attrs["decay"] = float(decay)
        if reset_optimizer:
            attrs["reset_optimizer"] = True
        before = [n for n in tracer.nodes if n.op is Op.SYNC and n.role == self.name]
        if before:
            raise trace_error(
                f"{self.name} takes over weights twice in a step",
                found=f"{before[0].id} ({before[0].source})",
                expected="one sync of a role, with the number of steps between refreshes: every=50",
                hint="leave one of the two syncs out",
            )
        update = tracer.last_update(source.name)
        if update is None:
            turned = f"; the role that takes weights comes first: {source.name}.sync({self.name})"
            raise trace_error(
                f"{call.name} takes the weights of '{source.name}', which nothing has updated yet",
                hint=f"write it after {source.name}.update(...)"
                + (turned if tracer.last_update(self.name) else ""),
            )
        if source.version not in (None, update.id):
            raise call.refuse("source", source, f"the newest version of {source.name}")
        tracer.add(
            Op.SYNC,
            name=call.name,
            role=self.name,
            reads={"weights": Read(update.id, (WEIGHTS,))},
            attrs=attrs,
        )


def _sampling_attrs(call: Call, n: int | None, options: SamplingOptions) -> dict[str, Attr]:
    """Returns the attributes of a `generate` node, made by an operation."""
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    sampling, grammar = given.pop("sampling", None), given.pop("grammar", None)
    call.check("n", n, Count | None)
    call.check("sampling", sampling, Sampling | None)
    call.check("grammar", grammar, Grammar | None, 'write grammar=fl.grammar.regex("...")')
    merged = call.spec(replace(sampling or Sampling(), **given))
    attrs: dict[str, Attr] = {"n": n, "sampling": None if sampling is None else merged}
    if sampling is None:
        attrs |= {option: getattr(merged, option) for option in given}
    return attrs | ({} if grammar is None else {"grammar": grammar})


# Rollouts of several turns.

MAX_OBSERVATION_TOKENS = 64
"""Tokens of an observation where the program does not say."""

_Taken: TypeAlias = tuple[Rollout, Scores]


@overload
def interact(
    policy: Policy,
    environment: Environment,
    prompts: Prompts,
    n: int | None = None,
    *,
    max_turns: int = ...,
    max_observation_tokens: int = ...,
    **options: Unpack[SamplingOptions],
) -> _Taken: ...


@overload
def interact(
    policy: Sequence[Policy],
    environment: Environment,
    prompts: Prompts,
    n: int | None = None,
    *,
    max_turns: int = ...,
    max_observation_tokens: int = ...,
    **options: Unpack[SamplingOptions],
) -> tuple[_Taken, ...]: ...


@operation
def interact(
    policy: Policy | Sequence[Policy],
    environment: Environment,
    prompts: Prompts,
    n: int | None = None,
    *,
    max_turns: int = 8,
    max_observation_tokens: int = MAX_OBSERVATION_TOKENS,
    **options: Unpack[SamplingOptions],
) -> _Taken | tuple[_Taken, ...]:
    """`n` episodes for each prompt.

    Args:
        policy: Who acts: each turn is one response. Of several, `(pro, con)`, each takes a turn
            after the one before it, in turns.
        environment: Who answers: an observation, a reward, and whether the episode is over.
        prompts: Tasks; an episode begins with the prompt and the environment's first observation.
        n: Episodes for each prompt; `train.group_size` of the config where it is None.
        max_turns: Turns at most, of all policies together.
        max_observation_tokens: Tokens of an observation at most; a longer one ends the episode.
        options: Options of sampling and a grammar, as of `Policy.generate`; `max_tokens` and the
            grammar are of one turn.

    Returns:
        The rollout, whose response mask leaves observations out, and the sum of each episode's
        rewards. The rollout also knows turns and their rewards, for advantages per turn. Of several
        policies a pair of these for each, with its own turns in the mask and its own rewards.
    """
    call = Call("fl.interact")
    policies = _acting(call, policy, environment)
    call.check("max_turns", max_turns, Count)
    call.check("max_observation_tokens", max_observation_tokens, Count)
    if max_turns < len(policies):
        raise call.refuse(
            "max_turns", max_turns, f"at least {len(policies)}, a turn of each policy"
        )
    tracer = environment._begin(Op.INTERACT)
    for each in policies:
        each._begin(Op.GENERATE)
    attrs = _sampling_attrs(call, n, options)
    region = tracer.region()
    episodes = tracer.add(
        Op.INTERACT,
        name=f"{environment.name}.interact",
        role=environment.name,
        region=region,
        reads=call.reads({"prompts": (prompts, Prompts)}),
        attrs={"max_turns": max_turns, "max_observation_tokens": max_observation_tokens},
    )
    turns = [
        tracer.add(
            Op.GENERATE,
            name=f"{each.name}.generate",
            role=each.name,
            region=region,
            reads={"observation": Read(episodes, (OBSERVATION,))},
            attrs=attrs,
        )
        for each in policies
    ]
    tracer.feed(
        episodes,
        {
            "turns" if place == 1 else f"turns_{place}": Read(node, _SAMPLES)
            for place, node in enumerate(turns, 1)
        },
    )
    fields = (*_SAMPLES, TURN, TOKEN_REWARD, STATE)
    rollout, scores = Rollout(tracer, episodes, fields), Scores(tracer, episodes, (SCORE,))
    if isinstance(policy, Policy):
        return rollout, scores
    return tuple(
        add_subset(Turns(policy=place, of=len(policies)), rollout, scores)
        for place in range(len(policies))
    )


def _acting(call: Call, policy: object, environment: object) -> tuple[Policy, ...]:
    """Returns the policies of an episode; raises TraceError unless they act in one environment."""
    policies = tuple(policy) if isinstance(policy, list | tuple) and policy else (policy,)
    if not all(isinstance(each, Policy) for each in policies):
        expected = "a policy, a role of the workflow, or several that take turns: (pro, con)"
        raise call.refuse("policy", policy, expected)
    if not isinstance(environment, Environment):
        raise call.refuse(
            "environment",
            environment,
            "an environment, a role of the workflow",
            "policies that take turns are one argument: fl.interact((pro, con), game, prompts)"
            if not isinstance(environment, dict | list)
            else "several environments have their part of the prompts each: fl.where(prompts, "
            "row=..., equals=...), one fl.interact for each part, and fl.concat of the rollouts",
        )
    return cast("tuple[Policy, ...]", policies)
