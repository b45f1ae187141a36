"""What pydantic found wrong, in the words of people who write configs.

Every problem has a place (`where`), what was found and what was expected; several become one
`ConfigError`, whose first problem stands in full and the others by name, in at most four lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flowrl.config.declared import (
    ABSENT,
    declared_at,
    fitting_model,
    inside,
    kinds_of,
    models_in,
)
from flowrl.config.nearest import listing, one_of_them, suggestion
from flowrl.config.schema import RunConfig
from flowrl.config.synonyms import called_here, how_to_get, meant_word
from flowrl.errors import ConfigError, combine

__all__ = ["Problems", "describe_value", "homes_of", "validation_error", "wrong_type"]

Problems: TypeAlias = Iterator[ConfigError]
"""What a check finds wrong, one by one."""

# Pydantic's error types, and what was expected where one of them is met.
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def validation_error(
    error: ValidationError,
    values: object,
    root: type[BaseModel],
    where: Callable[[str], str],
) -> ConfigError:
    """The `ConfigError` for a failed validation.

    Args:
        values: What was validated, as plain values.
        root: The model it was validated against.
        where: Says where a dotted key is written.
    """
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        # A list whose items are wrong is short of them, which is no mistake of its own.
        if details["type"] == "too_short" and details["input"] and len(error.errors()) > 1:
            continue
        by_path.setdefault(_path(details, values), []).append(details)
    # A misspelt key shows twice, as unknown and as missing; the misspelling is the one to mend.
    ordered = sorted(by_path.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    return combine([_problem(path, found, values, root, where) for path, found in ordered])


def describe_value(value: object) -> str:
    """A value and what it is: `'abc' (text)`; long ones are cut."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case str():
            return f"{_short(repr(value))} (text)"
        case int() | float():
            return repr(value)
        case dict():
            return f"a mapping of {listing([str(key) for key in value])}"
        case list() | tuple():
            return f"{_short(repr(list(value)))} (a list)"
        case _:
            return _short(repr(value))


def wrong_type(details: ErrorDetails) -> str:
    """What is wrong with a value of another file, by pydantic's words for it."""
    expected = _EXPECTED.get(details["type"])
    return f"must be {expected}" if expected is not None else details["msg"]


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _path(details: ErrorDetails, values: object) -> tuple[str, ...]:
    """The dotted key of an error, without the union members that pydantic puts between."""
    path: list[str] = []
    current = values
    *inner, last = details["loc"] or ("",)
    for part in inner:
        if (found := inside(current, part)) is not ABSENT:
            path.append(str(part))
            current = found
    if details["type"] == "missing" or inside(current, last) is not ABSENT:
        path.append(str(last))
    return tuple(path)


def _problem(
    path: tuple[str, ...],
    found: list[ErrorDetails],
    values: object,
    root: type[BaseModel],
    where: Callable[[str], str],
) -> ConfigError:
    details, key = found[0], ".".join(path)
    name, value = path[-1] if path else "the config", details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    if value is None and details["type"] not in ("extra_forbidden", "missing"):
        return _no_value(key, name, found, where)
    match details["type"]:
        case "extra_forbidden":
            return _unknown_key(path, values, root, where)
        case "missing":
            return _missing(path, values, root, where)
        case "union_tag_invalid" | "union_tag_not_found":
            return _unknown_kind(key, value, context, _kinds(path, values, root), where)
        case "literal_error":
            return _other_choice(key, name, value, str(context["expected"]), where)
        case "value_error":
            text, *way = map(str, context["error"].args)
            return ConfigError(
                f"{name} {text}" if text.startswith("must ") else text,
                where=where(key),
                found=None if isinstance(value, dict) else describe_value(value),
                hint=way[0]
                if way
                else f"change one of its values ({listing(list(value))})"
                if isinstance(value, dict)
                else "write another value in its place",
            )
        case "too_short" | "string_too_short":
            return ConfigError(
                f"{name} must not be empty",
                where=where(key),
                found=describe_value(value),
                hint="name at least one",
            )
        case bound if bound in _BOUNDS:
            words, limit = _BOUNDS[bound]
            return ConfigError(
                f"{name} must be {words} {context[limit]}",
                where=where(key),
                found=describe_value(value),
                hint=f"set {key} to {words} {context[limit]}",
            )
        case _:
            annotation, _ = declared_at(path, values, root)
            return _wrong_type(key, name, found, annotation, where)


