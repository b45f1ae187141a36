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
from flowrl.graph.ir import Field
from flowrl.graph.signatures import PROMPT
from flowrl.ids import NodeId
from flowrl.program.source import user_line
from flowrl.program.tracer import Read, Tracer
from flowrl.wording import nearest

if TYPE_CHECKING:
    from flowrl.data import PromptItem
    from flowrl.program.values import Array, SamplesValue

__all__ = [
    "Advantages",
    "Handle",
    "Logprobs",
    "Mapped",
    "Numbers",
    "Prompts",
    "Returns",
    "Rollout",
    "Samples",
    "Scores",
    "TokenRewards",
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

_REFUSED: Mapping[str, tuple[str, str]] = {
    "__bool__": ("as a truth value (in `if`, `while`, `and`, `or`, `not`)", _ON_DATA),
    "__len__": ("with len()", "sizes come from the configuration: group_size, prompts_per_step"),
    "__contains__": ("with `in`", _ON_DATA),
    "__getitem__": (
        "with [...]",
        "choose groups with fl.filter; operations pick the fields they need",
    ),
    "__setitem__": ("with [...] =", _ON_NUMBERS),
    "__delitem__": ("with del", "choose groups with fl.filter, samples with fl.select"),
    "__call__": ("as a function", "roles have operations: actor.generate(prompts)"),
    "__await__": ("with `await`", _AT_ONCE),
    "__aiter__": ("in `async for`", _AT_ONCE),
    "__array__": ("as an array", _ON_NUMBERS),
    "__format__": ("in a formatted string", "print(repr(handle)) shows which fields it has"),
    "__reduce_ex__": ("outside the process, as a pickle", "make it inside the workflow"),
    **dict.fromkeys(("__enter__", "__exit__"), ("in `with`", _AT_ONCE)),
    **dict.fromkeys(("__next__", "__reversed__"), ("in a loop", _ON_DATA)),
    **{
        f"__{name}__": ("as a number", _ON_NUMBERS)
        for name in ("float", "int", "index", "complex", "trunc")
    },
    **{
        f"__{name}__": ("in a comparison", _ON_DATA)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        f"__{side}{name}__": ("in arithmetic", _ON_NUMBERS)
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
            *("lshift", "rshift", "and", "or", "xor"),
        )
        for side in ("", "r")
    },
    **{
        f"__{name}__": ("in arithmetic", _ON_NUMBERS)
        for name in ("neg", "pos", "abs", "invert", "round", "floor", "ceil")
    },
}
"""Uses of a handle that are errors, by the method that Python calls: the use, and the hint."""

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
        fields: The fields of the data.
    """

    __slots__ = ("_tracer", "fields", "node")

    kind: ClassVar[str] = "a handle"
    comes_from: ClassVar[str | None] = None
    """The operation that makes such a handle, for hints."""
    _shown: ClassVar[str] = "print(handle.value)"
    """A line that shows the data with `executor=eager`, for hints."""
    _one_thing: ClassVar[str] = "keep it in one variable; operations pick the fields they need"
    """The hint where a program treats it as several values."""

    _tracer: Tracer
    node: NodeId
    fields: tuple[Field, ...]

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
        return TraceError(what, where=str(user_line()), found=found, hint=hint)

    def _refuse(self, use: str, hint: str) -> NoReturn:
        if self._tracer.executes:
            raise self._error(
                f"cannot be used {use}: what is computed with handles must be in the compiled "
                "program too",
                f"the data itself is .value, to look at and compute with ({self._shown}); in the "
                f"program, {hint}",
            )
        raise self._error(
            f"cannot be used {use}: there are no values while the workflow is traced", hint
        )

    def __iter__(self) -> NoReturn:
        caller = sys._getframe(1)
        # The instruction that asks: `a, b = handle` and `for each in handle` are distinguished.
        if caller.f_code.co_code[caller.f_lasti] in _UNPACKING:
            raise self._error("cannot be unpacked: it is one thing", self._one_thing)
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
        fields = ", ".join(field.name for field in self.fields)
        raise self._error(
            f"has no '{name}' to take out", self._instead(name), found=f"fields {fields}"
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


def _refusal(use: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(self: Handle, *args: object, **kwargs: object) -> NoReturn:
        self._refuse(use, hint)

    return refuse


for _method, (_use, _hint) in _REFUSED.items():
    setattr(Handle, _method, _refusal(_use, _hint))


class Prompts(Handle):
    """The prompts of a step: one row of the training data each."""

    __slots__ = ()
    kind = "the prompts"
    comes_from = "prompts are a parameter of the workflow: prompts: fl.Prompts"
    _shown = "print(prompts.value[0])"
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
    _shown = "print(rollout.value[0])"
    _one_thing = (
        "tokens, mask and logprobs are its fields: pass it whole to reward.score(rollout) and "
        "actor.update(rollout, ...)"
    )

    @property
    def value(self) -> SamplesValue:
        """Tokens, mask, texts, lengths and logprobs of the samples; see `Handle.value`."""
        return cast("SamplesValue", super().value)

    def _instead(self, name: str) -> str:
        read = _OF_SAMPLES.get(name)
        if read is None:
            made = "write values = critic.values(rollout)"
            return made if name == "values" else super()._instead(name)
        eager = f"with executor=eager it is rollout.value.{read}"
        if read == "texts":
            return f"a function of rewards.terms in the config reads the text; {eager}"
        if read == "prompts":
            return f"pass the workflow's prompts, which the rollout was made of; {eager}"
        source, reads, more = f'batch["{read}"]', read, ""
        if read == "lengths":
            source, reads = "batch.lengths", "response_mask"
            more = "; fl.shaping has penalties of length"
        return (
            f'compute with {source} in a function of yours, marked @fl.map(reads=("{reads}",), '
            f"gives=...), and call that with the rollout; {eager}{more}"
        )


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
    comes_from = "scores come from reward.score(rollout)"
    _shown = "print(scores.value > 0.5)"


class TokenRewards(Numbers):
    """The reward at each token, besides the score of the sample."""

    __slots__ = ()
    kind = "the token rewards"
    comes_from = (
        'token rewards come from prm.score(rollout, per="token") of an fl.RewardModel, or from a '
        "map that gives token_reward"
    )
    _shown = "print(token_rewards.value.sum())"


class Logprobs(Numbers):
    """One logprob a token, of the model that was asked, or what a map made of such."""

    __slots__ = ()
    kind = "the logprobs"
    comes_from = "logprobs come from reference.logprobs(rollout), or from a map that gives logprobs"
    _shown = "print(logprobs.value.mean())"


class Advantages(Numbers):
    """The weight of each sample, or of each token, in the policy gradient."""

    __slots__ = ()
    kind = "the advantages"
    comes_from = "advantages come from fl.advantage.group_relative(scores)"
    _shown = "print(advantages.value.mean())"
    _one_thing = (
        "write advantages = ...; a critic's returns come with the advantages of fl.advantage.gae "
        "and of fl.advantage.own(returns=True) alone"
    )


class Values(Numbers):
    """A critic's value of the state before each response token."""

    __slots__ = ()
    kind = "the values"
    comes_from = "values come from critic.values(rollout)"
    _shown = "print(values.value.mean())"


class Returns(Numbers):
    """The targets of a critic: one per response token."""

    __slots__ = ()
    kind = "the returns"
    comes_from = "returns come with the advantages: fl.advantage.gae(scores, values, rollout)"
    _shown = "print(returns.value.mean())"


class Mapped(Handle):
    """Fields that a function of the user's own gave (`fl.map`)."""

    __slots__ = ()
    kind = "what a map gave"
    _one_thing = "its fields stay together: pass it whole to fl.log, another map or extra=[...]"

    @property
    def value(self) -> Array | Mapping[str, Array]:
        """The field that the map gave, or its fields by name; see `Handle.value`."""
        return cast("Array | Mapping[str, Array]", super().value)
