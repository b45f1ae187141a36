"""Sets of samples: data rows of a step's prompts, pairs and joins of sets, and earlier samples.

solutions = fl.Examples.of(prompts)                       # of the very rows of these prompts
pairs = fl.pair(preferred=solutions, other=rollout)       # what SPIN learns from
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Self, TypeVar, cast, overload

from flowrl.graph.ir import Field, Op
from flowrl.graph.sample_sets import line_of_descent, sample_sets
from flowrl.graph.signatures import (
    PART,
    PREFERRED,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    STATE,
    TOKEN_REWARD,
    TOKENS,
    TURN,
)
from flowrl.ids import NodeId
from flowrl.program.formulas import subset_of
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
from flowrl.program.tracer import Read
from flowrl.specs import Replay, RowCondition, Scalar
from flowrl.specs.maps import ROW_PREFIX
from flowrl.specs.names import operation
from flowrl.user_lines import trace_error

_Part = TypeVar(
    "_Part",
    bound=Prompts | Samples | tuple[Samples, *tuple[Scores | Logprobs | Advantages, ...]],
)
_A = TypeVar("_A", Scores, Logprobs, Advantages)
_B = TypeVar("_B", Scores, Logprobs, Advantages)


class RowSamples(Samples):
    """Base of samples that come with data rows.

    Attributes:
        data: The kind of data.
        produces: Its fields.
    """

    __slots__ = ()
    data: ClassVar[str]
    produces: ClassVar[tuple[Field, ...]]

    @classmethod
    def _of(cls, prompts: Prompts) -> Self:
        call = Call(f"fl.{cls.__name__}.of")
        reads = call.reads({"prompts": (prompts, Prompts)})
        tracer = call.trace()
        if tracer.graph().node(prompts.node).op is Op.PROMPTS_OF:
            raise call.refuse(
                "prompts",
                prompts,
                "prompts of the data, which have rows, and these are made of samples",
                "pass the prompts that the samples answer",
            )
        node = tracer.add(
            Op.SOURCE, name=cls.data, reads=reads, outputs=cls.produces, attrs={"data": cls.data}
        )
        return cls(tracer, node, cls.produces)


class Examples(RowSamples):
    """Prompts with solutions, as samples whose response is the solution: supervised stages."""

    __slots__ = ()
    kind = "the examples"
    comes_from = "examples are a parameter of the workflow, or come from fl.Examples.of(prompts)"
    data: ClassVar[str] = "examples"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK)

    @classmethod
    @operation
    def of(cls, prompts: Prompts) -> Self:
        """The solutions of the very rows of a step's prompts.

        A parameter `examples: fl.Examples` takes rows of its own. Rows whose solution does not fit
        the model are then left out of the prompts too.

        Args:
            prompts: Prompts of the step.
        """
        return cls._of(prompts)


class Pairs(RowSamples):
    """Two answers to each prompt, the preferred one first: preference learning, reward models."""

    __slots__ = ()
    kind = "the pairs"
    comes_from = (
        "pairs are a parameter of the workflow, or come from fl.select.best_and_worst or fl.pair"
    )
    data: ClassVar[str] = "pairs"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK, PREFERRED)

    @classmethod
    @operation
    def of(cls, prompts: Prompts) -> Self:
        """The pairs of the very rows of a step's prompts, as `fl.Examples.of` gives solutions."""
        return cls._of(prompts)


@operation
def pair(*, preferred: Samples, other: Samples) -> Pairs:
    """Pairs of two sets of samples of the same prompts, for `fl.loss.dpo` and reward models.

    Sample k of a prompt in one set is paired with its sample k in the other. A set with one sample
    for a prompt has it paired with each of the other's. A prompt that one of the sets lacks (a
    filter took it out) makes no pair.

    Where one set answers prompts that are made of the other's samples, each of its samples is
    paired with the one that it comes of, as an answer to the prompt of that one.

    Args:
        preferred: The samples that are preferred: solutions, or those of a better policy.
        other: The samples that they are preferred to.
    """
    given = {"preferred": preferred, "other": other}
    reads = Call("fl.pair").reads({name: (samples, Samples) for name, samples in given.items()})
    for name, samples in given.items():
        if isinstance(samples, Pairs):
            raise Call("fl.pair").refuse(
                name,
                samples,
                "samples that are not paired yet",
                "pass a rollout or fl.Examples.of(prompts)",
            )
    tracer = Call("fl.pair").trace()
    graph = tracer.graph()
    made = sample_sets(graph)
    first, second = (graph.node(NodeId(made[read.node])) for read in reads.values())
    # What an answer to another prompt was sampled with is not its logprob as an answer to this one.
    revised = line_of_descent(graph, first, second) or line_of_descent(graph, second, first)
    both = ROLLOUT_LOGPROBS in preferred.fields and ROLLOUT_LOGPROBS in other.fields
    fields = (TOKENS, RESPONSE_MASK, *((ROLLOUT_LOGPROBS,) if both and not revised else ()))
    reads = {name: Read(read.node, fields) for name, read in reads.items()}
    outputs = (*fields, PREFERRED)
    return Pairs(tracer, tracer.add(Op.PAIR, name="pair", reads=reads, outputs=outputs), outputs)


