"""The user's own reward: `FILE.py:NAME`, loaded by path and called by parameter names.

`flowrl.config.reward_signatures` lists the forms that a function may have. A function of lists is
called with all samples of a batch, an async one with all of them at once, and the others sample by
sample.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import cast

from flowrl.backend.protocols import ScoreRequest
from flowrl.config.reward_signatures import (
    Parameters,
    missing_parameter,
    shown_signatures,
    signature_of,
)
from flowrl.errors import RewardError
from flowrl.user_files import callable_in
from flowrl.wording import listing, suggestion

_MAX_CONCURRENT = 16
"""Samples that an async function scores at once."""
_MAX_BATCH = 128


class UserFunction:
    """A reward function, ready to be called.

    It returns a finite number: an int, a float, a bool (1 or 0), a Fraction or Decimal, an array or
    tensor of one element, or a mapping with such a number as `score`. A function of lists returns a
    list of them, with None for a sample to which it does not apply. Text and NaN are not numbers,
    and never become 0.

    Args:
        target: `FILE.py:NAME`; modules in the file's folder can be imported, as for a script.
        where: The config key, for messages.
        chat: Completions are given as chat messages; by default if the row's prompt is.

    Attributes:
        batch_size: Samples that are scored in one call of `score_batch`.

    Raises:
        RewardError: The file or the function is missing, or it has a parameter that is not offered.
            Errors of the file itself are not caught: their traceback is the user's.
    """

    def __init__(self, target: str, *, where: str, chat: bool | None = None) -> None:
        self.target = target
        path, _, name = target.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            raise RewardError(
                "this is not a reference to a function",
                where=where,
                found=repr(target),
                expected="FILE.py:NAME",
            )
        kind = ("reward", "function", "functions")
        self._function = callable_in(path, name, kind, RewardError, where)
        self._chat = chat
        self._parameters, self._by_position = _parameters(self._function)
        self._signature = signature_of(self._parameters)
        missing = missing_parameter(self._parameters, self._signature)
        if missing is not None:
            raise RewardError(
                f"reward {target} asks for {missing!r}, which is not offered",
                where=where,
                expected=f"parameters of {shown_signatures()}",
                hint=suggestion(missing, self._signature.offers)
                or "rename the parameter, or give it a default",
            )
        is_async = any(
            map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__))
        )
        self.batch_size = (
            _MAX_BATCH if self._signature.is_batched else _MAX_CONCURRENT if is_async else 1
        )

    def __call__(self, request: ScoreRequest) -> float | None:
        """Returns the reward of a sample; None if it does not apply to the sample.

        Raises:
            RewardError: The function did not return a finite number.
        """
        return self.score_batch([request])[0]

    def score_batch(self, requests: Sequence[ScoreRequest]) -> list[float | None]:
        """Returns the rewards of samples; see `__call__`."""
        if self._signature.is_batched:
            returned = self._called_with_lists(requests)
            rewards = _as_list(returned)
            if rewards is None or len(rewards) != len(requests):
                raise self._wrong(requests[0], returned, f"a list of {len(requests)} numbers")
        else:
            rewards = _awaited([self._call(self._single(request)) for request in requests])
        return [
            self._reward(request, reward) for request, reward in zip(requests, rewards, strict=True)
        ]

    def _called_with_lists(self, requests: Sequence[ScoreRequest]) -> object:
        values = self._batch(requests)
        try:
            return _awaited([self._call(values)])[0]
        except TypeError as reason:
            if not self._signature.takes_columns or "string ind" not in str(reason):
                raise
            raise RewardError(
                f"reward {self.target} reads completions as chat messages but gets text; set "
                "chat: true in its term",
            ) from reason

    def _reward(self, request: ScoreRequest, returned: object) -> float | None:
        if returned is None and self._signature.is_batched:
            return None
        if isinstance(returned, Mapping):
            number = _number(returned.get("score"))
        else:
            number = _number(returned)
        if number is None:
            raise self._wrong(request, returned, "a finite number, or a mapping with it as score")
        return number

    def _wrong(self, request: ScoreRequest, returned: object, expected: str) -> RewardError:
        return RewardError(
            f"reward {self.target} returned {_described(returned)}",
            where=f"sample {request.sample}",
            expected=expected,
            hint="return a number for every response",
        )

    def _call(self, values: Mapping[str, object]) -> object:
        parameters = self._parameters
        names = values if parameters.takes_all else [n for n in parameters.names if n in values]
        by_position = [name for name in self._by_position if name in values]
        keywords = {name: values[name] for name in names if name not in by_position}
        return self._function(*(values[name] for name in by_position), **keywords)

    def _single(self, request: ScoreRequest) -> dict[str, object]:
        if self._signature.library == "verl":
            row = request.row
            return {
                "data_source": row.get("data_source", ""),
                "solution_str": request.response,
                "ground_truth": request.answer,
                "extra_info": row.get("extra_info") or {},
            }
        return {
            "prompt": request.prompt,
            "response": request.response,
            "answer": request.answer,
            "row": request.row,
        }

    def _batch(self, requests: Sequence[ScoreRequest]) -> dict[str, object]:
        if not self._signature.takes_columns:
            singles = [self._single(request) for request in requests]
            return {f"{name}s": [single[name] for single in singles] for name in singles[0]}
        messages = [request.row.get("prompt") for request in requests]
        as_chat = all(map(_is_chat, messages)) if self._chat is None else self._chat
        columns = requests[0].row
        for name in self._parameters.required:
            if name not in self._signature.offers and name not in columns:
                raise RewardError(
                    f"reward {self.target} asks for the column {name!r}, which the data row does "
                    "not have",
                    where=f"sample {requests[0].sample}",
                    found=f"columns {listing(columns)}",
                    hint=suggestion(name, columns) or "rename the column, or the parameter",
                )
        responses = [request.response for request in requests]
        return {
            **{
                name: [request.row.get(name) for request in requests]
                for name in columns
                if name != "prompt" or "prompt" in self._parameters.names
            },
            "prompts": messages if as_chat else [request.prompt for request in requests],
            "completions": [[{"role": "assistant", "content": text}] for text in responses]
            if as_chat
            else responses,
            "completion_ids": [list(request.tokens) for request in requests],
        }


def _awaited(values: Sequence[object]) -> list[object]:
    """Returns values, and the results of those among them that are awaited, all at once."""
    if not any(map(inspect.isawaitable, values)):
        return list(values)

    async def gathered() -> list[object]:
        return await asyncio.gather(*(cast(Awaitable[object], value) for value in values))

    return asyncio.run(gathered())


def _is_chat(prompt: object) -> bool:
    """True if a row's prompt is a list of chat messages."""
    return isinstance(prompt, list | tuple) and all(isinstance(m, Mapping) for m in prompt)


