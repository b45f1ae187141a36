"""Grammars by name: constraints on responses. A backend declares which kinds it supports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING, ClassVar

from flowrl.specs.base import Spec
from flowrl.specs.names import operation, refusing_others
from flowrl.user_lines import trace_error

__all__ = ["Grammar", "JsonSchema", "Regex", "json_schema", "regex"]

if not TYPE_CHECKING:  # a type checker should report unknown names
    __getattr__ = refusing_others(__name__, __all__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar(Spec):
    """The base of grammars. A grammar changes the distribution that tokens are sampled from."""

    family: ClassVar[str] = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex(Grammar):
    """Requires that the whole response matches `pattern`."""

    kind: ClassVar[str] = "regex"
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema(Grammar):
    """Requires a response that is a JSON value allowed by `schema` (a JSON Schema, as text)."""

    kind: ClassVar[str] = "json_schema"
    schema: str


@operation
def regex(pattern: str) -> Regex:
    """Restricts responses to those that match a regular expression as a whole.

    Raises:
        TraceError: Python's `re` cannot read the expression.
    """
    try:
        re.compile(pattern)
        if not isinstance(pattern, str):
            raise TypeError("it is not a string")
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise trace_error(
            f"this is not a regular expression: {error}",
            found=repr(pattern),
            expected="a string that Python's `re` can read",
        ) from None
    return Regex(pattern=pattern)


@operation
def json_schema(schema: Mapping[str, object]) -> JsonSchema:
    """Restricts responses to JSON values that a JSON Schema allows.

    Raises:
        TraceError: The schema is not a mapping that JSON can hold.
    """
    if not isinstance(schema, Mapping):
        raise trace_error(
            "a JSON schema is a mapping",
            found=repr(schema),
            expected='such as {"type": "object", "properties": {...}}',
            hint="fl.grammar.json_schema(json.loads(text))" if isinstance(schema, str) else None,
        )
    try:
        text = dumps(dict(schema), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise trace_error(f"JSON cannot hold this schema: {error}", found=repr(schema)) from None
    return JsonSchema(schema=text)
