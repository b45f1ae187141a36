"""Handles: symbolic data while a workflow is traced.

A handle has fields but no values, so it cannot be a truth value or a number; asking for one is a
`TraceError` at the user's line that says which construct to use instead. Where a program runs with
`executor=eager`, `handle.value` holds the data; all else is refused as in tracing, because the
compiled program could not do it.

Data that a workflow has as parameters (`fl.Prompts`, `fl.Examples`, `fl.Pairs`) are handles too.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

from flowrl.errors import TraceError
from flowrl.graph.ir import Field, names_of
from flowrl.graph.signatures import PROMPT
from flowrl.ids import NodeId
from flowrl.program.tracer import Read, Tracer
from flowrl.synonyms import meanings
from flowrl.user_lines import trace_error

if TYPE_CHECKING:
    from flowrl.data import PromptItem
    from flowrl.program.values import Array, SamplesValue

_ON_DATA = (
    "decide on data with an operation, such as fl.filter.zero_variance(rollout, scores) or fl.map; "
    "`if` and `for` work on the workflow's configuration arguments"
)
_AT_ONCE = "a workflow only says what happens; flowrl runs operations concurrently"
_ON_NUMBERS = (
    "compute with data inside an operation: fl.weighted_sum((accuracy, 1.0), (style, 0.2)) adds "
    "scores, fl.advantage.group_relative(scores) centres them, fl.map is a function of your own"
)

_ONE_THING = (
    "keep it in one variable and pass it whole: operations pick the fields they need, and a "
    "function marked @fl.map computes with them; with executor=eager the data is .value"
)

_REFUSED: tuple[tuple[str, str, str], ...] = (
    ("as a truth value (in `if`, `while`, `and`, `or`, `not`)", _ON_DATA, "bool"),
    ("with len()", "sizes come from the configuration: group_size, prompts_per_step", "len"),
    ("with `in`", _ON_DATA, "contains"),
    ("with [...]", "choose groups with fl.filter; operations pick the fields they need", "getitem"),
    ("with [...] =", _ON_NUMBERS, "setitem"),
    ("with del", "choose groups with fl.filter, samples with fl.select", "delitem"),
    ("as a function", "roles have operations: actor.generate(prompts)", "call"),
    ("with `await`", _AT_ONCE, "await"),
    ("in `async for`", _AT_ONCE, "aiter"),
    ("in `with`", _AT_ONCE, "enter exit"),
    ("in a loop", _ON_DATA, "next reversed"),
    ("as an array", _ON_NUMBERS, "array"),
    ("as a number", _ON_NUMBERS, "float int index complex trunc"),
    ("in a comparison", _ON_DATA, "eq ne lt le gt ge"),
    (
        "in arithmetic",
        _ON_NUMBERS,
        "add sub mul truediv floordiv mod pow matmul divmod lshift rshift and or xor "
        "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rdivmod rlshift rrshift rand ror rxor "
        "neg pos abs invert round floor ceil",
    ),
    ("in a formatted string", "print(repr(handle)) shows which fields it has", "format"),
    ("outside the process, as a pickle", "make it inside the workflow", "reduce_ex"),
)
"""Uses of a handle that are errors: the use, the hint, and the methods that Python calls."""

_UNPACKING = frozenset(dis.opmap[name] for name in ("UNPACK_SEQUENCE", "UNPACK_EX"))


class Handle:
    """Base of handles.

    Attributes:
        node: The node that makes the data.
        fields: The fields of the data.
    """

    __slots__ = ("_tracer", "fields", "node")

    kind: ClassVar[str] = "a handle"
    comes_from: ClassVar[str | None] = None
    """The operation that makes such a handle, for hints."""
    _tracer: Tracer
    node: NodeId
    fields: tuple[Field, ...]

    def __new__(cls, *given: object, **named: object) -> Self:
        """Refuses the type of a parameter that is called like an operation: `fl.Pairs(a, b)`."""
        if not given or not isinstance(given[0], Tracer):
            raise trace_error(
                f"fl.{cls.__name__} is a type, for parameters of workflows, and no operation",
                found=f"fl.{cls.__name__}(...)",
                hint=cls.comes_from,
            )
        return object.__new__(cls)

    def __init__(self, tracer: Tracer, node: NodeId, fields: tuple[Field, ...]) -> None:
        for name, value in (("_tracer", tracer), ("node", node), ("fields", fields)):
            object.__setattr__(self, name, value)

    def read(self) -> Read:
        """Returns the handle as an argument of an operation."""
        return Read(self.node, self.fields)

    @property
    def tracer(self) -> Tracer:
        """The trace that the handle belongs to."""
        return self._tracer

    @property
    def value(self) -> Any:
        """The data, where the program runs with `executor=eager`.

        Samples are a `flowrl.program.values.SamplesValue`; one field is its numpy array, `[N]` of
        samples or `[T]` of tokens; several fields are arrays by name.

        Raises:
            TraceError: The workflow is being traced, or a pass removed the operation.
        """
        return self._tracer.value_of(self.node, self.fields)

    def __repr__(self) -> str:
        fields = ", ".join(str(field) for field in self.fields)
        values = self._tracer.described_values(self.node, self.fields)
        return f"<{type(self).__name__} of {self.node}: {fields if values is None else values}>"

    def _error(self, problem: str, hint: str, found: str | None = None) -> TraceError:
        what = f"{self.kind} of '{self.node}' {problem}"
        return trace_error(what, found=found, hint=hint)

    def _refuse(self, use: str, hint: str) -> NoReturn:
        if self._tracer.executes:
            raise self._error(
                f"cannot be used {use}: what is computed with handles must be in the compiled "
                "program too",
                f"the data itself is .value, to look at and compute with; in the program, {hint}",
            )
        raise self._error(
            f"cannot be used {use}: there are no values while the workflow is traced", hint
        )

    def __iter__(self) -> NoReturn:
        caller = sys._getframe(1)
        # The instruction that asks: `a, b = handle` and `for each in handle` are distinguished.
        if caller.f_code.co_code[caller.f_lasti] in _UNPACKING:
            raise self._error("cannot be unpacked: it is one thing", _ONE_THING)
        self._refuse("in a loop or with *", _ON_DATA)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise self._error(
            "cannot be changed",
            "keep it in a variable of the program; operations make new data of old",
            found=f"an assignment to its '{name}'",
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __copy__(self) -> Self:
        return self  # it never changes

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # protocols that Python, notebooks and libraries probe for
            raise AttributeError(name)
        made_by = next(iter(meanings("handle", name)), None)
        raise self._error(
            f"has no '{name}' to take out",
            _ONE_THING if made_by is None else f"write {made_by}",
            found=f"fields {names_of(self.fields)}",
        )


def _refusal(use: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(self: Handle, *args: object, **kwargs: object) -> NoReturn:
        self._refuse(use, hint)

    return refuse


for _use, _hint, _methods in _REFUSED:
    for _method in _methods.split():
        setattr(Handle, f"__{_method}__", _refusal(_use, _hint))


class Prompts(Handle):
    """The prompts of a step: one row of the training data each."""

    __slots__ = ()
    kind = "the prompts"
    comes_from = "prompts are a parameter of the workflow: prompts: fl.Prompts"
    data: ClassVar[str] = "prompts"
    produces: ClassVar[tuple[Field, ...]] = (PROMPT,)

    @property
    def value(self) -> tuple[PromptItem, ...]:
        """The step's prompts, with their data rows; see `Handle.value`."""
        return cast("tuple[PromptItem, ...]", super().value)


