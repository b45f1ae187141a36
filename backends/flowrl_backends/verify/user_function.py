"""The user's own reward: `FILE.py:NAME`, loaded by path and called by parameter names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import ModuleType

from flowrl.backend.protocols import ScoreRequest
from flowrl.config.user_functions import REWARD_OFFERS
from flowrl.errors import RewardError
from flowrl.specs.user_functions import run_file
from flowrl.wording import listing, suggestion

__all__ = ["UserFunction"]


class UserFunction:
    """A reward function, ready to be called.

    It is called with those of `prompt`, `response`, `answer` and `row` that its parameters name;
    a parameter with a default may have any other name. It returns a finite number: an int, a
    float, a bool (1 or 0), a Fraction or Decimal, or an array or tensor of one element. None, text
    and NaN are not numbers, and never become 0.

    Args:
        target: `FILE.py:NAME`; modules in the file's folder can be imported, as for a script.
        where: The config key, for messages.

    Raises:
        RewardError: The file or the function is missing, or it has a parameter that is not offered.
            Errors of the file itself are not caught: their traceback is the user's.
    """

    def __init__(self, target: str, *, where: str) -> None:
        self.target = target
        path, _, name = target.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            raise RewardError(
                "this is not a reference to a function",
                where=where,
                found=repr(target),
                expected="FILE.py:NAME",
            )
        function = _function(_run_file(Path(path), where=where), Path(path), name, where=where)
        self._function = function
        self._positional, self._keywords = _parameters(function, target, where=where)

    def __call__(self, request: ScoreRequest) -> float:
        """Returns the reward of a sample.

        Raises:
            RewardError: The function did not return a finite number.
        """
        values: dict[str, object] = {
            "prompt": request.prompt,
            "response": request.response,
            "answer": request.answer,
            "row": request.row,
        }
        returned = self._function(
            *(values[name] for name in self._positional),
            **{name: values[name] for name in self._keywords},
        )
        number = _number(returned)
        if number is None:
            raise RewardError(
                f"reward {self.target} returned {_described(returned)}",
                where=f"sample {request.sample}",
                expected="a finite number",
                hint="return a number for every response",
            )
        return number


def _run_file(path: Path, *, where: str) -> ModuleType:
    if not path.is_file():
        raise RewardError(
            "no such reward file",
            where=where,
            found=str(path),
            hint=f"paths are relative to the working folder, {Path.cwd()}",
        )
    return run_file(path)


def _function(module: ModuleType, path: Path, name: str, *, where: str) -> Callable[..., object]:
    function = getattr(module, name, None)
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            f"reward {name!r} is an async function",
            where=where,
            found=f"{path}:{function.__code__.co_firstlineno}",
            hint="make it an ordinary function; it may call asyncio.run itself",
        )
    if callable(function):
        typed: Callable[..., object] = function
        return typed
    own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    raise RewardError(
        f"{path} has no function {name!r}",
        where=where,
        found=f"functions {listing(own)}",
        hint=suggestion(name, own) or "write FILE.py:NAME with a name that it defines",
    )


def _parameters(
    function: Callable[..., object], target: str, *, where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the arguments to pass by position and by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return (), REWARD_OFFERS
    positional: list[str] = []
    keywords: list[str] = []
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            keywords = [n for n in REWARD_OFFERS if n not in positional]
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        elif name in REWARD_OFFERS:
            by_position = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            (positional if by_position else keywords).append(name)
        elif parameter.default is inspect.Parameter.empty:
            raise RewardError(
                f"reward {target} asks for {name!r}, which is not offered",
                where=where,
                expected=f"parameters of {listing(REWARD_OFFERS)}, or with a default",
                hint=suggestion(name, REWARD_OFFERS),
            )
    return tuple(positional), tuple(dict.fromkeys(keywords))


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
