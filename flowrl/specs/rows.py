"""Conditions on the data rows of prompts and samples, by name: `fl.where`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from flowrl.specs.base import Scalar, Spec, Wrong, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCondition(Spec):
    """True for rows of which a field has one of some values, or none of them.

    Attributes:
        field: The field, which may be inside others: `meta.topic`.
        values: The values, as a JSON list.
        excluded: True if the field must have none of the values.
    """

    family: ClassVar[str] = "where"
    kind: ClassVar[str] = "row"

    field: str
    values: str
    excluded: bool = option(False)

    @classmethod
    def of(cls, field: str, values: Iterable[Scalar], *, excluded: bool) -> Self:
        """Returns the condition with these values."""
        return cls(field=field, values=json.dumps(list(values)), excluded=excluded)

    @property
    def listed(self) -> tuple[Scalar, ...]:
        """The values."""
        return tuple(json.loads(self.values))

    @property
    def each(self) -> tuple[Self, ...]:
        """A condition for each of the values, which rows meet that have it."""
        return tuple(self.of(self.field, [value], excluded=False) for value in self.listed)

    @property
    def described(self) -> str:
        """The condition as a reader writes it: `kind='maths'`."""
        if len(self.listed) == 1:
            return f"{self.field}{'!=' if self.excluded else '='}{self.listed[0]!r}"
        among = ", ".join(map(repr, self.listed))
        return f"{self.field} {'not ' if self.excluded else ''}in [{among}]"

    def accepts(self, value: object) -> bool:
        """Returns True if a row with this value in the field is kept."""
        # True is no 1, and 1 no True.
        is_listed = any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.listed
        )
        return is_listed != self.excluded

    def excludes(self, other: RowCondition) -> bool:
        """Returns True if no row meets both conditions, which are of one field."""
        if self.excluded or other.excluded:
            rest, named = (self, other) if self.excluded else (other, self)
            return not named.excluded and not any(map(rest.accepts, named.listed))
        return not any(map(self.accepts, other.listed))

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a field without a name, and values that are none."""
        if not self.field.strip():
            yield "field", self.field, "the name of a field of the data rows"
        try:
            values = json.loads(self.values)
        except ValueError:
            values = None
        scalar = str | int | float | bool | None
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(each, scalar) for each in values)
        ):
            yield "values", self.values, "a JSON list of strings, numbers, true, false or null"