def _missing(
    path: tuple[str, ...],
    values: object,
    root: type[BaseModel],
    where: Callable[[str], str],
) -> ConfigError:
    *section, name = path
    key = ".".join(path)
    if path[:2] == ("plan", "environments") and (unknown := _no_role(path[2], values, where)):
        return unknown
    inside = f" in {'.'.join(section)}" if section else ""
    return ConfigError(
        f"{name!r} is missing{inside}",
        where=where(key),
        hint=f"set {key}, in the file or as {key}=... on the command line"
        if root is RunConfig
        else f"add {name} to {'.'.join(section)} in that file"
        if section
        else f"add {name} to that file",
    )


def _other_choice(
    key: str, name: str, value: object, expected: str, where: Callable[[str], str]
) -> ConfigError:
    """Of a value that is none of some words; `expected` is pydantic's `'a', 'b' or 'c'`."""
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    meant = meant_word(str(value), choices)
    # In the first line, which is all that is told of it behind another mistake.
    called = "" if meant is None else f": it is called {meant}"
    return ConfigError(
        f"{name} cannot be {value!r}{called}",
        where=where(key),
        expected=f"one of {listing(choices)}" if len(choices) > 1 else choices[0],
        hint=f"write {meant}"
        if meant is not None
        else how_to_get(str(value), choices) or one_of_them(str(value), choices),
    )


def _no_role(name: str, values: object, where: Callable[[str], str]) -> ConfigError | None:
    """Of times of an environment that no role is: its name is to be mended, not what it lacks."""
    roles = values.get("roles") if isinstance(values, dict) else None
    if not isinstance(roles, dict) or name in roles:
        return None
    there = [str(role) for role in roles]
    return ConfigError(
        f"there is no role {name!r}",
        where=where(f"plan.environments.{name}"),
        expected=f"one of {listing(there)}",
        hint=suggestion(name, there) or f"leave the keys of plan.environments.{name} out",
    )


def _no_value(
    key: str, name: str, found: list[ErrorDetails], where: Callable[[str], str]
) -> ConfigError:
    """A null where there is always a value; `flowrl.config.nulls` says what it means elsewhere."""
    names = dict.fromkeys(_EXPECTED[d["type"]] for d in found if d["type"] in _EXPECTED)
    if "a number" in names:
        names.pop("a whole number", None)
    choices = [str(d["ctx"]["expected"]) for d in found if d["type"] == "literal_error"]
    return ConfigError(
        f"{name} always has a value, which null takes away from sections and named entries only",
        where=where(key),
        found="nothing (null)",
        expected=" or ".join([*names, *choices]) or None,
        hint="write the value that it shall have, or leave the key out to change nothing",
    )


def _wrong_type(
    key: str,
    name: str,
    found: list[ErrorDetails],
    annotation: object,
    where: Callable[[str], str],
) -> ConfigError:
    value = found[0]["input"]
    # The members of a union of plain types fail one by one, at one place.
    names = dict.fromkeys(_EXPECTED.get(details["type"], details["msg"]) for details in found)
    if models_in(annotation):
        names["a mapping"] = None
    if "a number" in names:
        names.pop("a whole number", None)
    hint = None
    if "text" in names and isinstance(value, dict):
        hint = "put text that holds braces in quotes"
    elif "text" in names and isinstance(value, int | float) and not models_in(annotation):
        hint = f"put it in quotes: '\"{value}\"' on the command line"
    elif "a list" in names and not isinstance(value, dict):
        hint = f"write a list: [{value}]"
    elif list(names) == ["a mapping"]:
        hint = _below(key, annotation)
    *most, last = names
    expected = f"{', '.join(most)} or {last}" if most else last
    return ConfigError(
        f"{name} must be {expected}",
        where=where(key),
        found=describe_value(value),
        hint=hint or f"write {expected}",
    )


