"""The parameters of a workflow function: its roles, its data, its arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from flowrl.errors import ConfigError, TraceError
from flowrl.graph.ir import SourceRef
from flowrl.ids import RoleName
from flowrl.program.handles import Examples, Handle, Pairs, Prompts
from flowrl.program.policy import Policy
from flowrl.program.roles import Critic, Environment, Reward, RewardModel
from flowrl.specs import Scalar
from flowrl.specs.names import kind_called, missing_name
from flowrl.wording import listing, one_of_them

__all__ = [
    "ROLE_KINDS",
    "Argument",
    "DataParameter",
    "Parameters",
    "RoleParameter",
    "bind_arguments",
    "bind_roles",
    "fits",
    "read_parameters",
]

_SCALARS = (int, float, str, bool, type(None))

RoleKind: TypeAlias = (
    type[Policy] | type[Reward] | type[RewardModel] | type[Critic] | type[Environment]
)
DataKind: TypeAlias = type[Prompts] | type[Examples] | type[Pairs]

ROLE_KINDS: tuple[RoleKind, ...] = (Policy, Reward, RewardModel, Critic, Environment)
_DATA: tuple[DataKind, ...] = (Prompts, Examples, Pairs)
_KINDS = tuple(kind.__name__ for kind in (*ROLE_KINDS, *_DATA))
_ACCEPTED = ", ".join(f"fl.{kind}" for kind in _KINDS) + (", int, float, str, bool or Literal[...]")


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleParameter:
    """A role: what the config must say something about.

    Attributes:
        name: Of the role in the config.
        kind: What it does.
        parameter: Of the function; the same, unless the workflow is bound to other roles.
    """

    name: RoleName
    kind: RoleKind
    parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParameter:
    """Data: prompts, or examples."""

    name: str
    kind: DataKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A setting of the workflow, given by `args` in the config.

    Attributes:
        types: Of which any value will do.
        choices: Values that a `Literal` names, in addition to those.
        default: `REQUIRED` where it has none.
    """

    name: str
    types: tuple[type, ...]
    choices: tuple[Scalar, ...]
    default: Scalar | _Required

    @property
    def expected(self) -> str:
        """For messages."""
        kinds = ["null" if t is type(None) else t.__name__ for t in self.types]
        choices = ["null" if choice is None else repr(choice) for choice in self.choices]
        if len(choices) > 1:
            return " or ".join([*kinds, "one of " + ", ".join(choices)])
        return " or ".join([*kinds, *choices])


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """All parameters, in the order of the function."""

    roles: tuple[RoleParameter, ...]
    data: tuple[DataParameter, ...]
    arguments: tuple[Argument, ...]


def read_parameters(
    function: Callable[..., object], local_names: Mapping[str, object], where: SourceRef
) -> Parameters:
    """The parameters of a workflow function, from its annotations.

    Raises:
        TraceError: a parameter without annotation or with one that has no meaning here.
    """
    try:
        hints = get_type_hints(function, localns=dict(local_names))
    except Exception as error:
        hint = _misspelt(error) or "import what they name: import flowrl as fl"
        text = str(error).removesuffix(f": {hint}")
        raise TraceError(
            f"the annotations of workflow '{function.__name__}' cannot be read",
            where=str(where),
            found=f"{type(error).__name__}: {text}",
            hint=hint,
        ) from error
    roles: list[RoleParameter] = []
    data: list[DataParameter] = []
    arguments: list[Argument] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = _annotation(function, parameter, hints, where)
        if kind in (*ROLE_KINDS, *_DATA):
            _refuse_default(function, parameter, where)
        if kind in ROLE_KINDS:
            role = RoleName(parameter.name)
            roles.append(RoleParameter(name=role, kind=kind, parameter=role))
        elif kind in _DATA:
            data.append(DataParameter(name=parameter.name, kind=kind))
        else:
            arguments.append(_read_argument(function, parameter, kind, where))
    if not any(role.kind.learns for role in roles):
        raise TraceError(
            f"workflow '{function.__name__}' has no role that learns",
            where=str(where),
            expected="a parameter such as actor: fl.Policy",
            hint="add a parameter such as actor: fl.Policy",
        )
    return Parameters(roles=tuple(roles), data=tuple(data), arguments=tuple(arguments))


def _misspelt(error: Exception) -> str | None:
    if isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType):
        owner = error.obj
        return missing_name(owner.__name__, str(error.name), getattr(owner, "__all__", ())).hint
    return None


def _refuse_default(
    function: Callable[..., object], parameter: inspect.Parameter, where: SourceRef
) -> None:
    if parameter.default is not parameter.empty:
        raise TraceError(
            f"parameter '{parameter.name}' of workflow '{function.__name__}' has a default, but "
            "roles and data come from the config",
            where=str(where),
            found=repr(parameter.default),
            hint="leave the default out; a role that only some settings use is used inside "
            "`if kl:`, and the config need not name it then",
        )


def _annotation(
    function: Callable[..., object],
    parameter: inspect.Parameter,
    hints: Mapping[str, object],
    where: SourceRef,
) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TraceError(
            f"parameter '{parameter.name}' of workflow '{function.__name__}' has no name to give",
            where=str(where),
            found=str(parameter.kind.description),
            expected="parameters with names of their own, without *, ** and /",
            hint="give it a name of its own, or leave it out",
        )
    if parameter.name not in hints:
        raise TraceError(
            f"parameter '{parameter.name}' of workflow '{function.__name__}' has no annotation",
            where=str(where),
            expected=_ACCEPTED,
            hint=_annotation_for(parameter),
        )
    return hints[parameter.name]


