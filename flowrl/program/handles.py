"""Handles: symbolic data while a workflow is traced.

A handle has fields but no values, so it cannot be a truth value or a number; asking for one is a
`TraceError` at the user's line that says which construct to use instead. Where a program runs with
`executor=eager`, `handle.value` holds the data; all else is refused as in tracing, because the
compiled program could not do it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

from flowrl.errors import TraceError
from flowrl.graph.types import Field
from flowrl.ids import NodeId
from flowrl.program.source import user_line
from flowrl.program.tracer import Read, Tracer
from flowrl.wording import nearest

if TYPE_CHECKING:
    from flowrl.program.values import Array, SamplesValue

__all__ = [
    "Advantages",
    "Handle",
    "Logprobs",
    "Mapped",
    "Returns",
    "Rollout",
    "Samples",
    "Scores",
    "Values",
]

_ON_DATA = (
    "decide on data with an operation, such as fl.filter.zero_variance(rollout, scores) or fl.map; "
    "`if` and `for` work on the workflow's configuration arguments"
)
_AT_ONCE = "a workflow only says what happens; flowrl runs operations concurrently"
_ON_NUMBERS = (
    "compute with data inside an operation: a reward function for scores, "
    "fl.advantage.group_relative(scores) for advantages, fl.map for a function of your own"
)


_MADE_BY = {
    **dict.fromkeys(
        ("logprob", "logprobs", "log_probs"),
        "logprobs = reference.logprobs(rollout); the engine's own go along with the rollout",
    ),
    **dict.fromkeys(("reward", "rewards", "score", "scores"), "scores = reward.score(rollout)"),
    **dict.fromkeys(
        ("advantage", "advantages"), "advantages = fl.advantage.group_relative(scores)"
    ),
    **dict.fromkeys(
        ("returns", "gae"), "advantages, returns = fl.advantage.gae(scores, values, rollout)"
    ),
    **dict.fromkeys(
        ("filter", "drop", "mask_out"),
        "rollout, scores = fl.filter.zero_variance(rollout, scores)",
    ),
    **dict.fromkeys(
        ("best", "select", "sort", "topk"),
        "rollout, scores = fl.select.top(rollout, scores, k=1)",
    ),
    "generate": "rollout = actor.generate(prompts)",
    "update": "actor.update(rollout, scores)",
    "log": 'fl.log("name", handle)',
}
"""Attributes that people look for on handles, and the operation that makes each."""

_OF_ARRAYS = (
    *("abs", "argmax", "clamp", "clip", "cpu", "cuda", "detach", "dtype", "exp", "item", "max"),
    *("mean", "median", "min", "normalize", "numpy", "reshape", "round", "shape", "size", "std"),
    *("sum", "to", "tolist", "var"),
)

_OF_SAMPLES = {
    **dict.fromkeys(("length", "lengths", "num_tokens", "response_lengths"), "lengths"),
    **dict.fromkeys(("text", "texts", "response", "responses", "completions"), "texts"),
    **dict.fromkeys(("prompt", "prompts"), "prompts"),
    **dict.fromkeys(("mask", "loss_mask", "response_mask"), "response_mask"),
    **dict.fromkeys(("ids", "input_ids", "token_ids", "tokens"), "tokens"),
    "rollout_logprobs": "rollout_logprobs",
}
"""Attributes that people look for on samples, and their names in `SamplesValue`."""

_UNPACKING = frozenset(dis.opmap[name] for name in ("UNPACK_SEQUENCE", "UNPACK_EX"))


class Handle:
    """Base of handles.

    Attributes:
        node: The node that makes the data.
        fields: What the data holds.
    """

    __slots__ = ("_tracer", "fields", "node")

    kind: ClassVar[str] = "a handle"
    _shown: ClassVar[str] = "print(handle.value)"
    """The way to look at the data with `executor=eager`, for messages."""
    _one_thing: ClassVar[str] = "keep it in one variable; operations pick the fields they need"
    """The hint where a program treats it as several values."""

    _tracer: Tracer
    node: NodeId
    fields: tuple[Field, ...]

    def __init__(self, tracer: Tracer, node: NodeId, fields: tuple[Field, ...]) -> None:
        for name, value in (("_tracer", tracer), ("node", node), ("fields", fields)):
            object.__setattr__(self, name, value)

    def read(self) -> Read:
        """The handle as an argument of an operation."""
        return Read(self.node, self.fields)

    @property
    def tracer(self) -> Tracer:
        """The trace that the handle belongs to."""
        return self._tracer

    @property
    def value(self) -> Any:
        """The data, where the program runs with `executor=eager`.

        Samples are a `flowrl.program.values.SamplesValue`; one field is its numpy array, `[N]` of
        samples or `[T]` of tokens; of several fields, the arrays by name.

        Raises:
            TraceError: while the workflow is traced; or the operation was left out by a pass.
        """
        return self._tracer.value_of(self.node, self.fields)

    def __repr__(self) -> str:
        fields = ", ".join(str(field) for field in self.fields)
        values = self._tracer.described_values(self.node, self.fields)
        return f"<{type(self).__name__} of {self.node}: {fields if values is None else values}>"

    __hash__ = object.__hash__

    def _refuse(self, use: str, hint: str) -> NoReturn:
        if self._tracer.executes:
            raise TraceError(
                f"{self.kind} of '{self.node}' cannot be used {use}: what is computed with handles "
                "must be in the compiled program too",
                where=str(user_line()),
                hint=f"the data itself is .value, to look at and compute with ({self._shown}); in "
                f"the program, {hint}",
            )
        raise TraceError(
            f"{self.kind} of '{self.node}' cannot be used {use}: there are no values "
            "while the workflow is traced",
            where=str(user_line()),
            hint=hint,
        )

    def __bool__(self) -> bool:
        self._refuse("as a truth value (in `if`, `while`, `and`, `or`, `not`)", _ON_DATA)

    def __len__(self) -> int:
        self._refuse(
            "with len()", "sizes come from the configuration: group_size, prompts_per_step"
        )

    def __iter__(self) -> NoReturn:
        caller = sys._getframe(1)
        # The instruction that asks: `a, b = handle` and `for each in handle` are distinguished.
        if caller.f_code.co_code[caller.f_lasti] in _UNPACKING:
            raise TraceError(
                f"{self.kind} of '{self.node}' cannot be unpacked: it is one thing",
                where=str(user_line()),
                hint=self._one_thing,
            )
        self._refuse("in a loop or with *", _ON_DATA)

    def __contains__(self, item: object) -> bool:
        self._refuse("with `in`", _ON_DATA)

    def __next__(self) -> NoReturn:
        self._refuse("in a loop", _ON_DATA)

    def __reversed__(self) -> NoReturn:
        self._refuse("in a loop", _ON_DATA)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._stay_as_it_is(name)

    def __delattr__(self, name: str) -> NoReturn:
        self._stay_as_it_is(name)

    def _stay_as_it_is(self, name: str) -> NoReturn:
        raise TraceError(
            f"{self.kind} of '{self.node}' cannot be changed",
            where=str(user_line()),
            found=f"an assignment to its '{name}'",
            hint="keep it in a variable of the program; operations make new data of old",
        )

    def __setitem__(self, item: object, value: object) -> NoReturn:
        self._refuse("with [...] =", _ON_NUMBERS)

    def __delitem__(self, item: object) -> NoReturn:
        self._refuse("with del", "choose groups with fl.filter, samples with fl.select")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("as a function", "roles have operations: actor.generate(prompts)")

    def __enter__(self) -> NoReturn:
        self._refuse("in `with`", _AT_ONCE)

    def __exit__(self, *error: object) -> None:
        """Python asks for it before `__enter__`, which refuses."""

    def __await__(self) -> NoReturn:
        self._refuse("with `await`", _AT_ONCE)

    def __aiter__(self) -> NoReturn:
        self._refuse("in `async for`", _AT_ONCE)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("outside the process, as a pickle", "make it inside the workflow")

    def __copy__(self) -> Self:
        return self  # it never changes

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getitem__(self, item: object) -> NoReturn:
        self._refuse(
            "with [...]", "choose groups with fl.filter; operations pick the fields they need"
        )

    def __float__(self) -> float:
        self._refuse("as a number", _ON_NUMBERS)

    def __int__(self) -> int:
        self._refuse("as a number", _ON_NUMBERS)

    def __index__(self) -> int:
        self._refuse("as a number", _ON_NUMBERS)

    def __complex__(self) -> complex:
        self._refuse("as a number", _ON_NUMBERS)

    def __trunc__(self) -> int:
        self._refuse("as a number", _ON_NUMBERS)

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("as an array", _ON_NUMBERS)

    def __format__(self, spec: str) -> str:
        self._refuse("in a formatted string", "print(repr(handle)) shows which fields it has")

    def _compare(self, other: object) -> NoReturn:
        self._refuse("in a comparison", _ON_DATA)

    def _compute(self, *others: object) -> NoReturn:
        self._refuse("in arithmetic", _ON_NUMBERS)

    def __eq__(self, other: object) -> bool:
        self._compare(other)

    def __ne__(self, other: object) -> bool:
        self._compare(other)

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _compute
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _compute
    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _compute
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _compute
    __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _compute
    __floor__ = __ceil__ = _compute
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _compute

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # protocols that Python, notebooks and libraries probe for
            raise AttributeError(name)
        fields = ", ".join(field.name for field in self.fields)
        raise TraceError(
            f"{self.kind} of '{self.node}' has no '{name}' to take out",
            where=str(user_line()),
            found=f"fields {fields}",
            hint=self._instead(name),
        )

    def _instead(self, name: str) -> str:
        """Returns what to write instead of an attribute that the handle does not have."""
        if name in {field.name for field in self.fields}:
            return "pass the handle itself, which has it"
        made_by = _MADE_BY.get(name)
        if made_by is not None:
            return f"write {made_by}"
        if name in _OF_ARRAYS:
            return f'{_ON_NUMBERS}; fl.log("name", handle) reports their mean'
        if name == "values" or nearest(name, ("value",)) is not None:
            return f"the data is .value, where the program runs with executor=eager: {self._shown}"
        return "pass the handle itself; operations pick the fields they need"


class Samples(Handle):
    """Samples with tokens: a rollout, or examples."""

    __slots__ = ()
    kind = "samples"
    _shown = "print(rollout.value[0])"
    _one_thing = (
        "tokens, mask and logprobs are its fields: pass it whole to reward.score(rollout) and "
        "actor.update(rollout, ...)"
    )

    def _instead(self, name: str) -> str:
        read = _OF_SAMPLES.get(name)
        if read is None:
            return (
                "write values = critic.values(rollout)"
                if name == "values"
                else super()._instead(name)
            )
        eager = f"with executor=eager it is rollout.value.{read}"
        if read == "texts":
            return f"a function of rewards.terms in the config reads the text; {eager}"
        if read == "prompts":
            return f"pass the workflow's prompts, which the rollout was made of; {eager}"
        source = f"batch.{read}" if read == "lengths" else f'batch["{read}"]'
        reads = "response_mask" if read == "lengths" else read
        more = "; fl.shaping has penalties of length" if read == "lengths" else ""
        return (
            f'compute with {source} in a function of yours, marked @fl.map(reads=("{reads}",), '
            f"gives=...), and call that with the rollout; {eager}{more}"
        )

    @property
    def value(self) -> SamplesValue:
        """Tokens, mask, texts, lengths and logprobs of the samples; see `Handle.value`."""
        return cast("SamplesValue", self._tracer.value_of(self.node, self.fields))


class Rollout(Samples):
    """Samples that a role generated: tokens, response_mask, rollout_logprobs, per token."""

    __slots__ = ()
    kind = "the rollout"


class Scores(Handle):
    """One score a sample."""

    __slots__ = ()
    kind = "the scores"
    _shown = "print(scores.value > 0.5)"

    @property
    def value(self) -> Array:
        """float32 `[N]`; see `Handle.value`."""
        return cast("Array", self._tracer.value_of(self.node, self.fields))


class Logprobs(Handle):
    """One logprob a token, of the model that was asked."""

    __slots__ = ()
    kind = "the logprobs"
    _shown = "print(logprobs.value.mean())"

    @property
    def value(self) -> Array:
        """float32 `[T]`, 0 off the responses; see `Handle.value`."""
        return cast("Array", self._tracer.value_of(self.node, self.fields))


class Advantages(Handle):
    """The weight of each sample in the policy gradient."""

    __slots__ = ()
    kind = "the advantages"
    _shown = "print(advantages.value.mean())"
    _one_thing = (
        "write advantages = ...; a critic's returns come with the advantages of fl.advantage.gae "
        "and of fl.advantage.own(returns=True) alone"
    )

    @property
    def value(self) -> Array:
        """float32 `[N]` or `[T]`; see `Handle.value`."""
        return cast("Array", self._tracer.value_of(self.node, self.fields))


class Values(Handle):
    """A critic's value of the state before each response token."""

    __slots__ = ()
    kind = "the values"
    _shown = "print(values.value.mean())"

    @property
    def value(self) -> Array:
        """float32 `[T]`, 0 off the responses; see `Handle.value`."""
        return cast("Array", self._tracer.value_of(self.node, self.fields))


class Returns(Handle):
    """The targets of a critic: one per response token."""

    __slots__ = ()
    kind = "the returns"
    _shown = "print(returns.value.mean())"

    @property
    def value(self) -> Array:
        """float32 `[T]`, 0 off the responses; see `Handle.value`."""
        return cast("Array", self._tracer.value_of(self.node, self.fields))


class Mapped(Handle):
    """Fields that a function of the user's own gave (`fl.map`)."""

    __slots__ = ()
    kind = "what a map gave"
    _one_thing = "its fields stay together: pass it whole to fl.log, another map or extra=[...]"

    @property
    def value(self) -> Array | Mapping[str, Array]:
        """The field that the map gave, or its fields by name; see `Handle.value`."""
        return cast("Array | Mapping[str, Array]", self._tracer.value_of(self.node, self.fields))