def _as_list(value: object) -> list[object] | None:
    """Returns a list, a tuple, or the elements of an array; None for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    elements = value.tolist() if hasattr(value, "tolist") else None
    return elements if isinstance(elements, list) else None


def _parameters(function: Callable[..., object]) -> tuple[Parameters, tuple[str, ...]]:
    """Returns the parameters, and the names of those that are passed by position alone."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Parameters(required=(), optional=(), takes_all=True), ()
    kind = inspect.Parameter
    named = [p for p in parameters if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
    return (
        Parameters(
            required=tuple(p.name for p in named if p.default is kind.empty),
            optional=tuple(p.name for p in named if p.default is not kind.empty),
            takes_all=any(p.kind is kind.VAR_KEYWORD for p in parameters),
        ),
        tuple(p.name for p in named if p.kind is kind.POSITIONAL_ONLY),
    )


def _number(value: object) -> float | None:
    """Returns a finite float; None if the value is not a finite number."""
    if not isinstance(value, Real | Decimal) and hasattr(value, "item"):
        try:
            # numpy's and torch's arrays of one element; larger ones raise.
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _described(value: object) -> str:
    try:
        text = repr(value)
    # repr of the user's own objects may raise anything.
    except Exception:
        text = "an object without repr"
    if len(text) > 80:
        text = text[:77] + "..."
    return text if isinstance(value, int | float | None) else f"{text} ({type(value).__name__})"
