"""Reads sizes from a `config.json`, with messages that name the key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flowrl.errors import PlanError

__all__ = ["ConfigReader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReader:
    """A `config.json` and how messages call it.

    Attributes:
        where: Names the config in messages, for example its path.
    """

    config: Mapping[str, object]
    where: str | None

    def family(self, known: Collection[str]) -> str:
        """The model's family.

        Raises:
            PlanError: none of `known`.
        """
        name = self.config.get("model_type")
        if not isinstance(name, str) or name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise PlanError(
                "no memory model for this model family",
                where=self.where,
                found=f"model_type {name!r}",
                expected=f"one of {', '.join(known)}" + (f" (nearest {near[0]})" if near else ""),
                hint="a new family needs its parameter counts (embedding, attention, mlp, norm, "
                "head; for experts, how many there are and how many are active), its KV bytes a "
                "token and its activations a token",
            )
        return name

    def refuse_quantised(self) -> None:
        """Refuses weights whose width is not that of a number type.

        Raises:
            PlanError: the config has a `quantization_config`.
        """
        if "quantization_config" in self.config:
            raise PlanError(
                "the weights are quantised, and their memory is not known from the shape",
                where=self.where,
                hint="give a folder with float32, bfloat16 or float16 weights",
            )

    def size(self, key: str, absent: int | None = None) -> int:
        """A whole number of at least 1; `absent` where the key is not there.

        Raises:
            PlanError: no such number.
        """
        if key not in self.config and absent is not None:
            return absent
        return self._number(key, least=1)

    def size_or_null(self, key: str, absent: int | None, null: int) -> int:
        """Like `size`, where a null means `null`, and so does an absent key without a default."""
        value = self.config.get(key, absent)
        return null if value is None else self.check(key, value)

    def size_or_none(self, key: str, absent: int | None) -> int | None:
        """Like `size`, where a null means that there is no such thing."""
        value = self.config.get(key, absent)
        return None if value is None else self.check(key, value)

    def count(self, key: str, absent: int) -> int:
        """A whole number of at least 0.

        Raises:
            PlanError: something else.
        """
        return absent if key not in self.config else self._number(key, least=0)

    def flag(self, key: str, absent: bool = False) -> bool:
        """Whether the key is true."""
        return self.config.get(key, absent) is True

    def check(self, key: str, value: object, least: int = 1) -> int:
        """The value, where it is a whole number of at least `least`.

        Raises:
            PlanError: it is not.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(
                f"{key} must be a whole number of at least {least}",
                where=self.where,
                found=repr(value),
            )
        return value

    def _number(self, key: str, least: int) -> int:
        if key not in self.config:
            raise PlanError(
                f"the model's config has no {key!r}", where=self.where, expected="a whole number"
            )
        return self.check(key, self.config[key], least)
