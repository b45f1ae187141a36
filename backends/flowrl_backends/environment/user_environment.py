"""A user's class as an `Environment`: each episode has an object, created when it begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from flowrl.backend.environment import (
    Action,
    EnvironmentContext,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.config.user_functions import ENVIRONMENT_OFFERS
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.user_files import callable_in
from flowrl.user_lines import definition_of
from flowrl.wording import listing, suggestion
from flowrl_backends.environment.step import Step
from flowrl_backends.environment.threads import Threads

_OFFERED: Mapping[str, tuple[str, ...]] = ENVIRONMENT_OFFERS
"""The values that the methods of an episode may request by the names of their parameters."""

Factory: TypeAlias = Callable[..., Any]


class UserEnvironment:
    """The episodes of a class that the user wrote.

    `reset` gets those of `row`, `seed`, `prompt`, `answer` and `sample` that its parameters name,
    and `step` those of `text`, `turn`, `finish` and `tokens`; a parameter with a default may have
    any other name. Coroutines run on the event loop, plain functions in a thread. If `reset` is not
    a coroutine, objects are also created in a thread. An object may have a `close()`.

    Args:
        context: The context, whose `environment` is `FILE.py:NAME` or `module:NAME`; NAME creates
            an episode's object from `options`.

    Raises:
        BackendError: The class does not exist, does not accept these options, or has a parameter
            that is not offered. Errors of the file itself are not caught: their traceback is the
            user's.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        self._target = context.environment
        self._where = f"roles.{context.role}"
        self._factory = _load(self._target, where=f"{self._where}.environment")
        self._options = dict(context.options)
        self._check_options()
        self._parameters: dict[tuple[type, str], tuple[str, ...]] = {}
        self._resets_in_loop = inspect.iscoroutinefunction(getattr(self._factory, "reset", None))
        if isinstance(self._factory, type):
            for method in _OFFERED:
                self._names(self._factory, method)
        self._episodes: dict[SampleId, Any] = {}
        self._threads = Threads(f"{context.role}-call")

    async def reset(self, episode: EpisodeStart) -> Observation:
        """See `Environment`."""
        make = partial(self._factory, **self._options)
        made = make() if self._resets_in_loop else await self._threads.run(make)
        self._episodes[episode.sample] = made
        offered = {name: getattr(episode, name) for name in _OFFERED["reset"]}
        returned = await self._call(made, "reset", offered)
        if isinstance(returned, str):
            return Observation(content=returned)
        if not isinstance(returned, Observation):
            expected = "text or an Observation; ids are Observation(content=np.array([...]))"
            raise self._returned("reset", returned, expected)
        return returned

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        """See `Environment`."""
        offered = {name: getattr(action, name) for name in _OFFERED["step"]}
        returned = await self._call(self._episodes[sample], "step", offered)
        if not isinstance(returned, Step):
            expected = "a Step: write `return Step(observation, reward=..., done=...)`"
            raise self._returned("step", returned, expected)
        return returned.outcome()

    async def close_episode(self, sample: SampleId) -> None:
        """See `Environment`."""
        close = getattr(self._episodes.pop(sample, None), "close", None)
        if inspect.iscoroutinefunction(close):
            await close()
        elif close is not None:
            await self._threads.run(close)

    async def close(self) -> None:
        """See `Environment`."""
        for sample in tuple(self._episodes):
            await self.close_episode(sample)
        self._threads.close()

    async def _call(self, made: object, method: str, offered: Mapping[str, object]) -> Any:
        function = getattr(made, method, None)
        arguments = {name: offered[name] for name in self._names(type(made), method)}
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        assert callable(function)  # checked by `_names`
        returned = await self._threads.run(partial(function, **arguments))
        # A decorator can make a plain function that returns a coroutine.
        return await returned if inspect.isawaitable(returned) else returned

    def _names(self, kind: type, method: str) -> tuple[str, ...]:
        """Returns the parameters of a method that are offered."""
        names = self._parameters.get((kind, method))
        if names is None:
            names = _parameters(kind, method, self._target, where=f"{self._where}.environment")
            self._parameters[kind, method] = names
        return names

    @property
    def places(self) -> Mapping[str, str]:
        """The places of the methods, `/games/guess.py:31 in step`, for errors of their results."""
        made = next(iter(self._episodes.values()), self._factory)
        places: dict[str, str] = {}
        for method in _OFFERED:
            function = inspect.unwrap(getattr(made, method, made))
            code = getattr(function, "__code__", None)
            if code is not None:
                places[method] = f"{definition_of(function)} in {method}"
        return places

    def _check_options(self) -> None:
        try:
            signature = inspect.signature(self._factory)
        except (TypeError, ValueError):
            return  # without a signature, the call itself reports wrong options
        try:
            signature.bind(**self._options)
        except TypeError as reason:
            names = list(signature.parameters)
            unknown = [name for name in self._options if name not in names]
            raise BackendError(
                f"{self._target} does not take these options: {reason}",
                where=f"{self._where}.options",
                found=", ".join(self._options) or "no options",
                expected=f"options of {listing(names)}",
                hint=suggestion(unknown[0], names) if unknown else None,
            ) from None

    def _returned(self, method: str, value: object, expected: str) -> TypeError:
        try:
            text = repr(value)
        # repr of the user's own objects may raise anything.
        except Exception:
            text = f"an object of {type(value).__name__}"
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return TypeError(f"{self._target}.{method} returned {shown}, not {expected}")


def _load(target: str, *, where: str) -> Factory:
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise BackendError(
            "this is not a reference to an environment",
            where=where,
            found=repr(target),
            expected="FILE.py:NAME or module:NAME",
        )
    return callable_in(place, name, ("environment", "class", "classes"), BackendError, where)


def _parameters(kind: type, method: str, target: str, *, where: str) -> tuple[str, ...]:
    function = getattr(kind, method, None)
    if not callable(function):
        raise BackendError(
            f"{target} has no {method}()",
            where=where,
            expected=f"methods {' and '.join(_OFFERED)}",
            hint=f"write `async def {method}(self, {', '.join(_OFFERED[method][:2])})`",
        )
    offered = _OFFERED[method]
    names: list[str] = []
    bound = isinstance(inspect.getattr_static(kind, method), staticmethod | classmethod)
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters if bound else parameters[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return offered
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.name in offered and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            names.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise BackendError(
                f"{target}.{method} asks for {parameter.name!r}, which is not offered",
                where=where,
                expected=f"parameters of {listing(offered)}, or with a default",
                hint=suggestion(parameter.name, offered),
            )
    return tuple(names)