def _annotation_for(parameter: inspect.Parameter) -> str:
    """Returns the annotation to write at a parameter, by its default or its name."""
    name, default = parameter.name, parameter.default
    if default is not parameter.empty and default is not None and type(default) in _SCALARS:
        return f"write {name}: {type(default).__name__} = {default!r}"
    called = kind_called(name, _KINDS)
    if called is not None:
        return f"write {name}: {called}"
    return f"write {name}: fl.Policy where it is a model, {name}: float where it is a number"


def _read_argument(
    function: Callable[..., object],
    parameter: inspect.Parameter,
    annotation: object,
    where: SourceRef,
) -> Argument:
    kinds, choices = _scalar_types(annotation)
    if not kinds and not choices:
        raise TraceError(
            f"parameter '{parameter.name}' of workflow '{function.__name__}' has an annotation "
            "that is neither a role, nor data, nor a plain setting",
            where=str(where),
            found=_spelt(annotation),
            expected=_ACCEPTED,
            hint=_meant(annotation) or _annotation_for(parameter),
        )
    argument = Argument(name=parameter.name, types=kinds, choices=choices, default=REQUIRED)
    if parameter.default is parameter.empty:
        return argument
    if not fits(argument, parameter.default):
        raise TraceError(
            f"the default of parameter '{parameter.name}' of workflow '{function.__name__}' "
            "does not fit its annotation",
            where=str(where),
            found=repr(parameter.default),
            expected=argument.expected,
            hint="change the default or the annotation",
        )
    return replace(argument, default=_converted(argument, parameter.default))


def _spelt(annotation: object) -> str:
    plain = isinstance(annotation, type | types.ModuleType) and get_origin(annotation) is None
    return str(getattr(annotation, "__name__", annotation) if plain else annotation)


def _meant(annotation: object) -> str | None:
    """Returns the annotation that a person may have meant."""
    parts = (annotation, *get_args(annotation))
    if any(part in (*ROLE_KINDS, *_DATA) for part in parts):
        if get_origin(annotation) not in (Union, types.UnionType):
            return "write one parameter for each of them"
        return "a role that only some settings use is still a parameter: use it inside `if kl:`"
    if any(isinstance(part, type) and issubclass(part, Handle) for part in parts):
        return "a function of handles needs no mark: leave @fl.workflow out, and call it"
    return None


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
    """The value of every argument: what the config gives, else the default.

    Raises:
        ConfigError: an unknown argument (with the nearest), a wrong type, a missing value.
    """
    names = [argument.name for argument in arguments]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"workflow '{workflow}' has no argument '{name}'",
                where=f"args.{name}",
                expected=f"one of {listing(names)}" if names else "no arguments",
                hint=one_of_them(name, names) if names else f"leave args.{name} out",
            )
    values: dict[str, Scalar] = {}
    for argument in arguments:
        if argument.name in given:
            values[argument.name] = _checked(workflow, argument, given[argument.name])
        elif isinstance(argument.default, _Required):
            meant = kind_called(argument.name, _KINDS)
            raise ConfigError(
                f"workflow '{workflow}' needs a value for '{argument.name}'",
                where=f"args.{argument.name}",
                expected=argument.expected,
                hint=f"set args.{argument.name} in the config"
                + (
                    f"; where it is data or a role, annotate it {argument.name}: {meant}"
                    if meant
                    else ""
                ),
            )
        else:
            values[argument.name] = argument.default
    return values


def bind_roles(
    workflow: str, roles: tuple[RoleParameter, ...], new_names: Mapping[str, str]
) -> tuple[RoleParameter, ...]:
    """Renames roles by their parameter as `new_names` says; the others keep their names.

    Raises:
        ConfigError: a parameter that is no role (with the nearest), or one role for two.
    """
    names = [role.parameter for role in roles]
    for name in new_names:
        if name not in names:
            raise ConfigError(
                f"workflow '{workflow}' has no role '{name}'",
                where=f"bind.{name}",
                expected=f"one of {listing(names)}",
                hint=one_of_them(name, names),
            )
    for name, role_name in new_names.items():
        if (
            not isinstance(role_name, str)
            or not role_name.isprintable()
            or role_name.split() != [role_name]
        ):
            raise ConfigError(
                f"'{role_name}' cannot be the name of a role",
                where=f"bind.{name}",
                expected="a key of roles, without blanks",
                hint="name a key of roles",
            )
    bound = tuple(
        replace(role, name=RoleName(new_names.get(role.parameter, role.name))) for role in roles
    )
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
    return bound


def _converted(argument: Argument, value: Scalar) -> Scalar:
    """A whole number will do where a float is wanted."""
    whole = type(value) is int and int not in argument.types and float in argument.types
    return (
        float(value) if whole and value is not None and not _is_choice(argument, value) else value
    )


def _is_choice(argument: Argument, value: object) -> bool:
    # 1 is no yes, and True no 1.
    return any(value == each and type(value) is type(each) for each in argument.choices)


def fits(argument: Argument, value: object) -> bool:
    """True if an argument may have that value."""
    whole = type(value) is int and float in argument.types
    return whole or type(value) in argument.types or _is_choice(argument, value)


def _checked(workflow: str, argument: Argument, value: Scalar) -> Scalar:
    if fits(argument, value):
        return _converted(argument, value)
    kind = type(value)
    choices = [choice for choice in argument.choices if isinstance(choice, str)]
    raise ConfigError(
        f"argument '{argument.name}' of workflow '{workflow}' is of the wrong "
        + ("value" if kind in map(type, argument.choices) else "type"),
        where=f"args.{argument.name}",
        found=f"{value!r} ({kind.__name__})",
        expected=argument.expected,
        hint=one_of_them(str(value), choices) if choices else "write such a value",
    )
