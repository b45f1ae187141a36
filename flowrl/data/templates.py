"""Templates of prompts and solutions, in which `{field}` is replaced by a field of the data row.

There is plain substitution and nothing else: no attributes, no format specifications, so that a
template can never run code or fail in ways a person would not expect. `{{` and `}}` are braces. A
template names at least one field: without any, all rows would be the same text.

A field inside others is named by its path: `reward_model.ground_truth`, `prompt.0.content`,
`messages.-1.content`. A template may be the bare name of a field.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from flowrl.config.data import PRESETS
from flowrl.errors import ConfigError, DataError
from flowrl.wording import excerpt, listing, suggestion

_JINJA = re.compile(r"\{\{-? +([^\W\d]\w*)(?: *\|[^{}]*)? +-?\}\}")
_OTHER_FORMS = (
    re.compile(r"\{\{-?\s*([^\W\d]\w*)[^{}]*\}\}"),
    re.compile(r"%\(([^\W\d]\w*)\)[a-z]"),
    re.compile(r"\$([^\W\d]\w*)"),
    re.compile(r"<([^\W\d]\w*)>"),
    re.compile(r"\[([^\W\d]\w*)\]"),
)
"""A field in the form of Jinja, Python's other formats or shells, or in brackets."""

_PATH = re.compile(r"[^\W\d]\w*(\.(-?\d+|\w+))*")

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A parsed template.

    Attributes:
        key: The config key it was written under, for messages.
        text: The template as it is written.
        pieces: Alternating literal text and field names; even positions are literals.

    >>> Template.parse("Q: {question}", key="data.prompt").render({"question": "1+1?"})
    'Q: 1+1?'
    """

    key: str
    text: str
    pieces: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, *, key: str) -> Template:
        """Reads a template.

        Raises:
            ConfigError: A brace that neither names a field nor is doubled; a field in Jinja's form,
                which would stay in the text; no field at all.
        """
        if _PATH.fullmatch(text):
            return cls(key=key, text=text, pieces=("", text, ""))
        if jinja := _JINJA.search(text):
            raise _in_another_form("this is Jinja's form of a field", text, jinja, key=key)
        pieces: list[str] = [""]
        position = 0
        for match in _PIECE.finditer(text):
            pieces[-1] += text[position : match.start()]
            position = match.end()
            piece = match.group()
            if piece in ("{{", "}}"):
                pieces[-1] += piece[0]
            elif match.group(1) is not None:
                pieces += [match.group(1), ""]
            else:
                raise ConfigError(
                    f"a single {piece!r} that names no field",
                    where=key,
                    found=repr(text),
                    expected="{field} for a field of the row, {{ and }} for braces",
                )
        pieces[-1] += text[position:]
        if len(pieces) == 1:
            forms = (form.search(text) for form in _OTHER_FORMS)
            form = next((match for match in forms if match), None)
            raise _in_another_form("this template names no field of the row", text, form, key=key)
        return cls(key=key, text=text, pieces=tuple(pieces))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that the template reads, in order."""
        return self.pieces[1::2]

    def value(self, fields: Mapping[str, object]) -> object:
        """Returns what is in the field, if the template is one field alone; else the text.

        Raises:
            DataError: The row lacks a field; `where` is left to the caller.
        """
        if len(self.pieces) == 3 and not self.pieces[0] and not self.pieces[2]:
            return field_value(fields, self.pieces[1], key=self.key)
        return self.render(fields)

    def render(self, fields: Mapping[str, object]) -> str:
        """Returns the text for a row.

        Raises:
            DataError: The row lacks a field, or it holds no text; `where` is left to the caller.
        """
        parts = list(self.pieces)
        for i in range(1, len(parts), 2):
            parts[i] = field_text(fields, parts[i], key=self.key)
        return "".join(parts)


