"""`@fl.workflow`: marks a function as a program that is traced, never called.

>>> import flowrl as fl
>>> @fl.workflow
... def three_lines(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
...     responses = actor.generate(prompts)
...     rewards = reward.score(responses)
...     actor.update(responses, rewards)
>>> [node.id for node in three_lines.trace().nodes]
['prompts', 'actor.generate', 'reward.score', 'actor.update']
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import overload

from flowrl.errors import FlowError, TraceError
from flowrl.graph.ir import Graph, Op
from flowrl.graph.verify import verify
from flowrl.program.parameters import (
    ROLE_KINDS,
    Argument,
    DataParameter,
    Parameter,
    RoleParameter,
    bind_arguments,
    bind_roles,
    read_parameters,
)
from flowrl.program.roles import Role
from flowrl.program.tracer import Tracer, active_tracer, tracing
from flowrl.specs import Scalar
from flowrl.specs.base import CountFromZero, refusal
from flowrl.specs.names import missing_name
from flowrl.synonyms import meanings
from flowrl.user_lines import definition_of, explained, trace_error
from flowrl.wording import listing, suggestion


class Workflow:
    """A workflow function, with what its signature says.

    Attributes:
        name: The function's.
        function: The function itself.
        max_staleness: Weight publications that a sample may be behind; None leaves it to
            `train.max_staleness` of the config. 0 is strictly on-policy.
        source: Where it is defined.
        roles: Its parameters of type `fl.Policy`, `fl.Reward` and the other roles.
        data: Its parameters of type `fl.Prompts`, `fl.Examples` and `fl.Pairs`.
        arguments: All others: the keys of `args` in the config.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        max_staleness: int | None,
        local_names: Mapping[str, object],
    ) -> None:
        self.name = function.__name__
        self.function = function
        source = definition_of(function)
        assert source is not None  # it is a function of Python code
        self.source = source
        self.max_staleness = max_staleness
        expected = refusal(max_staleness, CountFromZero | None)
        if expected is not None:
            raise TraceError(
                f"max_staleness of workflow '{self.name}' must count weight publications",
                where=str(source),
                found=repr(max_staleness),
                expected=expected,
            )
        parameters = read_parameters(function, local_names, self.source)
        self.roles = tuple(each for each in parameters if isinstance(each, RoleParameter))
        self.data = tuple(each for each in parameters if isinstance(each, DataParameter))
        self.arguments = tuple(each for each in parameters if isinstance(each, Argument))
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__name__ = function.__name__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<workflow {self.name} ({self.source})>"

    def bind(self, names: Mapping[str, str | Sequence[str]]) -> Workflow:
        """Returns the same workflow with other names for its roles.

        Args:
            names: Role of the config by parameter, where they differ: `{"actor": "teacher"}`
                makes a workflow that trains the teacher. Of a list of roles, their names:
                `{"teachers": ["maths", "code"]}`.

        Raises:
            ConfigError: a role that it does not have (with the nearest), or one role for two.
        """
        bound = copy.copy(self)
        bound.roles = bind_roles(self.name, self.roles, names)
        return bound

    def trace(self, args: Mapping[str, Scalar] | None = None) -> Graph:
        """Runs the function on symbolic handles; the graph of what it did, verified.

        Args:
            args: Values of its arguments; the others keep their defaults.

        Raises:
            ConfigError: an argument that the workflow does not take, or of the wrong type.
            TraceError: the program does what a traced program cannot, or raises; then
                `user_frames` holds its traceback.
            GraphError: the graph breaks the specification.
        """
        tracer = Tracer(self.name)
        try:
            self.perform(tracer, args)
        except FlowError:
            raise
        except Exception as error:
            raise self.raised(error) from error
        return self._checked(tracer)

    def _checked(self, tracer: Tracer) -> Graph:
        try:
            graph = tracer.finish()
        except TraceError as unused:
            # What an update lacks is often what nothing uses, and says more.
            update = tracer.graph()
            if update.of_op(Op.UPDATE):
                verify(update)
            raise unused
        if not graph.nodes:
            raise TraceError(
                f"workflow '{self.name}' does nothing",
                where=str(self.source),
                hint="end it with actor.update(rollout, rewards), or generate samples",
            )
        return verify(graph)

    def perform(self, tracer: Tracer, args: Mapping[str, Scalar] | None = None) -> object:
        """Calls the function on handles of `tracer`, which is the active one meanwhile.

        Returns:
            What the function returned.

        Raises:
            ConfigError: as `trace`.
            Exception: whatever the function raises.
        """
        handles: dict[str, object] = dict(bind_arguments(self.name, self.arguments, args or {}))
        with tracing(tracer):
            for role in self.roles:
                made = role.kind(tracer, role.name)
                if role.listed:
                    of_list = handles.setdefault(role.parameter, [])
                    assert isinstance(of_list, list)
                    of_list.append(made)
                else:
                    handles[role.parameter] = made
            for data in self.data:
                node = tracer.add(
                    Op.SOURCE,
                    name=data.parameter,
                    outputs=data.kind.produces,
                    attrs={"data": data.kind.data},
                    source=self.source,
                )
                handles[data.parameter] = data.kind(tracer, node, data.kind.produces)
            return self._call(tracer, (), handles)

    def raised(self, error: Exception) -> TraceError:
        """Returns the message for an error of the user's own program."""
        message = explained(f"workflow '{self.name}'", error, otherwise=str(self.source))
        return message if not isinstance(error, AttributeError) else _with_names(message, error)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Inside another workflow: its operations become part of that one's graph.

        Raises:
            TraceError: outside a workflow, or of a workflow that calls itself.
        """
        tracer = active_tracer()
        if tracer is None:
            raise trace_error(
                f"workflow '{self.name}' is a program to compile, not a function to call",
                hint=f"fl.run({self.name}, config), or {self.name}.trace() to see its graph",
            )
        self._check_staleness(tracer.stack[0])
        self._check_call(args, kwargs)
        return self._call(tracer, args, kwargs)

    def _call(
        self, tracer: Tracer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        if any(call.function is self.function for call in tracer.stack):
            raise trace_error(
                f"workflow '{self.name}' calls itself",
                found=" -> ".join([*(call.name for call in tracer.stack), self.name]),
                hint="a step is traced once and repeated train.steps times; no loop is needed",
            )
        tracer.calls.append(self)
        try:
            return self.function(*args, **kwargs)
        finally:
            tracer.calls.pop()

    def _check_staleness(self, outermost: Workflow) -> None:
        """A step has one bound on the age of its samples: that of the program that is run."""
        if self.max_staleness in (None, outermost.max_staleness):
            return
        raise trace_error(
            f"workflow '{self.name}' is declared with max_staleness={self.max_staleness}, and "
            f"'{outermost.name}', which calls it, with {outermost.max_staleness}",
            expected="one bound for the whole step",
            hint=f"write @fl.workflow(max_staleness={self.max_staleness}) above "
            f"'{outermost.name}', or leave it out at '{self.name}'",
        )

    def _check_call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:
            raise trace_error(
                f"workflow '{self.name}': {error}",
                expected=str(inspect.signature(self.function)),
                hint="call it with these parameters",
            ) from None

        parameters: list[Parameter] = [*self.roles, *self.data, *self.arguments]
        for parameter in parameters:
            name = parameter.parameter
            if name in bound.arguments and not parameter.accepts(bound.arguments[name]):
                raise trace_error(
                    f"workflow '{self.name}' cannot take this as '{name}'",
                    found=repr(bound.arguments[name]),
                    expected=parameter.expected,
                    hint="pass such a value",
                )


def _with_names(message: TraceError, error: AttributeError) -> TraceError:
    """Adds to a message what a role or a module of flowrl has in place of what was asked."""
    owner, asked = error.obj, str(error.name)
    if isinstance(owner, Role):
        names = owner.operations()
        message.what = f"{owner.described} is {owner.kind}, which has no '{asked}'"
        message.expected = f"one of {listing(names)}" if names else "fl.interact(actor, game, ...)"
        having = [f"fl.{kind.__name__}" for kind in ROLE_KINDS if asked in kind.operations()]
        annotate = f"annotate it {owner.name}: {' or '.join(having)}" if having else None
        meant = next(iter(meanings("role", asked)), asked)
        message.hint = suggestion(meant, names) or annotate or message.hint
    elif isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "flowrl":
        missing = missing_name(owner.__name__, asked, getattr(owner, "__all__", dir(owner)))
        message.what = missing.what
        message.expected = f"one of {listing(missing.names)}"
        message.hint = missing.hint or "write one of them"
    return message


@overload
def workflow(function: Callable[..., object], /) -> Workflow: ...


@overload
def workflow(
    *, max_staleness: int | None = None
) -> Callable[[Callable[..., object]], Workflow]: ...


def workflow(
    function: Callable[..., object] | None = None,
    /,
    *,
    max_staleness: int | None = None,
) -> Workflow | Callable[[Callable[..., object]], Workflow]:
    """Makes a workflow of a function; with or without arguments.

    Args:
        max_staleness: Weight publications that a sample may be behind when it is consumed; 0 is
            strictly on-policy, None leaves it to the config.

    Raises:
        TraceError: parameters that a workflow cannot have.
    """
    # Annotations written as strings may name what the enclosing function imported.
    local_names = sys._getframe(1).f_locals

    def make(target: Callable[..., object]) -> Workflow:
        if not inspect.isfunction(target):
            raise trace_error(
                "@fl.workflow marks functions",
                found=repr(target),
                hint="write it above a `def`; its option has a name: @fl.workflow(max_staleness=2)",
            )
        is_async = inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target)
        if is_async or inspect.isgeneratorfunction(target):
            raise TraceError(
                f"workflow '{target.__name__}' must be a plain function",
                where=str(definition_of(target)),
                found="async def" if is_async else "yield in its body",
                hint="a workflow only says what happens; flowrl runs operations concurrently",
            )
        return Workflow(target, max_staleness=max_staleness, local_names=local_names)

    return make if function is None else make(function)
