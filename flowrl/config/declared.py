"""What the configuration's classes declare at a dotted key: types, sections, kinds."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

__all__ = [
    "ABSENT",
    "declared_at",
    "fitting_model",
    "inside",
    "item_type",
    "kinds_of",
    "members_of",
    "models_in",
    "takes_value",
]

ABSENT = object()
"""No value, which None is one of."""


def inside(container: object, key: int | str) -> object:
    """The value of a key or an index; `ABSENT` where there is none."""
    match container:
        case dict():
            return container.get(key, ABSENT)
        case list() | tuple() if isinstance(key, int) and key < len(container):
            return container[key]
        case _:
            return ABSENT


def declared_at(
    path: tuple[str, ...], values: object, root: type[BaseModel]
) -> tuple[object, object]:
    """The declared type at `path`, and the value there."""
    annotation: object = root
    value = values
    for key in path:
        if isinstance(value, list):
            annotation = item_type(annotation, tuple, 0)
            value = inside(value, int(key))
            continue
        model = fitting_model(annotation, value)
        if model is None:
            annotation = item_type(annotation, dict, 1)
        elif key in model.model_fields:
            annotation = model.model_fields[key].annotation
        else:
            annotation = None
        value = inside(value, key)
    return annotation, value


def item_type(annotation: object, container: type, argument: int) -> object:
    """A type argument of the tuple or dict in a declared type; None without such."""
    for member in members_of(annotation):
        if get_origin(member) is container:
            return get_args(member)[argument]
    return None


def fitting_model(annotation: object, value: object) -> type[BaseModel] | None:
    """The model that `value` is meant as, judged by its kind where there are several."""
    kind = value.get("kind") if isinstance(value, dict) else None
    for model in models_in(annotation):
        if kind is None or not kinds_of(model) or kind in kinds_of(model):
            return model
    return None


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """What `kind` may be in a section; nothing where it has none."""
    info = model.model_fields.get("kind")
    if info is None or get_origin(info.annotation) is not Literal:
        return ()
    return get_args(info.annotation)


def models_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that a declared type allows."""
    return [
        member
        for member in members_of(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def takes_value(path: tuple[str, ...], root: type[BaseModel]) -> bool:
    """Whether a declared key may be one value: not only a section, or entries by name."""
    annotation, _ = declared_at(path, {}, root)
    sections = models_in(annotation)
    return any(
        member not in sections and get_origin(member) is not dict
        for member in members_of(annotation)
        if member is not type(None)
    )


def members_of(annotation: object) -> list[object]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for inner in get_args(annotation) for member in members_of(inner)]
    return [annotation]
