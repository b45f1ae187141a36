"""Grammars by name: what a response may look like. A backend declares which kinds it can hold."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["Grammar", "JsonSchema", "Regex", "json_schema", "regex"]


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
        ValueError: not an expression that Python's `re` reads.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return Regex(pattern=pattern)


def json_schema(schema: dict[str, object]) -> JsonSchema:
    """Responses that are a JSON value which a JSON Schema allows.

    Raises:
        ValueError: not JSON.
    """
    try:
        return JsonSchema(schema=json.dumps(schema, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
