"""What `null` takes away from a configuration: sections, and entries that have a name.

    stage: {sft: null}          the section of a stage, so that its defaults apply
    roles: {critic: null}       a role
    rewards: null               all rewards; likewise `train: null`, `eval: null`, `roles: null`
    rewards: {terms: {closeness: null}}     the reward term of that name
    bind: {student: null}       one entry

What is taken away is as though no file had written it, so that its default applies. Where nothing
is a value of its own (`stop`, `data.eval`, `roles.NAME.model`, values of `args`), null is that
value. A single value that is never nothing (`train.steps`) cannot be taken away: the validation
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import get_args, get_origin

from pydantic import BaseModel

from flowrl.config.declared import fitting_model, item_type, members_of, models_in
from flowrl.config.rewards import RewardTerm
from flowrl.config.yaml_tree import Value

__all__ = ["item_named", "item_names", "remove_nulls"]


def remove_nulls(values: dict[str, Value], root: type[BaseModel]) -> list[str]:
    """Takes away every null that stands for a section or an entry.

    Args:
        values: Are changed.
        root: What they are going to be validated against.

    Returns:
        Dotted keys of what was taken away; of a list the later items first.
    """
    removed: list[str] = []
    _look_into(values, root, "", removed)
    return removed


def item_names(items: Sequence[Value]) -> list[str]:
    """Names of a list's items, such as those of reward terms; nothing where they have none."""
    names = [_name(item) for item in items]
    return [name for name in names if name is not None]


def item_named(items: Sequence[Value], name: str) -> int | None:
    """The place of the item of a name, where one and only one has it."""
    places = [place for place, item in enumerate(items) if _name(item) == name]
    return places[0] if len(places) == 1 else None


def _name(item: Value) -> str | None:
    """The name that an item says, or that its kind has by default."""
    if not isinstance(item, dict):
        return None
    name = item.get("name")
    if name is None and isinstance(item.get("kind"), str):
        model = fitting_model(RewardTerm, item)
        name = None if model is None else model.model_fields["name"].default
    return name if isinstance(name, str) else None


def _look_into(value: Value, declared: object, path: str, removed: list[str]) -> None:
    match value:
        case dict():
            model = fitting_model(declared, value)
            for key, inner in list(value.items()):
                if model is None:
                    own: object = item_type(declared, dict, 1)
                    is_removable = own is not None and not _allows_nothing(own)
                else:
                    info = model.model_fields.get(key)
                    own = None if info is None else info.annotation
                    is_removable = _is_section(own)
                place = f"{path}.{key}" if path else key
                if inner is None and is_removable:
                    del value[key]
                    removed.append(place)
                else:
                    _look_into(inner, own, place, removed)
        case list():
            own = item_type(declared, tuple, 0)
            for index in reversed(range(len(value))):
                place = f"{path}.{index}"
                if value[index] is None and models_in(own):
                    del value[index]
                    removed.append(place)
                else:
                    _look_into(value[index], own, place, removed)
        case _:
            pass


def _allows_nothing(declared: object) -> bool:
    return NoneType in members_of(declared)


def _is_section(declared: object) -> bool:
    """Whether a declared type is of mappings or lists, and never of nothing."""
    members = members_of(declared)
    several = any(get_origin(member) in (dict, tuple) and get_args(member) for member in members)
    return not _allows_nothing(declared) and (several or bool(models_in(declared)))
