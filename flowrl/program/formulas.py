"""Nodes that compute a formula: advantages, filters, selections and maps, built in or one's own.

@fl.map(reads=("score", "response_mask"), gives="score", per_sample=True)
def brief(batch, *, scale=0.01):
    return batch["score"] - scale * batch.lengths

scores = brief(verifier.score(rollout), rollout, scale=0.02)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    overload,
)

from flowrl.graph.ir import Field, Op, Unit, called, held_field, names_of
from flowrl.graph.signatures import (
    ADVANTAGE,
    LOGPROBS,
    PART,
    PREFERRED,
    PROMPT,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SCORE,
    STATE,
    TOKEN_ADVANTAGE,
    TOKEN_REWARD,
    TOKENS,
    TURN,
    advantage_outputs,
    map_outputs,
)
from flowrl.program.handles import (
    Advantages,
    Handle,
    Logprobs,
    Mapped,
    Returns,
    Rollout,
    Samples,
    Scores,
    TokenRewards,
    Values,
)
from flowrl.program.operation import Call, operation_of
from flowrl.program.tracer import Read
from flowrl.specs import AdvantageSpec, FilterSpec, MapSpec, Replay, Scalar, SelectSpec
from flowrl.specs.advantage import (
    FIELDS,
    OptimalTokenBaseline,
    OwnAdvantage,
    Per,
    ReinforcePP,
    ReMax,
)
from flowrl.specs.base import format_list
from flowrl.specs.filters import BestAndWorst, Turns
from flowrl.specs.maps import OwnMap, WeightedSum, declared_fields, split_key
from flowrl.specs.names import operation
from flowrl.specs.user_functions import MarkedFunction, names_among
from flowrl.user_lines import trace_error

# Advantages.


_REWARDS_TO_GO = (ReinforcePP, ReMax, OptimalTokenBaseline)
"""Sums of rewards without a critic. The rewards of an environment count at the tokens at which it
gave them."""


def add_advantage(
    spec: AdvantageSpec,
    scores: Scores | Sequence[Scores] | None,
    rollout: Rollout | None = None,
    reference: Logprobs | None = None,
    values: Values | None = None,
    baseline: Scores | None = None,
    policy: Logprobs | None = None,
    token_rewards: TokenRewards | None = None,
) -> Advantages:
    """Adds the node; its edges carry the fields that the specification reads.

    Args:
        spec: The formula.
        scores: One a sample; several where the formula reads each of them.
        rollout: The samples that were scored.
        reference: Logprobs of the reference policy, or of a teacher.
        values: A critic's values.
        baseline: One score a prompt.
        policy: Logprobs of the policy, computed again.
        token_rewards: Rewards of tokens, besides the scores.
    """
    call = Call(called(spec) if spec.kind == "own" else f"fl.advantage.{spec.kind}")
    tracer = call.trace()
    spec = call.spec(spec)
    reads: dict[str, Read] = {}
    several = scores if isinstance(scores, list | tuple) and scores else (scores,)
    for place, each in enumerate(several, 1):
        if each is not None or spec.needs_scores:
            scored = call.handle("scores", each, Scores)
            reads["scores" if place == 1 else f"scores_{place}"] = scored.read()
    if rollout is not None or {"mask", "turns", "logprobs", "token_rewards", "source"} & set(
        spec.needs
    ):
        samples = call.handle("rollout", rollout, Rollout)
        wanted = _fields_read(spec, penalised=reference is not None)
        reads["rollout"] = Read(samples.node, tuple(f for f in samples.fields if f in wanted))
    reads |= call.reads(
        optional={
            "reference": (reference, Logprobs),
            "values": (values, Values),
            "baseline": (baseline, Scores),
            "policy": (policy, Logprobs),
            "token_rewards": (token_rewards, TokenRewards),
        },
    )
    outputs = advantage_outputs(spec)
    node = tracer.add(
        Op.ADVANTAGE, name="advantage", reads=reads, outputs=outputs, attrs={"spec": spec}
    )
    return Advantages(tracer, node, outputs[:1])


def _fields_read(spec: AdvantageSpec, *, penalised: bool) -> list[Field]:
    """Returns the fields of a rollout that an advantage reads, where the rollout has them."""
    fields = [RESPONSE_MASK]
    # With probabilities of the policy, logprobs are of the same pass as these.
    if penalised or ("logprobs" in spec.needs and "sum_pi_squared" not in spec.needs):
        fields.append(ROLLOUT_LOGPROBS)
    if "turns" in spec.needs:
        fields += (TURN, TOKEN_REWARD, STATE)
    if spec.gives_returns or isinstance(spec, _REWARDS_TO_GO) or "token_rewards" in spec.needs:
        fields.append(TOKEN_REWARD)
    if "source" in spec.needs:
        fields.append(PART)
    return fields


def returns_of(advantages: Advantages, spec: AdvantageSpec) -> Returns:
    """Returns the critic's targets that the same node gives."""
    return Returns(advantages.tracer, advantages.node, advantage_outputs(spec)[1:])