class Samples(Handle):
    """Samples with tokens: a rollout, or examples."""

    __slots__ = ()
    kind = "samples"
    comes_from = "samples come from actor.generate(prompts)"

    @property
    def value(self) -> SamplesValue:
        """Tokens, mask, texts, lengths and logprobs of the samples; see `Handle.value`."""
        return cast("SamplesValue", super().value)


class Rollout(Samples):
    """Samples that a role generated: tokens, response_mask, rollout_logprobs, per token."""

    __slots__ = ()
    kind = "the rollout"
    comes_from = "rollouts come from actor.generate(prompts)"


class Numbers(Handle):
    """Base of handles with one number a sample or a token."""

    __slots__ = ()

    @property
    def value(self) -> Array:
        """float32 `[N]` of samples or `[T]` of tokens, 0 off the responses; see `Handle.value`."""
        return cast("Array", super().value)


class Scores(Numbers):
    """One score a sample."""

    __slots__ = ()
    kind = "the scores"
    comes_from = (
        "scores come from reward.score(rollout), and those that responses state from "
        "fl.parse(rollout, regex=..., otherwise=0.0); rewards of tokens are token_rewards=..."
    )


class TokenRewards(Numbers):
    """The reward at each token, besides the score of the sample."""

    __slots__ = ()
    kind = "the token rewards"
    comes_from = (
        'token rewards come from prm.score(rollout, per="token") of an fl.RewardModel, or from a '
        "map that gives token_reward"
    )


class Logprobs(Numbers):
    """One logprob a token, of the model that was asked, or what a map made of such."""

    __slots__ = ()
    kind = "the logprobs"
    comes_from = "logprobs come from reference.logprobs(rollout), or from a map that gives logprobs"


class Advantages(Numbers):
    """The weight of each sample, or of each token, in the policy gradient."""

    __slots__ = ()
    kind = "the advantages"
    comes_from = "advantages come from fl.advantage.group_relative(scores)"


class Values(Numbers):
    """A critic's value of the state before each response token."""

    __slots__ = ()
    kind = "the values"
    comes_from = "values come from critic.values(rollout)"


class Returns(Numbers):
    """The targets of a critic: one per response token."""

    __slots__ = ()
    kind = "the returns"
    comes_from = "returns come with the advantages: fl.advantage.gae(scores, values, rollout)"


class Mapped(Handle):
    """Fields that a function of the user's own gave (`fl.map`)."""

    __slots__ = ()
    kind = "what a map gave"

    @property
    def value(self) -> Array | Mapping[str, Array]:
        """The field that the map gave, or its fields by name; see `Handle.value`."""
        return cast("Array | Mapping[str, Array]", super().value)
