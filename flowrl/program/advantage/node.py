"""The node of an advantage, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, overload

from flowrl.graph.signatures import (
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    STATE,
    TOKEN_REWARD,
    TURN,
    advantage_outputs,
)
from flowrl.graph.types import Op
from flowrl.program.handles import Advantages, Logprobs, Returns, Rollout, Scores, Values
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    is_number,
    operation,
    refuse_argument,
)
from flowrl.program.tracer import Read
from flowrl.specs import AdvantageSpec, Distill, OptimalTokenBaseline, ReinforcePP, ReMax, Scalar
from flowrl.specs.advantage import Per, UserAdvantage
from flowrl.wording import suggestion

__all__ = [
    "OwnAdvantage",
    "add_advantage",
    "choice",
    "number",
    "own",
    "returns_of",
]


_EPISODE = (TURN, TOKEN_REWARD, STATE)

_REWARDS_TO_GO = (ReinforcePP, ReMax, OptimalTokenBaseline)
"""Sums of rewards without a critic; an environment's are taken where they were given."""


def add_advantage(
    name: str,
    spec: AdvantageSpec,
    scores: Scores | Sequence[Scores] | None,
    rollout: Rollout | None = None,
    reference: Logprobs | None = None,
    values: Values | None = None,
    baseline: Scores | None = None,
    policy: Logprobs | None = None,
) -> Advantages:
    """Adds the node; its edges carry the fields that the specification reads."""
    tracer = current_tracer(name)
    reads: dict[str, Read] = {}
    several = scores if isinstance(scores, list | tuple) and scores else (scores,)
    for place, each in enumerate(several, 1):
        if each is not None or spec.needs_scores:
            scored = check_handle(each, Scores, operation=name, argument="scores")
            reads["scores" if place == 1 else f"scores_{place}"] = scored.read()
    if rollout is not None or {"mask", "turns", "logprobs", "token_rewards"} & set(spec.needs):
        samples = check_handle(rollout, Rollout, operation=name, argument="rollout")
        wanted = [RESPONSE_MASK]
        # With probabilities of the policy, logprobs are of the same pass as these.
        reads_logprobs = "logprobs" in spec.needs and "sum_pi_squared" not in spec.needs
        wanted += [ROLLOUT_LOGPROBS] if reference is not None or reads_logprobs else []
        wanted += _EPISODE if "turns" in spec.needs else ()
        if spec.gives_returns or isinstance(spec, _REWARDS_TO_GO) or "token_rewards" in spec.needs:
            wanted.append(TOKEN_REWARD)
        fields = tuple(field for field in samples.fields if field in wanted)
        reads["rollout"] = Read(samples.node, fields)
    if reference is not None:
        argument = "teacher" if isinstance(spec, Distill) else "reference"
        logprobs = check_handle(reference, Logprobs, operation=name, argument=argument)
        reads["reference"] = logprobs.read()
    if values is not None:
        reads["values"] = check_handle(values, Values, operation=name, argument="values").read()
    if baseline is not None:
        lone = check_handle(baseline, Scores, operation=name, argument="baseline")
        reads["baseline"] = lone.read()
    if policy is not None:
        own = check_handle(policy, Logprobs, operation=name, argument="policy")
        reads["policy"] = own.read()
    outputs = advantage_outputs(spec)
    node = tracer.add(
        Op.ADVANTAGE, name="advantage", reads=reads, outputs=outputs, attrs={"spec": spec}
    )
    return Advantages(tracer, node, outputs[:1])


def returns_of(advantages: Advantages, spec: AdvantageSpec) -> Returns:
    """The critic's targets that the same node gives."""
    return Returns(advantages.tracer, advantages.node, advantage_outputs(spec)[1:])


def choice(name: str, argument: str, value: object, allowed: Collection[object]) -> None:
    """Refuses a value that is none of those allowed."""
    # 1 is no yes, and True no 1.
    if any(value == each and type(value) is type(each) for each in allowed):
        return
    choices = ", ".join(map(repr, allowed))
    hint = suggestion(str(value), [str(each) for each in allowed])
    raise refuse_argument(name, argument, value, f"one of {choices}", hint)


def number(name: str, argument: str, value: float, *, most: float | None = None) -> float:
    """A number from 0 up, at most `most`."""
    if not is_number(value) or (most is not None and value > most):
        expected = "a number from 0 up" if most is None else f"a number from 0 to {most:g}"
        raise refuse_argument(name, argument, value, expected)
    return float(value)


# `@fl.advantage.own`: advantages that a function of the user's own computes.

_Given = TypeVar("_Given", Advantages, tuple[Advantages, Returns])


class OwnAdvantage(UserAdvantage, Generic[_Given]):
    """An advantage of the user's own, to be called inside a workflow.

    Its type says whether it gives a critic's targets too.
    """

    reserved: ClassVar[frozenset[str]] = frozenset(
        {"scores", "rollout", "reference", "values", "baseline"}
    )

    @operation
    def __call__(
        self,
        scores: Scores | Sequence[Scores],
        rollout: Rollout | None = None,
        *,
        reference: Logprobs | None = None,
        values: Values | None = None,
        baseline: Scores | None = None,
        **options: Scalar,
    ) -> _Given:
        """Advantages of each step's batch.

        Args:
            scores: One a sample; where it reads `rewards` a sequence of them, whose plain sum it
                gets as scores.
            rollout: The samples that were scored, where it reads their tokens.
            reference: Logprobs of another policy, where it reads `reference_logprobs`.
            values: A critic's, where it reads them.
            baseline: One score a prompt, where it reads `baselines`.
            options: Of the function.

        Returns:
            Advantages, and a critic's targets where it gives those.
        """
        spec = self.spec(**options)
        name = self.__name__
        advantages = add_advantage(name, spec, scores, rollout, reference, values, baseline)
        given = (advantages, returns_of(advantages, spec)) if spec.gives_returns else advantages
        return cast(_Given, given)


@overload
def own(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: Literal[False] = False
) -> Callable[[Callable[..., object]], OwnAdvantage[Advantages]]: ...


@overload
def own(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: Literal[True]
) -> Callable[[Callable[..., object]], OwnAdvantage[tuple[Advantages, Returns]]]: ...


def own(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: bool = False
) -> Callable[[Callable[..., object]], OwnAdvantage[Any]]:
    """Makes an advantage of a function `(batch, *, option=default, ...)`.

    The function is given an `AdvantageBatch` (`flowrl.algo.advantages`) with scores, groups and the
    fields that it declares, and returns an array: `[N]`, or `[N, T]` with `per="token"`.

    Args:
        per: What it gives one number for: `sample` or `token`.
        needs: Fields of the batch that it reads.
        returns: Whether it returns an `AdvantageResult` with a critic's targets.
    """
    return OwnAdvantage.mark(per=per, needs=needs, returns=returns)