# Parts of sets.


@operation
def where(
    given: _Part,
    *,
    row: str,
    equals: Scalar | EllipsisType = ...,
    one_of: Collection[Scalar] | None = None,
    none_of: Collection[Scalar] | None = None,
) -> _Part:
    """The prompts or samples of those data rows whose field has a value.

    How many they are differs from step to step.

    Args:
        given: Prompts of the data, samples, or samples with values of theirs: `(rollout, scores)`.
        row: The field of the rows; one inside another is `meta.topic`.
        equals: The value that the field has; or one of these two:
        one_of: Values of which it has one.
        none_of: Values of which it has none: the rest of the rows.
    """
    call = Call("fl.where")
    condition = _condition(call, row, equals, one_of, none_of)
    handles = given if isinstance(given, tuple) else (given,)
    if isinstance(given, Prompts):
        reads = call.reads({"prompts": (given, Prompts)})
    else:
        reads = _reads_of_part(call, handles, "")
    tracer = call.trace()
    outputs = tuple(field for read in reads.values() for field in read.fields)
    attrs = {"spec": condition}
    node = tracer.add(Op.WHERE, name="where", reads=reads, outputs=outputs, attrs=attrs)
    made = tuple(type(handle)(tracer, node, handle.fields) for handle in handles)
    return cast("_Part", made if isinstance(given, tuple) else made[0])


def _condition(
    call: Call,
    row: object,
    equals: Scalar | EllipsisType,
    one_of: Collection[Scalar] | None,
    none_of: Collection[Scalar] | None,
) -> RowCondition:
    asked = {"equals": None if equals is ... else [equals], "one_of": one_of, "none_of": none_of}
    written = [argument for argument, values in asked.items() if values is not None]
    if len(written) != 1:
        raise trace_error(
            f"{call.name} needs one of equals=, one_of= and none_of=",
            found=" and ".join(f"{argument}=" for argument in written) or "none of them",
            hint='write row="topic", equals="maths"',
        )
    (argument,) = written
    values: Any = asked[argument]
    if not isinstance(row, str) or not row.strip():
        raise call.refuse("row", row, "the name of a field of the data rows")
    if row.strip().startswith(ROW_PREFIX):
        raise call.refuse(
            "row",
            row,
            "the name of a field as the data rows have it",
            f'write row="{row.strip().removeprefix(ROW_PREFIX)}"; maps and templates, which read '
            "more than rows, have the prefix",
        )
    scalars = isinstance(values, Collection) and not isinstance(values, str | bytes | Handle)
    scalars = scalars and all(
        value is None or isinstance(value, str | int | float) for value in values
    )
    if not scalars or not values:
        raise call.refuse(
            argument,
            equals if argument == "equals" else values,
            "a string, a number, True, False or None"
            if argument == "equals"
            else "a list of strings, numbers, True, False or None",
            f"write one_of={equals!r}" if isinstance(equals, list | tuple | set) else None,
        )
    ordered = sorted(values, key=repr) if isinstance(values, set | frozenset) else values
    return RowCondition.of(row.strip(), ordered, excluded=argument == "none_of")


def _reads_of_part(call: Call, handles: Sequence[object], number: str) -> dict[str, Read]:
    """Returns what feeds the arguments of one set: its samples, and values of theirs."""
    first = handles[0] if handles else None
    if isinstance(first, tuple(_CARRIED)):
        expected = "samples, alone or with their values"
        raise call.refuse("parts", first, expected, f"join values with their samples: {_JOINED}")
    samples = call.handle("samples", first, Samples)
    reads = {f"rollout{number}": samples.read()}
    for handle in handles[1:]:
        argument = next((a for kind, a in _CARRIED.items() if isinstance(handle, kind)), None)
        if argument is None or f"{argument}{number}" in reads:
            raise call.refuse(
                "samples",
                handle,
                "the samples, and then scores, logprobs and advantages of them, one of each",
                "compute other values on what is returned",
            )
        value = call.handle(argument, handle, Handle)
        reads[f"{argument}{number}"] = value.read()
    return reads


