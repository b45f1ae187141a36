"""The base of all sections of a configuration, and the types that their fields declare.

A section is a pydantic model; `declared_at` finds the declared type of any dotted key, which
messages and the merge of files need before the values are validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from flowrl.entry_points import entries, find_entry
from flowrl.errors import ConfigError


def _no_truth_value(value: object) -> object:
    # bool is an int to Python, so that `seed: true` would silently mean 1.
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Int: TypeAlias = Annotated[int, BeforeValidator(_no_truth_value)]
Float: TypeAlias = Annotated[float, BeforeValidator(_no_truth_value)]
Args: TypeAlias = dict[str, str | int | float | bool | None]
Options: TypeAlias = dict[str, object | None]
"""Values for a plug-in to check; None is a value."""
Bind: TypeAlias = dict[str, str | tuple[str, ...]]


class Section(BaseModel):
    """Base of all sections: an unknown key is an error, and values never change.

    A validator is built at its first use, so that a section that is only read as a part of another
    one gets none of its own.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )


class Refusal(ValueError):
    """All reasons of a validator to refuse a value, each with its own place and way out.

    Args:
        problems: At least one; `where` is a dotted key below the validated value, such as `1.of`,
            or None for the value itself.
    """

    def __init__(self, *problems: ConfigError) -> None:
        super().__init__(problems[0].what)
        self.problems = problems


SectionT = TypeVar("SectionT", bound=Section)


class InstalledKinds(Generic[SectionT]):
    """Annotates a union of sections with `kind`: installed packages add kinds by entry points.

    An entry point's name is its `kind`. Packages are imported when a configuration is read, and a
    broken one ends only what names its kind.

    Args:
        group: The group of entry points.
        noun: What they are, for messages.
        base: The class that they derive from.
    """

    def __init__(self, group: str, noun: str, base: type[SectionT]) -> None:
        self.group, self._noun, self._base = group, noun, base

    def find(self, kind: str) -> type[SectionT]:
        """Returns the section of a kind.

        Raises:
            ConfigError: No package or more than one declares it, or what is declared is none.
        """
        entry = find_entry(self.group, kind, kind=self._noun, error=ConfigError)
        section = entry.load(ConfigError)
        base = self._base
        if isinstance(section, type) and issubclass(section, base) and kinds_of(section) == (kind,):
            return section
        raise ConfigError(
            f"{kind!r} is no {self._noun}",
            where=entry.origin,
            found=entry.target,
            expected=f"a subclass of {base.__module__}.{base.__name__} with "
            f"`kind: Literal[{kind!r}]`",
            hint=f"repair {entry.target} or uninstall {entry.distribution}",
        )

    def models(self) -> list[type[SectionT]]:
        """Returns the sections of all packages that can be imported."""
        sections = []
        for entry in entries(self.group):
            with suppress(ConfigError):
                sections.append(self.find(entry.name))
        return sections

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        own = tuple(kind for model in models_in(source) for kind in kinds_of(model))

        def validate(value: object, others: core_schema.ValidatorFunctionWrapHandler) -> object:
            if isinstance(value, self._base):
                return others(value) if kinds_of(type(value))[0] in own else value
            kind = kind_of(value)
            installed = [entry for entry in entries(self.group) if entry.name == kind]
            if not installed:
                return others(value)
            if kind in own:
                (package, *_) = installed
                raise Refusal(
                    ConfigError(
                        f"two {self._noun}s are called {kind!r}",
                        found=f"flowrl's own, and {package.target} of {package.origin}",
                        hint=f"have {package.distribution} declare another name, or uninstall it",
                        where="kind",
                    )
                )
            try:
                model = self.find(str(kind))
            except ConfigError as problem:
                reason = f"{problem.where}: {problem.found}"
                raise Refusal(
                    ConfigError(problem.what, found=reason, hint=problem.hint, where="kind")
                ) from problem
            return model.model_validate(value)

        def dump(
            value: Any, others: SerializerFunctionWrapHandler, info: SerializationInfo
        ) -> object:
            return others(value) if value.kind in own else value.model_dump(mode=info.mode)

        return core_schema.no_info_wrap_validator_function(
            validate,
            handler(source),
            serialization=core_schema.wrap_serializer_function_ser_schema(dump, info_arg=True),
        )


ABSENT = object()
"""Stands for a missing value, because None is a value."""


def child_of(container: object, key: int | str) -> object:
    """Returns the value of a key or an index; `ABSENT` where there is none."""
    match container:
        case dict():
            return container.get(key, ABSENT)
        case list() | tuple() if str(key).isdecimal() and int(key) < len(container):
            return container[int(key)]
        case _:
            return ABSENT


def declared_at(
    path: Sequence[str], values: object, root: type[BaseModel]
) -> tuple[object, object]:
    """Returns the declared type at `path`, and the value there."""
    annotation: object = root
    value = values
    for key in path:
        annotation = declared_child(annotation, key, kind_of(value))
        value = child_of(value, key)
    return annotation, value


def declared_child(annotation: object, key: str, kind: object = None) -> object:
    """Returns the declared type of the value of a key; None without such a declaration.

    Args:
        annotation: The declared type of the section, mapping or list that holds the value.
        key: The key; any in a mapping or a list.
        kind: The `kind` of the section, which decides where several are declared.
    """
    model = fitting_model(annotation, kind)
    if model is not None:
        info = model.model_fields.get(key)
        return None if info is None else info.annotation
    arguments = {get_origin(member): get_args(member) for member in members_of(annotation)}
    if dict in arguments:
        return arguments[dict][1]
    return arguments[tuple][0] if tuple in arguments else None


def kind_of(value: object) -> object:
    """Returns the kind that a section says by `kind`, or by the `use` of a reward term; else None.

    A `use` with a colon is a function of the user's, whose kind is `python`.
    """
    if not isinstance(value, dict):
        return None
    use = value.get("use")
    return value.get("kind") if use is None else "python" if ":" in str(use) else use


def fitting_model(annotation: object, kind: object) -> type[BaseModel] | None:
    """Returns the section of a declared type, by its `kind` where there are several."""
    for model in models_in(annotation):
        if kind is None or not kinds_of(model) or kind in kinds_of(model):
            return model
    return None


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the values of `kind` that name a section; none for a section without it."""
    info = model.model_fields.get("kind")
    is_name = info is not None and info.is_required() and get_origin(info.annotation) is Literal
    return get_args(info.annotation) if info is not None and is_name else ()


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Returns the sections that a declared type allows."""
    models = (
        member
        for member in members_of(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    )
    return list(dict.fromkeys(models))  # one that has several tags is there several times


def takes_value(path: tuple[str, ...], root: type[BaseModel]) -> bool:
    """True if a declared key may be a single value: not only a section, or entries by name."""
    annotation, _ = declared_at(path, {}, root)
    sections = models_in(annotation)
    return any(
        member not in sections and get_origin(member) is not dict
        for member in members_of(annotation)
        if member is not type(None)
    )


def members_of(annotation: object) -> list[object]:
    """Returns the members of a union, those of installed packages among them, or the type."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        kinds = [each.models() for each in metadata if isinstance(each, InstalledKinds)]
        return [*members_of(inner), *(model for models in kinds for model in models)]
    if get_origin(annotation) in (Union, UnionType):
        return [member for inner in get_args(annotation) for member in members_of(inner)]
    return [annotation]
