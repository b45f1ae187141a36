"""One recorded case: inputs and options of a library's function, and what it returned.

An *adapter* is a module of this package named like a family. It has one function::

    def compute(case: Case) -> Mapping[str, Value] | NotOffered

that reads the inputs and options of the case, computes the same quantities with flowrl, and returns
them under the keys of `case.expected`. Keys that the case does not expect are ignored; a key that
it expects and the adapter does not return is a failure. A choice that the adapter does not know
raises `UnknownConvention`; the names of all options that it knows are in `option_names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from flowrl.errors import DataError

__all__ = [
    "Case",
    "Compare",
    "Json",
    "NotOffered",
    "Result",
    "UnknownConvention",
    "Value",
    "choose",
]

_T = TypeVar("_T")

Json: TypeAlias = Any
"""A value that JSON can hold. Cases of one family agree on keys, not on all types."""

Value: TypeAlias = "npt.ArrayLike | Mapping[str, Value] | Sequence[Value]"
"""What an adapter returns under a key: numbers of any shape, ragged lists, or named numbers."""

Compare: TypeAlias = Literal["all", "response_mask", "upper_bound", "exact_per_function"]
"""`all`: every number; `response_mask`: only where `inputs["response_mask"]` is 1 (the values of
padding are undefined); `exact_per_function`: the score of each function, by its name. `upper_bound`
belongs to a family that is not run yet."""


@dataclass(frozen=True, slots=True)
class NotOffered:
    """Why flowrl has no such number: a defect of the recorded library, a choice that we refuse, or
    one that nobody here has heard of.

    What we refuse stands in docs/conventions.md.
    """

    reason: str


Result: TypeAlias = "Mapping[str, Value] | NotOffered"


class UnknownConvention(Exception):
    """A case asks for a choice that no adapter knows; it is not offered."""


def choose(known: Mapping[str, _T], name: object, what: str) -> _T:
    """What stands under a name that a case gives.

    Args:
        what: What the name is of, for the reason: `algorithm`.

    Raises:
        UnknownConvention: nothing does.
    """
    if not isinstance(name, str) or name not in known:
        raise UnknownConvention(f"the {what} {name!r} is not known here")
    return known[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recorded case.

    Attributes:
        family: The kind of quantity; names the adapter.
        name: Unique in its file: `<variant>__<library>__<scenario>`, the last part optional.
        convention: The formula in words, as whoever recorded it understood it.
        source: `repo`, `commit`, `file`, `function`.
        inputs: Arrays as nested lists; `None` stands for NaN.
        options: Parameters; names of a library's own options may stand under `peer_options`.
        expected: What the library returned, by name.
        rtol: Relative part of the tolerance.
        atol: Absolute part: a number passes where |got - want| <= atol + rtol |want|.
        compare: Which numbers are compared.
    """

    family: str
    name: str
    convention: str
    source: Mapping[str, str]
    inputs: Mapping[str, Json]
    options: Mapping[str, Json]
    expected: Mapping[str, Json]
    rtol: float
    atol: float
    compare: Compare

    @classmethod
    def from_json(cls, value: Json, family: str | None, where: str) -> Case:
        """The case that an element of `cases` holds; `family` is the file's.

        Raises:
            DataError: it is no mapping of mappings, a key is missing, a tolerance is no number, or
                `compare` names no rule.
        """
        if not isinstance(value, Mapping):
            raise DataError("an oracle case is no mapping", where=where, found=repr(value)[:60])
        needed = ("name", "inputs", "options", "expected", "rtol", "atol", "compare")
        missing = [key for key in needed if key not in value]
        if "family" not in value and family is None:
            missing.append("family")
        if missing:
            raise DataError(
                "an oracle case lacks keys",
                where=where,
                found=", ".join(value),
                expected=missing[0],
            )
        place = f"{where}: {value['name']}"
        if value["compare"] not in get_args(Compare):
            raise DataError(
                "an oracle case is compared by an unknown rule",
                where=place,
                found=str(value["compare"]),
                expected=", ".join(get_args(Compare)),
            )
        for key, kind, said in (
            *((key, Mapping, "a mapping") for key in ("inputs", "options", "expected")),
            *((key, int | float, "a number") for key in ("rtol", "atol")),
        ):
            if not isinstance(value[key], kind):
                raise DataError(
                    f"an oracle case has {key} of the wrong type",
                    where=place,
                    found=repr(value[key])[:60],
                    expected=said,
                )
        return cls(
            family=str(value.get("family", family)),
            name=str(value["name"]),
            convention=str(value.get("convention", "")),
            source=value.get("source") or {},
            inputs=value["inputs"],
            options=value["options"],
            expected=value["expected"],
            rtol=float(value["rtol"]),
            atol=float(value["atol"]),
            compare=value["compare"],
        )

    @property
    def variant(self) -> str:
        """The first part of the name."""
        return self._part(0)

    @property
    def library(self) -> str:
        """The second part of the name, in lower case; may name a flavour (`verl_vectorized`)."""
        return self._part(1).lower()

    def _part(self, number: int) -> str:
        parts = self.name.split("__", 2)
        return parts[number] if len(parts) > number else ""

    def option(self, name: str, default: Json = None) -> Json:
        """An option by name, in `options` or in its `peer_options`."""
        if name in self.options:
            return self.options[name]
        return (self.options.get("peer_options") or {}).get(name, default)

    def option_names(self) -> frozenset[str]:
        """Names of all options, of `peer_options` too."""
        return frozenset(self.options) | frozenset(self.options.get("peer_options") or {})

    def array(self, name: str) -> npt.NDArray[np.float64]:
        """An input as float64; `null` is NaN."""
        return np.array(self.inputs[name], np.float64)

    @property
    def mask(self) -> npt.NDArray[np.float64]:
        """The input `response_mask`, 1 at tokens that count."""
        return self.array("response_mask")