_Given = TypeVar("_Given", Advantages, tuple[Advantages, Returns])


class UserAdvantage(MarkedFunction[OwnAdvantage], Generic[_Given]):
    """An advantage of the user's own, to be called inside a workflow.

    Its type says whether it gives a critic's targets too.
    """

    reserved: ClassVar[frozenset[str]] = frozenset(
        {"scores", "rollout", "reference", "values", "baseline", "token_rewards"}
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
        token_rewards: TokenRewards | None = None,
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
            token_rewards: One reward a token, where it reads `process_rewards`.
            options: Of the function.

        Returns:
            Advantages, and a critic's targets where it gives those.
        """
        spec = self.spec(**options)
        advantages = add_advantage(
            spec, scores, rollout, reference, values, baseline, token_rewards=token_rewards
        )
        given = (advantages, returns_of(advantages, spec)) if spec.gives_returns else advantages
        return cast(_Given, given)


@overload
def own_advantage(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: Literal[False] = False
) -> Callable[[Callable[..., object]], UserAdvantage[Advantages]]: ...


@overload
def own_advantage(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: Literal[True]
) -> Callable[[Callable[..., object]], UserAdvantage[tuple[Advantages, Returns]]]: ...


@operation
def own_advantage(
    *, per: Per = "sample", needs: str | Iterable[str] = (), returns: bool = False
) -> Callable[[Callable[..., object]], UserAdvantage[Any]]:
    """Makes an advantage of a function `(batch, *, option=default, ...)`.

    The function is given an `AdvantageBatch` (`flowrl.algo.advantages`) with scores, groups and the
    fields that it declares, and returns an array: `[N]`, or `[N, T]` with `per="token"`.

    Args:
        per: What it gives one number for: `sample` or `token`.
        needs: Fields of the batch that it reads besides scores and groups, of `FIELDS`; one number
            a token needs the mask.
        returns: Whether it returns an `AdvantageResult` with a critic's targets.

    Raises:
        TraceError: No plan can name the function, or a field does not exist.
    """
    names_among(per, get_args(Per), what="per of fl.advantage.own")
    fields = names_among(
        needs,
        FIELDS,
        what="field of an advantage",
        other={name: f"batch.{name} is always there: leave it out" for name in ("scores", "groups")}
        | {"lengths": 'write needs="mask": batch.mask.sum(1) are the lengths'},
    )
    if (per == "token" or returns) and "mask" not in fields:
        fields = ("mask", *fields)
    reads = format_list(fields)
    return lambda function: UserAdvantage(
        function, kind="advantage", make=OwnAdvantage, reads=reads, per=per, returns=returns
    )


# Filters and selections.


_P = ParamSpec("_P")


def subset_of(
    kind: Callable[_P, FilterSpec | SelectSpec | Replay], module: str
) -> Callable[Concatenate[Rollout, Scores, _P], tuple[Rollout, Scores]]:
    """Makes the operation of a filter, a selection or a buffer."""
    return operation_of(kind, add_subset, module, rollout=Rollout, scores=Scores)


def add_subset(
    spec: FilterSpec | SelectSpec | Replay, rollout: Rollout, scores: Scores
) -> tuple[Rollout, Scores]:
    """Adds a filter, a selection or a buffer; returns the samples that it gives, with scores."""
    op = Op(spec.family)
    call = Call("fl.replay" if isinstance(spec, Replay) else f"fl.{op}.{spec.kind}")
    tracer = call.trace()
    reads = call.reads({"rollout": (rollout, Rollout), "scores": (scores, Scores)})
    node = tracer.add(
        op,
        name="turns" if isinstance(spec, Turns) else str(op),
        reads=reads,
        outputs=(*rollout.fields, PREFERRED if isinstance(spec, BestAndWorst) else SCORE),
        attrs={"spec": call.spec(spec)},
    )
    return Rollout(tracer, node, rollout.fields), Scores(tracer, node, (SCORE,))


# Maps.


MappedNumbers: TypeAlias = Scores | Advantages | Logprobs | TokenRewards
"""Handles that a map gives where other operations may read them."""


def add_map(call: Call, spec: MapSpec, handles: Iterable[Handle]) -> MappedNumbers | Mapped:
    """Adds the node of a map; each edge carries the fields that the map reads from it.

    Raises:
        TraceError: No argument has one of the keys, or the map reads nothing of an argument.
    """
    tracer = call.trace()
    spec = call.spec(spec)
    given = [call.handle("input", h, Handle) for h in handles]
    read: list[list[Field]] = [[] for _ in given]
    for key in spec.reads:
        field_name, place = split_key(key)
        having = [(i, f) for i, h in enumerate(given) if (f := _field_of(h, field_name))]
        if place >= len(having):
            raise trace_error(
                f"{call.name} reads '{key}', which none of its arguments gives",
                found="; ".join(f"{h.kind}: {names_of(h.fields)}" for h in given) or "nothing",
                hint=_CALLED_OTHERWISE.get(key)
                or (
                    "pass the rollout: samples have their texts and their data row"
                    if held_field(field_name)
                    else "pass what has it: scores, the rollout, logprobs, values"
                ),
            )
        index, field = having[place]
        if field.unit not in (Unit.SAMPLES, Unit.TOKENS):
            raise trace_error(
                f"{call.name} reads '{field.name}' of {given[index].kind}, which is one of "
                f"{field.unit}",
                expected="fields of samples or tokens",
                hint="a map computes with what was made of prompts: a rollout, scores",
            )
        read[index].append(field)
    for handle, fields in zip(given, read, strict=True):
        if not fields:
            raise trace_error(
                f"{call.name} reads nothing of {handle.kind} of '{handle.node}'",
                expected=f"what has {', '.join(spec.reads)}",
                hint=_read_of_another(handle, spec.reads)
                or "give it a handle that has one of these",
            )
    reads = {
        "input" if i == 0 else f"input_{i + 1}": Read(handle.node, tuple(read[i]))
        for i, handle in enumerate(given)
    }
    outputs = map_outputs(spec)
    node = tracer.add(Op.MAP, name="map", reads=reads, outputs=outputs, attrs={"spec": spec})
    return _MAPPED.get(outputs, Mapped)(tracer, node, outputs)


def _read_of_another(handle: Handle, keys: Sequence[str]) -> str | None:
    """Returns the hint where a map reads what a handle has of an earlier argument."""
    name = next((key for key in keys if _field_of(handle, split_key(key)[0])), None)
    if name is None:
        return None
    return (
        f"{name!r} is read of the first argument that has it: call the map once for each set of "
        f"samples, or read '{name}_2' too where it compares rollouts of the same prompts"
    )


def _field_of(handle: Handle, name: str) -> Field | None:
    """Returns the field that a handle has under a name; samples have texts and rows too."""
    named = next((field for field in handle.fields if field.name == name), None)
    return held_field(name) if named is None and isinstance(handle, Samples) else named


_CALLED_OTHERWISE = {
    "row": 'name the fields of the data row that it reads: reads="row.topic"',
    "prompt": 'the text of the prompt is "prompt_text" of the rollout',
    "answer": 'write "row.answer", if the field of the data row is called so',
    **dict.fromkeys(("texts", "response", "completion"), 'the text of the response is "text"'),
    **{
        name: f"batch.{name} is always there: leave it out of reads="
        for name in ("groups", "offsets", "lengths", "truncated")
    },
}
"""Keys that people write for what has another name or is there anyway, and what to do instead."""


_MAPPED: Mapping[tuple[Field, ...], type[MappedNumbers]] = {
    (SCORE,): Scores,
    (ADVANTAGE,): Advantages,
    (TOKEN_ADVANTAGE,): Advantages,
    (LOGPROBS,): Logprobs,
    (TOKEN_REWARD,): TokenRewards,
}
"""The handle that a map gives, by its outputs, where another operation may read it."""


_M = TypeVar("_M")


class UserMap(MarkedFunction[OwnMap], Generic[_M]):
    """A map of the user's own, to be called inside a workflow; its type says what it gives."""

    def __call__(self, *handles: Handle, **options: Scalar) -> _M:
        """Computes its fields of each step's batch.

        Args:
            handles: What it reads, in the order of its keys: `score` is the first that has a score,
                `score_2` the second.
            options: Of the function.

        Returns:
            Scores, advantages, logprobs or token rewards where it gives those, else something for
            `fl.log` and `extra=`.
        """
        return cast(_M, add_map(Call(self.__name__), self.spec(**options), handles))


@overload
def map_of(
    *, reads: str | Iterable[str], gives: Literal["score"] = "score", per_sample: bool = False
) -> Callable[[Callable[..., object]], UserMap[Scores]]: ...


@overload
def map_of(
    *, reads: str | Iterable[str], gives: Literal["token_reward"], per_sample: bool = False
) -> Callable[[Callable[..., object]], UserMap[TokenRewards]]: ...


@overload
def map_of(
    *, reads: str | Iterable[str], gives: Literal["logprobs"], per_sample: bool = False
) -> Callable[[Callable[..., object]], UserMap[Logprobs]]: ...


@overload
def map_of(
    *, reads: str | Iterable[str], gives: Literal["advantage"], per_sample: bool = False
) -> Callable[[Callable[..., object]], UserMap[Advantages]]: ...


@overload
def map_of(
    *, reads: str | Iterable[str], gives: str | Iterable[str], per_sample: bool = False
) -> Callable[[Callable[..., object]], UserMap[Any]]: ...


@operation
def map_of(
    *,
    reads: str | Iterable[str],
    gives: str | Iterable[str] = "score",
    per_sample: bool = False,
) -> Callable[[Callable[..., object]], UserMap[Any]]:
    """`@fl.map(...)`: makes a map of a function `(batch, *, option=default, ...)`.

    The function computes with numpy, on the batch that `flowrl.algo.maps.MapBatch` describes.

    Args:
        reads: Keys of the fields that it reads: `score`, `score_2`, `response_mask`, ...; of
            samples also `text`, `prompt_text`, and `row.NAME` for a field of the data row.
        gives: Fields: `score`, or `name/samples`, `name/tokens`, `name: dtype/unit`.
        per_sample: Whether what it gives of a sample depends on that sample alone; then it may
            come before a filter.
    """
    declared = declared_fields(reads, gives)
    return lambda function: UserMap(function, kind="map", make=OwnMap, alone=per_sample, **declared)


@operation
def weighted_sum(*scores: tuple[Scores, float]) -> Scores:
    """The sum of several scores of the same samples, each times its weight.

    Args:
        scores: Pairs of scores and weight: `fl.weighted_sum((accuracy, 1.0), (style, 0.2))`.
    """
    call = Call("fl.weighted_sum")
    handles, weights = weighted_scores(call, scores)
    given = add_map(call, WeightedSum.of(weights), handles)
    assert isinstance(given, Scores)
    return given


def weighted_scores(
    call: Call, pairs: Sequence[object], *, least: int = 1
) -> tuple[list[Scores], list[float]]:
    """Returns the scores and the weights of pairs, of which there must be `least`.

    Raises:
        TraceError: There are fewer pairs, or one is not scores and a finite number.
    """
    expected = "pairs of scores and weight"
    hint = f"write {call.name}((accuracy, 1.0), (style, 0.2))"
    handles: list[Scores] = []
    weights: list[float] = []
    for pair in pairs:
        value, weight = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, math.nan)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise call.refuse("scores", pair, expected, hint)
        handles.append(call.handle("scores", value, Scores))
        weights.append(float(weight))
    if len(weights) < least:
        raise call.refuse("scores", pairs, f"{least} or more {expected}", hint)
    return handles, weights


@operation
def log(name: str, value: Handle) -> None:
    """Shows the mean of a field with each step, and writes it to metrics.jsonl (`extra`).

    Args:
        name: Its name there; letters, digits and `_./-`.
        value: Anything with one field of numbers: scores, advantages, logprobs, values. Of several
            fields (a rollout), the first that is no token or mask.
    """
    tracer = Call("fl.log").trace()
    if not isinstance(name, str) or not re.fullmatch(r"[\w./-]+", name):
        raise Call("fl.log").refuse("name", name, "a name of letters, digits and _./-")
    before = [n for n in tracer.nodes if n.op is Op.LOG and n.attr("name") == name]
    if before:
        raise trace_error(
            f"'{name}' is logged twice",
            found=f"{before[0].source}",
            hint="each number of a step has a name of its own",
        )
    handle = Call("fl.log").handle("value", value, Handle)
    number = next((f for f in handle.fields if f not in (TOKENS, RESPONSE_MASK, PROMPT)), None)
    if number is None:
        raise Call("fl.log").refuse("value", value, "something with a field of numbers")
    reads = {"value": Read(handle.node, (number,))}
    tracer.add(Op.LOG, name=f"log.{name}", reads=reads, attrs={"name": name})
