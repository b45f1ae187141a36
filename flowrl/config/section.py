"""What all sections of a configuration share: strict keys, strict numbers, no change."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = ["Args", "Float", "Int", "Section"]


def _no_truth_value(value: object) -> object:
    # bool is an int to Python, so that `seed: true` would silently mean 1.
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Int: TypeAlias = Annotated[int, BeforeValidator(_no_truth_value)]
Float: TypeAlias = Annotated[float, BeforeValidator(_no_truth_value)]
Args: TypeAlias = dict[str, str | int | float | bool | None]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change.

    A validator is built when it is first asked for, so that a section that is only read as a part
    of another one gets none of its own.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )
