"""Turns pydantic's validation errors into messages for people who write configurations.

Every problem has a place (`where`), what was found and what was expected. Several become one
`ConfigError` of at most four lines: the first in full, the others by their place and first line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flowrl.config.schema import RunConfig
from flowrl.config.section import (
    ABSENT,
    Refusal,
    child_of,
    declared_at,
    fitting_model,
    kind_of,
    kinds_of,
    models_in,
)
from flowrl.errors import ConfigError, combine
from flowrl.synonyms import meanings
from flowrl.wording import excerpt, listing, one_of_them, suggestion

ModelT = TypeVar("ModelT", bound=BaseModel)

Problems: TypeAlias = Iterator[ConfigError]
"""The mistakes that a check finds, one by one."""

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


def validated(
    model: type[ModelT], values: object, where: Callable[[str], str], *, at: str = ""
) -> ModelT:
    """Returns plain values as a model.

    Args:
        model: The model.
        values: The plain values.
        where: Returns the place where a dotted key is written.
        at: The dotted key of the values; by default they are the whole file.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _validation_error(error, values, model, where, at) from None


def _validation_error(
    error: ValidationError,
    values: object,
    root: type[BaseModel],
    where: Callable[[str], str],
    at: str,
) -> ConfigError:
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        # A list whose items are wrong is short of them, which is no mistake of its own.
        if details["type"] == "too_short" and details["input"] and len(error.errors()) > 1:
            continue
        by_path.setdefault(_path(details, values), []).append(details)
    # A misspelt key shows twice, as unknown and as missing; the misspelling is the one to correct.
    ordered = sorted(by_path.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    return combine(
        [_Problem(path, details, values, root, where, at).message() for path, details in ordered]
    )


def _describe(value: object) -> str:
    """Returns a value and its kind: `'abc' (text)`; long ones are cut."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case str():
            return f"{excerpt(repr(value), 80)} (text)"
        case int() | float():
            return repr(value)
        case dict():
            return f"a mapping of {listing([str(key) for key in value])}"
        case list() | tuple():
            return f"{excerpt(repr(list(value)), 80)} (a list)"
        case _:
            return excerpt(repr(value), 80)


def wrong_type(details: ErrorDetails) -> str:
    """Returns what is wrong with a value of a file that is no configuration."""
    expected = _EXPECTED.get(details["type"])
    return f"must be {expected}" if expected is not None else details["msg"]


def homes_of(name: str, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns the dotted keys of a model, at any depth, whose last part is `name`."""
    homes = [prefix + name] if name in model.model_fields else []
    for key, info in model.model_fields.items():
        for inner in models_in(info.annotation):
            homes += homes_of(name, inner, f"{prefix}{key}.")
    return list(dict.fromkeys(homes))


def _path(details: ErrorDetails, values: object) -> tuple[str, ...]:
    """Returns the key of an error, without the union members that pydantic puts between."""
    path: list[str] = []
    current = values
    *inner, last = details["loc"] or ("",)
    for part in inner:
        if (child := child_of(current, part)) is not ABSENT:
            path.append(str(part))
            current = child
    if details["type"] == "missing" or child_of(current, last) is not ABSENT:
        path.append(str(last))
    return tuple(path)


class _Problem:
    """All that pydantic says about one key.

    Args:
        path: The parts of the dotted key.
        details: Pydantic's errors; the members of a union of types fail one by one.
        values: The plain values that were validated.
        root: The model that they were validated against.
        place: Returns the place where a dotted key is written.
        at: The dotted key of the values; empty for a whole file.
    """

    def __init__(
        self,
        path: tuple[str, ...],
        details: Sequence[ErrorDetails],
        values: object,
        root: type[BaseModel],
        place: Callable[[str], str],
        at: str,
    ) -> None:
        self.path, self.details, self.place = path, details, place
        self.values, self.root = values, root
        self.prefix = f"{at}." if at else ""
        self.key = ".".join((at, *path)) if at else ".".join(path)
        self.section = self.key.rpartition(".")[0]
        self.name = path[-1] if path else at or "the config"
        self.inside = f" in {self.section}" if self.section else ""
        self.where = place(self.key)
        self.value: object = details[0]["input"]

    def message(self) -> ConfigError:
        context: Mapping[str, Any] = self.details[0].get("ctx", {})
        kind = self.details[0]["type"]
        if self.value is None and kind not in ("extra_forbidden", "missing"):
            return self._wrong(
                "always has a value; null takes away sections and named entries only",
                "write a value, or leave the key out to change nothing",
            )
        match kind:
            case "extra_forbidden":
                return self._unknown_key()
            case "missing":
                return self._missing()
            case "union_tag_invalid" | "union_tag_not_found":
                return self._unknown_kind()
            case "literal_error":
                return self._other_choice(str(context["expected"]))
            case "value_error":
                return self._refused(context["error"])
            case "too_short" | "string_too_short":
                return self._wrong("must not be empty", "name at least one")
            case bound if bound in _BOUNDS:
                words, limit = _BOUNDS[bound]
                bounded = f"{words} {context[limit]}"
                return self._wrong(f"must be {bounded}", f"set {self.key} to {bounded}")
            case _:
                return self._wrong_type()

    def _wrong(self, what: str, hint: str) -> ConfigError:
        described = _describe(self.value)
        return ConfigError(f"{self.name} {what}", where=self.where, found=described, hint=hint)

    def _refused(self, error: ValueError) -> ConfigError:
        """Returns what a validator said, at its place."""
        if isinstance(error, Refusal):
            for problem in error.problems:
                below = f"{self.key}.{problem.where}" if problem.where else self.key
                problem.where = self.place(below)
            return combine(error.problems)
        text = str(error)
        if isinstance(self.value, dict):
            hint = f"change one of its values ({listing(list(self.value))})"
            return ConfigError(text, where=self.where, hint=hint)
        return ConfigError(
            f"{self.name} {text}" if text.startswith("must ") else text,
            where=self.where,
            found=_describe(self.value),
            hint="write another value in its place",
        )

    def _missing(self) -> ConfigError:
        if self.root is RunConfig or self.prefix:
            hint = f"set {self.key}, in the file or as {self.key}=... on the command line"
        else:
            hint = f"add {self.name} to {f'{self.section} in ' if self.section else ''}that file"
        return ConfigError(f"{self.name!r} is missing{self.inside}", where=self.where, hint=hint)

    def _other_choice(self, expected: str) -> ConfigError:
        """Refuses a value that is none of the words in pydantic's `'a', 'b' or 'c'`."""
        choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
        word = str(self.value)
        near = (meant for meant in meanings("value", word) if meant.partition(", ")[0] in choices)
        meant = next(near, None)
        # In the first line, which is all that a message behind another one shows.
        called = f": it is called {meant}" if meant in choices else ""
        hint = f"{'write' if called else 'take'} {meant}"
        return ConfigError(
            f"{self.name} cannot be {self.value!r}{called}",
            where=self.where,
            expected=f"one of {listing(choices)}" if len(choices) > 1 else choices[0],
            hint=one_of_them(word, choices) if meant is None else hint,
        )

    def _models(self) -> list[type[BaseModel]]:
        """Returns the sections that the key may hold."""
        return models_in(declared_at(self.path, self.values, self.root)[0])

    def _wrong_type(self) -> ConfigError:
        models = self._models()
        names = dict.fromkeys(_EXPECTED.get(each["type"], each["msg"]) for each in self.details)
        if models:
            names["a mapping"] = None
        if "a number" in names:
            names.pop("a whole number", None)
        *most, last = names
        expected = f"{', '.join(most)} or {last}" if most else last
        hint = f"write {expected}"
        if "text" in names and isinstance(self.value, dict):
            hint = "put text that holds braces in quotes"
        elif "text" in names and isinstance(self.value, int | float) and not models:
            hint = f"put it in quotes: '\"{self.value}\"' on the command line"
        elif "a list" in names and not isinstance(self.value, dict):
            hint = f"write a list: [{self.value}]"
        elif expected == "a mapping":
            hint = self._section_hint(models)
        return self._wrong(f"must be {expected}", hint)

    def _section_hint(self, models: Sequence[type[BaseModel]]) -> str:
        """Returns what to write in place of a single value where a section belongs."""
        if kinds := _kinds(models):
            return f"write {{kind: {kinds[0]}, ...}}; there are {listing(kinds)}"
        fields = [field for model in models for field in sorted(model.model_fields)]
        if not fields:
            return f"write what it holds by name: {self.key}.NAME"
        return f"write a key of it, {self.key}.KEY; KEY is one of {listing(fields)}"

    def _unknown_kind(self) -> ConfigError:
        kinds, kind = _kinds(self._models()), kind_of(self.value)
        if kind is None:
            what, place = "does not say its kind", self.where
        else:
            what, place = f"has no kind '{kind}'", self.place(f"{self.key}.kind")
        hint = suggestion(str(kind), kinds) or f"write {{kind: {kinds[0]}, ...}}"
        if "python" in kinds:  # terms of rewards
            hint += "; {use: FILE.py:NAME} takes a function of yours"
        return ConfigError(
            f"{self.key} {what}",
            where=place,
            expected=f"kind: {listing(kinds)}",
            hint=hint,
        )

    def _unknown_key(self) -> ConfigError:
        annotation, value = declared_at(self.path[:-1], self.values, self.root)
        model = fitting_model(annotation, kind_of(value))
        allowed = sorted(model.model_fields) if model is not None else []
        # A right key in the wrong section beats a key that is merely similar.
        homes = homes_of(self.name, self.root, self.prefix)
        hint = (
            self._synonym_hint(value, allowed)
            or (f"did you mean {' or '.join(homes[:3])}?" if homes else None)
            or suggestion(self.name, allowed)
        )
        if "." in self.name:
            hint = "nest keys in a file; dots belong to the command line"
        elif self.path == ("nodes",):
            hint = "a file that describes machines goes next to a configuration, as cluster=FILE"
        return ConfigError(
            f"unknown key {self.name!r}{self.inside}",
            where=self.where,
            expected=listing(allowed) if allowed else None,
            hint=hint or "take it out, or write one of those",
        )

    def _synonym_hint(self, section: object, allowed: Sequence[str]) -> str | None:
        """Returns the hint for another trainer's key, also of its section: `optimizer: {lr: 1}`."""
        path, value = self.path, child_of(section, self.name)
        while isinstance(value, dict) and len(value) == 1:
            key, value = next(iter(value.items()))
            path = (*path, str(key))
        meant = meanings("key", path[-1])
        if not meant:
            return None
        key, _, more = meant[0].partition(" ")
        # A role's own optimizer has the keys of `train.optimizer`.
        if path == self.path and key.rpartition(".")[2] in allowed:
            key = ".".join([*path[:-1], key.rpartition(".")[2]])
        return f"it is called {key} {more}".rstrip()


def _kinds(models: Sequence[type[BaseModel]]) -> list[str]:
    return [kind for model in models for kind in kinds_of(model)]
