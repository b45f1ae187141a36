"""Reads sizes from a `config.json`, with messages that name the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flowrl.errors import PlanError
from flowrl.wording import nearest

MOST = 1 << 31
"""Of any size in a config: more is a slip of the hand."""

MOST_LAYERS = 10_000
"""The deepest model that is known has some hundred; layers are counted one by one."""

ALIKE = 0.75
"""Of two names, where one may be the other misspelt: qwen3_next is no qwen3_moe."""


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
        if "model_type" not in self.config:
            raise PlanError(
                "the config says no model family: model_type is missing",
                where=self.where,
                expected=f"one of {', '.join(known)}",
                hint="take the config.json that came with the model, or add model_type to it",
            )
        name = self.config["model_type"]
        if not isinstance(name, str) or name not in known:
            near = nearest(str(name), known, cutoff=ALIKE)
            experts = any("expert" in key for key in self.config)
            if near and experts and "moe" not in near:
                near = None  # mixtral is no misspelt mistral
            near = next(iter(_of_class(str(name), known)), near)
            raise PlanError(
                "no memory model for this model family",
                where=self.where,
                found=f"model_type {name!r}",
                expected=f"one of {', '.join(known)}" + (f" (nearest {near})" if near else ""),
                hint=(f"write model_type {near}, if it is that one, or " if near else "")
                + "take a model of one of these families (configs/models has some)",
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
                found="quantization_config",
                hint="give a folder with float32, bfloat16 or float16 weights; to plan for them, "
                "take quantization_config out of the config.json",
            )

    def size(self, key: str, absent: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to `most`; `absent` where the key is not there.

        Raises:
            PlanError: no such number.
        """
        if key not in self.config and absent is not None:
            return absent
        return self._number(key, least=1, most=most)

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
        """Whether the key is true; a null is what an absent key is.

        Raises:
            PlanError: it is neither true nor false.
        """
        value = self.config.get(key)
        if value is None:
            return absent
        if not isinstance(value, bool):
            raise PlanError(
                f"{key} must be true or false",
                where=self.where,
                found=repr(value),
                hint="correct it in the model's config: true or false, without quotes",
            )
        return value

    def layers(self, key: str) -> frozenset[int]:
        """A list of layers, counted from 0; an absent key or a null names none.

        Raises:
            PlanError: something else.
        """
        value = self.config.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(
            isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
        ):
            raise PlanError(
                f"{key} must be a list of layers, whole numbers from 0",
                where=self.where,
                found=repr(value)[:80],
                hint="correct it in the model's config, for example [0, 1]",
            )
        return frozenset(value)

    def check(self, key: str, value: object, least: int = 1, most: int = MOST) -> int:
        """The value, where it is a whole number from `least` to `most`.

        Raises:
            PlanError: it is not.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise PlanError(
                f"{key} must be a whole number from {least} to {most:,}",
                where=self.where,
                found=repr(value)[:80],
                hint=f"correct {key} in the model's config",
            )
        return value

    def _number(self, key: str, least: int, most: int = MOST) -> int:
        if key not in self.config:
            raise PlanError(
                f"the model's config has no {key!r}",
                where=self.where,
                expected="a whole number",
                hint="take the config.json that came with the model, or add the key",
            )
        return self.check(key, self.config[key], least, most)


def _of_class(name: str, known: Collection[str]) -> list[str]:
    """The family that a class of it is named by: `qwen3_moe` of `Qwen3MoeForCausalLM`."""
    stem = name.lower().removesuffix("forcausallm")
    return [family for family in known if family.replace("_", "") == stem]
