"""Grammars by name: what a response may look like. A backend declares which kinds it can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING, ClassVar

from flowrl.errors import TraceError
from flowrl.specs.base import Spec
from flowrl.specs.function import caller
from flowrl.specs.names import raise_missing

__all__ = ["Grammar", "JsonSchema", "Regex", "json_schema", "regex"]

if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

    def __getattr__(name: str) -> object:
        raise_missing(__name__, name, __all__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar(Spec):
    """Base of grammars. A grammar changes the distribution that tokens are drawn from."""

    family: ClassVar[str] = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex(Grammar):
    """The whole response matches `pattern`."""

    kind: ClassVar[str] = "regex"
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema(Grammar):
    """The response is a JSON value that `schema` (a JSON Schema, as text) allows."""

    kind: ClassVar[str] = "json_schema"
    schema: str


def regex(pattern: str) -> Regex:
    """Responses that match a regular expression as a whole.

    Raises:
        TraceError: not an expression that Python's `re` reads.
    """
    try:
        re.compile(pattern)
        if not isinstance(pattern, str):
            raise TypeError("it is no text")
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise TraceError(
            f"this is no regular expression: {error}",
            where=caller(),
            found=repr(pattern),
            expected="a text that Python's `re` reads",
        ) from None
    return Regex(pattern=pattern)


def json_schema(schema: Mapping[str, object]) -> JsonSchema:
    """Responses that are a JSON value which a JSON Schema allows.

    Raises:
        TraceError: not a mapping that JSON can hold.
    """
    if not isinstance(schema, Mapping):
        raise TraceError(
            "a JSON schema is a mapping",
            where=caller(),
            found=repr(schema),
            expected='such as {"type": "object", "properties": {...}}',
            hint="fl.grammar.json_schema(json.loads(text))" if isinstance(schema, str) else None,
        )
    try:
        text = dumps(dict(schema), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(
            f"JSON cannot hold this schema: {error}", where=caller(), found=repr(schema)
        ) from None
    return JsonSchema(schema=text)