_CARRIED: Mapping[type[Handle], str] = {
    Scores: "scores",
    Logprobs: "logprobs",
    Advantages: "advantages",
}
"""Values that may go with samples, and the arguments that they feed."""

_JOINED = "rollout, scores = fl.concat((a, a_scores), (b, b_scores))"


# Sets of several sets.


@overload
def concat(*parts: Samples, missing_logprob: float | None = ...) -> Rollout: ...


@overload
def concat(
    *parts: tuple[Samples, _A], missing_logprob: float | None = ...
) -> tuple[Rollout, _A]: ...


@overload
def concat(
    *parts: tuple[Samples, _A, _B], missing_logprob: float | None = ...
) -> tuple[Rollout, _A, _B]: ...


@operation
def concat(*parts: Any, missing_logprob: float | None = None) -> Any:
    """One set of the samples of several, in which those of a prompt are one group.

    A prompt that only one of the sets has keeps the samples that it has there. The field `source`
    is the place of a sample's set among the arguments, from 0: maps and losses of your own read it
    by this name (`extra=("source",)` of a loss), and so do advantages (`needs=("source",)`).

    Args:
        parts: Sets of samples; or each with values of its samples, `(rollout, scores)`, which are
            joined in the same way: scores, logprobs and advantages.
        missing_logprob: What losses read as the logprob of tokens that no policy sampled, of
            examples joined with a rollout. 0.0 takes their probability as 1, as LUFFY does (Yan et
            al., 2025, arXiv:2504.14945). Without it, such a set has no `rollout_logprobs`, and
            losses that read these refuse it.
    """
    call = Call("fl.concat")
    tupled = [isinstance(part, tuple) for part in parts]
    if len(set(tupled)) != 1:
        raise call.refuse(
            "parts",
            tuple(parts),
            "one or more sets of samples, either all alone or all with their values",
            f"write fl.concat(a, b), or {_JOINED}",
        )
    is_number = isinstance(missing_logprob, int | float) and not isinstance(missing_logprob, bool)
    if missing_logprob is not None and not (is_number and missing_logprob <= 0):
        raise call.refuse("missing_logprob", missing_logprob, "a number of at most 0")
    reads: dict[str, Read] = {}
    kinds: list[list[type[Handle]]] = []
    for number, part in enumerate(parts, 1):
        handles = part if isinstance(part, tuple) else (part,)
        reads |= _reads_of_part(call, handles, "" if number == 1 else f"_{number}")
        kinds.append([type(handle) for handle in handles[1:]])
        if isinstance(handles[0], Pairs):
            raise call.refuse(
                "parts", handles[0], "samples that are not paired", "join them before fl.pair"
            )
    if any(kind != kinds[0] for kind in kinds):
        raise call.refuse(
            "parts", tuple(parts), "sets with the same kinds of values in the same order"
        )
    fields = _joined_fields(reads, missing_logprob)
    values = tuple(
        field
        for argument, read in reads.items()
        if argument in _CARRIED.values()
        for field in read.fields
    )
    tracer = call.trace()
    node = tracer.add(
        Op.CONCAT,
        name="concat",
        reads=reads,
        outputs=(*fields, *values),
        attrs={"missing_logprob": None if missing_logprob is None else float(missing_logprob)},
    )
    joined = Rollout(tracer, node, fields)
    if not tupled[0]:
        return joined
    return (joined, *(type(h)(tracer, node, h.fields) for h in parts[0][1:]))


def _joined_fields(reads: Mapping[str, Read], missing_logprob: float | None) -> tuple[Field, ...]:
    """Returns the fields of joined samples: those that all parts have, and `source`."""
    parts = [read.fields for argument, read in reads.items() if argument.startswith("rollout")]
    episodes = [field for field in (TURN, TOKEN_REWARD, STATE) if any(field in p for p in parts)]
    logprobs = missing_logprob is not None or all(ROLLOUT_LOGPROBS in part for part in parts)
    sampled = (ROLLOUT_LOGPROBS,) if logprobs else ()
    return (TOKENS, RESPONSE_MASK, *sampled, *episodes, PART)


replay = subset_of(Replay, __name__)
