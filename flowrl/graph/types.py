"""The small vocabulary of the graph: operations, units, types, levels, fields, source lines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["DType", "Field", "Level", "Op", "SourceRef", "Unit"]


class Op(StrEnum):
    """The operation of a node."""

    SOURCE = "source"
    GENERATE = "generate"
    INTERACT = "interact"
    SCORE = "score"
    LOGPROBS = "logprobs"
    VALUES = "values"
    ADVANTAGE = "advantage"
    FILTER = "filter"
    SELECT = "select"
    UPDATE = "update"
    SYNC = "sync"
    LOG = "log"
    MAP = "map"


class Unit(StrEnum):
    """The unit for which a field holds one value.

    A step has `prompts`; each is answered by a group; a group has samples; a sample has tokens.
    `roles` is for the parameters of a model, of which a role has one set.
    """

    PROMPTS = "prompts"
    GROUPS = "groups"
    SAMPLES = "samples"
    TOKENS = "tokens"
    ROLES = "roles"


class DType(StrEnum):
    """The type of a field's values; `model` is the role's parameter type."""

    INT64 = "int64"
    FLOAT32 = "float32"
    BOOL = "bool"
    MODEL = "model"


class Level(StrEnum):
    """The level of a compiled graph; each has a stricter specification than the one before.

    - `traced`: what the program says; sizes, sampling and loss may still be left to the config.
    - `lowered`: nothing is left open, weight sync is explicit, edges carry only what is read.
    - `placed`: belongs to a plan that says where every node runs.
    """

    TRACED = "traced"
    LOWERED = "lowered"
    PLACED = "placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRef:
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        """`file:line`; files below the current folder are named from there, for people to click."""
        return f"{_shown(self.file)}:{self.line}"


def _shown(path: str) -> str:
    """The shortest name by which a person finds the file from the current folder."""
    if not Path(path).is_absolute():
        return path
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if relative.startswith("..") else relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A named array that a node produces: one value of `dtype` for each `unit`."""

    name: str
    dtype: DType
    unit: Unit

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}/{self.unit}"