def _below(key: str, annotation: object) -> str:
    """What to write where a value stands in the place of a section."""
    models = models_in(annotation)
    kinds = [kind for model in models for kind in kinds_of(model)]
    if kinds:
        return f"write {{kind: {kinds[0]}, ...}}; there are {listing(kinds)}"
    keys = [field for model in models for field in sorted(model.model_fields)]
    if not keys:
        return f"write what it holds by name: {key}.NAME"
    return f"write a key of it, {key}.KEY; KEY is one of {listing(keys)}"


def _unknown_kind(
    key: str,
    value: object,
    context: Mapping[str, Any],
    kinds: Sequence[str],
    where: Callable[[str], str],
) -> ConfigError:
    kind = value.get("kind") if isinstance(value, dict) else None
    expected = f"kind: {listing(kinds)}"
    if kind is None:
        return ConfigError(
            f"{key} does not say its kind",
            where=where(key),
            found=describe_value(value),
            expected=expected,
            hint=f"write {{kind: {kinds[0] if kinds else 'NAME'}, ...}}",
        )
    return ConfigError(
        f"{key} has no kind {str(kind)!r}",
        where=where(f"{key}.kind"),
        expected=expected,
        hint=one_of_them(str(kind), kinds),
    )


def _unknown_key(
    path: tuple[str, ...],
    values: object,
    root: type[BaseModel],
    where: Callable[[str], str],
) -> ConfigError:
    section, name = path[:-1], path[-1]
    model = _model_at(section, values, root)
    allowed = sorted(model.model_fields) if model is not None else []
    if "." in name:
        hint: str | None = "nest keys in a file; dots belong to the command line"
    elif path == ("nodes",):
        hint = "a file that describes machines goes beside a configuration, as cluster=FILE"
    else:
        # A key that is right but stands in the wrong section beats one that is merely alike.
        below, key = _written_below(path, values)
        hint = called_here(below, key, allowed if below == section else ())
        hint = hint or _elsewhere(name, root) or suggestion(name, allowed)
    return ConfigError(
        f"unknown key {name!r}" + (f" in {'.'.join(section)}" if section else ""),
        where=where(".".join(path)),
        expected=listing(allowed) if allowed else None,
        hint=hint or "take it out, or write one of those",
    )


def _written_below(path: tuple[str, ...], values: object) -> tuple[tuple[str, ...], str]:
    """Section and key of the one value below an unknown key: of `optimizer`, `optimizer.lr`."""
    value = values
    for part in path:
        if isinstance(value, list | tuple):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    while isinstance(value, dict) and len(value) == 1:
        part, value = next(iter(value.items()))
        path = (*path, str(part))
    return path[:-1], path[-1]


def _elsewhere(name: str, root: type[BaseModel]) -> str | None:
    """Where a key of that very name does belong, if there is such a place."""
    homes = homes_of(name, root)
    return f"did you mean {' or '.join(homes[:3])}?" if homes else None


def homes_of(name: str, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of a model, at any depth, whose last part is `name`."""
    homes = [prefix + name] if name in model.model_fields else []
    for key, info in model.model_fields.items():
        for inner in models_in(info.annotation):
            homes += homes_of(name, inner, f"{prefix}{key}.")
    return list(dict.fromkeys(homes))


def _model_at(
    path: tuple[str, ...], values: object, root: type[BaseModel]
) -> type[BaseModel] | None:
    annotation, value = declared_at(path, values, root)
    return fitting_model(annotation, value)


def _kinds(path: tuple[str, ...], values: object, root: type[BaseModel]) -> list[str]:
    annotation, _ = declared_at(path, values, root)
    return [kind for model in models_in(annotation) for kind in kinds_of(model)]
