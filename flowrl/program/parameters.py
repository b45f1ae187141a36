"""The parameters of a workflow function: its roles, its data, its arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from flowrl.errors import ConfigError, TraceError
from flowrl.ids import RoleName
from flowrl.program.handles import Prompts
from flowrl.program.policy import Policy
from flowrl.program.roles import Critic, Environment, Reward, RewardModel
from flowrl.program.sets import Examples, Pairs
from flowrl.specs import Scalar
from flowrl.user_lines import SourceRef
from flowrl.wording import listing, one_of_them, suggestion

_SCALARS = (int, float, str, bool, type(None))

RoleKind: TypeAlias = (
    type[Policy] | type[Reward] | type[RewardModel] | type[Critic] | type[Environment]
)
DataKind: TypeAlias = type[Prompts] | type[Examples] | type[Pairs]

ROLE_KINDS: tuple[RoleKind, ...] = (Policy, Reward, RewardModel, Critic, Environment)
_DATA: tuple[DataKind, ...] = (Prompts, Examples, Pairs)
_KINDS = tuple(kind.__name__ for kind in (*ROLE_KINDS, *_DATA))
_ACCEPTED = ", ".join(f"fl.{kind}" for kind in _KINDS) + (", int, float, str, bool or Literal[...]")


_HINT = (
    "write actor: fl.Policy for a model, teachers: list[fl.Policy] for several, size: int = 8 for "
    "a setting; a role that only some settings use is a parameter too, and is used inside `if kl:`"
)

UNBOUND = 2
"""Roles of a list that no config names: the least number that shows what the program does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleParameter:
    """A role, which the config describes.

    Attributes:
        name: The name of the role in the config.
        kind: The class of its handle, whose operations it performs.
        parameter: The name of the function's parameter; the same, unless `Workflow.bind` renames
            the role.
        listed: True for one of the roles of a parameter `list[fl.Policy]`.
    """

    name: RoleName
    kind: RoleKind
    parameter: str
    listed: bool = False

    @property
    def expected(self) -> str:
        """What a call gives, for messages."""
        return f"list[fl.{self.kind.__name__}]" if self.listed else f"fl.{self.kind.__name__}"

    def accepts(self, value: object) -> bool:
        """Returns True for a handle of the role, or a list of them."""
        if not self.listed:
            return isinstance(value, self.kind)
        return (
            isinstance(value, list | tuple)
            and len(value) > 0
            and all(isinstance(each, self.kind) for each in value)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParameter:
    """Data: prompts, or examples."""

    parameter: str
    kind: DataKind

    @property
    def expected(self) -> str:
        """What a call gives, for messages."""
        return f"fl.{self.kind.__name__}"

    def accepts(self, value: object) -> bool:
        """Returns True for a handle of the data."""
        return isinstance(value, self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A setting of the workflow, given by `args` in the config.

    Attributes:
        parameter: Its name.
        types: The types of its values.
        choices: Values that a `Literal` names, in addition to those of the types.
        required: True if it has no default.
        default: The default.
    """

    parameter: str
    types: tuple[type, ...]
    choices: tuple[Scalar, ...]
    required: bool = True
    default: Scalar = None

    @property
    def expected(self) -> str:
        """Its values, for messages."""
        kinds = ["null" if t is type(None) else t.__name__ for t in self.types]
        choices = ["null" if choice is None else repr(choice) for choice in self.choices]
        if len(choices) > 1:
            return " or ".join([*kinds, "one of " + ", ".join(choices)])
        return " or ".join([*kinds, *choices])

    def accepts(self, value: object) -> bool:
        """Returns True for one of its values; a whole number may stand for a float."""
        whole = type(value) is int and float in self.types
        return whole or type(value) in self.types or self._is_choice(value)

    def _is_choice(self, value: object) -> bool:
        # 1 is no yes, and True no 1.
        return any(value == each and type(value) is type(each) for each in self.choices)

    def converted(self, value: Scalar) -> Scalar:
        """Returns a value that it accepts, as a float where it is a whole number for one."""
        if type(value) is int and int not in self.types and not self._is_choice(value):
            return float(value)
        return value


Parameter: TypeAlias = RoleParameter | DataParameter | Argument


def read_parameters(
    function: Callable[..., object], local_names: Mapping[str, object], where: SourceRef
) -> list[Parameter]:
    """Returns the parameters of a workflow function, from its annotations, in their order.

    Raises:
        TraceError: A parameter has no annotation, or one without a meaning here.
    """
    workflow = f"workflow '{function.__name__}'"
    try:
        hints = get_type_hints(function, localns=dict(local_names))
    except Exception as error:
        raise TraceError(
            f"the annotations of {workflow} cannot be read",
            where=str(where),
            found=f"{type(error).__name__}: {error}",
            hint="import what they name: import flowrl as fl",
        ) from error
    parameters: list[Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        try:
            kind = _annotation(parameter, hints)
            if kind in ROLE_KINDS:
                role = RoleName(parameter.name)
                parameters.append(RoleParameter(name=role, kind=kind, parameter=role))
            elif (each := _listed_kind(kind)) is not None:
                names = [f"{parameter.name}_{number}" for number in range(1, UNBOUND + 1)]
                parameters += _listed_roles(parameter.name, each, names)
            elif kind in _DATA:
                parameters.append(DataParameter(parameter=parameter.name, kind=kind))
            else:
                parameters.append(_read_argument(parameter, kind))
        except TraceError as error:
            error.what = f"parameter '{parameter.name}' of {workflow} {error.what}"
            error.where = str(where)
            raise
    if not any(isinstance(each, RoleParameter) and each.kind.learns for each in parameters):
        raise TraceError(
            f"{workflow} has no role that learns",
            where=str(where),
            expected="a parameter such as actor: fl.Policy",
            hint="add a parameter such as actor: fl.Policy",
        )
    return parameters


def _listed_kind(annotation: object) -> RoleKind | None:
    """Returns the kind of the roles of `list[fl.Policy]`; None for other annotations."""
    if get_origin(annotation) is not list:
        return None
    return next((kind for kind in ROLE_KINDS if get_args(annotation) == (kind,)), None)


def _listed_roles(parameter: str, kind: RoleKind, names: Sequence[str]) -> list[RoleParameter]:
    return [
        RoleParameter(name=RoleName(name), kind=kind, parameter=parameter, listed=True)
        for name in names
    ]


# The errors of these functions begin where `read_parameters` names the parameter.


def _annotation(parameter: inspect.Parameter, hints: Mapping[str, object]) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TraceError(
            "has no name to give",
            found=str(parameter.kind.description),
            expected="parameters with names of their own, without *, ** and /",
            hint="give it a name of its own, or leave it out",
        )
    if parameter.name not in hints:
        raise TraceError("has no annotation", expected=_ACCEPTED, hint=_HINT)
    kind = hints[parameter.name]
    of_config = kind in (*ROLE_KINDS, *_DATA) or _listed_kind(kind) is not None
    if of_config and parameter.default is not parameter.empty:
        raise TraceError(
            "has a default, but roles and data come from the config",
            found=repr(parameter.default),
            hint="leave the default out; a role that only some settings use is used inside "
            "`if kl:`, and the config need not name it then",
        )
    return kind


def _read_argument(parameter: inspect.Parameter, annotation: object) -> Argument:
    kinds, choices = _scalar_types(annotation)
    if not kinds and not choices:
        raise TraceError(
            "has an annotation that is neither a role, nor data, nor a plain setting",
            found=inspect.formatannotation(annotation),
            expected=_ACCEPTED,
            hint=_HINT,
        )
    argument = Argument(parameter=parameter.name, types=kinds, choices=choices)
    if parameter.default is parameter.empty:
        return argument
    if not argument.accepts(parameter.default):
        raise TraceError(
            "has a default that does not fit its annotation",
            found=repr(parameter.default),
            expected=argument.expected,
            hint="change the default or the annotation",
        )
    return replace(argument, required=False, default=argument.converted(parameter.default))


def _scalar_types(annotation: object) -> tuple[tuple[type, ...], tuple[Scalar, ...]]:
    """Returns the scalar types and the single values of an annotation; empty where it has none."""
    if annotation is None or annotation is type(None):
        return (type(None),), ()
    if isinstance(annotation, type) and annotation in _SCALARS:
        return (annotation,), ()
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return ((), values) if all(type(value) in _SCALARS for value in values) else ((), ())
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [_scalar_types(part) for part in get_args(annotation)]
        if not all(kinds or values for kinds, values in parts):
            return (), ()
        choices = tuple(value for _, values in parts for value in values)
        return tuple(dict.fromkeys(kind for kinds, _ in parts for kind in kinds)), choices
    return (), ()


def bind_arguments(
    workflow: str, arguments: tuple[Argument, ...], given: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Returns the value of each argument: the one that the config gives, else the default.

    Raises:
        ConfigError: An argument is unknown (with the nearest), of the wrong type, or missing.
    """
    names = [argument.parameter for argument in arguments]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"workflow '{workflow}' has no argument '{name}'",
                where=f"args.{name}",
                expected=f"one of {listing(names)}" if names else "no arguments",
                hint=suggestion(name, names)
                or f"remove args.{name}; args=null removes all arguments that a file gives",
            )
    values: dict[str, Scalar] = {}
    for argument in arguments:
        name = argument.parameter
        if name in given:
            values[name] = _checked(workflow, argument, given[name])
        elif argument.required:
            raise ConfigError(
                f"workflow '{workflow}' needs a value for '{name}'",
                where=f"args.{name}",
                expected=argument.expected,
                hint=f"set args.{name} in the config; annotate it where it is a role or data",
            )
        else:
            values[name] = argument.default
    return values


def bind_roles(
    workflow: str,
    roles: tuple[RoleParameter, ...],
    new_names: Mapping[str, str | Sequence[str]],
) -> tuple[RoleParameter, ...]:
    """Renames roles by their parameter; those that `new_names` does not have keep their names.

    Args:
        new_names: The name of a role by parameter; of a list of roles, their names.

    Raises:
        ConfigError: A parameter is no role (with the nearest), or two roles have one name.
    """
    parameters = {role.parameter: role for role in roles}
    names = list(parameters)
    for name, given in new_names.items():
        if name not in names:
            raise ConfigError(
                f"workflow '{workflow}' has no role '{name}'",
                where=f"bind.{name}",
                expected=f"one of {listing(names)}",
                hint=one_of_them(name, names),
            )
        listed = parameters[name].listed
        if isinstance(given, str) == listed or (listed and not given):
            raise ConfigError(
                f"'{name}' of workflow '{workflow}' is {'a list of roles' if listed else 'a role'}",
                where=f"bind.{name}",
                found=repr(given),
                expected="keys of roles, in a list" if listed else "a key of roles",
                hint=f"write {name}: [{given or 'NAME'}]" if listed else f"write {name}: NAME",
            )
        for role_name in (given,) if isinstance(given, str) else given:
            if not role_name.isprintable() or role_name.split() != [role_name]:
                raise ConfigError(
                    f"'{role_name}' cannot be the name of a role",
                    where=f"bind.{name}",
                    expected="a key of roles, without blanks",
                    hint="name a key of roles",
                )
    bound: list[RoleParameter] = []
    for name, first in parameters.items():
        new = new_names.get(name)
        if new is None:
            bound += [role for role in roles if role.parameter == name]
        elif isinstance(new, str):
            bound.append(replace(first, name=RoleName(new)))
        else:
            bound += _listed_roles(name, first.kind, new)
    for role in bound:
        same = [other.parameter for other in bound if other.name == role.name]
        if len(same) > 1:
            raise ConfigError(
                f"one role fills two of workflow '{workflow}'",
                where=f"bind.{next(name for name in same if name in new_names)}",
                found=f"{role.name} for {' and '.join(same)}",
                expected="a role of its own for each",
                hint="bind one of them to another role",
            )
    return tuple(bound)


def _checked(workflow: str, argument: Argument, value: Scalar) -> Scalar:
    if argument.accepts(value):
        return argument.converted(value)
    choices = [choice for choice in argument.choices if isinstance(choice, str)]
    raise ConfigError(
        f"argument '{argument.parameter}' of workflow '{workflow}' cannot have this value",
        where=f"args.{argument.parameter}",
        found=f"{value!r} ({type(value).__name__})",
        expected=argument.expected,
        hint=one_of_them(str(value), choices) if choices else "write such a value",
    )
