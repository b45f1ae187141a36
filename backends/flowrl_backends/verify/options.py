"""The options of one reward term, read from JSON values with messages that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flowrl.errors import ConfigError
from flowrl.wording import listing


class TermOptions:
    """Typed reads of a term's options.

    Attributes:
        values: The options.
        where: The key of the term in the config, such as `rewards.terms[0]`.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number; the default if the key is missing.

        Raises:
            ConfigError: The value is not a finite number, or is missing without a default. The
                other methods raise it in the same cases.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "not a number", value)
        if not math.isfinite(value):
            raise self._wrong(key, "not a finite number", value)
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns a whole number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "not a whole number", value)
        return value

    def truth(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "neither true nor false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a string."""
        value = self._value(key, default)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "no text", value)
        return value

    def truth_or_none(self, key: str) -> bool | None:
        """Returns a boolean; None if the key is missing or null."""
        return None if self.values.get(key) is None else self.truth(key, False)

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Returns a list of strings."""
        value = self._value(key, default)
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, "not a list of texts", value)
        return tuple(value)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Returns one of `choices`; the first if the key is missing."""
        value = self.text(key, choices[0])
        if value not in choices:
            raise ConfigError(
                "no such choice",
                where=f"{self.where}.{key}",
                found=repr(value),
                expected=f"one of {listing(choices)}",
            )
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise ConfigError(f"{key!r} is missing", where=self.where)
        return value

    def _wrong(self, key: str, what: str, value: object) -> ConfigError:
        return ConfigError(what, where=f"{self.where}.{key}", found=repr(value))