def _in_another_form(what: str, text: str, form: re.Match[str] | None, *, key: str) -> ConfigError:
    right = None if form is None else f"{text[: form.start()]}{{{form[1]}}}{text[form.end() :]}"
    return ConfigError(
        f"{what}, so every row would read the same",
        where=key,
        found=repr(text),
        expected="{field} for a field of the row, {{ and }} for braces",
        hint=f"write {key}={right!r}" if right else "put the field in single braces, as {prompt}",
    )


def field_text(fields: Mapping[str, object], name: str, *, key: str) -> str:
    """Returns the text of a field: strings as they are, numbers as JSON writes them."""
    value = field_value(fields, name, key=key)
    if isinstance(value, str):
        return value
    if _is_number(value):
        return str(value)
    raise _wrong(f"field {name!r}, which {key} reads, is neither text nor a number", value, key=key)


def field_number(fields: Mapping[str, object], name: str, *, key: str) -> float:
    """Returns the finite number in a field."""
    value = field_value(fields, name, key=key)
    if _is_number(value) and abs(value) <= sys.float_info.max:
        return float(value)
    raise _wrong(f"field {name!r}, which {key} reads, is no number", value, key=key)


def field_value(fields: Mapping[str, object], name: str, *, key: str) -> object:
    """Returns what is in a field, which may be inside others.

    Raises:
        DataError: The row lacks it.
    """
    if name in fields:
        return fields[name]
    value: object = fields
    path = name.split(".")
    for depth, part in enumerate(path):
        match value:
            case Mapping() if part in value:
                value = value[part]
            case list() if _is_index(part, len(value)):
                value = value[int(part)]
            case _:
                raise _missing(fields, path[:depth], value, name, key=key)
    return value


def _is_index(part: str, length: int) -> bool:
    digits = part.removeprefix("-")
    return len(digits) < 10 and digits.isdecimal() and -length <= int(part) < length


def _missing(
    fields: Mapping[str, object], before: Sequence[str], value: object, name: str, *, key: str
) -> DataError:
    what = f"the row has no field {name!r}, which {key} reads"
    if not before:
        preset = _fitting_preset(fields, key.rpartition(".")[2])
        columns = preset and f"the row has the columns of data.preset={preset}"
        hints = filter(None, (suggestion(name, fields), columns))
        return DataError(
            what,
            found=f"fields {listing(fields)}" if fields else "no fields",
            hint="; ".join(hints) or f"change {key} or the row",
        )
    what += f": {'.'.join(before)} has no {name.split('.')[len(before)]!r}"
    error = _wrong(what, value, key=key)
    if isinstance(value, Mapping):
        error.found = f"fields {listing(value)} in it"
    elif isinstance(value, list):
        error.found = f"a list of {len(value)}"
    return error


def _wrong(what: str, value: object, *, key: str) -> DataError:
    return DataError(what, found=_described(value), hint=f"change {key} or the row")


def _fitting_preset(fields: Mapping[str, object], key: str) -> str | None:
    """Returns the first preset that sets `key` and whose prompt and answers the row has."""
    for preset, keys in PRESETS.items():
        if key not in keys:
            continue
        named = (str(keys.get(key, "")) for key in ("prompt", "answer", "rejected"))
        values = [fields.get(name.strip("{}").split(".")[0]) for name in named if name]
        turns = keys.get("turns")
        marks = tuple(turns.values()) if isinstance(turns, Mapping) else ()
        if None not in values and (not marks or str(values[0]).startswith(marks)):
            return preset
    return None


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Whole numbers are finite, also those that no float can hold.
    return isinstance(value, int) or math.isfinite(value)


def _described(value: object) -> str:
    """Returns what a value is, in the words of JSON, and its beginning."""
    match value:
        case None | bool():
            return f"the value {json.dumps(value)}"
        case dict():
            return f"an object {excerpt(repr(value))}"
        case list():
            return f"an array {excerpt(repr(value))}"
        case _:
            return f"a {type(value).__name__} {excerpt(repr(value))}"
